"""What is drawn for a plan beside the rest: second instances, calls within calls.

It has a generator of its own, so that the rest of a seed's plan stays as it was.
"""

from __future__ import annotations

import random

from .handlers import CHARGE, MOVE, PLAIN, Behaviour, Way
from .plan import SECOND, BranchPlan, Cut, ParticipantPlan, Plan, Restore, Stop, TransactionPlan

SECOND_RATE = 0.25
ROLLS_RATE = 0.15
GONE_RATE = 0.3
BELOW_RATE = 0.2
RESTORE_RATE = 0.12


def more(plan: Plan) -> Plan:
    """The plan with these as well."""
    return _More(plan).plan()


class _More:
    """Draws them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._random = random.Random(f"more {plan.seed}")

    def _chance(self, rate: float) -> bool:
        return self._random.random() < rate

    def plan(self) -> Plan:
        """All of it."""
        plan = self._plan
        participants = tuple(map(self._participant, plan.participants))
        self._doubled = {p.name for p in participants if p.second}
        return plan._replace(
            participants=participants,
            transactions=tuple(map(self._transaction, plan.transactions)),
            crashes=(*map(self._stop, plan.crashes), *self._gone()),
            strays=tuple(map(self._stop, plan.strays)),
            pauses=tuple(map(self._stop, plan.pauses)),
            restore=self._restore() if self._chance(RESTORE_RATE) else None,
            cuts=tuple(Cut(self._one(c.source), self._one(c.target), c.at_us, c.for_us) for c in plan.cuts),
        )

    # --- instances -----------------------------------------------------------------------------------------

    def _participant(self, participant: ParticipantPlan) -> ParticipantPlan:
        rolls_at_us = self._random.randint(1, self._plan.faults_end_us // 2) if self._chance(ROLLS_RATE) else 0
        return participant._replace(second=self._chance(SECOND_RATE), rolls_at_us=rolls_at_us)

    def _one(self, name: str) -> str:
        """One of the instances of a participant; a coordinator as it is."""
        return f"{name}b" if name in self._doubled and self._chance(0.5) else name

    def _stop(self, stop: Stop) -> Stop:
        return stop._replace(who=self._one(stop.who))

    def _gone(self) -> list[Stop]:
        """One of two instances may be gone for long, and the other has to do it all."""
        source = self._random
        return [
            Stop(self._one(name), source.randint(0, 300_000), source.randint(2, 10) * SECOND)
            for name in sorted(self._doubled)
            if self._chance(GONE_RATE)
        ]

    def _restore(self) -> Restore:
        """Near what happens, as most of it is over soon."""
        source, t = self._random, self._random.choice(self._plan.transactions)
        if self._chance(0.6):
            return Restore(None, source.randint(500, 150_000))
        near_us = source.choice((30_000, 30_000, 100_000, t.timeout_ms * 1000))
        return Restore(max(0, t.at_us + source.randint(-10_000, near_us)), source.randint(1_000, near_us + 100_000))

    # --- calls within calls --------------------------------------------------------------------------------

    def _transaction(self, t: TransactionPlan) -> TransactionPlan:
        if len(self._plan.participants) < 2 or not self._chance(BELOW_RATE):
            return t
        return t._replace(
            branches=tuple((n, self._with_below(b) if self._chance(0.6) else b) for n, b in t.branches),
        )

    def _with_below(self, branch: BranchPlan, depth: int = 1) -> BranchPlan:
        source = self._random
        others = [n for n in range(len(self._plan.participants)) if n != branch.participant]
        way = source.choice((Way.SLOW, Way.REFUSES, Way.FAILS)) if self._chance(0.25) else Way.PLAIN
        behaviour = PLAIN if way is Way.PLAIN else Behaviour(way, source.choice((5, 50, 500)), times=1)
        action = CHARGE if self._chance(0.1) else MOVE
        amount = source.choice((-1, 1)) * source.randint(1, 40)
        below = BranchPlan(source.choice(others), action, source.choice("ab"), amount, behaviour)
        return branch._replace(below=self._with_below(below, depth + 1) if depth < 2 and self._chance(0.3) else below)
