"""The instances of the participants: processes that serve one name on one database, and keep it up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
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

from .coordinators import Client
from .database_server import DatabaseServer
from .direct import enlist
from .loop import SimLoop, World
from .losses import Losses
from .participants import ParticipantNode, Service
from .plan import ParticipantPlan
from .ports import Connected
from .store_rows import Database

LOOK_UP_S = 1.0
DRAIN_S = 0.5


class SimInstance:
    """One instance; see ``ports.Instance``. Its database is ``service.server``, or ``stray`` if it ``strays``."""

    def __init__(
        self,
        world: World,
        name: str,
        plan: ParticipantPlan,
        service: Service,
        stray: DatabaseServer,
        registry: Database,
        losses: Losses,
        client_of: Callable[[SimLoop], Client],
        source: random.Random,
    ) -> None:
        self._world = world
        self._plan = plan
        self._service = service
        self._stray = stray
        self._registry = registry
        self._losses = losses
        self._client_of = client_of
        self._source = source
        self.name = name
        self.participant = plan.name
        self.connected: dict[Connected, None] = {}
        self.refuses = True
        self.strays = False
        """Whether its next process is one with the wrong database."""
        self._node: ParticipantNode | None = None
        self._loop = SimLoop(world, name)
        self._loop.alive = False

    @property
    def answers_as(self) -> str:
        """The fence id that its present process names."""
        return self._node.fence_id if self._node is not None else self._service.server.fence_id

    @property
    def loop(self) -> SimLoop:
        """That of its present process."""
        return self._loop

    def start(self) -> None:
        """Start its process, and its upkeep in it."""
        loop = self._loop = SimLoop(self._world, self.name)
        self.refuses = self._source.random() < 0.7
        loop.on_crash = self._ended
        loop.arrive(self._begin, loop)

    def _ended(self) -> None:
        connected, self.connected = self.connected, {}
        if self.refuses:
            for each in connected:
                each.ended()

    def _begin(self, loop: SimLoop) -> None:
        server = self._stray if self.strays else self._service.server
        node = self._node = ParticipantNode(self._world, self.name, loop, self._service, self._source, server=server)
        if not self.strays:  # on the wrong database it is refused, and what was registered stands
            self._registry.register(self.participant, self.name, server.fence_id)
        records = _Records(self._client_of(loop), self._losses, self.participant)
        self._world.graveyard.append(node)
        loop.create_task(self._keep_up(node, records))

    async def _keep_up(self, node: ParticipantNode, records: _Records) -> None:
        while True:
            await asyncio.sleep(self._plan.upkeep_s * self._source.uniform(0.5, 1.5))
            await node.purge(records)
            if self._plan.resolves:
                await node.resolve(records)

    async def stop(self) -> None:
        """Stop as a service does that is told to: it is withdrawn, its last calls are answered, and it ends."""
        loop, node = self._loop, self._node
        self._registry.withdraw(self.participant, self.name)
        if node is not None:
            await node.drain(DRAIN_S)
        loop.crash()

    def receive(self, call: IncomingCall, on_reply: Callable[[Reply], None]) -> None:
        """See ``ports.Instance``."""
        if self._node is not None:
            self._world.counts["calls taken by a second instance"] += self.name != self.participant
            self._node.receive(call, on_reply)

    def call_directly(
        self, xid: str, parent: int, key: str, branch: BranchSpec, seconds: float, answer: Callable[[Any], None]
    ) -> None:
        """Take a direct call, in a turn of ``loop``; ``answer`` is told an Enlisted or the error."""
        node, loop = self._node, self._loop
        if node is None or node.fence_id != self._service.server.fence_id:
            return  # what is on the wrong database is not registered, and nobody enlists who is not
        payload = Payload(branch.payload.data, branch.payload.content_type)
        until_s = loop.time() + seconds
        wanted = Wanted(xid, parent, key, self.participant, branch.action, payload, node.fence_id, until_s)

        async def acting() -> None:
            try:
                answer(await enlist(node, self._client_of(loop), wanted))
            except (Refused, TricordError) as error:
                answer(error)

        loop.create_task(acting())


class _Records:
    """What a participant asks the coordinators."""

    def __init__(self, client: Client, losses: Losses, participant: str) -> None:
        self._client = client
        self._losses = losses
        self._participant = participant

    async def look_up(self, xids: Sequence[str]) -> LookedUp:
        """How far transactions have come."""
        wanted = [bytes.fromhex(xid) for xid in xids]

        async def work(engine: Engine) -> Any:
            return await engine.store.look_up(wanted)

        found = await self._ask("LookUp", work)
        stored = {xid.hex(): State(state) for xid, state in found.states.items()}
        self._losses.looked_up(self._participant, stored)
        states = {xid: TransactionState(state.name) for xid, state in stored.items()}
        return LookedUp(states, found.store_id, found.incarnation)

    async def fetch(self, xid: str) -> Transaction | None:
        """A whole one."""

        async def work(engine: Engine) -> Any:
            return await engine.get(xid=bytes.fromhex(xid))

        tx = await self._ask("Get", work)
        self._losses.fetched(self._participant, xid, tx)
        return None if tx is None else read_transaction(transaction_message(tx))

    async def _ask(self, what: str, work: Callable[[Engine], Any]) -> Any:
        try:
            return await self._client.ask(self._client.any(), what, work, LOOK_UP_S)
        except Exception as error:
            raise OutcomeUnknown(str(error), "") from error
