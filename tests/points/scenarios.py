"""What is asked for in a run: so many branches, each at a participant of its own, and what becomes of them."""

from __future__ import annotations

from typing import NamedTuple

from coordinator.model import Policy, State
from tests.simulator.handlers import MOVE, PLAIN, Behaviour, Way
from tests.simulator.network import NetworkRates
from tests.simulator.plan import BranchPlan, ParticipantPlan, Plan, TransactionPlan
from tests.simulator.store import StoreRates
from tests.simulator.transactions import Flavour

SEED = 1
PATIENT_MS = 60_000
"""Longer than any two crashes take."""
TIMEOUT_MS = 150
SLOW_MS = 200
"""How long the last branch's Try takes where the deadline is to cancel: longer than the time-out."""
AMOUNTS = {1: (-10,), 2: (-10, 10), 3: (-20, 10, 10)}
"""By the number of branches: what each moves when it is confirmed."""
FLAVOURS = (Flavour.READ_COMMITTED, Flavour.LOCKING, Flavour.ONE_WRITER)
"""How the participants' databases isolate, the first participant's first."""
LATE_MS = 100
"""Shorter than a lease."""
OUTCOMES = ("commit", "late", "refuse", "timeout")
"""What becomes of it.

commit   all are tried and confirmed
late     the same, but if somebody is killed before it is decided, the deadline comes first, and it is cancelled
refuse   the last branch refuses, so that it is cancelled
timeout  the last branch's Try takes longer than the transaction may, so that the deadline cancels it
"""
POLICY = Policy(
    call_timeout_ms=100,
    lease_ms=150,
    lease_margin_ms=25,
    backoff_base_ms=10,
    backoff_cap_ms=100,
    attention_after=10,
    linger_ms=20,
    park_ms=100,
)


class Scenario(NamedTuple):
    """So many branches, how it ends, and how many coordinators there are."""

    branches: int
    outcome: str
    coordinators: int = 1

    def __str__(self) -> str:
        return f"{self.branches} {self.outcome}" + (f" {self.coordinators}" if self.coordinators > 1 else "")

    @staticmethod
    def read(text: str) -> Scenario:
        """What ``str`` has made a text of. Raises ValueError."""
        for scenario in ALL:
            if str(scenario) == text:
                return scenario
        raise ValueError(f"no scenario is called {text!r}")

    @property
    def kills_max(self) -> int:
        """How many are killed in a run, at the most."""
        return 2 if self.coordinators == 1 else 1

    def ends(self, killed: bool) -> set[State]:
        """How it may end, by whether somebody is killed."""
        confirmed = {State.CONFIRMED} if self.outcome in ("commit", "late") else set()
        cancelled = {State.CANCELLED} if self.outcome in ("refuse", "timeout") or killed else set()
        return confirmed if self.outcome == "commit" else confirmed | cancelled

    def moved(self, end: State | None) -> int:
        """What all accounts together gain by this end."""
        return sum(AMOUNTS[self.branches]) if end is State.CONFIRMED else 0

    def plan(self) -> Plan:
        """As the simulator wants it: nothing goes wrong but who is killed."""
        last = {"refuse": Behaviour(Way.REFUSES), "timeout": Behaviour(Way.SLOW, SLOW_MS)}.get(self.outcome, PLAIN)
        branches = tuple(
            (n, BranchPlan(n - 1, MOVE, "a", amount, last if n == self.branches else PLAIN))
            for n, amount in enumerate(AMOUNTS[self.branches], 1)
        )
        asked = TransactionPlan(
            1, "execute", branches, at_us=5_000,
            timeout_ms={"late": LATE_MS, "timeout": TIMEOUT_MS}.get(self.outcome, PATIENT_MS),
            patience_s=0.3, until="FINISHED", cancels=False, forgets=False, together=False, renews=False,
            dies_at_us=None, twin_us=None, other_us=None, operators=(),
        )  # fmt: skip
        participants = tuple(
            ParticipantPlan(
                f"p{n}", flavour.name, skew_ms=0, trouble=0.0, says_error=0.0, intent_lease_ms=1_000,
                upkeep_s=1_000.0, resolves=False, resolve_after_s=1_000.0,
            )
            for n, flavour in enumerate(FLAVOURS[: self.branches], 1)
        )  # fmt: skip
        return Plan(
            SEED, (3,) * self.coordinators, participants, (asked,), POLICY, NetworkRates(), StoreRates(),
            crashes=(), strays=(), pauses=(), cuts=(), jumps=(), outages=(), dead=None, upgrade_us=None,
            faults_end_us=0,
        )  # fmt: skip


ALONE = [Scenario(branches, outcome) for branches in (1, 2, 3) for outcome in OUTCOMES]
BESIDE = [Scenario(branches, outcome, 2) for branches in (1, 2, 3) for outcome in OUTCOMES]
"""With a second coordinator that takes over, because the killed one stays away for long."""
ALL = [*ALONE, *BESIDE]
