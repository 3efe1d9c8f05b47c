"""What does not fit between coordinator, store, settings and participants: facts in, findings out.

Pure: ``doctor_facts`` gathers. A finding says what is wrong and what to do about it; the only thing that the doctor
itself may change is when a transaction is looked at next, which is safe at any time: a call that was made before is
made again, and participants answer repeats from their fence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, IntEnum
from typing import NamedTuple

SKEW_MS_MAX = 1_000
"""How far a participant's database clock may be from the store's."""
ALIKE_MAX = 50
"""Findings of one kind about one participant that are told one by one."""


class Severity(IntEnum):
    """How bad it is; the numbers are the contract's."""

    INFO = 1
    WARNING = 2
    ERROR = 3


class Finding(NamedTuple):
    """One thing that does not fit."""

    severity: Severity
    code: str
    problem: str
    advice: str
    participant: str = ""
    xid: str = ""
    branch_id: int = 0
    mendable: bool = False
    """Whether the transaction can be made due now, which mends it."""


class Limits(NamedTuple):
    """The moment, and what counts as long, in ms."""

    now_ms: int
    grace_ms: int
    lease_ms: int
    far_ms: int
    """No retry, lease or put-off lies further ahead."""
    retention_ms: int
    """0: for ever."""


# --- store and settings -----------------------------------------------------------------------------------


def of_store(revision: str, needed: str, row_format: int, newest_format: int) -> Iterator[Finding]:
    """How far the store has been migrated, against what the program can do."""
    if revision != needed:
        yield Finding(
            Severity.WARNING,
            "SCHEMA_REVISION",
            f"the store has schema revision {revision}, this program is made for {needed}",
            "bring all coordinators to the version that has migrated the store",
        )
    if row_format < newest_format:
        yield Finding(
            Severity.INFO,
            "ROW_FORMAT",
            f"rows are written up to format {row_format}, this program could write {newest_format}",
            "when no older coordinator runs any more: tricord migrate --finish",
        )


class Registered(NamedTuple):
    """What is known of a participant."""

    actions: frozenset[str]
    withdrawn: frozenset[str]
    """What it could do before."""
    addresses: tuple[str, ...]
    fence_ids: frozenset[str]


def of_settings(call_timeouts: Iterable[str], known: Mapping[str, Registered]) -> Iterator[Finding]:
    """Time-outs that are set for names that nobody has."""
    names = set(known) | {f"{name}.{action}" for name, each in known.items() for action in each.actions}
    for name in sorted(set(call_timeouts) - names):
        yield Finding(
            Severity.WARNING,
            "SETTING_UNUSED",
            f"call_timeouts_ms names {name!r}, which no registered participant or action is called",
            "mend the name, or remove it; if the participant is still to come, nothing is wrong",
        )


# --- participants -----------------------------------------------------------------------------------------


class Reach(Enum):
    """What became of a question to one address."""

    ANSWERED = "answered"
    NOT_OFFERED = "not offered"
    """It answers, but cannot be asked about its fence."""
    STRANGER = "stranger"
    """Another participant is there."""
    SILENT = "silent"
    UNREADABLE = "unreadable"
    """It answers that it cannot read its fence."""
    BUSY = "busy"
    """Somebody else is looking at its fence."""


class FenceFacts(NamedTuple):
    """What a participant says of its fence."""

    fence_id: str
    retention_ms: int
    skew_ms: int
    """Its clock less the store's."""
    skew_doubt_ms: int
    """How much of that may be the way there and back."""


class Answer(NamedTuple):
    """What one address of a participant said."""

    participant: str
    address: str
    reach: Reach
    took_ms: int
    text: str = ""
    fence: FenceFacts | None = None


def of_answer(answer: Answer, known: Registered, limits: Limits) -> Iterator[Finding]:
    """One address: whether it can be reached, and whether its fence fits."""
    name, address = answer.participant, answer.address
    if answer.reach is Reach.SILENT:
        problem = f"{address} did not answer ({answer.text}; waited {answer.took_ms} ms)"
        advice = "start it again; if it has gone for good, withdraw it, so that calls do not go there"
        yield Finding(Severity.ERROR, "ADDRESS_UNREACHABLE", problem, advice, name)
    elif answer.reach is Reach.STRANGER:
        advice = "two programs claim one address: give each its own, and register them again"
        yield Finding(Severity.ERROR, "ADDRESS_OF_ANOTHER", f"{address}: {answer.text}", advice, name)
    elif answer.reach is Reach.NOT_OFFERED:
        problem = f"{address} cannot be asked about its fence (GetFence is not implemented)"
        yield Finding(Severity.INFO, "FENCE_NOT_TOLD", problem, "nothing, or a participant SDK that has it", name)
    elif answer.reach is Reach.UNREADABLE:
        problem = f"{address} cannot read its fence: {answer.text}"
        yield Finding(Severity.ERROR, "FENCE_UNREADABLE", problem, "look at the participant's database and log", name)
    elif answer.reach is Reach.BUSY:
        yield not_compared(name, f"{address}: {answer.text}")
    if answer.fence is not None:
        yield from _of_fence(answer, answer.fence, known, limits)


def _of_fence(answer: Answer, fence: FenceFacts, known: Registered, limits: Limits) -> Iterator[Finding]:
    name, address = answer.participant, answer.address
    told = {fence_id for fence_id in known.fence_ids if fence_id}
    if told and fence.fence_id not in told:
        problem = f"{address} has fence database {fence.fence_id}, registered is {', '.join(sorted(told))}"
        advice = "it stands on another database than its transactions began on: lead it back before anything else"
        yield Finding(Severity.ERROR, "FENCE_DIFFERS", problem, advice, name)
    apart_ms = abs(fence.skew_ms) - fence.skew_doubt_ms
    if apart_ms > SKEW_MS_MAX:
        far = apart_ms > limits.lease_ms
        problem = (
            f"the database clock of {address} is {length(abs(fence.skew_ms))} "
            f"{'ahead of' if fence.skew_ms > 0 else 'behind'} the store's"
        )
        advice = "have both machines keep the time (NTP): ages, leases and retentions are measured by these clocks"
        yield Finding(Severity.ERROR if far else Severity.WARNING, "CLOCK_SKEW", problem, advice, name)
    if 0 < limits.retention_ms < fence.retention_ms:
        problem = (
            f"it keeps fence rows for {length(fence.retention_ms)}, the coordinator its transactions for only "
            f"{length(limits.retention_ms)}: rows whose transaction is forgotten are never purged"
        )
        advice = "set the coordinator's retention_ms above the participant's retention"
        yield Finding(Severity.WARNING, "RETENTION", problem, advice, name)


def not_compared(name: str, why: str) -> Finding:
    """Its fence rows were not compared, or not all of them."""
    return Finding(Severity.INFO, "NOT_COMPARED", f"not all of its fence was looked at: {why}", "ask again later", name)


def nowhere(name: str) -> Finding:
    """A participant without any address."""
    advice = "start it; what is owed to it waits until then"
    return Finding(Severity.WARNING, "PARTICIPANT_NOWHERE", "it has no address at the moment", advice, name)


class Overflow:
    """Keeps a flood of findings of one kind from hiding all others."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], list[Finding]] = {}
        self._left: dict[tuple[str, str], int] = {}

    def admits(self, finding: Finding) -> bool:
        """Whether it is to be told by itself; otherwise it is counted."""
        kind = finding.code, finding.participant
        seen = self._seen.setdefault(kind, [])
        if len(seen) < ALIKE_MAX:
            seen.append(finding)
            return True
        self.leave_out(*kind, 1)
        return False

    def leave_out(self, code: str, participant: str, count: int) -> None:
        """Count so many more of a kind of which some were told, and of which only the number is known."""
        kind = code, participant
        if count > 0 and kind in self._seen:
            self._left[kind] = self._left.get(kind, 0) + count

    def rest(self) -> Iterator[Finding]:
        """One for each kind of which there were too many."""
        for kind, count in self._left.items():
            first = self._seen[kind][0]
            yield first._replace(problem=f"and {count} more of that kind", xid="", branch_id=0, mendable=False)


def length(milliseconds: int) -> str:
    """A length of time for people, in the largest unit that fits."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if milliseconds >= size:
            return f"{milliseconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{milliseconds} ms"
