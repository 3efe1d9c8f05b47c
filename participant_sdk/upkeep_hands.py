"""What carries out the steps of a round of upkeep: moves, questions to the coordinator, and calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from participant_sdk.background import TaskMover, ThreadMover, view_of
from participant_sdk.call import IncomingCall, Reply
from participant_sdk.coordinator_lookup import AsyncCoordinatorLookup, CoordinatorLookup
from participant_sdk.databases import Database
from participant_sdk.engines import AsyncEngineFence, SyncEngineFence
from participant_sdk.upkeep_steps import Fetch, LookUp, Move, RunCall


class ThreadHands(ThreadMover):
    """Carries out the steps of rounds in the thread that calls, until it is told to stop from another."""

    def __init__(
        self,
        coordinator: str,
        engine_fence: SyncEngineFence,
        database: Database,
        execute: Callable[[IncomingCall], Reply],
    ) -> None:
        super().__init__(view_of(engine_fence.engine), engine_fence.turn if database.one_writer else None)
        self._execute = execute
        self._lookup = CoordinatorLookup(coordinator)

    def close(self) -> None:
        """Stop after the present step; a question to the coordinator ends at once."""
        super().close()
        self._lookup.close()

    def _perform(self, move: Move) -> Any:
        match move:
            case LookUp(xids):
                return self._lookup.look_up(xids)
            case Fetch(xid):
                return self._lookup.fetch(xid)
            case RunCall(call):
                return self._execute(call)
        return super()._perform(move)


class TaskHands(TaskMover):
    """As `ThreadHands`, in a task."""

    def __init__(
        self,
        coordinator: str,
        engine_fence: AsyncEngineFence,
        database: Database,
        execute: Callable[[IncomingCall], Awaitable[Reply]],
    ) -> None:
        super().__init__(view_of(engine_fence.engine), engine_fence.turn if database.one_writer else None)
        self._execute = execute
        self._lookup = AsyncCoordinatorLookup(coordinator)

    async def close(self) -> None:
        """As `ThreadHands.close`."""
        await super().close()
        await self._lookup.close()

    async def _perform(self, move: Move) -> Any:
        match move:
            case LookUp(xids):
                return await self._lookup.look_up(xids)
            case Fetch(xid):
                return await self._lookup.fetch(xid)
            case RunCall(call):
                return await self._execute(call)
        return await super()._perform(move)
