"""What is wrong with transactions that are not finished, and what is left on record of finished ones. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .doctor import Finding, Limits, Registered, Severity, length
from .model import WHY_STUCK, Attention, BranchStatus, State, Transaction


class OpenFacts(NamedTuple):
    """An unfinished transaction as stored. ``tx`` None: this program cannot read it."""

    xid: str
    row_format: int
    wake_ms: int
    tx: Transaction | None


class OpenTally:
    """Findings about unfinished transactions: of each at once, and about many of them together at the end."""

    def __init__(self, known: Mapping[str, Registered], limits: Limits, only: str = "") -> None:
        self._known = known
        self._limits = limits
        self._only = only
        self._missing: dict[tuple[str, str], list[str]] = {}
        self._overdue: dict[int, list[OpenFacts]] = {}
        self._waiting: dict[str, list[tuple[int, str]]] = {}

    def take(self, facts: OpenFacts) -> Iterator[Finding]:
        """What is to say about one."""
        limits = self._limits
        if limits.now_ms - facts.wake_ms > max(2 * limits.lease_ms, limits.grace_ms):
            self._overdue.setdefault(facts.row_format, []).append(facts)
        tx = facts.tx
        if tx is None:
            return
        latest_ms = limits.now_ms + limits.far_ms
        if tx.state is State.TRYING:
            latest_ms = max(latest_ms, tx.deadline_ms + limits.grace_ms)
        if facts.wake_ms > latest_ms:
            problem = (
                f"nobody looks at it for another {length(facts.wake_ms - limits.now_ms)}, and nothing explains that"
            )
            advice = "make it due now (--apply); then see whether a clock was wrong"
            yield Finding(Severity.WARNING, "WAKES_LATE", problem, advice, xid=facts.xid, mendable=True)
        yield from _of_attention(facts.xid, tx)
        self._take_branches(facts.xid, tx)

    def _take_branches(self, xid: str, tx: Transaction) -> None:
        decided = tx.state is not State.TRYING
        for branch, step in zip(tx.spec.branches, tx.steps, strict=True):
            if step.status in (BranchStatus.CONFIRMED, BranchStatus.CANCELLED, BranchStatus.REFUSED):
                continue
            if self._only and branch.participant != self._only:
                continue
            known = self._known.get(branch.participant)
            if known is None or branch.action not in known.actions:
                self._missing.setdefault((branch.participant, branch.action), []).append(xid)
            if decided:
                self._waiting.setdefault(branch.participant, []).append((tx.decided_ms, step.error))

    def together(self) -> Iterator[Finding]:
        """What is to say about all of them."""
        for (name, action), xids in sorted(self._missing.items()):
            known = self._known.get(name)
            what = f"action {action}" if known is not None else "participant"
            before = " any more" if known is not None and action in known.withdrawn else ""
            problem = f"{_some(xids, 'open transaction')} cannot go on: {what} {name} is not registered{before}"
            if known is not None:
                problem = f"{_some(xids, 'open transaction')} cannot go on: {name} does not offer {action}{before}"
            advice = (
                "start a version of the participant that has it; until then nothing of it is confirmed or cancelled"
            )
            yield Finding(Severity.ERROR, "NOT_REGISTERED", problem, advice, name, xid=xids[0])
        for row_format, rows in sorted(self._overdue.items()):
            yield self._overdue_finding(row_format, rows)
        for name, waiting in sorted(self._waiting.items()):
            oldest_ms, error = min(waiting)
            age_ms = self._limits.now_ms - oldest_ms
            if age_ms > self._limits.grace_ms:
                problem = f"{len(waiting)} decided branches wait for it, the first for {length(age_ms)}"
                problem += f"; its last error: {error[:200]}" if error else ""
                yield Finding(
                    Severity.WARNING, "BACKLOG", problem, "bring the participant back; nothing else is needed", name
                )

    def _overdue_finding(self, row_format: int, rows: list[OpenFacts]) -> Finding:
        late_ms = self._limits.now_ms - min(facts.wake_ms for facts in rows)
        xids = [facts.xid for facts in rows]
        problem = f"{_some(xids, 'transaction')} due, up to {length(late_ms)} ago, and nobody drives them"
        if any(facts.tx is None for facts in rows):
            advice = "their rows cannot be read by this version: start a coordinator of the version that wrote them"
            problem += f" (row format {row_format})"
        else:
            advice = "look at the coordinators' logs and load; start another one"
        return Finding(Severity.ERROR, "NOBODY_DRIVES", problem, advice, xid=xids[0])


def _of_attention(xid: str, tx: Transaction) -> Iterator[Finding]:
    errors = "; ".join(tx.errors())[:500]
    if tx.attention is Attention.VIOLATION:
        problem = f"a participant contradicts the protocol: {errors}"
        advice = f"tricord show {xid}; compare with the participant's own rows"
        yield Finding(Severity.ERROR, "ATTENTION_VIOLATION", problem, advice, xid=xid)
    elif tx.attention is Attention.STUCK:
        advice = (
            f"tricord show {xid}; look at the coordinators' logs from before they ended; it is tried ever more rarely"
        )
        yield Finding(Severity.ERROR, "ATTENTION_STUCK", WHY_STUCK, advice, xid=xid)
    elif tx.attention is Attention.RETRYING:
        problem = f"a branch fails again and again: {errors}"
        advice = f"tricord show {xid}; mend the cause at the participant, the coordinator goes on by itself"
        yield Finding(Severity.WARNING, "ATTENTION_RETRYING", problem, advice, xid=xid)


def of_finished(xid: str) -> Finding:
    """A finished transaction on whose record a contradiction stands."""
    problem = "it is finished, and a participant contradicted the protocol on the way"
    advice = f"tricord show {xid}; nothing is owed any more"
    return Finding(Severity.INFO, "ATTENTION_ON_RECORD", problem, advice, xid=xid)


def _some(xids: Sequence[str], what: str) -> str:
    """How many, in words that go on with what they do."""
    return f"1 {what}" if len(xids) == 1 else f"{len(xids)} {what}s"
