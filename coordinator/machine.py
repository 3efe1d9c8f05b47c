"""Everything that moves a transaction is in this file.

First run, retry, time-out, recovery after a crash and take-over by another coordinator all ask the same questions:
what does this transaction owe its participants now (``due``), what do their replies make of it (``apply``), and when
must somebody look at it again (``wake_at``). A decided transaction never turns: there is no row in ``TRANSITIONS``
that would do it, and a move without a row raises and changes nothing.

Pure: time is an argument, and the jitter of the back-off is drawn from the transaction's own random xid.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
    Seen,
    Spec,
    State,
    Step,
    Transaction,
)
from .past import Failure, remember

ERROR_CHARS_MAX = 500

# What every transaction comes by many times: a member is found ten times as fast by a name of this module as by that
# of its enum.
_TRYING, _CONFIRMING, _CANCELLING = State.TRYING, State.CONFIRMING, State.CANCELLING
_TRY, _DONE, _CALM = Phase.TRY, Outcome.DONE, Attention.NONE
_TRIED, _CONFIRMED, _REFUSED = BranchStatus.TRIED, BranchStatus.CONFIRMED, BranchStatus.REFUSED


class Event(IntEnum):
    """What can move a transaction."""

    ALL_TRIED = 1
    """Every branch has answered Try with DONE, and no more can be added by the initiator."""
    REFUSED = 2
    """A branch has refused its Try."""
    DEADLINE = 3
    """The time-out is over and not all branches are tried."""
    ALL_CONFIRMED = 4
    ALL_CANCELLED = 5
    INITIATOR = 6
    """Its initiator cancels it."""
    NOT_NAMED = 7
    """A branch was enlisted, and whoever called it has answered for good without having seen it tried."""
    OPERATOR = 8
    """An operator cancels it."""


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.TRYING, Event.ALL_TRIED): State.CONFIRMING,
    (State.TRYING, Event.REFUSED): State.CANCELLING,
    (State.TRYING, Event.DEADLINE): State.CANCELLING,
    (State.TRYING, Event.INITIATOR): State.CANCELLING,
    (State.TRYING, Event.NOT_NAMED): State.CANCELLING,
    (State.TRYING, Event.OPERATOR): State.CANCELLING,
    (State.CONFIRMING, Event.ALL_CONFIRMED): State.CONFIRMED,
    (State.CANCELLING, Event.ALL_CANCELLED): State.CANCELLED,
}


class IllegalMove(Exception):
    """A move that is not in ``TRANSITIONS``. Nothing was changed."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{event.name} cannot move a transaction that is {state.name}")
        self.state = state
        self.event = event


def begin(spec: Spec, now_ms: int, policy: Policy, save_id: int = 0) -> Transaction:
    """The first value of a transaction: TRYING, every branch owed its Try, leased to whoever begins it.

    An interactive one has no branches yet and owes nothing. Raises ValueError if another has none: it would have
    nothing to decide.
    """
    if spec.interactive:
        deadline_ms = spec.created_ms + spec.timeout_ms
        return Transaction(
            spec, State.TRYING, (), save_id=save_id, wake_ms=deadline_ms, updated_ms=now_ms, sealed=False
        )
    if not spec.branches:
        raise ValueError("a transaction needs at least one branch")
    deadline_ms = spec.created_ms + spec.timeout_ms
    wake_ms = _lease_end(spec, deadline_ms, now_ms, policy)
    steps = (_PENDING,) * len(spec.branches)
    return Transaction(spec, State.TRYING, steps, save_id=save_id, wake_ms=wake_ms, updated_ms=now_ms)


def due(tx: Transaction, now_ms: int, policy: Policy) -> tuple[Call, ...]:
    """The calls that this transaction owes its participants now."""
    if tx.state is _TRYING and tx.deadline_ms <= now_ms:
        return ()  # apply() cancels it; no Try may leave any more
    calls = []
    for branch, step in enumerate(tx.steps):
        if step.next_ms <= now_ms and (phase := called(tx, branch)) is not None:
            calls.append(_call(tx, branch, phase, now_ms, policy))
    return tuple(calls)


def owes(tx: Transaction, now_ms: int) -> bool:
    """Whether there are any calls that are ``due``."""
    if tx.state is State.TRYING and tx.deadline_ms <= now_ms:
        return False
    return any(step.next_ms <= now_ms and called(tx, branch) is not None for branch, step in enumerate(tx.steps))


def call_of(tx: Transaction, branch: int, now_ms: int, policy: Policy) -> Call:
    """The call that a branch is owed. No Try lasts longer than its transaction may be undecided."""
    phase = called(tx, branch)
    if phase is None:
        raise ValueError(f"branch {branch + 1} is owed no call")
    return _call(tx, branch, phase, now_ms, policy)


def _call(tx: Transaction, branch: int, phase: Phase, now_ms: int, policy: Policy) -> Call:
    timeout_ms = policy.call_timeout_of(tx.spec.branches[branch])
    if phase is _TRY:
        timeout_ms = min(timeout_ms, tx.deadline_ms - now_ms)
    return Call(branch, phase, tx.steps[branch].attempts + 1, timeout_ms)


def called(tx: Transaction, branch: int) -> Phase | None:
    """The phase of the call that a branch is owed by the coordinator, now or at its next attempt, if any.

    Whoever enlisted reports its Try by itself; in an ordered transaction a Try waits for the one before it.
    """
    phase = wanted(tx, branch, tx.steps[branch])
    if phase is _TRY:
        joined = tx.joined_as(branch) if tx.joined else None
        if joined is not None and joined.enlisted:
            return None
        if tx.spec.ordered and joined is None and branch and tx.steps[branch - 1].status is not BranchStatus.TRIED:
            return None
    return phase


def waits(tx: Transaction, branch: int, now_ms: int) -> bool:
    """Whether a branch is owed a call that is not out, with anybody: it has failed, and waits for its next attempt.

    One that is due may be out: nothing is saved when a call leaves. So may the first call of an added branch, whose
    ``next_ms`` is its lease.
    """
    step = tx.steps[branch]
    return step.attempts > 0 and step.next_ms > now_ms and called(tx, branch) is not None


def rests(tx: Transaction, now_ms: int) -> bool:
    """Whether no call can be out: every branch that is owed one waits for its next attempt."""
    return all(waits(tx, n, now_ms) or called(tx, n) is None for n in range(len(tx.steps)))


def wanted(tx: Transaction, branch: int, step: Step) -> Phase | None:
    """The phase that a branch, which has come so far, still wants an answer for, if any.

    Of one that was resolved by hand that is no Confirm nor Cancel any more, but that its participant writes it down.
    """
    if tx.resolved and (resolution := tx.resolution_of(branch)) is not None:
        if step.status in _ENDS:
            return None
        return Phase.SETTLE_CONFIRMED if resolution.confirmed else Phase.SETTLE_CANCELLED
    return _OWED[tx.state][step.status]


_ENDS = (BranchStatus.CONFIRMED, BranchStatus.CANCELLED)


def _wanted(state: State, status: BranchStatus) -> Phase | None:
    if state is State.TRYING:
        return Phase.TRY if status is BranchStatus.PENDING else None
    if state is State.CONFIRMING:
        return Phase.CONFIRM if status is BranchStatus.TRIED else None
    if state is State.CANCELLING:
        # To every branch, also one that refused or whose Try may never have arrived: that Try may still be on its way.
        return Phase.CANCEL if status is not BranchStatus.CANCELLED else None
    return None


# By their numbers, which begin with 1: looked up for every branch of every save.
_OWED: tuple[tuple[Phase | None, ...], ...] = (
    (),
    *((None, *(_wanted(state, status) for status in BranchStatus)) for state in State),
)


def apply(tx: Transaction, replies: Sequence[Reply], now_ms: int, policy: Policy) -> Transaction:
    """What these replies, and the time, make of the transaction; the very same value if nothing.

    Monotone: a final answer is never overwritten, so replies may be applied again, late, or to a value that another
    coordinator saved (protocol A6).
    """
    if not replies:
        return _settled(tx, now_ms)
    steps = list(tx.steps)
    attention = tx.attention.lasting
    seen: list[Seen] = []
    failures: list[Failure] = []
    for reply in replies:
        step = steps[reply.branch]
        if wanted(tx, reply.branch, step) is not reply.phase:
            if _fails_late(tx.state, step, reply):
                failures.append(Failure(reply.branch, Phase.TRY, 0, reply.error[:ERROR_CHARS_MAX], reply.attention))
            steps[reply.branch] = step = _late(tx.state, step, reply)
            if _contradicts(tx.state, step, reply):
                attention = Attention.VIOLATION
            continue
        if reply.outcome is _DONE:
            reply = _checked(step, reply)
        steps[reply.branch], raised = _answered(tx, step, reply, now_ms, policy)
        attention = max(attention, raised)
        if reply.outcome is not _DONE and not (reply.phase is Phase.TRY and reply.outcome is Outcome.REFUSED):
            error, flagged = steps[reply.branch].error, raised is Attention.VIOLATION
            failures.append(Failure(reply.branch, reply.phase, step.attempts + 1, error, flagged))
        if reply.seen and steps[reply.branch].status is BranchStatus.TRIED:
            seen += (Seen(reply.branch + 1, branch_id) for branch_id in reply.seen)
    moved = tx
    if seen:
        tx = tx._replace(seen=tx.seen + tuple(seen))
    after = tuple(steps)
    if seen or failures or after != tx.steps or attention is not tx.attention:
        moved = tx._replace(steps=after, attention=attention, updated_ms=now_ms)
        if failures or tx.past:
            moved = moved._replace(past=remember(tx, steps, failures, now_ms))
    return _settled(moved, now_ms)


def _settled(tx: Transaction, now_ms: int) -> Transaction:
    """The transaction after all that its branches' progress, or the time, brings about."""
    while (event := _event(tx, now_ms)) is not None:
        tx = move(tx, event, now_ms)
    return tx


def move(tx: Transaction, event: Event, now_ms: int, reason: str = "") -> Transaction:
    """The transaction after an event. Raises IllegalMove, and changes nothing, if the table has no such move."""
    state = TRANSITIONS.get((tx.state, event))
    if state is None:
        raise IllegalMove(tx.state, event)
    if state.finished:
        attention = Attention.NONE if tx.attention is Attention.RETRYING else tx.attention.lasting
        return tx._replace(state=state, attention=attention, updated_ms=now_ms)
    return tx._replace(
        state=state,
        # The new phase starts with a clean schedule, without the lease of an added branch's first Try; the last error
        # stays for people to read.
        steps=tuple([s._replace(attempts=0, next_ms=0) if s.attempts or s.next_ms else s for s in tx.steps]),
        decided_ms=now_ms,
        updated_ms=now_ms,
        cancel_reason=reason or _cancel_reason(tx, event),
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
        enough_ms = now_ms + policy.longest_call_of(tx.spec) + policy.lease_margin_ms
        if tx.state is _TRYING:
            enough_ms = min(enough_ms, tx.deadline_ms)
        end_ms = _lease_end(tx.spec, tx.deadline_ms if tx.state is _TRYING else None, now_ms, policy)
        return tx.wake_ms if tx.wake_ms is not None and enough_ms <= tx.wake_ms <= end_ms else end_ms
    times = [step.next_ms for branch, step in enumerate(tx.steps) if called(tx, branch) is not None]
    if tx.state is _TRYING:
        times.append(tx.deadline_ms)
    return max(now_ms, min(times))


def visitors_wake_at(tx: Transaction, mine: Collection[int], now_ms: int, policy: Policy) -> int | None:
    """As ``wake_at``, for whoever changes a transaction that another coordinator may be driving.

    ``mine`` are the branches with calls of the visitor's own. Of other branches that seem to be due nobody can tell
    whether their calls are out: they are left under the lease that stands, which is never lengthened for them, nor
    cut short, not even for a branch that waits for its next attempt.
    """
    if tx.state.finished:
        return None
    stands_ms = now_ms if tx.wake_ms is None else max(now_ms, tx.wake_ms)
    owing = [branch for branch in range(len(tx.steps)) if called(tx, branch) is not None]
    others_out = any(tx.steps[branch].next_ms <= now_ms for branch in owing if branch not in mine)
    times = []
    for branch in owing:
        next_ms = tx.steps[branch].next_ms
        if branch in mine:
            left_ms = policy.call_timeout_of(tx.spec.branches[branch]) + policy.lease_margin_ms
            times.append(max(next_ms, now_ms + left_ms))
        else:
            times.append(stands_ms if others_out else next_ms)
    if tx.state is State.TRYING:
        times.append(tx.deadline_ms + (policy.lease_margin_ms if mine else 0))
    return max(now_ms, min(times))


def _lease_end(spec: Spec, deadline_ms: int | None, now_ms: int, policy: Policy) -> int:
    """Until when nobody else need look. No Try outlasts the deadline, so that one need not wait for a lease.

    The deadline is None for what is decided.
    """
    longest_ms = policy.longest_call_of(spec) + policy.lease_margin_ms
    end_ms = now_ms + max(policy.lease_ms, longest_ms)
    if deadline_ms is not None:
        end_ms = min(end_ms, max(now_ms, deadline_ms) + policy.lease_margin_ms)
    return end_ms


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
    Phase.SETTLE_CONFIRMED: BranchStatus.CONFIRMED,
    Phase.SETTLE_CANCELLED: BranchStatus.CANCELLED,
}


def _answered(tx: Transaction, step: Step, reply: Reply, now_ms: int, policy: Policy) -> tuple[Step, Attention]:
    """The branch after an answer that it was waiting for."""
    if reply.outcome is _DONE:
        status = _DONE_STATUS[reply.phase]
        fence_id = step.fence_id or reply.fence_id
        if reply.result is None and step.result is None and step.refusal is None and not step.error:
            return _plain(status, fence_id), _CALM
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
        wait_ms = max(
            min(reply.retry_ms, policy.backoff_cap_ms), backoff_ms(tx.spec.xid, reply.branch, attempts, policy)
        )
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


def from_registered(reply: Reply, registered: str) -> Reply:
    """The reply; if it is an answer from another fence database than the registered one (if any is), a VIOLATION.

    It says nothing about the branch then (protocol C3).
    """
    if not registered or reply.fence_id == registered or reply.outcome in (Outcome.UNKNOWN, Outcome.VIOLATION):
        return reply
    error = f"answered by fence database {reply.fence_id or '(none named)'}, registered is {registered}"
    return Reply(reply.branch, reply.phase, Outcome.VIOLATION, reply.fence_id, error=error)


def _checked(step: Step, reply: Reply) -> Reply:
    """A "done" from another fence database than Try's says nothing about this branch (protocol C3)."""
    if reply.phase is Phase.TRY or not step.fence_id or reply.fence_id == step.fence_id:
        return reply
    error = f"{reply.phase.name} was answered by fence database {reply.fence_id or '?'}, Try by {step.fence_id}"
    return reply._replace(outcome=Outcome.VIOLATION, error=error)


def _late(state: State, step: Step, reply: Reply) -> Step:
    """What an answer that nobody waits for any more still teaches.

    Which database a Try has reserved in: its Cancel must be answered by that one, whichever of the two answers comes
    first (protocol C3). Or why it is not known whether it has: a person who looks for the reason finds it.
    """
    if reply.phase is not Phase.TRY or state not in (State.CANCELLING, State.CANCELLED):
        return step
    if reply.outcome is Outcome.DONE and not step.fence_id:
        return step._replace(fence_id=reply.fence_id)
    if _fails_late(state, step, reply) and not step.error:
        return step._replace(error=reply.error[:ERROR_CHARS_MAX])
    return step


def _fails_late(state: State, step: Step, reply: Reply) -> bool:
    """Whether it is a Try's failure that came after the decision to cancel, to a branch that knows nothing better."""
    known = reply.phase is not Phase.TRY or reply.outcome is not Outcome.UNKNOWN
    return not known and state is State.CANCELLING and step.status is BranchStatus.PENDING


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
    # Of what was resolved by hand against the decision a person knows already.
    return reply.phase is Phase.CANCEL and state in (State.CONFIRMING, State.CONFIRMED)


def _event(tx: Transaction, now_ms: int) -> Event | None:
    """The event that the branches' progress, or the time, has brought about."""
    statuses: Sequence[BranchStatus] = [step.status for step in tx.steps]
    if tx.state is _TRYING:
        if _REFUSED in statuses:
            return Event.REFUSED
        if tx.sealed:
            if tx.joined and _not_named(tx):
                return Event.NOT_NAMED
            if statuses.count(_TRIED) == len(statuses):
                return Event.ALL_TRIED
        return Event.DEADLINE if now_ms >= tx.deadline_ms else None
    if tx.resolved:  # by hand, either way: such branches have ended when nothing is owed to them any more
        statuses = [s for n, s in enumerate(statuses) if tx.resolution_of(n) is None or s not in _ENDS]
    if tx.state is _CONFIRMING:
        return Event.ALL_CONFIRMED if statuses.count(_CONFIRMED) == len(statuses) else None
    if tx.state is _CANCELLING:
        return Event.ALL_CANCELLED if statuses.count(BranchStatus.CANCELLED) == len(statuses) else None
    return None


def named(tx: Transaction, branch_ids: Iterable[int]) -> set[int]:
    """These branches, and those that their participants, or the participants of those, saw tried (protocol B3)."""
    found = set(branch_ids)
    while True:
        more = {seen.branch_id for seen in tx.seen if seen.by in found and seen.branch_id not in found}
        if not more:
            return found
        found |= more


def _not_named(tx: Transaction) -> list[int]:
    """The branch_ids that nobody will name any more, of a transaction that no initiator confirms.

    Whoever the coordinator called has answered for good, and did not see them tried: it may have taken the error for
    a "no" and gone on without them.
    """
    begun = range(1, tx.begun + 1)
    if tx.spec.interactive or any(tx.steps[n - 1].status is not BranchStatus.TRIED for n in begun):
        return []
    found = named(tx, begun)
    return [n for n in range(tx.begun + 1, len(tx.steps) + 1) if n not in found]


def _cancel_reason(tx: Transaction, event: Event) -> str:
    if event is Event.DEADLINE:
        if tx.renewed_ms:
            return f"undecided at its deadline, {tx.deadline_ms - tx.spec.created_ms} ms after its beginning"
        return f"undecided after its timeout of {tx.spec.timeout_ms} ms"
    if event is Event.NOT_NAMED:
        which = ", ".join(map(str, _not_named(tx)))
        return f"branch {which} was enlisted, and not seen tried by whoever called it"
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
