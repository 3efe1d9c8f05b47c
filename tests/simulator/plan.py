"""What a run is to be, drawn from its seed: who is there, what is asked, and what goes wrong when.

A plan is a value. Parts can be dropped from it by name (``without``), which is how a failing seed is made small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from coordinator.model import Policy

from .handlers import Behaviour
from .network import NetworkRates
from .store import StoreRates

SECOND = 1_000_000


class BranchPlan(NamedTuple):
    """One branch; see ``handlers``."""

    participant: int
    action: str
    account: str
    amount: int
    behaviour: Behaviour
    below: BranchPlan | None = None
    """What its Try calls directly."""


class ParticipantPlan(NamedTuple):
    """One participant and its database."""

    name: str
    flavour: str
    skew_ms: int
    trouble: float
    """How often things go wrong between it and its database: 0 to 1."""
    says_error: float
    """How often a good answer is made an error of."""
    intent_lease_ms: int
    upkeep_s: float
    """How often it purges, and resolves if it does, about."""
    resolves: bool
    resolve_after_s: float
    second: bool = False
    """Whether a second instance serves it."""
    rolls_at_us: int = 0
    """When its instances are replaced, one after another; 0: never."""


class OperatorPlan(NamedTuple):
    """What an operator does, and when."""

    action: str
    """cancel, retry or resolve"""
    at_us: int
    branch_id: int = 1
    confirmed: bool = False


class TransactionPlan(NamedTuple):
    """One transaction, and what its initiator does."""

    number: int
    kind: str
    """execute, ordered, interactive, or direct: interactive, and every other participant is called directly"""
    branches: tuple[tuple[int, BranchPlan], ...]
    """Each with its number."""
    at_us: int
    timeout_ms: int
    patience_s: float
    """How long the initiator waits for an answer before it asks again, somewhere."""
    until: str
    cancels: bool
    """An interactive one: in the end it is cancelled, not confirmed."""
    forgets: bool
    """The initiator confirms without naming one branch."""
    together: bool
    """The initiator of an interactive one adds its branches all at once."""
    renews: bool
    dies_at_us: int | None
    """The initiator's process ends."""
    twin_us: int | None
    """A second initiator asks the same under the same key, so much later."""
    other_us: int | None
    """A second initiator asks something else under the same key."""
    operators: tuple[OperatorPlan, ...]

    @property
    def interactive(self) -> bool:
        """Whether its initiator adds the branches one at a time."""
        return self.kind in ("interactive", "direct")


class Stop(NamedTuple):
    """A process crashes, or stands still."""

    who: str
    at_us: int
    for_us: int
    callbacks: int = 0
    """It crashes so many callbacks later: at any await."""
    gently: bool = False
    """It is told to stop, and drains."""


class Cut(NamedTuple):
    """A one-way partition."""

    source: str
    target: str
    at_us: int
    for_us: int


class Jump(NamedTuple):
    """The store's clock is set, for everybody."""

    at_us: int
    by_ms: int


class Restore(NamedTuple):
    """The coordinators' store is put back to an earlier time, with another history from then on."""

    to_us: int | None
    """To that time; None: to just before the first decision to confirm."""
    after_us: int
    """So long after that time."""


class Plan(NamedTuple):
    """All of a run."""

    seed: int
    programs: tuple[int, ...]
    """For each coordinator the row format that its program knows at first."""
    participants: tuple[ParticipantPlan, ...]
    transactions: tuple[TransactionPlan, ...]
    policy: Policy
    network: NetworkRates
    store: StoreRates
    crashes: tuple[Stop, ...]
    strays: tuple[Stop, ...]
    """A participant's process that runs on another database than its own for a while."""
    pauses: tuple[Stop, ...]
    cuts: tuple[Cut, ...]
    jumps: tuple[Jump, ...]
    outages: tuple[tuple[int, int], ...]
    """Of the store: when, and for how long."""
    dead: int | None
    """A participant that is gone from the beginning until all that is not its own has ended."""
    upgrade_us: int | None
    """When the older programs are replaced; some time later the new format may be written."""
    faults_end_us: int
    restore: Restore | None = None

    def parts(self) -> Iterator[str]:
        """The names of all that may be dropped, the largest first."""
        yield from (f"transaction{t.number}" for t in self.transactions)
        for t in self.transactions:
            yield from (f"branch{t.number}.{n}" for n, _ in t.branches)
            yield from (f"below{t.number}.{n}" for n, branch in t.branches if branch.below is not None)
            yield from (f"operator{t.number}.{n}" for n in range(len(t.operators)))
            yield from (
                f"{what}{t.number}"
                for what in ("twin", "other", "renewal", "death")
                if getattr(t, _FIELDS[what]) not in (None, False)
            )
        yield from (f"coordinator{n}" for n in range(len(self.programs), 1, -1))
        for what in ("crashes", "strays", "pauses", "cuts", "jumps", "outages"):
            many = getattr(self, what)
            if many:
                yield what
            yield from (f"{what}{n}" for n in range(len(many)) if len(many) > 1)
        for group in ("network", "store"):
            rates = getattr(self, group)
            yield from (f"{group}.{name}" for name in rates._fields if getattr(rates, name))
        for p in self.participants:
            yield from (f"{p.name}.{name}" for name in _PARTICIPANTS if getattr(p, name))
        if self.dead is not None:
            yield "dead"
        if self.upgrade_us is not None:
            yield "upgrade"
        if self.restore is not None:
            yield "restore"

    @property
    def retention_ms(self) -> int:
        """How long fences remember at least: a little longer than any transaction can be undecided."""
        longest_ms = max((t.timeout_ms * (2 if t.renews else 1) for t in self.transactions), default=0)
        return longest_ms * 25 // 24 + 2_000 + self.clock_margin_ms

    @property
    def clock_margin_ms(self) -> int:
        """How far clocks may be apart, at the most."""
        jumps_ms = sum(abs(jump.by_ms) for jump in self.jumps)
        return 700 + jumps_ms + max(abs(p.skew_ms) for p in self.participants)


_PARTICIPANTS = ("skew_ms", "trouble", "says_error", "resolves", "second", "rolls_at_us")
OF_TRANSACTIONS = ("branch", "below", "operator", "twin", "other", "renewal", "death")
"""What the names of a transaction's parts begin with, before its number."""
_FIELDS = {"twin": "twin_us", "other": "other_us", "renewal": "renews", "death": "dies_at_us"}


def without(plan: Plan, dropped: tuple[str, ...]) -> Plan:
    """The plan without these parts (names of ``Plan.parts``; unknown ones are ignored)."""
    gone = set(dropped)
    kept = []
    for t in plan.transactions:
        if f"transaction{t.number}" in gone:
            continue
        branches = tuple(
            (n, b._replace(below=None) if f"below{t.number}.{n}" in gone else b)
            for n, b in t.branches
            if f"branch{t.number}.{n}" not in gone
        )
        changes: dict[str, Any] = {
            _FIELDS[what]: (False if what == "renewal" else None) for what in _FIELDS if f"{what}{t.number}" in gone
        }
        operators = tuple(o for n, o in enumerate(t.operators) if f"operator{t.number}.{n}" not in gone)
        if branches:
            kept.append(t._replace(branches=branches, operators=operators, **changes))
    plan = plan._replace(transactions=tuple(kept))
    for what in ("crashes", "strays", "pauses", "cuts", "jumps", "outages"):
        many = getattr(plan, what)
        left = () if what in gone else tuple(one for n, one in enumerate(many) if f"{what}{n}" not in gone)
        changed: dict[str, Any] = {what: left}
        plan = plan._replace(**changed)
    for group in ("network", "store"):
        rates = getattr(plan, group)
        off = {name: 0.0 for name in rates._fields if f"{group}.{name}" in gone}
        changed = {group: rates._replace(**off)}
        plan = plan._replace(**changed)
    while len(plan.programs) > 1 and f"coordinator{len(plan.programs)}" in gone:
        plan = plan._replace(programs=plan.programs[:-1])
    plan = plan._replace(
        participants=tuple(
            p._replace(**{name: type(getattr(p, name))() for name in _PARTICIPANTS if f"{p.name}.{name}" in gone})
            for p in plan.participants
        )
    )
    if "restore" in gone:
        plan = plan._replace(restore=None)
    if "dead" in gone:
        plan = plan._replace(dead=None)
    if "upgrade" in gone:
        plan = plan._replace(upgrade_us=None, programs=(max(plan.programs),) * len(plan.programs))
    return plan
