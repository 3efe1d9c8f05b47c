"""Requests that are safe to repeat, on an Engine or an AsyncEngine: `begin` gives a run, or the stored answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, Self, TypeVar

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from participant_sdk.idempotency import prepare
from participant_sdk.idempotency.asking import asked_of, begin, looked_up
from participant_sdk.idempotency.fronts import AnyFront, Front, check_fronts
from participant_sdk.idempotency.heartbeat import TaskBeat, ThreadBeat
from participant_sdk.idempotency.listening import TaskListener, ThreadListener
from participant_sdk.idempotency.moves import carry_out, carry_out_async
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.record import Record
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.request import KeyedRequest
from participant_sdk.idempotency.runs import AsyncRun, Run
from participant_sdk.idempotency.setup import Setup, check_bounds, default_owner
from participant_sdk.idempotency.sweepers import AsyncSweeper, Sweeper
from participant_sdk.idempotency.sweeping import DEFAULT_SWEEP, Sweep
from participant_sdk.idempotency.tables import DEFAULT, IdempotencyTables
from participant_sdk.idempotency.waiting import TaskWaiting, ThreadWaiting

if TYPE_CHECKING:
    from psycopg import AsyncConnection as RawAsyncConnection
    from psycopg import Connection as RawConnection
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

UNDOING_S: Final = 5.0
"""How long `close` waits for claims that were cancelled to be undone."""


E = TypeVar("E", bound=Engine | AsyncEngine)
F = TypeVar("F", bound=AnyFront)


class _Parts(NamedTuple):
    """What works in the background and waits, for a kind of engine."""

    beat: type[Any]
    sweeper: type[Any]
    waiting: type[Any]
    listener: type[Any]
    asyncio: bool


class AnyIdempotency(Generic[E, F]):
    """What `Idempotency` and `AsyncIdempotency` have in common: their settings, and what is made of them."""

    _parts: ClassVar[_Parts]

    def __init__(
        self,
        engine: E,
        *,
        namespace: str = "default",
        tables: IdempotencyTables = DEFAULT,
        fronts: Sequence[F] = (),
        owner: str | None = None,
        waiters_max: int = 256,
        waiters_per_key_max: int = 32,
        poll_s: float = 0.5,
        listen: bool | Engine = True,
        sweep: Sweep | None = DEFAULT_SWEEP,
    ) -> None:
        check_bounds(waiters_max, waiters_per_key_max, poll_s, owner)
        parts = self._parts
        check_fronts(fronts, asyncio=parts.asyncio)
        synchronous = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        store = prepare.check_engine(synchronous, tables)
        self.engine = engine
        self.sweeper = None if sweep is None else parts.sweeper(engine, tables, sweep)
        self._beat = parts.beat(engine, store)
        self._listener = None
        waiting = parts.waiting(poll_s, waiters_max, waiters_per_key_max)
        if listen and store.channel is not None:
            self._listener = parts.listener(engine if listen is True else listen, store.channel, waiting)
            waiting.on_wait = self._listener.wanted
        owner = owner or default_owner()
        self.setup = Setup(
            store, synchronous.dialect, synchronous.pool, namespace, owner, tuple(fronts), waiting, self._beat
        )


class Idempotency(AnyIdempotency[Engine, Front]):
    """A store of idempotency keys on `engine`. Any thread may use it; a context manager, or `start` and `close`.

    `namespace` keeps programs that share a table apart. `fronts`: where ended records are looked for first, the
    nearest first. `owner`: who runs here, for people, at most 100 characters. `waiters_max`: how many requests may
    wait in this process, `waiters_per_key_max`: for one key. `poll_s`: how soon they look again, at first, in seconds.
    `listen`: on PostgreSQL, have one connection that is told of ends while somebody waits. Behind a pooler that cannot
    LISTEN, give an engine that goes around it, or False: looking from time to time is enough. `sweep`: how records that
    have expired are deleted in the background, from `start` to `close`; None: not here. Raises ConfigurationError.
    """

    _parts = _Parts(ThreadBeat, Sweeper, ThreadWaiting, ThreadListener, asyncio=False)
    sweeper: Sweeper | None

    def start(self) -> None:
        """Make the table, or check it. Raises ConfigurationError and StoreUnavailable."""
        with prepare.errors_told(self.engine, self.setup.store):
            with self.engine.connect() as connection:
                prepare.make_table(connection, self.setup.store)
            if self.setup.fronts:
                carry_out(self.setup.know(), self.engine)
        if self.sweeper is not None:
            self.sweeper.start()

    def close(self) -> None:
        """Stop what runs in the background. Runs that are open may still end; their leases are renewed no more."""
        if self.sweeper is not None:
            self.sweeper.stop()
        self._beat.close()
        if self._listener is not None:
            self._listener.close()

    def begin(
        self,
        operation: Operation,
        request: KeyedRequest,
        *,
        on: Session | Connection | RawConnection[Any] | None = None,
        deadline_s: float | None = None,
    ) -> Replay | Run:
        """Give the stored answer, or a run; waits up to `operation.wait_s` while another one runs.

        `on`: your own local transaction, in which the work is to happen (see `Run.join`). `deadline_s`: when nobody
        waits for the answer any more; no lease lasts longer. Raises IdempotencyKeyReused, InProgress,
        AnswerNotStored, RunUnknown, NotComparable and StoreUnavailable; in each case nothing has run.
        """
        asked = asked_of(self.setup, operation, request, on, deadline_s)
        found = carry_out(begin(asked, self.setup), self.engine)
        return found if isinstance(found, Replay) else Run(asked, found, self.setup, self.engine)

    def look_up(self, operation: Operation, key: str, tenant: str = "") -> Record | None:
        """The record of a key as it is now, in the database. Raises StoreUnavailable."""
        return carry_out(looked_up(self.setup, operation, key, tenant), self.engine)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncIdempotency(AnyIdempotency[AsyncEngine, AnyFront]):
    """As `Idempotency`, on an AsyncEngine. Used from one event loop."""

    _parts = _Parts(TaskBeat, AsyncSweeper, TaskWaiting, TaskListener, asyncio=True)
    sweeper: AsyncSweeper | None

    async def start(self) -> None:
        """As `Idempotency.start`."""
        with prepare.errors_told(self.engine.sync_engine, self.setup.store):
            async with self.engine.connect() as connection:
                await connection.run_sync(prepare.make_table, self.setup.store)
            if self.setup.fronts:
                await carry_out_async(self.setup.know(), self.engine)
        if self.sweeper is not None:
            self.sweeper.start()

    async def close(self) -> None:
        """As `Idempotency.close`."""
        if self.setup.carried:
            await asyncio.wait(self.setup.carried, timeout=UNDOING_S)
        if self.sweeper is not None:
            await self.sweeper.stop()
        await self._beat.close()
        if self._listener is not None:
            await self._listener.close()

    async def begin(
        self,
        operation: Operation,
        request: KeyedRequest,
        *,
        on: AsyncSession | AsyncConnection | RawAsyncConnection[Any] | None = None,
        deadline_s: float | None = None,
    ) -> Replay | AsyncRun:
        """As `Idempotency.begin`."""
        asked = asked_of(self.setup, operation, request, on, deadline_s)
        found = await carry_out_async(begin(asked, self.setup), self.engine)
        return found if isinstance(found, Replay) else AsyncRun(asked, found, self.setup, self.engine)

    async def look_up(self, operation: Operation, key: str, tenant: str = "") -> Record | None:
        """As `Idempotency.look_up`."""
        return await carry_out_async(looked_up(self.setup, operation, key, tenant), self.engine)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
