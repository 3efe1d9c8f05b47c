"""The two kinds of engine, and how a call's steps are run on them.

Everything that decides lives in `local_transaction`; here a connection is taken, the steps are carried out, and
whatever goes wrong is rolled back and handed to `after_error`. The SDK works on its own view of the user's engine
(same pool, own event listeners), so that the user's other work is not touched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from participant_sdk import lost_actions, prepare
from participant_sdk.actions import Actions
from participant_sdk.batch import Batch, batch_of, clearing, dissolved, steps_of_batch
from participant_sdk.call import IncomingCall, Outcome, Reply
from participant_sdk.databases.database import wait_ms
from participant_sdk.fence import Phase
from participant_sdk.fence_tables import FenceTables
from participant_sdk.gathering import Answers
from participant_sdk.handler import LocalTransactionMisused, guard_handlers
from participant_sdk.handling import told
from participant_sdk.local_transaction import Fence, after_error, steps_of
from participant_sdk.steps import CallFailed, Step, run, run_async
from participant_sdk.turns import TURN, Held, TaskTurn, ThreadTurn

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

logger = logging.getLogger("tricord.participant")

R = TypeVar("R")

_NOT_CLEARED = "what a batch may have left in the fence log could not be looked for: %s"
_TOO_LATE = "its time was up before it could start"
_FREE: Final = nullcontext()
_WAITED = "another call was writing to the database all the time that this one could wait"


class SyncEngineFence:
    """The fence on an Engine, for `def` handlers. Any thread may call `execute`."""

    def __init__(self, engine: Engine, tables: FenceTables, retention_ms: int) -> None:
        self.engine = engine.execution_options()
        self._tables = tables
        self._retention_ms = retention_ms
        self.turn = ThreadTurn()

    def prepare(self, actions: Actions, connections_needed: int) -> Fence:
        """Create the tables, prove the engine's transactions; raises ConfigurationError."""
        database = prepare.check_engine(self.engine, self._tables, connections_needed)
        with prepare.errors_told(self.engine), self.engine.connect() as first, self.engine.connect() as second:
            prepare.check_apart(first, second)
            database.fence_id = prepare.make_tables(first, self._tables)
            xid, failure = token_hex(16), None
            try:
                run(prepare.probe(database, xid), first)
            except Exception as error:
                failure = error
            prepare.undo(first)
            prepare.check_rolled_back(second, self._tables, xid, failure)
        guard_handlers(self.engine)
        return Fence(database, database.fence_id, actions, self._retention_ms)

    def tell_of_lost_actions(self, participant: str, actions: Actions) -> None:
        """See `lost_actions`."""
        with self.engine.connect() as connection:
            lost_actions.tell(connection, self._tables, participant, actions)

    def execute(self, call: IncomingCall, fence: Fence) -> Reply:
        """Run one call to its reply. Never raises for what the call or its handler does."""
        if call.phase is Phase.TRY and call.seconds_left() <= 0:
            return Reply.unknown(_TOO_LATE)
        runs, began_at = 0, time.monotonic()
        while True:
            runs += 1
            try:
                return _logged(call, self._run(call, steps_of(call, fence), fence))
            except Exception as error:
                next_step = after_error(call, error, runs, time.monotonic() - began_at, fence.database)
                if isinstance(next_step, Reply):
                    return _logged(call, next_step, error)
            time.sleep(next_step)

    def execute_batch(self, calls: Sequence[IncomingCall], fence: Fence) -> Answers:
        """Run calls of one action and phase, each of another branch, in one local transaction.

        Never raises for what calls or their handlers do.
        """
        batch = batch_of(calls)
        if batch is None:
            return Answers()
        try:
            replies = self._run(batch.patient, steps_of_batch(batch, fence), fence)
        except Exception as error:
            answers = dissolved(batch, error, fence.database)
        else:
            return _answers(batch, replies)
        if (steps := clearing(batch, fence)) is not None:
            try:
                self._run(batch.patient, steps, fence)
            except Exception as error:
                logger.warning(_NOT_CLEARED, told(error))
        return answers

    def _run(self, call: IncomingCall, steps: Generator[Step, Any, R], fence: Fence) -> R:
        """Carry out `steps` on a connection; `call` says how long they may wait for their turn."""
        with (
            self._turn_of(call) if fence.database.one_writer else _FREE as turn,
            self.engine.connect() as connection,
        ):
            if turn is not None:
                connection.info[TURN] = turn
            try:
                return run(steps, connection)
            except LocalTransactionMisused:
                if not connection.closed:
                    connection.invalidate()  # SQLAlchemy takes its transaction for ended: close it to roll back
                raise

    @contextmanager
    def _turn_of(self, call: IncomingCall) -> Iterator[Held]:
        """Where only one can write, calls take turns here, in place of polling the database for its lock."""
        if not self.turn.acquire(is_try=call.phase is Phase.TRY, seconds=wait_ms(call) / 1000):
            raise CallFailed(_WAITED)
        held = Held(self.turn.release)
        try:
            yield held
        finally:
            held.give()


class AsyncEngineFence:
    """The fence on an AsyncEngine, for `async def` handlers. Used from one event loop."""

    def __init__(self, engine: AsyncEngine, tables: FenceTables, retention_ms: int) -> None:
        self.engine = engine.execution_options()
        self._tables = tables
        self._retention_ms = retention_ms
        self.turn = TaskTurn()

    async def prepare(self, actions: Actions, connections_needed: int) -> Fence:
        """Create the tables, prove the engine's transactions; raises ConfigurationError."""
        database = prepare.check_engine(self.engine.sync_engine, self._tables, connections_needed)
        with prepare.errors_told(self.engine.sync_engine):
            async with self.engine.connect() as first, self.engine.connect() as second:
                prepare.check_apart(
                    cast("Connection", first.sync_connection), cast("Connection", second.sync_connection)
                )
                database.fence_id = await first.run_sync(prepare.make_tables, self._tables)
                xid, failure = token_hex(16), None
                try:
                    await run_async(prepare.probe(database, xid), first)
                except Exception as error:
                    failure = error
                await first.run_sync(prepare.undo)
                await second.run_sync(prepare.check_rolled_back, self._tables, xid, failure)
        guard_handlers(self.engine.sync_engine)
        return Fence(database, database.fence_id, actions, self._retention_ms)

    async def tell_of_lost_actions(self, participant: str, actions: Actions) -> None:
        """See `lost_actions`."""
        async with self.engine.connect() as connection:
            await connection.run_sync(lost_actions.tell, self._tables, participant, actions)

    async def execute(self, call: IncomingCall, fence: Fence) -> Reply:
        """Run one call to its reply. Never raises for what the call or its handler does."""
        if call.phase is Phase.TRY and call.seconds_left() <= 0:
            return Reply.unknown(_TOO_LATE)
        runs, began_at = 0, time.monotonic()
        while True:
            runs += 1
            try:
                return _logged(call, await self._run(call, steps_of(call, fence), fence))
            except Exception as error:
                next_step = after_error(call, error, runs, time.monotonic() - began_at, fence.database)
                if isinstance(next_step, Reply):
                    return _logged(call, next_step, error)
            await asyncio.sleep(next_step)

    async def execute_batch(self, calls: Sequence[IncomingCall], fence: Fence) -> Answers:
        """As `SyncEngineFence.execute_batch`."""
        batch = batch_of(calls)
        if batch is None:
            return Answers()
        try:
            replies = await self._run(batch.patient, steps_of_batch(batch, fence), fence)
        except Exception as error:
            answers = dissolved(batch, error, fence.database)
        else:
            return _answers(batch, replies)
        if (steps := clearing(batch, fence)) is not None:
            try:
                await self._run(batch.patient, steps, fence)
            except Exception as error:
                logger.warning(_NOT_CLEARED, told(error))
        return answers

    async def _run(self, call: IncomingCall, steps: Generator[Step, Any, R], fence: Fence) -> R:
        async with (
            self._turn_of(call) if fence.database.one_writer else _FREE as turn,
            self.engine.connect() as connection,
        ):
            if turn is not None:
                cast("Connection", connection.sync_connection).info[TURN] = turn
            try:
                return await run_async(steps, connection)
            except LocalTransactionMisused:
                if not connection.closed:
                    await connection.invalidate()
                raise

    @asynccontextmanager
    async def _turn_of(self, call: IncomingCall) -> AsyncIterator[Held]:
        if not await self.turn.acquire(is_try=call.phase is Phase.TRY, seconds=wait_ms(call) / 1000):
            raise CallFailed(_WAITED)
        held = Held(self.turn.release)
        try:
            yield held
        finally:
            held.give()


def _answers(batch: Batch, replies: Sequence[Reply]) -> Answers:
    """Those to all members, in their order."""
    return Answers({call.key: _logged(call, reply) for call, reply in zip(batch.calls, replies, strict=True)})


def _logged(call: IncomingCall, reply: Reply, error: Exception | None = None) -> Reply:
    if reply.outcome is Outcome.UNKNOWN:
        trace = error if error is not None and not isinstance(error, CallFailed) else None
        logger.warning("%s: unknown, rolled back: %s", call, reply.error, exc_info=trace)
    elif reply.outcome is Outcome.VIOLATION:
        logger.error("%s: %s", call, reply.error)
    else:
        logger.debug("%s: %s", call, reply.outcome.value)
    return reply
