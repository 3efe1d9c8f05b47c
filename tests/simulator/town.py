"""The participants of a run: the SDK's own code in processes of the town, on simulated databases of theirs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from coordinator.engine import Engine
from coordinator.model import BranchSpec, State
from coordinator.wire import transaction_message
from participant_sdk.call import IncomingCall, Reply
from participant_sdk.client_enlisting import Wanted
from participant_sdk.coordinator_messages import read_transaction
from participant_sdk.errors import OutcomeUnknown, Refused, TricordError
from participant_sdk.payload import Payload
from participant_sdk.transaction import LookedUp, Transaction, TransactionState
from participant_sdk.upkeep import Upkeep

from .coordinators import Client
from .database_faults import DatabaseFaults
from .database_server import Committed, DatabaseServer
from .direct import enlist
from .handlers import Behaviour, Business
from .invariants import Watch, stray_name
from .loop import SimLoop, World
from .participants import Answered, ParticipantNode, Service
from .plan import ParticipantPlan
from .transactions import Flavour

BALANCE = 1_000
ACCOUNTS = ("a", "b")
LOOK_UP_S = 1.0


class SimParticipant:
    """A participant; see ``ports.Participant``."""

    def __init__(
        self,
        world: World,
        plan: ParticipantPlan,
        watch: Watch,
        retention_ms: int,
        behaviour_of: Callable[[str, int], Behaviour],
        client_of: Callable[[SimLoop], Client],
    ) -> None:
        self._world = world
        self._plan = plan
        self.name = plan.name
        self._client_of = client_of
        source = random.Random(world.random.getrandbits(64))
        t = plan.trouble
        faults = DatabaseFaults(
            lost_before=t * 0.05, lost_after=t * 0.05, lands_later=t * 0.05, conflict=t * 0.1,
            conflict_at_commit=t * 0.15, slow=t * 0.05,
        )  # fmt: skip
        self.server = DatabaseServer(
            world, f"{plan.name}-db", source, flavour=Flavour[plan.flavour], faults=faults, skew_ms=plan.skew_ms
        )
        self.stray = DatabaseServer(
            world, f"{plan.name}-stray", source, flavour=Flavour[plan.flavour], faults=DatabaseFaults()
        )
        for server, name in ((self.server, plan.name), (self.stray, stray_name(plan.name))):
            for account in ACCOUNTS:
                server.open_account(account, BALANCE)
            watch.opens(name, ACCOUNTS, BALANCE)
            server.on_commit.append(partial(_tell, watch, name))
        business = Business(random.Random(source.getrandbits(64)), behaviour_of)
        self.service = Service(
            plan.name,
            self.server,
            business,
            retention_ms,
            lease_ms=plan.intent_lease_ms,
            upkeep=Upkeep(resolve_after=timedelta(seconds=plan.resolve_after_s), batch=2),
            says_error=plan.says_error,
        )

        def answered(answer: Answered) -> None:
            name = plan.name if answer.node.fence_id == self.fence_id else stray_name(plan.name)
            watch.answered(name, answer.call, answer.true)

        self.service.on_answer.append(answered)
        self.strays = False
        """Whether its next process is one with the wrong database."""
        self._node: ParticipantNode | None = None
        self._loop = SimLoop(world, plan.name)
        self._loop.alive = False
        self._source = source

    @property
    def fence_id(self) -> str:
        """That of its database, as registered."""
        return self.server.fence_id

    @property
    def answers_as(self) -> str:
        """The fence id that its present process names."""
        return self._node.fence_id if self._node is not None else self.fence_id

    @property
    def loop(self) -> SimLoop:
        """That of its present process."""
        return self._loop

    def start(self) -> None:
        """Start its process, and its upkeep in it."""
        loop = self._loop = SimLoop(self._world, self.name)
        loop.arrive(self._begin, loop)

    def _begin(self, loop: SimLoop) -> None:
        server = self.stray if self.strays else self.server
        node = self._node = ParticipantNode(self._world, self.name, loop, self.service, self._source, server=server)
        records = _Records(self._client_of(loop))
        self._world.graveyard.append(node)
        loop.create_task(self._keep_up(node, records))

    async def _keep_up(self, node: ParticipantNode, records: _Records) -> None:
        while True:
            await asyncio.sleep(self._plan.upkeep_s * self._source.uniform(0.5, 1.5))
            await node.purge(records)
            if self._plan.resolves:
                await node.resolve(records)

    def receive(self, call: IncomingCall, on_reply: Callable[[Reply], None]) -> None:
        """See ``ports.Participant``."""
        if self._node is not None:
            self._node.receive(call, on_reply)

    def call_directly(
        self, xid: str, key: str, branch: BranchSpec, seconds: float, answer: Callable[[Any], None]
    ) -> None:
        """Take an initiator's call, in a turn of ``loop``; ``answer`` is told an Enlisted or the error."""
        node, loop = self._node, self._loop
        if node is None or node.fence_id != self.fence_id:
            return  # what is on the wrong database is not registered, and nobody enlists who is not
        payload = Payload(branch.payload.data, branch.payload.content_type)
        until_s = loop.time() + seconds
        wanted = Wanted(xid, 0, key, self.name, branch.action, payload, node.fence_id, until_s)

        async def acting() -> None:
            try:
                answer(await enlist(node, self._client_of(loop), wanted))
            except (Refused, TricordError) as error:
                answer(error)

        loop.create_task(acting())

    def heal(self) -> None:
        """See ``ports.Participant``."""
        self.service.heal()


def _tell(watch: Watch, name: str, committed: Committed) -> None:
    watch.committed(name, committed.changes)


class _Records:
    """What a participant asks the coordinators."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def look_up(self, xids: Sequence[str]) -> LookedUp:
        """How far transactions have come."""
        wanted = [bytes.fromhex(xid) for xid in xids]

        async def work(engine: Engine) -> Any:
            return await engine.store.look_up(wanted)

        found = await self._ask("LookUp", work)
        states = {xid.hex(): TransactionState(State(state).name) for xid, state in found.states.items()}
        return LookedUp(states, found.store_id, found.incarnation)

    async def fetch(self, xid: str) -> Transaction | None:
        """A whole one."""

        async def work(engine: Engine) -> Any:
            return await engine.get(xid=bytes.fromhex(xid))

        tx = await self._ask("Get", work)
        return None if tx is None else read_transaction(transaction_message(tx))

    async def _ask(self, what: str, work: Callable[[Engine], Any]) -> Any:
        try:
            return await self._client.ask(self._client.any(), what, work, LOOK_UP_S)
        except Exception as error:
            raise OutcomeUnknown(str(error), "") from error
