"""A participant: its name, its engine, its actions, and how it is put on the network.

    bank = Participant("bank-a", engine)
    ... handlers ...
    bank.serve("127.0.0.1:7801", coordinator="127.0.0.1:7800")              # Engine, `def` handlers
    await bank.serve_async("127.0.0.1:7801", coordinator="127.0.0.1:7800")  # AsyncEngine, `async def` handlers

`serve` is the whole program; `start` is the same without waiting for its end; `add_to_server` is for a program that
has a gRPC server of its own. `purge` and `resolve` do once what a participant that serves does in the background.
Each has a form for either flavour, and calling the wrong one says so.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

from participant_sdk import serve
from participant_sdk.actions import ActionDefinition, Actions, check_name, complete_actions
from participant_sdk.background import Moves
from participant_sdk.batch_keys import BatchKey, BatchKeys, check_declared
from participant_sdk.call import IncomingCall, Reply
from participant_sdk.engines import AsyncEngineFence, SyncEngineFence
from participant_sdk.enlist import TaskEnlisting, ThreadEnlisting, not_served
from participant_sdk.errors import ConfigurationError
from participant_sdk.fence_tables import DEFAULT, FenceTables
from participant_sdk.gathering import Answers
from participant_sdk.holds import HoldsQuery, declare
from participant_sdk.lanes import TaskLanes, ThreadLanes
from participant_sdk.local_transaction import TRY_AGE_MAX_MS, Fence
from participant_sdk.serve_attached import AsyncAttached, Attached, unary_trys_of
from participant_sdk.service_inspection import Inspection, TaskInspection, ThreadInspection
from participant_sdk.tried_memory import TriedMemory
from participant_sdk.upkeep import DEFAULT as UPKEEP
from participant_sdk.upkeep import PurgeReport, Report, ResolveReport, Upkeep
from participant_sdk.upkeep_hands import TaskHands, ThreadHands
from participant_sdk.upkeep_loops import TaskUpkeep, ThreadUpkeep
from participant_sdk.upkeep_purge import purging
from participant_sdk.upkeep_resolve import Scan, resolving
from participant_sdk.upkeep_steps import Job, Memory, finish

if TYPE_CHECKING:
    import grpc
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[[Any], Any])
AnyReport = TypeVar("AnyReport", bound=Report)

TRY_WORKERS: Final = 8
PHASE2_WORKERS: Final = 4
WAITING_MAX: Final = 1_000
STREAMS_MAX: Final = 16
GRACE_SECONDS: Final = 20.0
LEASE: Final = timedelta(minutes=1)
LEASE_MAX: Final = timedelta(days=1)
RETENTION: Final = timedelta(days=7)
RETENTION_MIN: Final = timedelta(milliseconds=TRY_AGE_MAX_MS)
RETENTION_MAX: Final = timedelta(days=3650)


class Participant:
    """A named service that takes part in transactions.

    `engine` is a SQLAlchemy Engine (handlers are `def` functions) or AsyncEngine (`async def`) on PostgreSQL, MariaDB
    or SQLite. At most `try_workers` Trys and, apart from them, `phase2_workers` Confirms and Cancels run at a time,
    each on a connection of its own; at most `waiting_max` calls of either kind are admitted at a time, beyond that they
    are answered "overloaded". A Try of a transaction that began more than 25 hours ago is refused; rows of the fence
    (`tables`) are kept for `retention` at least. Raises ConfigurationError.
    """

    def __init__(
        self,
        name: str,
        engine: Engine | AsyncEngine,
        *,
        try_workers: int = TRY_WORKERS,
        phase2_workers: int = PHASE2_WORKERS,
        waiting_max: int = WAITING_MAX,
        retention: timedelta = RETENTION,
        tables: FenceTables = DEFAULT,
    ) -> None:
        self.name = check_name("participant", name)
        for setting, value in (
            ("try_workers", try_workers),
            ("phase2_workers", phase2_workers),
            ("waiting_max", waiting_max),
        ):
            if value < 1:
                raise ConfigurationError(f"{setting} is {value}, but must be 1 or more")
        self._try_workers = try_workers
        self._phase2_workers = phase2_workers
        self._waiting_max = waiting_max
        if not RETENTION_MIN <= retention <= RETENTION_MAX:
            raise ConfigurationError(f"retention is {retention}, but must be {RETENTION_MIN} to {RETENTION_MAX}")
        self._retention_ms = retention // timedelta(milliseconds=1)
        self._tables = tables
        self._asynchronous = hasattr(engine, "sync_engine")
        self._engine = engine
        self._engine_fence: SyncEngineFence | AsyncEngineFence | None = None
        self._fence: Fence | None = None
        self._definitions: dict[str, ActionDefinition[Any, Any]] = {}
        self._holds: HoldsQuery | None = None
        self._upkeep_memory = Memory()
        self._enlisting: ThreadEnlisting | TaskEnlisting | None = None
        self._tried_memory = TriedMemory()

    def action(
        self,
        name: str,
        *,
        external: bool = False,
        lease: timedelta = LEASE,
        batch: bool = False,
        batch_key: BatchKey | None = None,
    ) -> Callable[[Callable[P, R]], ActionDefinition[P, R]]:
        """Decorator of a Try handler `(call: Call[T], db)`; its result has the decorators `.confirm` and `.cancel`.

        `name` is what initiators call, 1 to 64 characters of `A-Z a-z 0-9 . _ -`. `external`: Try has an effect outside
        the database; then Cancel reaches it even if Try failed, but waits for `lease`, which must be longer than the
        handler ever takes. `batch`: calls of one kind and one `batch_key` (a field of the payload, or a function of
        it) that wait while others of it run then share one local transaction. Raises ConfigurationError.
        """
        check_declared(name, batch, batch_key, external)
        if not timedelta(seconds=1) <= lease <= LEASE_MAX:
            raise ConfigurationError(f"the lease of action {name!r} is {lease}, but must be 1 s to {LEASE_MAX}")

        def decorate(try_handler: Callable[P, R]) -> ActionDefinition[P, R]:
            if name in self._definitions:
                raise ConfigurationError(f"participant {self.name!r} has two actions {name!r}")
            definition = ActionDefinition(
                name,
                try_handler,
                asynchronous=self._asynchronous,
                lease_ms=lease // timedelta(milliseconds=1) if external else None,
                batch_key=batch_key,
                enlist=self._enlist,
            )
            self._definitions[name] = definition
            self._fence = None
            return definition

        return decorate

    def holds(self, *actions: str) -> Callable[[F], F]:
        """Decorator of a query `(db)` that gives a `Hold` for all that is reserved for branches in your tables.

        A generator, or a function that returns a list. It runs when an operator asks (`tricord doctor`), in a read-only
        local transaction, together with a look at the fence: a hold must have a TRIED branch, and a TRIED branch of
        these `actions` (none named: of any) must have a hold. Raises ConfigurationError.
        """

        def decorate(function: F) -> F:
            if self._holds is not None:
                raise ConfigurationError(f"participant {self.name!r} has two queries of holds()")
            self._holds = declare(function, actions, asynchronous=self._asynchronous)
            self._fence = None
            return function

        if any(not isinstance(action, str) for action in actions):
            raise ConfigurationError("write @….holds() with the names of actions, or without any: @….holds()")
        return decorate

    def check(self) -> Actions:
        """All actions, checked to be complete and rightly typed; raises ConfigurationError. Starting does it too."""
        actions = complete_actions(self.name, self._definitions)
        if self._holds is not None:
            self._holds.check(actions)
        return actions

    def prepare(self) -> str:
        """Create the fence tables if they are missing and prove that the engine has transactions.

        Returns the id of the fence database. Raises ConfigurationError. Starting does it too.
        """
        return self._prepare().fence_id

    async def prepare_async(self) -> str:
        """As `prepare`, for an AsyncEngine."""
        return (await self._prepare_async()).fence_id

    def add_to_server(self, server: grpc.Server, *, streams_max: int = STREAMS_MAX) -> Attached:
        """Add the participant to a `grpc.server` that is not started yet; others may be on it, too.

        Every open Exchange stream holds a worker thread of the server, so it needs more than `streams_max` + 4 of
        them; a coordinator process opens one stream. Raises ConfigurationError.
        """
        unary_trys_of(server, streams_max)
        fence = self._prepare()
        engine_fence = cast(SyncEngineFence, self._engine_fence)

        def execute(call: IncomingCall) -> Reply:
            return self._tried_memory.completed(call, engine_fence.execute(call, fence))

        def execute_batch(calls: list[IncomingCall]) -> Answers:
            return self._tried_memory.completed_all(calls, engine_fence.execute_batch(calls, fence))

        key_of = BatchKeys(fence.actions).of
        workers = self._try_workers, self._phase2_workers
        lanes = ThreadLanes(execute, *workers, self._waiting_max, execute_batch, key_of)
        self._enlisting = ThreadEnlisting(self.name, fence, lanes)

        def begin_upkeep(coordinator: str, upkeep: Upkeep) -> ThreadUpkeep:
            return ThreadUpkeep(coordinator, self._job(fence, upkeep), engine_fence, lanes)

        inspection = ThreadInspection(Inspection(self.name, fence), engine_fence, self._holds)
        return Attached(self.name, fence, lanes, server, streams_max, begin_upkeep, self._enlisting, inspection)

    async def add_to_server_async(self, server: grpc.aio.Server) -> AsyncAttached:
        """Add the participant to a `grpc.aio.server` that is not started yet; others may be on it, too.

        Raises ConfigurationError.
        """
        fence = await self._prepare_async()
        engine_fence = cast(AsyncEngineFence, self._engine_fence)

        async def execute(call: IncomingCall) -> Reply:
            return self._tried_memory.completed(call, await engine_fence.execute(call, fence))

        async def execute_batch(calls: list[IncomingCall]) -> Answers:
            return self._tried_memory.completed_all(calls, await engine_fence.execute_batch(calls, fence))

        key_of = BatchKeys(fence.actions).of
        workers = self._try_workers, self._phase2_workers
        lanes = TaskLanes(execute, *workers, self._waiting_max, execute_batch, key_of)
        self._enlisting = TaskEnlisting(self.name, fence, lanes)

        def begin_upkeep(coordinator: str, upkeep: Upkeep) -> TaskUpkeep:
            return TaskUpkeep(coordinator, self._job(fence, upkeep), engine_fence, lanes)

        inspection = TaskInspection(Inspection(self.name, fence), engine_fence, self._holds)
        return AsyncAttached(self.name, fence, lanes, server, begin_upkeep, self._enlisting, inspection)

    def start(
        self,
        listen: str,
        *,
        coordinator: str | None = None,
        advertise: str | None = None,
        upkeep: Upkeep | None = UPKEEP,
    ) -> serve.Serving:
        """Serve on `listen` ("host:port", port 0 chooses one) until the returned handle's `stop`.

        With `coordinator` ("host:port") it registers itself there, in the background, as reachable at `advertise`
        (default: the address it listens on), and keeps its fence in order as `upkeep` says (None: not at all). Raises
        ConfigurationError.
        """
        return serve.start(self, listen, coordinator, advertise, upkeep, STREAMS_MAX)

    async def start_async(
        self,
        listen: str,
        *,
        coordinator: str | None = None,
        advertise: str | None = None,
        upkeep: Upkeep | None = UPKEEP,
    ) -> serve.AsyncServing:
        """As `start`, for an AsyncEngine."""
        return await serve.start_async(self, listen, coordinator, advertise, upkeep)

    def serve(
        self,
        listen: str,
        *,
        coordinator: str | None = None,
        advertise: str | None = None,
        upkeep: Upkeep | None = UPKEEP,
        grace: float = GRACE_SECONDS,
    ) -> None:
        """Serve until SIGTERM or SIGINT; then take no more calls and give those that run `grace` seconds to end.

        Otherwise as `start`; returns when all has ended. Raises ConfigurationError, also if the coordinator refuses
        the registration.
        """
        serve.serve(self, listen, coordinator, advertise, upkeep, STREAMS_MAX, grace)

    async def serve_async(
        self,
        listen: str,
        *,
        coordinator: str | None = None,
        advertise: str | None = None,
        upkeep: Upkeep | None = UPKEEP,
        grace: float = GRACE_SECONDS,
    ) -> None:
        """As `serve`, for an AsyncEngine."""
        await serve.serve_async(self, listen, coordinator, advertise, upkeep, grace)

    def purge(self, coordinator: str, upkeep: Upkeep = UPKEEP) -> PurgeReport:
        """Delete what is over, once and now: rows older than the retention whose transaction is finished.

        That it is finished is asked of the `coordinator` ("host:port"). A participant that serves does it by itself;
        this is for a job of its own, which may run beside it. Never TRIED rows, nor what the coordinator has no record
        of. What goes wrong on the way is in the report's `error`, with what was done until then. Raises
        ConfigurationError.
        """
        return self._once(coordinator, upkeep, purging)

    async def purge_async(self, coordinator: str, upkeep: Upkeep = UPKEEP) -> PurgeReport:
        """As `purge`, for an AsyncEngine."""
        return await self._once_async(coordinator, upkeep, purging)

    def resolve(self, coordinator: str, upkeep: Upkeep = UPKEEP) -> ResolveReport:
        """Settle branches that have been TRIED for longer than `resolve_after`, once and now.

        Confirm or Cancel is run as the `coordinator` ("host:port") has it on record; what it has no record of, or has
        not decided, stays. Otherwise as `purge`.
        """
        return self._once(coordinator, upkeep, lambda job: resolving(job, Scan()))

    async def resolve_async(self, coordinator: str, upkeep: Upkeep = UPKEEP) -> ResolveReport:
        """As `resolve`, for an AsyncEngine."""
        return await self._once_async(coordinator, upkeep, lambda job: resolving(job, Scan()))

    def _once(self, coordinator: str, upkeep: Upkeep, round_of: Callable[[Job], Moves[AnyReport]]) -> AnyReport:
        serve.split_address(coordinator)
        fence = self._prepare()
        engine_fence = cast(SyncEngineFence, self._engine_fence)
        job = self._job(fence, upkeep)
        hands = ThreadHands(coordinator, engine_fence, fence.database, lambda call: engine_fence.execute(call, fence))
        try:
            return finish(job, hands.run(round_of(job)))
        finally:
            hands.close()

    async def _once_async(
        self, coordinator: str, upkeep: Upkeep, round_of: Callable[[Job], Moves[AnyReport]]
    ) -> AnyReport:
        serve.split_address(coordinator)
        fence = await self._prepare_async()
        engine_fence = cast(AsyncEngineFence, self._engine_fence)
        job = self._job(fence, upkeep)
        hands = TaskHands(coordinator, engine_fence, fence.database, lambda call: engine_fence.execute(call, fence))
        try:
            return finish(job, await hands.run(round_of(job)))
        finally:
            await hands.close()

    def _enlist(self, action: str, payload: object, branch_key: str | None, timeout: float | None) -> Any:
        """See `ActionDefinition.enlist`; for an AsyncEngine a coroutine."""
        if self._enlisting is None:
            raise not_served(self.name)
        return self._enlisting.enlist(action, payload, branch_key, timeout)

    def _job(self, fence: Fence, upkeep: Upkeep) -> Job:
        return Job(self.name, fence, upkeep, self._upkeep_memory)

    def _prepare(self) -> Fence:
        if self._asynchronous:
            raise ConfigurationError(
                f"participant {self.name!r} has an AsyncEngine: await serve_async, start_async, add_to_server_async "
                "or prepare_async"
            )
        if self._fence is None:
            actions = self.check()
            engine_fence = SyncEngineFence(cast("Engine", self._engine), self._tables, self._retention_ms)
            self._fence = engine_fence.prepare(actions, self._try_workers + self._phase2_workers)
            engine_fence.tell_of_lost_actions(self.name, actions)
            self._engine_fence = engine_fence
        return self._fence

    async def _prepare_async(self) -> Fence:
        if not self._asynchronous:
            raise ConfigurationError(
                f"participant {self.name!r} has an Engine, not an AsyncEngine: call serve, start, add_to_server or "
                "prepare"
            )
        if self._fence is None:
            actions = self.check()
            engine_fence = AsyncEngineFence(cast("AsyncEngine", self._engine), self._tables, self._retention_ms)
            self._fence = await engine_fence.prepare(actions, self._try_workers + self._phase2_workers)
            await engine_fence.tell_of_lost_actions(self.name, actions)
            self._engine_fence = engine_fence
        return self._fence
