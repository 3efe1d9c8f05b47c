"""Everything that moves a transaction is in this file.

First run, retry, time-out, recovery after a crash and take-over by another coordinator all ask the same questions:
what does this transaction owe its participants now (``due``), what do their replies make of it (``apply``), and when
must somebody look at it again (``wake_at``). A decided transaction never turns: there is no row in ``TRANSITIONS``
that would do it, and a move without a row raises and changes nothing.

Pure: time is an argument, and the jitter of the back-off is drawn from the transaction's own random xid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from .model import (
    Attention,
    BranchStatus,
    Call,
    Outcome,
    Phase,
    Policy,
    Refusal,
    Reply,
    Spec,
    State,
    Step,
    Transaction,
)

ERROR_CHARS_MAX = 500


class Event(IntEnum):
    """What can move a transaction."""

    ALL_TRIED = 1
    """Every branch has answered Try with DONE."""
    REFUSED = 2
    """A branch has refused its Try."""
    DEADLINE = 3
    """The time-out is over and not all branches are tried."""
    ALL_CONFIRMED = 4
    ALL_CANCELLED = 5


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.TRYING, Event.ALL_TRIED): State.CONFIRMING,
    (State.TRYING, Event.REFUSED): State.CANCELLING,
    (State.TRYING, Event.DEADLINE): State.CANCELLING,
    (State.CONFIRMING, Event.ALL_CONFIRMED): State.CONFIRMED,
    (State.CANCELLING, Event.ALL_CANCELLED): State.CANCELLED,
}


class IllegalMove(Exception):
    """A move that is not in ``TRANSITIONS``. Nothing was changed."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{event.name} cannot move a transaction that is {state.name}")
        self.state = state
        self.event = event


def begin(spec: Spec, now_ms: int, policy: Policy) -> Transaction:
    """The first value of a transaction: TRYING, every branch owed its Try, leased to whoever begins it.

    Raises ValueError if there are no branches: such a transaction has nothing to decide.
    """
    if not spec.branches:
        raise ValueError("a transaction needs at least one branch")
    return Transaction(
        spec,
        State.TRYING,
        (_PENDING,) * len(spec.branches),
        wake_ms=now_ms + policy.lease_ms,
        updated_ms=now_ms,
    )


def due(tx: Transaction, now_ms: int, policy: Policy) -> tuple[Call, ...]:
    """The calls that this transaction owes its participants now."""
    state = tx.state
    timeout_ms = policy.call_timeout_ms
    if state is State.TRYING:
        left_ms = tx.spec.deadline_ms - now_ms
        if left_ms <= 0:
            return ()  # apply() cancels it; no Try may leave any more
        timeout_ms = min(timeout_ms, left_ms)
    calls = []
    for branch, step in enumerate(tx.steps):
        phase = owed(state, step)
        if phase is not None and step.next_ms <= now_ms:
            calls.append(Call(branch, phase, step.attempts + 1, timeout_ms))
    return tuple(calls)


def owed(state: State, step: Step) -> Phase | None:
    """The phase that a branch still wants an answer for, if any."""
    if state is State.TRYING:
        return Phase.TRY if step.status is BranchStatus.PENDING else None
    if state is State.CONFIRMING:
        return Phase.CONFIRM if step.status is BranchStatus.TRIED else None
    if state is State.CANCELLING:
        # To every branch, also one that refused or whose Try may never have arrived: that Try may still be on its way.
        return Phase.CANCEL if step.status is not BranchStatus.CANCELLED else None
    return None


def apply(tx: Transaction, replies: Iterable[Reply], now_ms: int, policy: Policy) -> Transaction:
    """What these replies, and the time, make of the transaction; the very same value if nothing.

    Monotone: a final answer is never overwritten, so replies may be applied again, late, or to a value that another
    coordinator saved (protocol A6).
    """
    steps = list(tx.steps)
    attention = tx.attention
    for reply in replies:
        step = steps[reply.branch]
        if owed(tx.state, step) is not reply.phase:
            steps[reply.branch] = step = _late(tx.state, step, reply)
            if _contradicts(tx.state, step, reply):
                attention = Attention.VIOLATION
            continue
        if reply.outcome is Outcome.DONE:
            reply = _checked(step, reply)
        steps[reply.branch], raised = _answered(tx, step, reply, now_ms, policy)
        attention = max(attention, raised)
    moved = tx
    if attention is not tx.attention or any(a is not b for a, b in zip(steps, tx.steps, strict=True)):
        moved = tx._replace(steps=tuple(steps), attention=attention, updated_ms=now_ms)
    event = _event(moved, now_ms)
    return moved if event is None else move(moved, event, now_ms)


def move(tx: Transaction, event: Event, now_ms: int) -> Transaction:
    """The transaction after an event. Raises IllegalMove, and changes nothing, if the table has no such move."""
    state = TRANSITIONS.get((tx.state, event))
    if state is None:
        raise IllegalMove(tx.state, event)
    if state.finished:
        attention = Attention.NONE if tx.attention is Attention.RETRYING else tx.attention
        return tx._replace(state=state, attention=attention, updated_ms=now_ms)
    return tx._replace(
        state=state,
        # The new phase starts with a clean schedule; the last error stays for people to read.
        steps=tuple(s._replace(attempts=0, next_ms=0) if s.attempts else s for s in tx.steps),
        decided_ms=now_ms,
        updated_ms=now_ms,
        cancel_reason=_cancel_reason(tx, event),
    )


def wake_at(tx: Transaction, now_ms: int, policy: Policy, *, calls_out: bool) -> int | None:
    """When somebody must look at this transaction again; None when it is finished.

    While calls are out this is a lease: it outlasts the longest of them, so that nobody adopts a transaction that is
    being driven (protocol A5). A lease that is still long enough is kept: an update that leaves the index alone is
    half the price. Otherwise it is the next attempt, or the deadline if that comes first.
    """
    if tx.state.finished:
        return None
    if calls_out:
        enough_ms = now_ms + policy.call_timeout_ms + policy.lease_margin_ms
        if tx.wake_ms is not None and tx.wake_ms >= enough_ms:
            return tx.wake_ms
        return now_ms + policy.lease_ms
    times = [step.next_ms for step in tx.steps if owed(tx.state, step) is not None]
    if tx.state is State.TRYING:
        times.append(tx.spec.deadline_ms)
    return max(now_ms, min(times))


def backoff_ms(xid: bytes, branch: int, attempt: int, policy: Policy) -> int:
    """Full jitter: somewhere between 0 and a ceiling that doubles with each attempt, up to the cap.

    The randomness is that of the xid, stirred, so that the function stays pure and two transactions still differ.
    """
    ceiling = min(policy.backoff_cap_ms, policy.backoff_base_ms << min(attempt - 1, 20))
    stirred = int.from_bytes(xid[8:], "big") ^ (branch << 32) ^ attempt
    stirred = (stirred ^ (stirred >> 31)) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    stirred = (stirred ^ (stirred >> 29)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    return ((stirred >> 32) * (ceiling + 1)) >> 32


def state_diagram() -> str:
    """The transition table as a Mermaid state diagram, for ARCHITECTURE."""
    lines = ["stateDiagram-v2", "    [*] --> TRYING"]
    lines += [f"    {a.name} --> {b.name}: {event.name}" for (a, event), b in TRANSITIONS.items()]
    lines += [f"    {state.name} --> [*]" for state in State if state.finished]
    return "\n".join(lines)


# --- how one reply changes one branch ---------------------------------------------------------------------

_PENDING = Step()
_PLAIN: dict[tuple[BranchStatus, str], Step] = {}


def _plain(status: BranchStatus, fence_id: str) -> Step:
    """A step without result, refusal or error: the same few for nearly all branches, so they are made once."""
    step = _PLAIN.get((status, fence_id))
    if step is None:
        if len(_PLAIN) > 10_000:
            _PLAIN.clear()
        step = _PLAIN[status, fence_id] = Step(status, fence_id=fence_id)
    return step


_DONE_STATUS = {
    Phase.TRY: BranchStatus.TRIED,
    Phase.CONFIRM: BranchStatus.CONFIRMED,
    Phase.CANCEL: BranchStatus.CANCELLED,
}


def _answered(tx: Transaction, step: Step, reply: Reply, now_ms: int, policy: Policy) -> tuple[Step, Attention]:
    """The branch after an answer that it was waiting for."""
    if reply.outcome is Outcome.DONE:
        status = _DONE_STATUS[reply.phase]
        fence_id = step.fence_id or reply.fence_id
        if reply.result is None and step.result is None and step.refusal is None and not step.error:
            return _plain(status, fence_id), Attention.NONE
        result = reply.result if reply.phase is Phase.TRY else step.result
        return step._replace(status=status, fence_id=fence_id, result=result), Attention.NONE
    if reply.phase is Phase.TRY and reply.outcome is Outcome.REFUSED:
        refusal = Refusal(*(text[:ERROR_CHARS_MAX] for text in reply.refusal or Refusal("refused")))
        return step._replace(status=BranchStatus.REFUSED, refusal=refusal, fence_id=reply.fence_id), Attention.NONE
    error = reply.error[:ERROR_CHARS_MAX]
    if reply.phase is Phase.TRY and reply.outcome is Outcome.VIOLATION:
        # Nothing was run, and nothing ever will be under this call: it counts as a refusal, and somebody should know.
        return step._replace(status=BranchStatus.REFUSED, error=error), Attention.VIOLATION
    attempts = step.attempts + 1
    if reply.outcome is Outcome.UNKNOWN:
        wait_ms = backoff_ms(tx.spec.xid, reply.branch, attempts, policy)
        raised = Attention.VIOLATION if reply.attention else Attention.NONE
        if raised is Attention.NONE and attempts >= policy.attention_after:
            raised = Attention.RETRYING
    else:  # VIOLATION, or a refusal where there is nothing left to refuse: parked, and flagged at once
        wait_ms = policy.backoff_cap_ms
        raised = Attention.VIOLATION
        if reply.outcome is Outcome.REFUSED:
            text = f"refused {reply.phase.name}, which cannot be refused: {_refusal_text(step, reply)}"
            error = text[:ERROR_CHARS_MAX]
    return step._replace(attempts=attempts, next_ms=now_ms + wait_ms, error=error), raised


def _checked(step: Step, reply: Reply) -> Reply:
    """A "done" from another fence database than Try's says nothing about this branch (protocol C3)."""
    if reply.phase is Phase.TRY or not step.fence_id or reply.fence_id == step.fence_id:
        return reply
    error = f"{reply.phase.name} was answered by fence database {reply.fence_id or '?'}, Try by {step.fence_id}"
    return reply._replace(outcome=Outcome.VIOLATION, error=error)


def _late(state: State, step: Step, reply: Reply) -> Step:
    """What an answer that nobody waits for any more still teaches: which database a Try has reserved in.

    Its Cancel must be answered by that one, whichever of the two answers comes first (protocol C3).
    """
    late_try = reply.phase is Phase.TRY and reply.outcome is Outcome.DONE
    if late_try and state in (State.CANCELLING, State.CANCELLED) and not step.fence_id and reply.fence_id:
        return step._replace(fence_id=reply.fence_id)
    return step


def _contradicts(state: State, step: Step, reply: Reply) -> bool:
    """Whether a late answer says that something happened which the record says did not."""
    cancelled = state in (State.CANCELLING, State.CANCELLED)
    if reply.phase is Phase.TRY:
        if reply.outcome is Outcome.REFUSED:
            # Once it is being cancelled, the fence refuses a Try that its Cancel has overtaken.
            return not cancelled and step.status in (BranchStatus.TRIED, BranchStatus.CONFIRMED)
        if reply.outcome is not Outcome.DONE:
            return False
        elsewhere = bool(reply.fence_id) and bool(step.fence_id) and reply.fence_id != step.fence_id
        return step.status is BranchStatus.REFUSED or elsewhere
    if reply.outcome is not Outcome.DONE:
        return False
    if reply.phase is Phase.CONFIRM:
        return cancelled
    return state in (State.CONFIRMING, State.CONFIRMED)


def _event(tx: Transaction, now_ms: int) -> Event | None:
    """The event that the branches' progress, or the time, has brought about."""
    statuses: Sequence[BranchStatus] = [step.status for step in tx.steps]
    if tx.state is State.TRYING:
        if BranchStatus.REFUSED in statuses:
            return Event.REFUSED
        if all(s is BranchStatus.TRIED for s in statuses):
            return Event.ALL_TRIED
        return Event.DEADLINE if now_ms >= tx.spec.deadline_ms else None
    if tx.state is State.CONFIRMING:
        return Event.ALL_CONFIRMED if all(s is BranchStatus.CONFIRMED for s in statuses) else None
    if tx.state is State.CANCELLING:
        return Event.ALL_CANCELLED if all(s is BranchStatus.CANCELLED for s in statuses) else None
    return None


def _cancel_reason(tx: Transaction, event: Event) -> str:
    if event is Event.DEADLINE:
        return f"undecided after its timeout of {tx.spec.timeout_ms} ms"
    if event is not Event.REFUSED:
        return ""
    for index, step in enumerate(tx.steps):
        if step.status is BranchStatus.REFUSED:
            branch = tx.spec.branches[index]
            why = _refusal_text(step, None)
            return f"branch {index + 1} ({branch.participant}.{branch.action}) refused: {why}"
    return ""


def _refusal_text(step: Step, reply: Reply | None) -> str:
    refusal = step.refusal if reply is None else reply.refusal
    if refusal is None:
        return step.error or "no reason given"
    return f"{refusal.reason}: {refusal.message}" if refusal.message else refusal.reason
