"""What work in the background consists of, as values, and what carries it out: in a thread, and in asyncio.

The work itself is written once, as a generator of moves. Told to stop, its hands stop at once where they wait, and
after the statement that they are at where they work: a driver that is cut off in the middle of one would lose its
connection.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from participant_sdk.databases.database import Script
from participant_sdk.steps import RunAgain, run, run_async
from participant_sdk.turns import TaskTurn, ThreadTurn

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

R = TypeVar("R")
AnyEngine = TypeVar("AnyEngine", "Engine", "AsyncEngine")

WAIT_SECONDS: Final = 1.0
"""How long work in the background waits for a lock at most; it is in no hurry and comes again."""
_NO_TURN: Final = "other calls were writing to the database all the time"


@dataclass(frozen=True, slots=True)
class Do:
    """Run a script on a connection of its own; where only one can write, one that `writes` takes its turn."""

    script: Script[Any]
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Rest:
    """Wait so many seconds, or until told to stop."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """Call something that may give an awaitable; gives what comes of it."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


Moves: TypeAlias = Generator[Any, Any, R]


def view_of(engine: AnyEngine) -> AnyEngine:
    """The engine for who mostly looks: what it reads under PostgreSQL's SERIALIZABLE could make others' calls fail."""
    if engine.dialect.name != "postgresql":
        return engine
    return engine.execution_options(isolation_level="READ COMMITTED")


class ThreadMover:
    """Carries out moves in the thread that calls, until it is told to stop from another.

    `turn`: where only one can write, whose turn it is; None: nobody takes turns.
    """

    def __init__(self, engine: Engine, turn: ThreadTurn | None = None) -> None:
        self._engine = engine
        self._turn = turn
        self._stopping = threading.Event()

    def run(self, moves: Moves[R]) -> R | None:
        """Returns what the moves return, None if it was told to stop before."""
        try:
            move = next(moves)
            while True:
                failure = answer = None
                try:
                    answer = self._perform(move)
                except Exception as error:
                    failure = error
                if self._stopping.is_set():  # then neither means anything: the connection was closed
                    return None
                move = moves.send(answer) if failure is None else moves.throw(failure)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            moves.close()

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stopping.is_set()

    def close(self) -> None:
        """Stop after the present move; a rest ends at once."""
        self._stopping.set()

    def _perform(self, move: Any) -> Any:
        match move:
            case Do():
                return self._do(move)
            case Rest(seconds):
                return self._stopping.wait(seconds)
            case Call(function, arguments):
                return function(*arguments)
        raise TypeError(f"{move!r} is no move")

    def _do(self, move: Do) -> Any:
        turn = self._turn if move.writes else None
        if turn is not None and not turn.acquire(is_try=True, seconds=WAIT_SECONDS):
            raise RunAgain(_NO_TURN)
        try:
            with self._engine.connect() as connection:
                return run(move.script, connection)
        finally:
            if turn is not None:
                turn.release()


class TaskMover:
    """As `ThreadMover`, in a task."""

    def __init__(self, engine: AsyncEngine, turn: TaskTurn | None = None) -> None:
        self._engine = engine
        self._turn = turn
        self._stopping = asyncio.Event()

    async def run(self, moves: Moves[R]) -> R | None:
        """As `ThreadMover.run`."""
        try:
            move = next(moves)
            while True:
                failure = answer = None
                try:
                    answer = await self._perform(move)
                except Exception as error:
                    failure = error
                if self._stopping.is_set():  # then neither means anything: the connection was closed
                    return None
                move = moves.send(answer) if failure is None else moves.throw(failure)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            moves.close()

    async def wait_stopping(self) -> None:
        """Wait until it is told to stop."""
        await self._stopping.wait()

    async def close(self) -> None:
        """As `ThreadMover.close`."""
        self._stopping.set()

    async def _perform(self, move: Any) -> Any:
        match move:
            case Do():
                return await self._do(move)
            case Rest(seconds):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), seconds)
                return None
            case Call(function, arguments):
                given = function(*arguments)
                return await given if isawaitable(given) else given
        raise TypeError(f"{move!r} is no move")

    async def _do(self, move: Do) -> Any:
        turn = self._turn if move.writes else None
        if turn is not None and not await turn.acquire(is_try=True, seconds=WAIT_SECONDS):
            raise RunAgain(_NO_TURN)
        try:
            async with self._engine.connect() as connection:
                return await run_async(move.script, connection)
        finally:
            if turn is not None:
                turn.release()
