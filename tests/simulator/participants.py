"""One process of a simulated participant: the SDK's real lanes, engine fence, steps, upkeep and wire, on a loop.

What lasts longer than a process is the participant's ``Service``: its database, its business, who watches it. Two
nodes may share one, as two processes of one service do.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

from participant_sdk.actions import Actions
from participant_sdk.batch_keys import BatchKeys
from participant_sdk.call import IncomingCall, Outcome, Reply
from participant_sdk.engines import AsyncEngineFence
from participant_sdk.fence_tables import DEFAULT
from participant_sdk.gathering import Answers
from participant_sdk.lanes import TaskLanes
from participant_sdk.local_transaction import Fence
from participant_sdk.service_messages import read_call, write_reply
from participant_sdk.tried_memory import TriedMemory
from participant_sdk.upkeep import PurgeReport, ResolveReport, Upkeep
from participant_sdk.upkeep_purge import purging
from participant_sdk.upkeep_resolve import Scan, resolving
from participant_sdk.upkeep_steps import Memory
from tests.simulator.database import SimDatabase
from tests.simulator.database_client import SimEngine
from tests.simulator.database_server import DatabaseServer
from tests.simulator.handlers import Business, actions_of
from tests.simulator.loop import SimLoop, World
from tests.simulator.participant_upkeep import Records, SimHands, SimJob
from tricord.v1 import participant_pb2

SAID_ERROR: Final = "it was done, and then an error was said"


class Answered(NamedTuple):
    """A reply at the moment at which it leaves its process."""

    node: ParticipantNode
    call: IncomingCall
    reply: Reply
    true: Reply
    """Before it was made an error of."""


@dataclass(slots=True)
class Service:
    """What the processes of one participant have in common.

    ``retention_ms`` must be above all that a Try can have behind it when it arrives and is still meant: a
    transaction's longest time-out. ``lease_ms``: of external actions. ``says_error``: how often a good answer is made
    an error of. ``batch``: whether calls of one account run together.
    """

    name: str
    server: DatabaseServer
    business: Business
    retention_ms: int
    lease_ms: int = 2_000
    upkeep: Upkeep = field(default_factory=Upkeep)
    says_error: float = 0.0
    batch: bool = False
    try_workers: int = 8
    phase2_workers: int = 4
    waiting_max: int = 200
    on_resolve: Callable[[IncomingCall], None] = lambda _call: None
    """Told of calls that the resolver makes."""
    on_answer: list[Callable[[Answered], None]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    actions: Actions = field(init=False)

    def __post_init__(self) -> None:
        self.actions = actions_of(self.business, self.lease_ms, batch=self.batch)

    def check_budget(self, timeout_ms_max: int) -> None:
        """Raises ValueError unless the retention is longer than any transaction can be undecided.

        In the ratio that the product has: 25 hours, of transactions that are decided within 24.
        """
        if self.retention_ms * 24 < timeout_ms_max * 25:
            raise ValueError(f"retention_ms is {self.retention_ms}, too short for time-outs of {timeout_ms_max} ms")

    def heal(self) -> None:
        """No faults from now on."""
        self.says_error = 0.0
        self.business.heals = True
        self.server.faults.heal()


class ParticipantNode:
    """One process, from its start to the crash of its loop. ``server``: another database than its service's."""

    def __init__(
        self,
        world: World,
        name: str,
        loop: SimLoop,
        service: Service,
        rng: random.Random,
        *,
        server: DatabaseServer | None = None,
    ) -> None:
        self.world = world
        self.name = name
        self.loop = loop
        self.service = service
        self._rng = rng
        server = server or service.server
        self.engine = SimEngine(loop, server)
        self.database = SimDatabase(server.flavour, server.fence_id)
        self.fence = Fence(self.database, server.fence_id, service.actions, service.retention_ms)
        self._engine_fence = AsyncEngineFence(cast(Any, self.engine), DEFAULT, service.retention_ms)
        workers = service.try_workers, service.phase2_workers
        key_of = BatchKeys(service.actions).of
        self._lanes = TaskLanes(self._execute, *workers, service.waiting_max, self._execute_batch, key_of)
        self._tried_memory = TriedMemory()
        self._memory = Memory()
        self._scan = Scan()
        self._ended = False
        before = loop.on_crash

        def crashed() -> None:
            before()
            self.end()
            self.engine.crashed()

        loop.on_crash = crashed

    def end(self) -> None:
        """It is dead, or the run is over: what is collected as garbage now starts nothing and tells nobody."""
        self._ended = True
        self._lanes._abandoned = True

    @property
    def fence_id(self) -> str:
        """What its replies name."""
        return self.fence.fence_id

    def receive(self, call: IncomingCall, on_reply: Callable[[Reply], None]) -> None:
        """A call has arrived: in a turn of this process's loop. ``on_reply`` is called once, unless it crashes."""

        def answer(true: Reply) -> None:
            if self._ended:
                return
            reply = true
            if true.outcome is not Outcome.UNKNOWN and self._rng.random() < self.service.says_error:
                reply = Reply.unknown(SAID_ERROR)
                self.service.counts["said_error"] += 1
            self.service.counts[f"{call.phase.name} {reply.outcome.name}"] += 1
            answered = Answered(self, call, reply, true)
            for watcher in self.service.on_answer:
                watcher(answered)
            on_reply(reply)

        self._lanes.submit(call, answer)

    def receive_message(self, message: participant_pb2.Call, on_reply: Callable[[participant_pb2.Reply], None]) -> None:
        """As ``receive``, for what travels on the wire."""
        call = read_call(message, self.serves)
        if isinstance(call, Reply):
            on_reply(write_reply(message.call_id, call, self.fence_id))
            return
        self.receive(call, lambda reply: on_reply(write_reply(message.call_id, reply, self.fence_id)))

    @property
    def serves(self) -> Collection[str]:
        """The participants that are served here."""
        return (self.service.name,)

    async def purge(self, records: Records) -> PurgeReport | None:
        """One purge, by what the coordinator's ``records`` say."""
        report = await self._hands(records).run(purging(self._job()))
        if report is not None:
            self.service.counts["purged"] += report.purged
        return report

    async def resolve(self, records: Records) -> ResolveReport | None:
        """One round of the resolver."""
        report = await self._hands(records).run(resolving(self._job(), self._scan))
        if report is not None:
            self.service.counts["resolved"] += report.confirmed + report.cancelled
        return report

    def _hands(self, records: Records) -> SimHands:
        return SimHands(records, self._engine_fence, self.database, self._run)

    def _job(self) -> SimJob:
        return SimJob(self.service.name, self.fence, self.service.upkeep, self._memory)

    async def _run(self, call: IncomingCall) -> Reply:
        """As a call that has arrived: upkeep goes through the lanes, too."""
        self.service.on_resolve(call)
        future = self.loop.create_future()
        self.receive(call, future.set_result)
        reply: Reply = await future
        return reply

    async def _execute(self, call: IncomingCall) -> Reply:
        return self._tried_memory.completed(call, await self._engine_fence.execute(call, self.fence))

    async def _execute_batch(self, calls: list[IncomingCall]) -> Answers:
        self.service.counts["together"] += len(calls)
        answers = await self._engine_fence.execute_batch(calls, self.fence)
        self.service.counts["batches"] += bool(answers.replies)
        return self._tried_memory.completed_all(calls, answers)

    async def drain(self, grace_s: float) -> None:
        """Admit no more calls, and wait for those under way, so long at the most."""
        await self._lanes.drain(grace_s)
