"""One participant in a world of its own: its callers, its processes, its database, and all that can go wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta

from coordinator.model import Phase
from participant_sdk.fence import Phase as SdkPhase
from participant_sdk.upkeep import Upkeep
from tests.simulator.branch_callers import NAME, Branch, Callers, Chaos
from tests.simulator.branch_watch import BranchWatch, Broken
from tests.simulator.database_server import DatabaseFaults, DatabaseServer
from tests.simulator.handlers import MOVE, Behaviour, Business, Way, effect_key, read_payload
from tests.simulator.loop import SimLoop, World
from tests.simulator.participants import ParticipantNode, Service
from tests.simulator.transactions import Account, Flavour, Key

RETENTION_MS = 4_000
MARGIN_MS = 1_000
"""Of the purge, for the database's clock, which is wrong by up to half of it."""
LEASE_MS = 800
RESOLVE_AFTER = timedelta(milliseconds=700)
FAULTS_MS = 6_000
END_MS = 20 * FAULTS_MS
STEPS_MAX = 400_000
BALANCE = 100


class BranchScene:
    """A run of one seed. ``calm``: nothing goes wrong, and a branch begins each 10 ms."""

    def __init__(self, seed: int, *, branches: int = 6, calm: bool = False, tracing: bool = False) -> None:
        self.world = World(seed, tracing=tracing)
        rng = self.rng = self.world.random
        self.calm = calm
        self.server = DatabaseServer(
            self.world,
            "bank-db",
            random.Random(rng.random()),
            flavour=rng.choice(list(Flavour)),
            faults=DatabaseFaults(
                lost_before=self._rate(0.0, 0.03, 0.15),
                lost_after=self._rate(0.0, 0.03, 0.15),
                lands_later=self._rate(0.0, 0.03, 0.15),
                conflict=self._rate(0.0, 0.05, 0.2),
                conflict_at_commit=self._rate(0.0, 0.1, 0.3),
                slow=self._rate(0.0, 0.05),
            ),
        )
        self.server.open_account("a", BALANCE)
        self.business = Business(random.Random(rng.random()), self._behaviour_of)
        self.business.provider_loses = self._rate(0.0, 0.2)
        upkeep = Upkeep(batch=3, resolve_after=RESOLVE_AFTER)
        batch = seed % 2 == 1
        self.service = Service(NAME, self.server, self.business, RETENTION_MS, LEASE_MS, upkeep, batch=batch)
        self.service.says_error = self._rate(0.0, 0.1)
        self.nodes: list[ParticipantNode] = []
        some = self._rate(0.0, 0.02, 0.1, 0.25)
        chaos = Chaos(loss=some, repeat=self._rate(0.0, 0.2, 0.5), slow=some, crash=some)
        self.watch = BranchWatch(lambda xid: self._branch(xid).done, lambda xid: self._branch(xid).by_hand)
        fence_id, broke = self.server.fence_id, self.watch.broke
        self.callers = Callers(self.world, chaos, self.nodes, fence_id, broke, RETENTION_MS, calm=calm)
        self.server.on_commit += [
            self.watch.committed,
            lambda committed: self.world.note("database", f"{committed.changes}"),
        ]
        self.service.on_answer += [
            self.watch.answered,
            lambda told: self.world.note(told.node.name, f"{told.call}: {told.reply}"),
        ]
        self._behaviours: dict[Key, Behaviour] = {}
        for number in range(1 if calm else rng.randint(1, 2)):
            self.nodes.append(self._node(number))
        for number in range(branches):
            self.world.at(1000 * (10 * number if calm else rng.randint(0, 2_000)), self.callers.begin)
        if not calm:
            self._plan_faults()

    def play(self) -> Counter[str]:
        """Play it to its end, and look whether all is well; what has happened how often. Raises Broken."""
        try:
            over = self.world.run(self._over, 1000 * END_MS, STEPS_MAX)
            if over and not self._broken():  # and what still may come
                self.world.run(self._broken, self.world.now_us + 1000 * 2 * FAULTS_MS, STEPS_MAX)
            if self.watch.broken is not None:
                raise self.watch.broken
            if not over:
                left = [branch for branch in self.callers.branches.values() if not branch.done]
                raise Broken(f"not at its end: {left}")
            self._check_end()
        finally:
            for node in self.nodes:
                node.end()
            self.world.close()
        return self.service.counts + Counter(self.server.counts) + self.world.counts

    def _rate(self, *rates: float) -> float:
        return 0.0 if self.calm else self.rng.choice(rates)

    def _branch(self, xid: str) -> Branch:
        return self.callers.branches[xid]

    def _behaviour_of(self, xid: str, branch_id: int) -> Behaviour:
        key = xid, branch_id
        if key not in self._behaviours:
            rng = self.rng
            way = Way.PLAIN if self.calm else rng.choice([Way.PLAIN] * 4 + list(Way))
            phase = rng.choice((SdkPhase.TRY, SdkPhase.CONFIRM, SdkPhase.CANCEL))
            self._behaviours[key] = Behaviour(way, rng.randint(0, 2_500), phase, rng.choice((1, 3, None)))
        return self._behaviours[key]

    # --- processes, and what befalls them ------------------------------------------------------------------

    def _node(self, number: int) -> ParticipantNode:
        loop = SimLoop(self.world, f"bank-{number}")
        if self.rng.random() < self.callers.chaos.crash:
            loop.crash_in = self.rng.randint(1, 400)
        loop.on_crash = lambda: self._crashed(number)
        return ParticipantNode(self.world, loop.name, loop, self.service, random.Random(self.rng.random()))

    def _crashed(self, number: int) -> None:
        self.world.counts["crash"] += 1
        self.world.note(f"bank-{number}", "crashed")
        self.world.at(1000 * self.rng.randint(1, 1_000), self._restart, number)

    def _restart(self, number: int) -> None:
        self.nodes[number] = self._node(number)

    def _plan_faults(self) -> None:
        rng, at = self.rng, self.world.at
        for _ in range(rng.randint(0, 12)):
            at(1000 * rng.randint(0, FAULTS_MS), self._something_goes_wrong)
        at(1000 * FAULTS_MS, self._heal)
        for _ in range(rng.randint(0, 6)):
            purge_ms = rng.choice((rng.randint(1_000, 3 * FAULTS_MS), RETENTION_MS + rng.randint(-1_000, 3_000)))
            at(1000 * purge_ms, self._upkeep, ParticipantNode.purge)
            if rng.random() < 0.5:  # by a clock that is ahead, and is set back when the purge has just read it
                at(1000 * purge_ms - 1, self._set_clock, MARGIN_MS // 2)
                at(1000 * (purge_ms + rng.randint(1, 300)), self._set_clock, -MARGIN_MS // 2)
        for _ in range(rng.randint(0, 3)):
            at(1000 * rng.randint(1_000, FAULTS_MS), self._upkeep, ParticipantNode.resolve)

    def _something_goes_wrong(self) -> None:
        node = self.rng.choice(self.nodes)
        kind = self.rng.choice(("crash", "pause", "away", "skew"))
        self.world.note("chaos", kind)
        self.world.counts[kind] += kind != "crash"  # that is counted when it happens
        match kind:
            case "crash":
                node.loop.crash()
            case "pause":
                node.loop.pause(1000 * self.rng.randint(1, 4_000))
            case "away":
                self.server.go_away(self.rng.randint(1, 1_000))
            case "skew":
                self._set_clock(self.rng.randint(-MARGIN_MS // 2, MARGIN_MS // 2))

    def _set_clock(self, skew_ms: int) -> None:
        self.server.skew_ms = skew_ms

    def _heal(self) -> None:
        self.callers.healed = True
        self.callers.chaos = Chaos()
        self.service.heal()
        for node in self.nodes:
            node.loop.crash_in = None

    def _upkeep(self, work: Callable[[ParticipantNode, Callers], Awaitable[object]]) -> None:
        node = self.rng.choice(self.nodes)

        async def run() -> None:
            await work(node, self.callers)

        node.loop.arrive(lambda: node.loop.create_task(run()))

    # --- the end -------------------------------------------------------------------------------------------

    def _broken(self) -> bool:
        return self.watch.broken is not None

    def _over(self) -> bool:
        return self._broken() or (self.callers.healed and self.callers.over)

    def _check_end(self) -> None:
        wanted = Account(BALANCE)
        effects = self.server.rows("effect")
        for branch in self.callers.branches.values():
            key = branch.xid, 1
            confirmed = effects.get(effect_key(*key, SdkPhase.CONFIRM), 0)
            if key not in self.watch.settled and confirmed != (branch.decision is Phase.CONFIRM):
                raise Broken(f"Confirm had its effect {confirmed} times: {branch}")
            what = branch.spec.branches[0]
            amount = read_payload(what.payload.data)[1]
            if what.action == MOVE:
                left = amount if key in self.watch.settled else 0  # what a person has to see to
                wanted = Account(
                    wanted.balance + confirmed * amount, wanted.held - min(left, 0), wanted.due + max(left, 0)
                )
            elif key not in self.watch.settled and (key in self.business.provider.captured) != bool(confirmed):
                raise Broken(f"the provider's end is not that of the branch: {branch}")
        if (account := self.server.tables.latest(("account", "a"))) != wanted:
            raise Broken(f"at rest the account is {account}, and should be {wanted}")
        for key in self.business.provider.authorised:
            if key not in self.watch.settled:
                self._check_left(key)
        if self.world.unexpected:
            raise Broken(f"what nobody has caught: {self.world.unexpected}")

    def _check_left(self, key: Key) -> None:
        """Left at the provider: only by a process that stopped after the provider's answer, or by one whose handler
        outlived its lease, and which then did not reach its database."""
        self.world.counts["left at the provider"] += 1
        behaviour = self._behaviours[key]
        outlived = behaviour.way is Way.SLOW and behaviour.ms >= LEASE_MS // 2
        if not outlived and not any(self.world.counts[kind] for kind in ("crash", "pause", "away")):
            raise Broken(f"still authorised: {key}")
