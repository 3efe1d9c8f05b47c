"""What happens between a request and its answer, as values, and the two thin runners that carry it out.

As the steps of a local transaction (participant_sdk.steps), one layer above: a move may take a connection, run a script
on it, wait, or ask a front. `asking` and `ending` are written once, as generators of moves; a runner performs each on
an Engine in the thread that calls, or on an AsyncEngine, sends back what it gives, and decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from participant_sdk.idempotency.faults import told
from participant_sdk.idempotency.lines import Line, stand_on, stand_on_async
from participant_sdk.steps import run, run_async

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from participant_sdk.databases.database import Script

logger = logging.getLogger("tricord.idempotency")

R = TypeVar("R")


class Move(Protocol):
    """Something to do. What it gives is sent back into the generator, what it raises is thrown in."""

    def perform(self, engine: Engine) -> Any:
        """Do it."""

    async def perform_async(self, engine: AsyncEngine) -> Any:
        """Do it."""


Moves: TypeAlias = Generator[Move, Any, R]


_carried: Final[set[asyncio.Task[Any]]] = set()


async def carried_through(
    work: Coroutine[Any, Any, R],
    after: Callable[[R], Awaitable[None]] | None = None,
    carried: set[asyncio.Task[Any]] = _carried,
) -> R:
    """Wait for it. If the task that waits is cancelled, it goes on by itself, and what comes `after` then follows.

    `carried`: where it is then, for whoever waits for it.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        rest: asyncio.Task[Any] = task if after is None else loop.create_task(_followed(task, after))
        carried.add(rest)
        rest.add_done_callback(carried.discard)
        rest.add_done_callback(_tell_failure)
        raise


async def _followed(work: asyncio.Task[R], after: Callable[[R], Awaitable[None]]) -> None:
    await after(await work)


def _tell_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("what a cancelled task has left was not carried through: %s", told(error))


@dataclass(slots=True)
class Take:
    """Take a connection; gives a Line of our own."""

    def perform(self, engine: Engine) -> Line:
        """See Move."""
        return Line(engine.connect())

    async def perform_async(self, engine: AsyncEngine) -> Line:
        """See Move."""
        return Line(await engine.connect().start())


@dataclass(slots=True)
class StandOn:
    """Use what the user has handed in; gives a Line on it. Raises ConfigurationError."""

    on: Any

    def perform(self, engine: Engine) -> Line:
        """See Move."""
        return stand_on(self.on, engine)

    async def perform_async(self, engine: AsyncEngine) -> Line:
        """See Move."""
        return await stand_on_async(self.on, engine)


@dataclass(slots=True)
class On:
    """Run a script on a line; gives what it gives."""

    line: Line
    script: Script[Any]

    def perform(self, engine: Engine) -> Any:
        """See Move."""
        return run(self.script, self.line.connection)

    async def perform_async(self, engine: AsyncEngine) -> Any:
        """See Move."""
        return await run_async(self.script, self.line.connection)


@dataclass(slots=True)
class Apart:
    """Run a script on a connection that is taken for it alone; gives what it gives."""

    script: Script[Any]

    def perform(self, engine: Engine) -> Any:
        """See Move."""
        with engine.connect() as connection:
            return run(self.script, connection)

    async def perform_async(self, engine: AsyncEngine) -> Any:
        """See Move."""
        async with engine.connect() as connection:
            return await run_async(self.script, connection)


@dataclass(slots=True)
class Flush:
    """Have the sessions on a line write down what they hold back. Raises ConfigurationError: see Line."""

    line: Line

    def perform(self, engine: Engine) -> None:
        """See Move."""
        for flush in self.line.flushes:
            flush()
        self.line.check_alone()

    async def perform_async(self, engine: AsyncEngine) -> None:
        """See Move."""
        for flush in self.line.flushes:
            await flush()
        self.line.check_alone()


@dataclass(slots=True)
class CommitTheirs:
    """Commit, in its owner's way, a line that stands on what the user has handed in."""

    line: Line

    def perform(self, engine: Engine) -> None:
        """See Move."""
        self.line.on.commit()

    async def perform_async(self, engine: AsyncEngine) -> None:
        """See Move."""
        await self.line.on.commit()


@dataclass(slots=True)
class GiveBack:
    """Roll back what is not committed, and be done with the line. Never raises. `lost`: nothing more is said on it."""

    line: Line
    lost: bool = False

    def perform(self, engine: Engine) -> None:
        """See Move."""
        line = self.line
        if line.spoilt() or (self.lost and line.on is None):
            with suppress(Exception):
                line.connection.invalidate()
        if line.on is not None:
            with suppress(Exception):
                line.on.rollback()
            return
        for session in line.sessions:
            with suppress(Exception):
                session.close()
        with suppress(Exception):
            line.connection.close()

    async def perform_async(self, engine: AsyncEngine) -> None:
        """See Move. It is carried through, too: of one that is broken off, the pool would not get its connection."""
        if not self.lost and self.line.at_rest():
            with suppress(Exception):
                await self.line.connection.close()
        else:
            await carried_through(self._give_back())

    async def _give_back(self) -> None:
        line = self.line
        if line.spoilt() or (self.lost and line.on is None):
            with suppress(Exception):
                await line.connection.invalidate()
        if line.on is not None:
            with suppress(Exception):
                await line.on.rollback()
            return
        for session in line.sessions:
            with suppress(Exception):
                await session.close()
        with suppress(Exception):
            await line.connection.close()


@dataclass(slots=True)
class Told:
    """Call something of the user's that may give an awaitable, such as a front; gives what comes of it."""

    call: Any
    arguments: tuple[Any, ...]

    def perform(self, engine: Engine) -> Any:
        """See Move."""
        return self.call(*self.arguments)

    async def perform_async(self, engine: AsyncEngine) -> Any:
        """See Move."""
        given = self.call(*self.arguments)
        return await given if isawaitable(given) else given


@dataclass(slots=True)
class Pause:
    """Wait."""

    seconds: float

    def perform(self, engine: Engine) -> None:
        """See Move."""
        time.sleep(self.seconds)

    async def perform_async(self, engine: AsyncEngine) -> None:
        """See Move."""
        await asyncio.sleep(self.seconds)


def carry_out(moves: Moves[R], engine: Engine) -> R:
    """Carry out the moves; an error that they do not catch comes out."""
    try:
        move = next(moves)
        while True:
            try:
                given = move.perform(engine)
            except BaseException as error:
                move = moves.throw(error)
            else:
                move = moves.send(given)
    except StopIteration as stop:
        result: R = stop.value
        return result


async def carry_out_async(moves: Moves[R], engine: AsyncEngine) -> R:
    """As `carry_out`, in a task."""
    try:
        move = next(moves)
        while True:
            try:
                given = await move.perform_async(engine)
            except BaseException as error:
                move = moves.throw(error)
            else:
                move = moves.send(given)
    except StopIteration as stop:
        result: R = stop.value
        return result
