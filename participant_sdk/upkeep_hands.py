"""What carries out the steps of a round of upkeep: in a thread, and in asyncio.

Told to stop, they stop at once where they wait, and after the statement that they are at where they work: a driver
that is cut off in the middle of one would lose its connection.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from participant_sdk.call import IncomingCall, Reply
from participant_sdk.coordinator_lookup import AsyncCoordinatorLookup, CoordinatorLookup
from participant_sdk.databases import Database
from participant_sdk.engines import AsyncEngineFence, SyncEngineFence
from participant_sdk.steps import RunAgain, run, run_async
from participant_sdk.upkeep_sql import WAIT_SECONDS
from participant_sdk.upkeep_steps import Do, Fetch, LookUp, Move, Moves, Rest, RunCall

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

R = TypeVar("R")
AnyEngine = TypeVar("AnyEngine", "Engine", "AsyncEngine")

_NO_TURN: Final = "other calls were writing to the database all the time"


def view_of(engine: AnyEngine) -> AnyEngine:
    """The engine for who mostly looks: what it reads under PostgreSQL's SERIALIZABLE could make others' calls fail."""
    if engine.dialect.name != "postgresql":
        return engine
    return engine.execution_options(isolation_level="READ COMMITTED")


class ThreadHands:
    """Carries out the steps of rounds in the thread that calls, until it is told to stop from another."""

    def __init__(
        self,
        coordinator: str,
        engine_fence: SyncEngineFence,
        database: Database,
        execute: Callable[[IncomingCall], Reply],
    ) -> None:
        self._database = database
        self._engine = view_of(engine_fence.engine)
        self._turn = engine_fence.turn
        self._execute = execute
        self._lookup = CoordinatorLookup(coordinator)
        self._stopping = threading.Event()

    def run(self, moves: Moves[R]) -> R | None:
        """Returns what the steps return, None if it was told to stop before."""
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
        """Stop after the present step; a question to the coordinator ends at once."""
        self._stopping.set()
        self._lookup.close()

    def _perform(self, move: Move) -> Any:
        match move:
            case Do():
                return self._do(move)
            case LookUp(xids):
                return self._lookup.look_up(xids)
            case Fetch(xid):
                return self._lookup.fetch(xid)
            case RunCall(call):
                return self._execute(call)
            case Rest(seconds):
                return self._stopping.wait(seconds)

    def _do(self, move: Do) -> Any:
        takes_turn = move.writes and self._database.one_writer
        if takes_turn and not self._turn.acquire(is_try=True, seconds=WAIT_SECONDS):
            raise RunAgain(_NO_TURN)
        try:
            with self._engine.connect() as connection:
                return run(move.script, connection)
        finally:
            if takes_turn:
                self._turn.release()


class TaskHands:
    """As `ThreadHands`, in a task."""

    def __init__(
        self,
        coordinator: str,
        engine_fence: AsyncEngineFence,
        database: Database,
        execute: Callable[[IncomingCall], Awaitable[Reply]],
    ) -> None:
        self._database = database
        self._engine = view_of(engine_fence.engine)
        self._turn = engine_fence.turn
        self._execute = execute
        self._lookup = AsyncCoordinatorLookup(coordinator)
        self._stopping = asyncio.Event()

    async def run(self, moves: Moves[R]) -> R | None:
        """As `ThreadHands.run`."""
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
        """As `ThreadHands.close`."""
        self._stopping.set()
        await self._lookup.close()

    async def _perform(self, move: Move) -> Any:
        match move:
            case Do():
                return await self._do(move)
            case LookUp(xids):
                return await self._lookup.look_up(xids)
            case Fetch(xid):
                return await self._lookup.fetch(xid)
            case RunCall(call):
                return await self._execute(call)
            case Rest(seconds):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), seconds)
                return None

    async def _do(self, move: Do) -> Any:
        takes_turn = move.writes and self._database.one_writer
        if takes_turn and not await self._turn.acquire(is_try=True, seconds=WAIT_SECONDS):
            raise RunAgain(_NO_TURN)
        try:
            async with self._engine.connect() as connection:
                return await run_async(move.script, connection)
        finally:
            if takes_turn:
                self._turn.release()
