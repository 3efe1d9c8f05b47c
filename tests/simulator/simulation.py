"""One run: the town is built from a plan, lives with its faults, and must come to rest without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from coordinator.model import Transaction

from .calls_out import CallsOut
from .coordinators import Client, CoordinatorNode, Town
from .drawing import plan_of
from .faults import Faults
from .handlers import PLAIN, Behaviour
from .initiators import Initiator, behaviours_of, key_of
from .instances import SimInstance
from .invariants import Violation, Watch
from .loop import SimLoop, Stuck, World
from .network import Network
from .operators import Operator, put_right
from .plan import Plan, TransactionPlan, without
from .seeded import Substitution, seeded
from .store_rows import Database
from .town import SimParticipant

STEPS_MAX = 300_000
LIVENESS_US = 60_000_000
"""Within so long after the last fault everything has ended."""
BESIDE_US = 15_000_000
"""Likewise beside a dead participant, which must not make the others wait for what it makes its own wait for."""
AFTERMATH_US = 16_000_000
"""Longer than any message is under way: what is still out there arrives, and must change nothing."""
SHORT_AFTERMATH_US = 5_000_000
"""Where none is very late."""


class Result(NamedTuple):
    """What came of a run."""

    seed: int
    steps: int
    hash: str
    counts: Counter[str]
    violations: tuple[Violation, ...]
    lines: tuple[str, ...]


def run_seed(
    seed: int,
    dropped: tuple[str, ...] = (),
    *,
    tracing: bool = False,
    substitutions: tuple[Substitution, ...] = (),
) -> Result:
    """Run a seed, less what is dropped of its plan; ``substitutions`` stand in the product for the time of the run."""
    return run_plan(without(plan_of(seed), dropped), tracing=tracing, substitutions=substitutions)


def run_plan(plan: Plan, *, tracing: bool = False, substitutions: tuple[Substitution, ...] = ()) -> Result:
    """Run a plan."""
    world = World(plan.seed, tracing=tracing)
    with seeded(world, plan.clock_margin_ms, substitutions):
        simulation = Simulation(world, plan)
        try:
            simulation.run()
        finally:
            world.close()
    return Result(
        plan.seed,
        world.steps,
        world.hash.hexdigest(),
        world.counts,
        tuple(simulation.watch.violations),
        tuple(world.lines or ()),
    )


class Simulation:
    """A town and its life."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.watch = Watch(world)
        self.watch.exact = not (any(plan.store) or plan.jumps or plan.pauses or plan.outages)
        self.network = Network(world, plan.network)
        self.database = Database(world, self.watch.commit)
        self.database.format = min(plan.programs)
        self.store_rates = plan.store
        self.participants: dict[str, SimParticipant] = {}
        self.instances: dict[str, SimInstance] = {}
        town = Town(
            world,
            self.network,
            self.database,
            self.instances,
            plan.policy,
            lambda: self.store_rates,
            self.watch,
        )
        self.coordinators = [CoordinatorNode(town, f"c{n}", program) for n, program in enumerate(plan.programs, 1)]
        self.initiators: list[Initiator] = []
        self._build_participants()
        self.faults = Faults(self)
        self._plan_requests()

    def _build_participants(self) -> None:
        plan = self.plan
        self._behaviours = {key_of(t): behaviours_of(t) for t in plan.transactions}
        for each in plan.participants:
            self.participants[each.name] = participant = SimParticipant(
                self.world,
                each,
                self.watch,
                plan.retention_ms,
                self._behaviour_of,
                self.database,
                lambda loop: Client(loop, self.network, self.coordinators),
                self._calls_out,
            )
            for instance in participant.instances:
                self.instances[instance.name] = instance
                self.database.register(each.name, instance.name, participant.server.fence_id)
                instance.start()
        for coordinator in self.coordinators:
            coordinator.start()

    def _calls_out(self, loop: SimLoop) -> CallsOut:
        return CallsOut(loop, self.network, self.participants, self.watch)

    def _behaviour_of(self, xid: str, branch_id: int) -> Behaviour:
        tx = self.watch.stands.get(xid) or self.watch.losses.lost[xid]
        branches = tx.spec.branches
        return (
            self._behaviours[tx.spec.key].get(branches[branch_id - 1], PLAIN) if branch_id <= len(branches) else PLAIN
        )

    # --- who asks ------------------------------------------------------------------------------------------

    def _client(self, name: str) -> tuple[SimLoop, Client]:
        loop = SimLoop(self.world, name)
        return loop, Client(loop, self.network, self.coordinators)

    def _plan_requests(self) -> None:
        for t in self.plan.transactions:
            self._initiator(t, f"i{t.number}", t.at_us, t.dies_at_us, other=False)
            if t.twin_us is not None:
                self._initiator(t, f"i{t.number}twin", t.at_us + t.twin_us, None, other=False)
            if t.other_us is not None and not t.interactive:
                self._initiator(t, f"i{t.number}other", t.at_us + t.other_us, None, other=True)
            for operator in t.operators:
                loop, client = self._client("operator")
                acting = Operator(client, self.watch, self.world, key_of(t), operator)
                self.world.at(
                    operator.at_us, loop.arrive, lambda loop=loop, acting=acting: loop.create_task(acting.run())
                )

    def _initiator(self, t: TransactionPlan, name: str, at_us: int, dies_at_us: int | None, *, other: bool) -> None:
        loop, client = self._client(name)
        initiator = Initiator(self.world, client, self.watch, t, name, self._calls_out(loop))

        def start() -> None:
            self.world.graveyard.append(loop.create_task(initiator.run_other() if other else initiator.run()))

        self.world.at(at_us, loop.arrive, start)
        if dies_at_us is not None and dies_at_us > at_us:

            def die() -> None:
                self.world.counts["initiators died"] += 1
                self.world.note(name, "dies")
                loop.crash()
                initiator.ended = True

            self.world.at(dies_at_us, die)
        self.initiators.append(initiator)

    # --- its life ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All of it."""
        try:
            self._run()
        except Stuck as error:
            self.watch.wrong(11, str(error))
        for participant in self.participants.values():
            self.world.counts["did it, then said error"] += participant.service.counts["said_error"]
            for name, count in participant.server.counts.items():
                self.world.counts[f"participants' databases: {name}"] += count
        self.world.unexpected += self.world.untold()
        if self.world.unexpected and not self.watch.violations:
            self.watch.wrong(13, "; ".join(self.world.unexpected[:3]))

    def _run(self) -> None:
        world = self.world
        aftermath_us = AFTERMATH_US if self.plan.network.very_late else SHORT_AFTERMATH_US
        awake_us = max((pause.at_us + pause.for_us for pause in self.plan.pauses), default=0)
        if self._go(lambda: False, max(world.now_us, awake_us) + aftermath_us):
            return
        self.faults.end()
        loop, client = self._client("operator")
        loop.arrive(lambda: loop.create_task(put_right(client, self.watch, world)))
        if self.plan.dead is not None:
            dead = f"p{self.plan.dead + 1}"
            if self._go(lambda: self._all_ended(dead), world.now_us + BESIDE_US):
                return
            if not self._all_ended(dead):
                self.watch.wrong(12, f"while {dead} is gone: {self._open(dead)}")
                return
            world.counts["ended beside a dead participant"] += 1
            self.faults.bring_back(dead)
        if self._go(lambda: self._all_ended(None), world.now_us + LIVENESS_US):
            return
        if not self._all_ended(None):
            self.watch.wrong(11, self._open(None))
            return
        if self._go(
            lambda: False, world.now_us + (AFTERMATH_US if self.plan.network.very_late else SHORT_AFTERMATH_US)
        ):
            return
        for coordinator in self.coordinators:
            if coordinator.engine is not None and coordinator.engine.live:
                self.watch.wrong(11, f"{coordinator.name} still drives {coordinator.engine.live} transactions")
        self.watch.at_rest()

    def _go(self, done: Callable[[], bool], until_us: int) -> bool:
        """Let things happen; whether an invariant was broken."""
        self.world.run(done, until_us, STEPS_MAX)
        return self.world.stop

    def _all_ended(self, dead: str | None) -> bool:
        return not self._open_transactions(dead) and (
            dead is not None or all(initiator.ended for initiator in self.initiators)
        )

    def _open_transactions(self, dead: str | None) -> list[Transaction]:
        return [
            tx
            for tx in self.watch.stands.values()
            if not tx.state.finished and (dead is None or all(b.participant != dead for b in tx.spec.branches))
        ]

    def _open(self, dead: str | None) -> str:
        rows = [f"{tx.spec.xid.hex()} is {tx.state.name}" for tx in self._open_transactions(dead)]
        asking = [i.name for i in self.initiators if not i.ended]
        return f"not ended: {'; '.join(rows)}; initiators without an answer: {asking}"
