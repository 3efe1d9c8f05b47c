"""What happened to a transaction, as operators see it: from its row, and from the audit's records of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tricord.v1 import operator_pb2 as pb

from .model import BranchStatus, Past, Phase, Run, State, Transaction
from .operator_audit import read_outcome
from .store.audit import AuditRow
from .wire import timestamp

HISTORY_RECORDS_MAX = 100

# Which of the events of one ms comes first: all of Try, the decision, all of Confirm or Cancel, the rest.
_TRY, _DECISION, _PHASE_2, _REST = range(4)
_PHASES = {
    Phase.TRY: "Try",
    Phase.CONFIRM: "Confirm",
    Phase.CANCEL: "Cancel",
    Phase.SETTLE_CONFIRMED: "Settle as confirmed",
    Phase.SETTLE_CANCELLED: "Settle as cancelled",
}
_Event = tuple[int, int, pb.HistoryEvent]
"""Its time in ms, its place in that ms, the event."""


def history(tx: Transaction, rows: Sequence[AuditRow]) -> list[pb.HistoryEvent]:
    """What happened to a transaction, oldest first; ``rows`` are its audit records."""
    events = [*_milestones(tx)]
    for past in tx.past:
        events += _of_branch(tx, past)
    events += _actions(rows)
    events.sort(key=lambda event: event[:2])
    return [event for _, _, event in events]


def _milestones(tx: Transaction) -> Iterator[_Event]:
    spec = tx.spec
    begun = "interactive" if spec.interactive else f"with {tx.begun} branch{'es' if tx.begun > 1 else ''}"
    yield _event(spec.created_ms, _TRY, "created", f"{begun}, timeout {spec.timeout_ms} ms")
    if tx.decided_ms:
        confirms = tx.state in (State.CONFIRMING, State.CONFIRMED)
        why = "to confirm" if confirms else f"to cancel: {tx.cancel_reason}"
        yield _event(tx.decided_ms, _DECISION, "decided", why)
    if tx.state.finished:  # nothing is saved after that
        yield _event(tx.updated_ms, _REST, "finished", tx.state.name)


def _of_branch(tx: Transaction, past: Past) -> Iterator[_Event]:
    """Its failures in the order in which they came, and when it has answered for good."""
    branch_id, branch = past.branch_id, tx.spec.branches[past.branch_id - 1]
    for run in past.runs:
        place = _TRY if run.phase is Phase.TRY else _PHASE_2
        yield _event(run.first_ms, place, "failed", _failed_text(branch_id, run), branch_id, _failed(run))
    if past.dropped is not None:
        runs, attempts, first_ms, last_ms = past.dropped
        text = (
            f"branch {branch_id}: {attempts} more failed attempt{'s' if attempts > 1 else ''}, "
            f"the last at {_time_text(last_ms)}; why is not kept"
        )
        failed = pb.FailedAttempts(attempts=attempts, last_time=timestamp(last_ms), runs=runs)
        yield _event(first_ms, _PHASE_2, "dropped", text, branch_id, failed)
    for status, time_ms in past.ends:
        place = _TRY if status in (BranchStatus.TRIED, BranchStatus.REFUSED) else _PHASE_2
        text = f"branch {branch_id} ({branch.participant}.{branch.action})"
        yield _event(time_ms, place, status.name.lower(), text, branch_id)


def _actions(rows: Sequence[AuditRow]) -> Iterator[_Event]:
    answered = {read_outcome(row).get("asked_id") for row in rows}
    for row in rows:
        after = read_outcome(row)
        if not after and row.id.hex() in answered:
            continue
        what = after.get("outcome", "asked; what came of it was not written down")
        text = f"{what}: {row.reason}" if row.reason else what
        event = pb.HistoryEvent(time=timestamp(row.time_ms), event=row.action, detail=text, actor=row.actor)
        yield row.time_ms, _REST, event


def _event(
    time_ms: int, place: int, event: str, detail: str, branch_id: int = 0, failed: pb.FailedAttempts | None = None
) -> _Event:
    message = pb.HistoryEvent(
        time=timestamp(time_ms), event=event, detail=detail, branch_id=branch_id, failed=failed
    )  # fmt: skip
    return time_ms, place, message


def _failed_text(branch_id: int, run: Run) -> str:
    which = f"attempt {run.first_attempt}"
    if run.attempts > 1:
        which = f"attempts {run.first_attempt} to {run.last_attempt}, the last at {_time_text(run.last_ms)}"
    flag = " (needs attention)" if run.attention else ""
    return f"branch {branch_id} {_PHASES[run.phase]}, {which}{flag}: {run.error or 'no error was given'}"


def _failed(run: Run) -> pb.FailedAttempts:
    return pb.FailedAttempts(
        attempts=run.attempts,
        last_time=timestamp(run.last_ms),
        phase=int(run.phase),  # type: ignore[arg-type]  # the same numbers; a test compares them
        first_attempt=run.first_attempt,
        last_attempt=run.last_attempt,
        error=run.error,
        attention=run.attention,
    )


def _time_text(ms: int) -> str:
    return timestamp(ms).ToDatetime().isoformat(timespec="milliseconds") + "Z"
