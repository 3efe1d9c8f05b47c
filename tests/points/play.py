"""One run: a scenario, with processes killed at some points; it must come to its end, and all must be as it should."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import NamedTuple

from coordinator.model import Attention, State
from tests.simulator import database_faults
from tests.simulator.coordinators import Client, CoordinatorNode
from tests.simulator.loop import SimLoop, World
from tests.simulator.network import Network
from tests.simulator.plan import Plan
from tests.simulator.seeded import Substitution, seeded
from tests.simulator.simulation import Simulation
from tests.simulator.store import SimStore
from tests.simulator.town import ACCOUNTS, BALANCE
from tests.simulator.transactions import Account

from .points import Points
from .scenarios import Scenario

BACK_US = 30_000
"""A killed process is started again after so long: before its leases end."""
LONG_US = 3_000_000
"""A coordinator beside which there is another one, after so long: all has ended by then."""
END_US = 20_000_000
"""Within so long all has ended."""
QUIET_US = 400_000
"""Longer than anything is under way: what is still out there arrives, and must change nothing."""

FIXED: tuple[Substitution, ...] = (
    (Network, "_delay_us", lambda network: 1_000),
    (SimStore, "_delay_us", lambda store: 500),
    (database_faults, "TRIP_US", (300, 300)),
)
"""How long everything takes."""


class Played(NamedTuple):
    """What came of a run."""

    points: Sequence[str]
    """Those that were passed after the last kill; all if nobody was killed."""
    end: State | None
    claimed: bool
    """Whether a coordinator has claimed it: one that began anew, or another one."""
    wrong: Sequence[str]
    lines: Sequence[str]


class _InTurn(Client):
    """Asks the coordinators one after another, the first one first."""

    asked = -1

    def any(self) -> CoordinatorNode:
        """The next one."""
        self.asked += 1
        return self._coordinators[self.asked % len(self._coordinators)]


class _Town(Simulation):
    """Lives until its transaction has ended and all is quiet."""

    def __init__(self, world: World, plan: Plan) -> None:
        super().__init__(world, plan)
        for participant in self.participants.values():
            participant.service.heal()

    def _client(self, name: str) -> tuple[SimLoop, Client]:
        loop = SimLoop(self.world, name)
        return loop, _InTurn(loop, self.network, self.coordinators)

    def _run(self) -> None:
        world = self.world
        if self._go(lambda: bool(self.watch.stands) and self._all_ended(None), END_US):
            return
        if not self._all_ended(None):
            self.watch.wrong(11, self._open(None))
            return
        if self._go(lambda: False, world.now_us + QUIET_US):
            return
        for coordinator in self.coordinators:
            if coordinator.engine is not None and coordinator.engine.live:
                self.watch.wrong(11, f"{coordinator.name} still drives {coordinator.engine.live} transactions")
        self.watch.at_rest()


def play(
    scenario: Scenario,
    kills: Sequence[str] = (),
    *,
    tracing: bool = False,
    substitutions: tuple[Substitution, ...] = (),
) -> Played:
    """Run a scenario, and kill whoever comes to these points, one after another."""
    plan = scenario.plan()
    world = World(plan.seed, tracing=tracing)
    away_us = {"c": BACK_US if scenario.coordinators == 1 else LONG_US, "p": BACK_US}
    points = Points(world, kills, away_us)
    gc.disable()  # a run is short, and all of it goes at once
    try:
        with seeded(world, plan.clock_margin_ms, (*FIXED, *points.substitutions(), *substitutions)):
            town = _Town(world, plan)
            points.nodes = {node.name: node for node in town.coordinators}
            points.nodes |= town.instances
            try:
                town.run()
            finally:
                world.close()
    finally:
        gc.enable()
    wrong = [str(violation) for violation in town.watch.violations] or _judged(town, scenario, bool(kills))
    wrong += [f"nobody came to {point}" for point in points.left]
    ends = [tx.state for tx in town.watch.stands.values()]
    return Played(
        points.passed[points.after_kill :],
        ends[0] if len(ends) == 1 else None,
        world.counts["claims"] > 0,
        wrong,
        tuple(world.lines or ()),
    )


def _judged(town: _Town, scenario: Scenario, killed: bool) -> list[str]:
    """What is not as it should be at the end, where no invariant was broken."""
    stands = list(town.watch.stands.values())
    if len(stands) != 1:
        return [f"there are {len(stands)} transactions"]
    (tx,), (initiator,) = stands, town.initiators
    wrong = []
    if tx.state not in scenario.ends(killed):
        wrong.append(f"it ended {tx.state.name}")
    if tx.attention is Attention.VIOLATION:
        wrong.append("a participant contradicted the protocol")
    if initiator.answer is None or initiator.answer.state is not tx.state:
        wrong.append(f"it is {tx.state.name}, and {initiator.answer and initiator.answer.state.name} was told")
    accounts = [account for each in town.participants.values() for account in each.server.rows("account").values()]
    total, gain = sum(account.balance for account in accounts), scenario.moved(tx.state)
    before = BALANCE * len(ACCOUNTS) * scenario.branches
    if total != before + gain or any(account != Account(account.balance) for account in accounts):
        wrong.append(f"the accounts held {before} together, and {gain:+d} were moved: {accounts}")
    return wrong
