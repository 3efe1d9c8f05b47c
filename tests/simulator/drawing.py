"""Draws a plan from a seed: what goes wrong, goes wrong near what happens anyway."""

from __future__ import annotations

import random

from coordinator.model import Policy
from participant_sdk.fence import Phase

from .drawing_more import more
from .handlers import CHARGE, MOVE, Behaviour, Way
from .network import NetworkRates
from .plan import SECOND, BranchPlan, Cut, Jump, OperatorPlan, ParticipantPlan, Plan, Stop, TransactionPlan
from .store import StoreRates
from .transactions import Flavour


def plan_of(seed: int) -> Plan:
    """The plan of a seed."""
    return more(_Drawing(seed).plan())


class _Drawing:
    """Draws a plan."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)

    def _chance(self, rate: float) -> bool:
        return self._random.random() < rate

    def _rate(self, share: float, most: float) -> float:
        """0 in most runs, else something up to ``most``: one fault among healthy parts, or all at once."""
        return self._random.random() * most if self._chance(share) else 0.0

    def plan(self) -> Plan:
        source = self._random
        coordinators = source.choice((1, 2, 2, 2, 3))
        participants = source.choice((1, 2, 2, 3, 3, 4))
        policy = self._policy()
        bad = self._chance(0.85)
        self._participants = tuple(self._participant(f"p{n}", bad) for n in range(1, participants + 1))
        older = source.choice((1, 2, 2)) if self._chance(0.12) and coordinators > 1 else None
        programs = [3] * coordinators
        if older is not None:
            for n in range(source.randint(1, coordinators)):
                programs[n] = older
        window_us = source.choice((50_000, 300_000, 2 * SECOND))
        transactions = tuple(
            self._transaction(n, participants, policy, window_us)
            for n in range(1, source.choice((1, 1, 2, 2, 3, 4, 6)) + 1)
        )
        faults_end_us = source.choice((2, 5, 10)) * SECOND
        names = [f"c{n}" for n in range(1, coordinators + 1)] + [f"p{n}" for n in range(1, participants + 1)]
        self._moments = self._interesting(transactions, policy)
        return Plan(
            self._seed,
            tuple(programs),
            self._participants,
            transactions,
            policy,
            NetworkRates(
                loss=self._rate(0.5, 0.3), repeat=self._rate(0.5, 0.5), slow=self._rate(0.5, 0.5),
                very_late=self._rate(0.35, 0.15),
            ) if bad else NetworkRates(),
            StoreRates(
                slow=self._rate(0.3, 0.2), lost_before=self._rate(0.3, 0.2), lost_after=self._rate(0.3, 0.2),
                lands_later=self._rate(0.3, 0.2), again=self._rate(0.3, 0.2), error=self._rate(0.3, 0.3),
            ) if bad else StoreRates(),
            tuple(self._stop(names, 2 * SECOND) for _ in range(source.choice((0, 0, 1, 1, 2, 3, 5)))),
            (self._stop(names[coordinators:], 2 * SECOND),) if self._chance(0.2) else (),
            tuple(
                self._stop(names, source.choice((policy.lease_ms, 3 * policy.lease_ms, policy.call_timeout_ms)) * 1000)
                for _ in range(source.choice((0, 0, 1, 2)))
            ),
            tuple(self._cut(names) for _ in range(source.choice((0, 0, 0, 1, 2)))),
            tuple(
                Jump(self._moment(), source.choice((-3000, -500, 500, 3000)))
                for _ in range(source.choice((0, 0, 0, 0, 1, 2)))
            ),
            tuple((self._moment(), source.randint(10_000, 4 * SECOND)) for _ in range(source.choice((0, 0, 0, 0, 1)))),
            source.randrange(participants) if participants > 1 and self._chance(0.1) else None,
            self._moment() if older is not None else None,
            faults_end_us,
        )  # fmt: skip

    def _policy(self) -> Policy:
        source = self._random
        call_ms = source.choice((200, 500, 1000))
        lease_ms = call_ms * source.choice((5, 8, 16)) // 4  # no less is accepted as a setting
        return Policy(
            call_timeout_ms=call_ms,
            lease_ms=lease_ms,
            lease_margin_ms=lease_ms // 5,
            backoff_base_ms=source.choice((10, 50)),
            backoff_cap_ms=source.choice((300, 1500)),
            attention_after=source.choice((2, 5, 10)),
            linger_ms=source.choice((20, 100, 250)),
            park_ms=source.choice((100, 1000)),
        )

    def _transaction(self, number: int, participants: int, policy: Policy, window_us: int) -> TransactionPlan:
        source = self._random
        kind = source.choice(("execute", "execute", "execute", "ordered", "interactive", "interactive", "direct"))
        branches = tuple((n, self._branch(participants, policy)) for n in range(1, source.choice((1, 2, 2, 2, 3)) + 1))
        timeout_ms = source.choice((150, policy.call_timeout_ms, policy.call_timeout_ms + 20, 1500, 3000, 6000, 6000))
        at_us = source.randrange(window_us)
        near_us = [at_us + ms * 1000 for ms in (3, 8, 15, policy.call_timeout_ms, timeout_ms, policy.lease_ms)]
        operators = tuple(
            OperatorPlan(
                source.choice(("cancel", "retry", "resolve")),
                source.choice(near_us) + source.randint(-3_000, 20_000),
                source.randint(1, len(branches)),
                self._chance(0.5),
            )
            for _ in range(source.choice((0, 0, 0, 0, 1, 1, 2)))
        )
        return TransactionPlan(
            number,
            kind,
            branches,
            at_us,
            timeout_ms,
            source.choice((0.1, 0.5, 2.0)),
            source.choice(("DECIDED", "FINISHED", "FINISHED")),
            cancels=self._chance(0.25),
            forgets=self._chance(0.08),
            together=self._chance(0.3),
            renews=self._chance(0.1),
            dies_at_us=source.choice(near_us) if self._chance(0.12) else None,
            twin_us=source.choice((0, 0, 1_000, 20_000, SECOND, 6 * SECOND)) if self._chance(0.3) else None,
            other_us=source.choice((0, 1_000, 20_000, SECOND)) if self._chance(0.15) else None,
            operators=operators,
        )

    def _branch(self, participants: int, policy: Policy) -> BranchPlan:
        source = self._random
        action = CHARGE if self._chance(0.1) else MOVE
        amount = -2_000 if self._chance(0.05) else source.choice((-1, 1)) * source.randint(1, 40)
        way = source.choice(list(Way)) if self._chance(0.4) else Way.PLAIN
        participant = source.randrange(participants)
        if way is Way.SWALLOWS and self._participants[participant].flavour == Flavour.ONE_WRITER.name:
            way = Way.PLAIN  # where an error undoes nothing, whoever swallows it has done half
        behaviour = Behaviour(
            way,
            ms=max(1, source.choice((5, 50, policy.call_timeout_ms, 1500, 3000)) + source.randint(-5, 20)),
            phase=Phase(source.choice((1, 2, 3))),
            times=source.choice((1, 2, 5)),
        )
        return BranchPlan(participant, action, source.choice("ab"), amount, behaviour)

    def _participant(self, name: str, bad: bool) -> ParticipantPlan:
        source = self._random
        return ParticipantPlan(
            name,
            source.choice(list(Flavour)).name,
            source.choice((0, 0, 0, -400, 400)),
            self._rate(0.5, 1.0) if bad else 0.0,
            self._rate(0.3, 0.3) if bad else 0.0,
            source.choice((400, 1500)),
            source.choice((1.0, 4.0)),
            self._chance(0.3),
            source.choice((0.5, 3.0)),
        )

    def _interesting(self, transactions: tuple[TransactionPlan, ...], policy: Policy) -> list[int]:
        """Times at which something happens anyway: what goes wrong, goes wrong near them."""
        moments = []
        for t in transactions:
            for ms in (0, 2, 5, 10, 20, policy.linger_ms, policy.call_timeout_ms, t.timeout_ms, policy.lease_ms):
                moments.append(t.at_us + ms * 1000)
        return moments

    def _moment(self) -> int:
        return max(0, self._random.choice(self._moments) + self._random.randint(-4_000, 12_000))

    def _stop(self, names: list[str], longest_us: int) -> Stop:
        source = self._random
        return Stop(
            source.choice(names),
            self._moment(),
            source.randint(1_000, longest_us + 300_000),
            source.randint(0, 60),
            self._chance(0.15),
        )

    def _cut(self, names: list[str]) -> Cut:
        source = self._random
        source_name, target = source.sample(names, 2) if len(names) > 1 else (names[0], names[0])
        return Cut(source_name, target, self._moment(), source.randint(50_000, 4 * SECOND))
