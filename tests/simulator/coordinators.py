"""Coordinators: the real engine in a process on the simulated world."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from coordinator.engine import Engine, FormatNotReady, KeyReused, UnknownXid
from coordinator.journal import Overloaded
from coordinator.model import Policy
from coordinator.orders import Denied
from coordinator.participants import Participants
from coordinator.store.rows import RowRejected, StoreError

from .deliveries import CallWatch, SimDelivery
from .loop import SimLoop, World
from .network import Network
from .ports import Instance
from .store import SimStore, StoreRates
from .store_rows import Database

FINAL = (KeyReused, Denied)
"""Errors that are an answer; after all others it is not known what has happened, or nothing has."""
SERVED = (*FINAL, FormatNotReady, Overloaded, RowRejected, StoreError, UnknownXid)

START_AGAIN_S = 0.1

Work = Callable[[Engine], Awaitable[Any]]


class Town(NamedTuple):
    """What all coordinators share."""

    world: World
    network: Network
    database: Database
    instances: Mapping[str, Instance]
    """By address."""
    policy: Policy
    store_rates: Callable[[], StoreRates]
    """Those that hold now: faults come to an end."""
    watch: CallWatch


class Unanswered(Exception):
    """No answer came in time: it is not known what has become of the request."""


class CoordinatorNode:
    """One coordinator: a process that is started, crashes, and is started again."""

    def __init__(self, town: Town, name: str, program: int) -> None:
        self.town = town
        self.name = name
        self.program = program
        """The highest row format that its program knows; a newer program is started in an upgrade."""
        self.engine: Engine | None = None
        self.loop = SimLoop(town.world, name)
        self.loop.alive = False

    def start(self) -> None:
        """Start its process."""
        town = self.town
        self.loop = SimLoop(town.world, self.name)
        self.engine = None
        self.loop.arrive(self._begin, self.loop)

    def _begin(self, loop: SimLoop) -> None:
        town = self.town
        town.world.note(self.name, f"starts (row format {self.program})")
        store = SimStore(town.database, loop, town.store_rates, self.program)
        loop.create_task(self._open(loop, store))

    async def _open(self, loop: SimLoop, store: SimStore) -> None:
        """As the product: it serves when it has the list of participants; somebody starts it again until then."""
        town = self.town
        participants = Participants(store)  # type: ignore[arg-type]
        while True:
            try:
                await participants.refresh()
                break
            except StoreError:
                await asyncio.sleep(START_AGAIN_S)
        pause_ms_max = town.policy.backoff_cap_ms
        delivery = SimDelivery(town.network, loop, town.instances, town.watch, participants, pause_ms_max)
        self.engine = Engine(store, delivery, town.policy)  # type: ignore[arg-type]
        await self.engine.start()

    def crash(self) -> None:
        """End its process as a power cut does."""
        if self.loop.alive:
            self.town.world.note(self.name, "crashes")
            self.town.world.graveyard.append(self.engine)
            self.loop.crash()
            self.engine = None

    def serve(self, work: Work, answer: Callable[[Any], None]) -> None:
        """Have a request carried out, in a turn of this process; ``answer`` is called with what came of it."""
        engine, loop = self.engine, self.loop
        if engine is None:
            return

        async def serving() -> None:
            try:
                end = await work(engine)
            except SERVED as error:
                end = error
            answer(end)

        loop.create_task(serving())


class Client:
    """Asks coordinators from a process of its own."""

    def __init__(self, loop: SimLoop, network: Network, coordinators: list[CoordinatorNode]) -> None:
        self.loop = loop
        self.network = network
        self._coordinators = coordinators

    def any(self) -> CoordinatorNode:
        """Some coordinator, alive or not: who asks does not know."""
        return self.loop.world.random.choice(self._coordinators)

    async def ask(self, target: CoordinatorNode, what: str, work: Work, timeout_s: float) -> Any:
        """One request. Raises what the coordinator raised, and Unanswered when no answer comes in time."""
        loop, network = self.loop, self.network
        answered: asyncio.Future[Any] = loop.create_future()
        loop.world.note(loop.name, f"asks {target.name}: {what}")

        def reply(end: Any) -> None:
            network.send(target.name, loop.name, f"answer to {what}", lambda: loop.arrive(settle, end))

        def settle(end: Any) -> None:
            if not answered.done():
                answered.set_result(end)

        network.send(loop.name, target.name, what, lambda: target.loop.arrive(target.serve, work, reply))
        done, _ = await asyncio.wait([answered], timeout=timeout_s)
        if not done:
            raise Unanswered(what)
        end = answered.result()
        if isinstance(end, Exception):
            raise end.with_traceback(None)
        return end
