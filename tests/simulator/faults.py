"""What goes wrong in a run, and that it comes to an end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .coordinators import CoordinatorNode
from .instances import SimInstance
from .network import NetworkRates
from .plan import Cut, Jump, Stop
from .store import StoreRates
from .town import SimParticipant

if TYPE_CHECKING:
    from .simulation import Simulation

UPGRADE_STEP_US = 300_000
GRACE_S = 0.5
START_US = 20_000


class Faults:
    """Has the faults of a plan happen, and ends them."""

    def __init__(self, simulation: Simulation) -> None:
        self._s = simulation
        self._world = simulation.world
        self._over = False
        self._dead = ""
        plan, world = simulation.plan, simulation.world
        for crash in plan.crashes:
            world.at(crash.at_us, self._crash, crash)
        for stray in plan.strays:
            world.at(stray.at_us, self._stray, stray)
        for pause in plan.pauses:
            world.at(pause.at_us, self._pause, pause)
        for cut in plan.cuts:
            world.at(cut.at_us, self._cut, cut)
        for jump in plan.jumps:
            world.at(jump.at_us, self._jump, jump)
        for at_us, for_us in plan.outages:
            world.at(at_us, self._outage, for_us)
        if plan.dead is not None:
            self._dead = f"p{plan.dead + 1}"
            world.counts["participants gone for long"] += 1
            for instance in simulation.participants[self._dead].instances:
                instance.loop.crash()
        for participant in simulation.participants.values():
            if participant.plan.rolls_at_us:
                world.at(participant.plan.rolls_at_us, self._roll, participant, 0)
        if plan.restore is not None:
            if plan.restore.to_us is None:
                simulation.database.before_confirming = self._back_up
            else:
                world.at(plan.restore.to_us, self._back_up)
        if plan.upgrade_us is not None:
            world.at(plan.upgrade_us, self._upgrade)
        self._restart: dict[str, int] = {}

    def end(self) -> None:
        """No more faults: what is away comes back, what is cut is mended."""
        self._over = True
        simulation, world = self._s, self._world
        world.note("town", "faults end")
        simulation.network.rates = NetworkRates()
        simulation.network.cut.clear()
        simulation.store_rates = StoreRates()
        simulation.database.down = False
        for participant in simulation.participants.values():
            participant.service.heal()
        for instance in simulation.instances.values():
            self._home(instance)
        old = any(coordinator.program < 3 for coordinator in simulation.coordinators)
        if (simulation.plan.upgrade_us is None and old) or (simulation.database.format < 3 and not old):
            self._upgrade()
        for node in self._nodes().values():
            if not self._is_dead(node):
                node.loop.crash_in = None
                self._start(node.name)

    def bring_back(self, name: str) -> None:
        """The participant that was gone is there again."""
        self._dead = ""
        for instance in self._s.participants[name].instances:
            self._start(instance.name)

    def _nodes(self) -> dict[str, CoordinatorNode | SimInstance]:
        nodes: dict[str, CoordinatorNode | SimInstance] = {c.name: c for c in self._s.coordinators}
        return nodes | self._s.instances

    def _is_dead(self, node: CoordinatorNode | SimInstance) -> bool:
        return isinstance(node, SimInstance) and node.participant == self._dead

    def _start(self, name: str) -> None:
        node = self._nodes()[name]
        if not node.loop.alive and not self._is_dead(node):
            self._world.note(name, "is started again")
            node.start()

    # --- processes -----------------------------------------------------------------------------------------

    def _crash(self, crash: Stop) -> None:
        node = self._nodes().get(crash.who)
        if node is None or self._over or not node.loop.alive:
            return
        world = self._world

        def crashed() -> None:
            world.counts["crashes of coordinators" if crash.who[0] == "c" else "crashes of participants"] += 1
            world.counts["crashes of one instance of two"] += self._has_another(node)
            world.note(crash.who, "crashes")
            world.at(crash.for_us, self._start, crash.who)

        if crash.gently and isinstance(node, CoordinatorNode) and node.engine is not None:
            world.counts["coordinators stopped gently"] += 1
            world.note(node.name, "is told to stop")
            stopping = node.engine

            async def stop() -> None:
                await stopping.stop(GRACE_S)
                node.loop.crash()

            node.loop.on_crash = crashed
            node.loop.arrive(lambda: world.graveyard.append(node.loop.create_task(stop())))
            return
        before = node.loop.on_crash

        def on_crash() -> None:
            before()
            crashed()

        node.loop.on_crash = on_crash
        node.loop.crash_in = crash.callbacks

    def _has_another(self, node: CoordinatorNode | SimInstance) -> bool:
        if isinstance(node, CoordinatorNode):
            return False
        return any(each is not node and each.loop.alive for each in self._s.participants[node.participant].instances)

    def _stray(self, stray: Stop) -> None:
        instance = self._s.instances.get(stray.who)
        if instance is None or self._over or self._is_dead(instance):
            return
        self._world.counts["participants on the wrong database"] += 1
        instance.strays = True
        self._world.note(stray.who, "is restarted on the wrong database")
        instance.loop.crash()
        self._start(stray.who)
        self._world.at(stray.for_us, self._home, instance)

    def _home(self, instance: SimInstance) -> None:
        if instance.strays:
            instance.strays = False
            self._world.note(instance.name, "is restarted on its own database")
            instance.loop.crash()
            self._start(instance.name)

    def _roll(self, participant: SimParticipant, number: int) -> None:
        """The instances are replaced, one after another: each is told to stop, and another is started in its place."""
        if number == len(participant.instances):
            self._world.counts["participants rolled"] += 1
            return
        instance = participant.instances[number]
        loop = instance.loop
        if self._over or not loop.alive or instance.strays:
            return
        self._world.note(instance.name, "is told to stop")
        before = loop.on_crash

        def on_crash() -> None:
            before()
            self._world.at(START_US, self._start, instance.name)
            self._world.at(2 * START_US, self._roll, participant, number + 1)

        loop.on_crash = on_crash
        loop.arrive(lambda: self._world.graveyard.append(loop.create_task(instance.stop())))

    def _pause(self, pause: Stop) -> None:
        node = self._nodes().get(pause.who)
        if node is not None and node.loop.alive and not self._over:
            self._world.note(pause.who, f"stands still for {pause.for_us // 1000} ms")
            long = pause.for_us > self._s.plan.policy.lease_ms * 1000
            self._world.counts["pauses longer than a lease" if long else "pauses"] += 1
            node.loop.pause(pause.for_us)

    def _upgrade(self) -> None:
        """Programs are replaced one after another; when none is old, the new format may be written."""
        old = [c for c in self._s.coordinators if c.program < 3]
        world = self._world
        if not old:
            if self._s.database.format < 3:
                self._s.database.format = 3
                world.counts["upgrades finished"] += 1
                world.note("town", "row format 3 may be written")
            return
        node = old[0]
        node.program = 3
        world.note(node.name, "is replaced by a newer program")
        world.counts["programs replaced"] += 1
        node.loop.crash()
        world.at(5_000, self._start, node.name)
        world.at(world.random.randint(10_000, UPGRADE_STEP_US), self._upgrade)

    # --- network, store, clock -----------------------------------------------------------------------------

    def _cut(self, cut: Cut) -> None:
        if not self._over:
            pair = (cut.source, cut.target)
            self._world.counts["one-way partitions"] += 1
            self._world.note("network", f"nothing comes from {cut.source} to {cut.target} any more")
            self._s.network.cut.add(pair)
            self._world.at(cut.for_us, self._s.network.cut.discard, pair)

    def _outage(self, for_us: int) -> None:
        if not self._over:
            self._world.counts["store outages"] += 1
            self._world.note("store", f"is away for {for_us // 1000} ms")
            self._s.database.down = True
            self._world.at(for_us, setattr, self._s.database, "down", False)

    def _back_up(self) -> None:
        restore = self._s.plan.restore
        assert restore is not None
        self._s.database.before_confirming = None
        self._s.database.keep()
        self._world.at(restore.after_us, self._restore_store)

    def _restore_store(self) -> None:
        """All coordinators are stopped for it, and started again."""
        if self._over:
            return
        database, world = self._s.database, self._world
        world.counts["stores restored"] += 1
        world.note("store", "is restored to an earlier time")
        for node in self._s.coordinators:
            node.loop.crash()
            world.at(world.random.randint(1, 10) * START_US, self._start, node.name)
        database.restore()
        self._s.watch.restored(database.rows.values(), database.flagged)

    def _jump(self, jump: Jump) -> None:
        if not self._over:
            self._world.counts["jumps of the store's clock"] += 1
            self._world.note("store", f"its clock jumps by {jump.by_ms} ms")
            self._s.database.skew_us += jump.by_ms * 1000
