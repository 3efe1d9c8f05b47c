"""The transition table, and what replies and time make of a transaction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import machine
from coordinator.machine import (
    ERROR_CHARS_MAX,
    Event,
    IllegalMove,
    apply,
    backoff_ms,
    begin,
    due,
    move,
    owes,
    state_diagram,
    wake_at,
)
from coordinator.model import (
    Attention,
    BranchSpec,
    BranchStatus,
    Outcome,
    Payload,
    Phase,
    Policy,
    Refusal,
    Reply,
    Spec,
    State,
    Step,
    Transaction,
)

POLICY = Policy()
XID = bytes.fromhex("01980000000070008a5c3e1f7b9d2460")
TIMEOUT_MS = 30_000

ALLOWED = {
    (State.TRYING, Event.ALL_TRIED): State.CONFIRMING,
    (State.TRYING, Event.REFUSED): State.CANCELLING,
    (State.TRYING, Event.DEADLINE): State.CANCELLING,
    (State.TRYING, Event.INITIATOR): State.CANCELLING,
    (State.TRYING, Event.OPERATOR): State.CANCELLING,
    (State.TRYING, Event.NOT_NAMED): State.CANCELLING,
    (State.CONFIRMING, Event.ALL_CONFIRMED): State.CONFIRMED,
    (State.CANCELLING, Event.ALL_CANCELLED): State.CANCELLED,
}
"""Written out a second time, so that a row that is added or changed by mistake does not agree with itself."""


def spec(branches: int = 2, *, timeout_ms: int = TIMEOUT_MS) -> Spec:
    return Spec(XID, b"", 0, timeout_ms, tuple(BranchSpec(f"bank-{n}", "debit") for n in range(branches)))


def transaction(state: State, *steps: Step | BranchStatus, wake_ms: int | None = 10_000) -> Transaction:
    made = tuple(step if isinstance(step, Step) else Step(step) for step in steps)
    return Transaction(spec(len(made)), state, made, wake_ms=wake_ms)


def done(branch: int, phase: Phase, fence_id: str = "") -> Reply:
    return Reply(branch, phase, Outcome.DONE, fence_id)


def unknown(branch: int, phase: Phase, error: str = "unavailable", *, attention: bool = False) -> Reply:
    return Reply(branch, phase, Outcome.UNKNOWN, error=error, attention=attention)


def refused(branch: int, reason: str = "insufficient funds", message: str = "") -> Reply:
    return Reply(branch, Phase.TRY, Outcome.REFUSED, refusal=Refusal(reason, message))


def violation(branch: int, phase: Phase, error: str = "confirm after cancel") -> Reply:
    return Reply(branch, phase, Outcome.VIOLATION, error=error)


PENDING, TRIED, REFUSED = BranchStatus.PENDING, BranchStatus.TRIED, BranchStatus.REFUSED
CONFIRMED, CANCELLED = BranchStatus.CONFIRMED, BranchStatus.CANCELLED


# --- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_pair_of_state_and_event(state: State, event: Event) -> None:
    before = transaction(state, TRIED, TRIED)
    copy = before._replace()
    if (state, event) in ALLOWED:
        assert move(before, event, 7).state is ALLOWED[state, event]
    else:
        with pytest.raises(IllegalMove, match=f"{event.name} cannot move a transaction that is {state.name}") as raised:
            move(before, event, 7)
        assert (raised.value.state, raised.value.event) == (state, event)
    assert before == copy


def test_nothing_leads_from_one_decision_to_the_other() -> None:
    confirms = {State.CONFIRMING, State.CONFIRMED}
    cancels = {State.CANCELLING, State.CANCELLED}
    for (before, _), after in machine.TRANSITIONS.items():
        assert not before.finished
        assert (before in confirms) <= (after in confirms)
        assert (before in cancels) <= (after in cancels)


def test_a_decision_starts_a_clean_schedule_and_keeps_the_last_error() -> None:
    slow = Step(TRIED, attempts=3, next_ms=9_000, error="unavailable", result=Payload(b"17"))
    after = move(transaction(State.TRYING, slow, TRIED), Event.ALL_TRIED, 500)
    assert after.steps[0] == Step(TRIED, error="unavailable", result=Payload(b"17"))
    assert after.decided_ms == after.updated_ms == 500


def test_the_diagram_shows_every_row_of_the_table_and_no_other() -> None:
    lines = {line.strip() for line in state_diagram().splitlines()}
    moves = {f"{a.name} --> {b.name}: {event.name}" for (a, event), b in ALLOWED.items()}
    assert lines == moves | {"stateDiagram-v2", "[*] --> TRYING", "CONFIRMED --> [*]", "CANCELLED --> [*]"}


# --- begin, due ------------------------------------------------------------------------------------------------------


def test_begin_owes_every_branch_its_try_under_a_lease() -> None:
    tx = begin(spec(3), 40, POLICY)
    assert (tx.state, tx.version, tx.wake_ms, tx.attention) == (State.TRYING, 1, 10_040, Attention.NONE)
    assert [(call.branch, call.phase, call.attempt) for call in due(tx, 40, POLICY)] == [
        (0, Phase.TRY, 1),
        (1, Phase.TRY, 1),
        (2, Phase.TRY, 1),
    ]


def test_begin_without_branches_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one branch"):
        begin(spec(0), 0, POLICY)


OWED: dict[State, dict[BranchStatus, Phase]] = {
    State.TRYING: {PENDING: Phase.TRY},
    State.CONFIRMING: {TRIED: Phase.CONFIRM},
    State.CONFIRMED: {},
    State.CANCELLING: dict.fromkeys((PENDING, TRIED, REFUSED, CONFIRMED), Phase.CANCEL),
    State.CANCELLED: {},
}


@pytest.mark.parametrize(("state", "status"), list(product(State, BranchStatus)))
def test_what_is_owed_to_a_branch(state: State, status: BranchStatus) -> None:
    phases = [call.phase for call in due(transaction(state, status), 5, POLICY)]
    assert phases == [phase for owed, phase in OWED[state].items() if owed is status]


def test_a_call_is_not_due_before_its_back_off_is_over() -> None:
    tx = transaction(State.CONFIRMING, Step(TRIED, attempts=4, next_ms=100), CONFIRMED)
    assert due(tx, 99, POLICY) == ()
    (call,) = due(tx, 100, POLICY)
    assert (call.branch, call.phase, call.attempt, call.timeout_ms) == (0, Phase.CONFIRM, 5, POLICY.call_timeout_ms)


def test_a_try_is_given_no_more_time_than_the_transaction_has() -> None:
    tx = transaction(State.TRYING, PENDING)
    assert due(tx, TIMEOUT_MS - 5_001, POLICY)[0].timeout_ms == 5_000
    assert due(tx, TIMEOUT_MS - 70, POLICY)[0].timeout_ms == 70


def test_why_a_try_is_not_known_is_kept_when_another_branch_has_refused_before() -> None:
    tx = apply(begin(spec(2), 0, POLICY), [refused(0)], 5, POLICY)
    assert tx.state is State.CANCELLING
    told = apply(tx, [unknown(1, Phase.TRY, "no answer in 5000 ms")], 6, POLICY)
    assert told.steps[1] == tx.steps[1]._replace(error="no answer in 5000 ms")
    assert told.wake_ms == tx.wake_ms
    again = apply(told, [unknown(1, Phase.TRY, "the coordinator stops")], 7, POLICY)
    assert again.steps == told.steps
    cancelled = apply(told, [done(1, Phase.CANCEL, "db-1")], 8, POLICY)
    assert apply(cancelled, [unknown(1, Phase.TRY)], 9, POLICY) is cancelled


@pytest.mark.parametrize("late_ms", [0, 1, 1_000_000])
def test_no_try_is_due_from_the_deadline_on(late_ms: int) -> None:
    assert due(transaction(State.TRYING, PENDING, TRIED), TIMEOUT_MS + late_ms, POLICY) == ()


def test_the_deadline_bounds_no_call_of_phase_2() -> None:
    tx = transaction(State.CONFIRMING, TRIED)
    assert due(tx, 10 * TIMEOUT_MS, POLICY)[0].timeout_ms == POLICY.call_timeout_ms


# --- apply: the decision ---------------------------------------------------------------------------------------------


def test_nothing_new_is_the_very_same_value() -> None:
    tx = transaction(State.TRYING, TRIED, PENDING)
    assert apply(tx, (), 5, POLICY) is tx
    assert apply(tx, [done(0, Phase.TRY)], 5, POLICY) is tx


def test_all_tried_decides_to_confirm() -> None:
    tx = apply(begin(spec(), 0, POLICY), [done(0, Phase.TRY), done(1, Phase.TRY)], 30, POLICY)
    assert (tx.state, tx.decided_ms, tx.cancel_reason) == (State.CONFIRMING, 30, "")


def test_one_refusal_decides_to_cancel_and_says_who_and_why() -> None:
    tx = apply(begin(spec(), 0, POLICY), [refused(1, "no-funds", "3 EUR missing"), done(0, Phase.TRY)], 30, POLICY)
    assert tx.state is State.CANCELLING
    assert tx.cancel_reason == "branch 2 (bank-1.debit) refused: no-funds: 3 EUR missing"
    assert [step.status for step in tx.steps] == [TRIED, REFUSED]


def test_the_deadline_decides_to_cancel_and_not_a_moment_before() -> None:
    tx = transaction(State.TRYING, TRIED, PENDING)
    assert apply(tx, (), TIMEOUT_MS - 1, POLICY) is tx
    late = apply(tx, (), TIMEOUT_MS, POLICY)
    assert (late.state, late.cancel_reason) == (State.CANCELLING, "undecided after its timeout of 30000 ms")


def test_a_last_try_that_is_seen_after_the_deadline_still_confirms() -> None:
    tx = apply(transaction(State.TRYING, TRIED, PENDING), [done(1, Phase.TRY)], TIMEOUT_MS + 5, POLICY)
    assert tx.state is State.CONFIRMING


@pytest.mark.parametrize("state", [State.CONFIRMING, State.CANCELLING])
def test_only_an_undecided_transaction_times_out(state: State) -> None:
    tx = transaction(state, TRIED, TRIED)
    assert apply(tx, (), 100 * TIMEOUT_MS, POLICY) is tx


def test_a_result_is_kept_for_confirm_and_beyond() -> None:
    held = Reply(0, Phase.TRY, Outcome.DONE, "db", Payload(b"hold-17"))
    tx = apply(begin(spec(1), 0, POLICY), [held], 5, POLICY)
    ended = apply(tx, [done(0, Phase.CONFIRM, "db")], 9, POLICY)
    assert ended.state is State.CONFIRMED
    assert ended.steps[0] == Step(CONFIRMED, fence_id="db", result=Payload(b"hold-17"))


def test_a_try_that_is_a_violation_is_a_refusal_with_attention() -> None:
    tx = apply(begin(spec(), 0, POLICY), [violation(0, Phase.TRY, "another payload")], 5, POLICY)
    assert (tx.state, tx.attention, tx.steps[0].status) == (State.CANCELLING, Attention.VIOLATION, REFUSED)
    assert tx.cancel_reason == "branch 1 (bank-0.debit) refused: another payload"


# --- apply: phase 2 --------------------------------------------------------------------------------------------------

PHASE_2 = [(State.CONFIRMING, Phase.CONFIRM), (State.CANCELLING, Phase.CANCEL)]


@pytest.mark.parametrize(("state", "phase"), PHASE_2)
def test_it_ends_when_every_branch_has_answered(state: State, phase: Phase) -> None:
    tx = transaction(state, TRIED, TRIED)
    half = apply(tx, [done(1, phase)], 5, POLICY)
    assert half.state is state
    assert [call.branch for call in due(half, 5, POLICY)] == [0]
    assert apply(half, [done(0, phase)], 6, POLICY).state.finished


@pytest.mark.parametrize(("state", "phase"), PHASE_2)
@pytest.mark.parametrize("outcome", [Outcome.VIOLATION, Outcome.REFUSED])
def test_what_cannot_be_said_in_phase_2_parks_the_branch(state: State, phase: Phase, outcome: Outcome) -> None:
    reply = Reply(0, phase, outcome, refusal=Refusal("limit", "too late"), error="no such hold")
    tx = apply(transaction(state, TRIED, TRIED), [reply], 40, POLICY)
    assert (tx.state, tx.attention) == (state, Attention.VIOLATION)
    assert (tx.steps[0].status, tx.steps[0].next_ms) == (TRIED, 40 + POLICY.backoff_cap_ms)
    said = "no such hold" if outcome is Outcome.VIOLATION else f"refused {phase.name}, which cannot be refused: limit"
    assert tx.steps[0].error.startswith(said)


@pytest.mark.parametrize(("state", "phase"), PHASE_2)
def test_done_by_another_fence_database_than_try_is_not_done(state: State, phase: Phase) -> None:
    tx = transaction(state, Step(TRIED, fence_id="db-1"))
    for other in ("db-2", ""):
        after = apply(tx, [done(0, phase, other)], 5, POLICY)
        assert (after.state, after.attention, after.steps[0].status) == (state, Attention.VIOLATION, TRIED)
        assert after.steps[0].error == f"{phase.name} was answered by fence database {other or '?'}, Try by db-1"
    assert apply(tx, [done(0, phase, "db-1")], 5, POLICY).state.finished


def test_a_refused_branch_is_cancelled_by_the_database_that_refused() -> None:
    refusal = Reply(0, Phase.TRY, Outcome.REFUSED, "db-1", refusal=Refusal("no"))
    tx = apply(begin(spec(1), 0, POLICY), [refusal], 5, POLICY)
    assert apply(tx, [done(0, Phase.CANCEL, "db-2")], 6, POLICY).attention is Attention.VIOLATION
    assert apply(tx, [done(0, Phase.CANCEL, "db-1")], 6, POLICY).state is State.CANCELLED


# --- apply: attention ------------------------------------------------------------------------------------------------


def test_attention_comes_with_the_tenth_failure_and_goes_with_the_end() -> None:
    tx = transaction(State.CONFIRMING, TRIED)
    for attempt in range(1, 13):
        tx = apply(tx, [unknown(0, Phase.CONFIRM)], attempt, POLICY)
        assert tx.steps[0].attempts == attempt
        assert tx.attention is (Attention.RETRYING if attempt >= 10 else Attention.NONE)
    assert apply(tx, [done(0, Phase.CONFIRM)], 99, POLICY).attention is Attention.NONE


@pytest.mark.parametrize("reply", [violation(0, Phase.CONFIRM), unknown(0, Phase.CONFIRM, attention=True)])
def test_a_violation_stays_on_record(reply: Reply) -> None:
    tx = apply(transaction(State.CONFIRMING, TRIED), [reply], 5, POLICY)
    assert tx.attention is Attention.VIOLATION
    for _ in range(12):
        tx = apply(tx, [unknown(0, Phase.CONFIRM)], 5, POLICY)
        assert tx.attention is Attention.VIOLATION
    ended = apply(tx, [done(0, Phase.CONFIRM)], 6, POLICY)
    assert (ended.state, ended.attention) == (State.CONFIRMED, Attention.VIOLATION)


CONTRADICTIONS = [
    (State.CONFIRMING, TRIED, refused(0)),
    (State.CONFIRMED, CONFIRMED, refused(0)),
    (State.TRYING, TRIED, refused(0)),
    (State.CANCELLING, REFUSED, done(0, Phase.TRY)),
    (State.TRYING, Step(TRIED, fence_id="db-1"), done(0, Phase.TRY, "db-2")),
    (State.CONFIRMING, Step(TRIED, fence_id="db-1"), done(0, Phase.TRY, "db-2")),
    (State.CANCELLED, Step(CANCELLED, fence_id="db-1"), done(0, Phase.TRY, "db-2")),
    (State.CANCELLING, TRIED, done(0, Phase.CONFIRM)),
    (State.CANCELLED, CANCELLED, done(0, Phase.CONFIRM)),
    (State.CONFIRMING, TRIED, done(0, Phase.CANCEL)),
    (State.CONFIRMED, CONFIRMED, done(0, Phase.CANCEL)),
]


@pytest.mark.parametrize(("state", "status", "reply"), CONTRADICTIONS)
def test_a_late_answer_that_contradicts_the_record_is_flagged(
    state: State, status: BranchStatus | Step, reply: Reply
) -> None:
    tx = transaction(state, status, PENDING)
    after = apply(tx, [reply], 5, POLICY)
    assert after == tx._replace(attention=Attention.VIOLATION, updated_ms=5)


HARMLESS = [
    (State.TRYING, TRIED, done(0, Phase.TRY)),
    (State.TRYING, TRIED, unknown(0, Phase.TRY, attention=True)),
    (State.CONFIRMING, TRIED, done(0, Phase.TRY)),
    (State.CONFIRMED, CONFIRMED, done(0, Phase.CONFIRM)),
    (State.CANCELLING, PENDING, done(0, Phase.TRY)),
    (State.CANCELLING, PENDING, refused(0)),
    (State.CANCELLING, TRIED, refused(0, "overtaken by its Cancel")),
    (State.CONFIRMING, Step(TRIED, fence_id="db-1"), done(0, Phase.TRY, "db-1")),
    (State.CANCELLED, Step(CANCELLED, fence_id="db-1"), done(0, Phase.TRY, "db-1")),
    (State.CANCELLED, Step(CANCELLED, fence_id="db-1"), done(0, Phase.TRY)),
    (State.CANCELLING, REFUSED, refused(0)),
    (State.CANCELLED, CANCELLED, done(0, Phase.TRY)),
    (State.CANCELLED, CANCELLED, refused(0)),
    (State.CANCELLED, CANCELLED, done(0, Phase.CANCEL)),
]


@pytest.mark.parametrize(("state", "status", "reply"), HARMLESS)
def test_a_late_answer_that_fits_the_record_changes_nothing(
    state: State, status: BranchStatus | Step, reply: Reply
) -> None:
    tx = transaction(state, status, PENDING)
    assert apply(tx, [reply], 5, POLICY) is tx


def test_a_try_that_is_refused_after_its_cancel_is_no_contradiction() -> None:
    # Tried; the transaction is being cancelled, and Cancel has run at the participant, whose reply is on its way. A
    # repeat of Try that another coordinator had sent is refused there, as the fence demands. Nobody did wrong.
    tx = transaction(State.CANCELLING, TRIED, CANCELLED)
    assert apply(tx, [refused(0, "suspended")], 5, POLICY).attention is Attention.NONE


@pytest.mark.parametrize("try_first", [True, False])
def test_a_late_try_tells_which_database_must_be_cancelled(*, try_first: bool) -> None:
    # Branch 1 is refused; a moment later branch 2 says that it is tried, in db-1. Its Cancel is answered by db-2, which
    # knows nothing of it and says "done". The hold in db-1 stays: somebody must be told (protocol C3).
    tx = transaction(State.CANCELLING, CANCELLED, PENDING)
    replies = [done(1, Phase.TRY, "db-1"), done(1, Phase.CANCEL, "db-2")]
    for reply in replies if try_first else reversed(replies):
        tx = apply(tx, [reply], 5, POLICY)
    assert tx.attention is Attention.VIOLATION


# --- apply: errors ---------------------------------------------------------------------------------------------------


def test_an_error_is_cut_and_outlives_success() -> None:
    tx = apply(begin(spec(1), 0, POLICY), [unknown(0, Phase.TRY, "x" * 9_000)], 5, POLICY)
    assert tx.steps[0].error == "x" * ERROR_CHARS_MAX
    tx = apply(tx, [done(0, Phase.TRY)], 500, POLICY)
    tx = apply(tx, [done(0, Phase.CONFIRM)], 501, POLICY)
    assert (tx.state, tx.steps[0].error) == (State.CONFIRMED, "x" * ERROR_CHARS_MAX)


@pytest.mark.parametrize("state", [State.TRYING, State.CONFIRMING])
def test_the_text_of_a_refusal_is_cut_too(state: State) -> None:
    phase = Phase.TRY if state is State.TRYING else Phase.CONFIRM
    reply = Reply(0, phase, Outcome.REFUSED, refusal=Refusal("no", "x" * 9_000))
    tx = apply(transaction(state, PENDING if state is State.TRYING else TRIED), [reply], 5, POLICY)
    assert len(tx.steps[0].error) < 2 * ERROR_CHARS_MAX
    assert len(tx.cancel_reason) < 2 * ERROR_CHARS_MAX


# --- wake_at ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.CONFIRMED, State.CANCELLED])
@pytest.mark.parametrize("calls_out", [True, False])
def test_nobody_looks_at_a_finished_transaction(state: State, *, calls_out: bool) -> None:
    assert wake_at(transaction(state, CONFIRMED), 5, POLICY, calls_out=calls_out) is None


def test_a_lease_that_is_long_enough_is_kept_and_a_shorter_one_renewed() -> None:
    enough_ms = 50 + POLICY.call_timeout_ms + POLICY.lease_margin_ms
    for wake_ms, expected in [
        (enough_ms, enough_ms),
        (enough_ms - 1, 50 + POLICY.lease_ms),
        (None, 50 + POLICY.lease_ms),
    ]:
        tx = transaction(State.CONFIRMING, TRIED, wake_ms=wake_ms)
        assert wake_at(tx, 50, POLICY, calls_out=True) == expected


def test_with_no_call_out_it_wakes_for_the_next_attempt() -> None:
    steps = (Step(TRIED, attempts=1, next_ms=700), Step(TRIED, attempts=1, next_ms=600), Step(CONFIRMED, next_ms=10))
    assert wake_at(transaction(State.CONFIRMING, *steps), 50, POLICY, calls_out=False) == 600
    assert wake_at(transaction(State.CONFIRMING, *steps), 900, POLICY, calls_out=False) == 900


def test_with_no_call_out_it_wakes_for_the_deadline_if_that_is_nearer() -> None:
    tx = transaction(State.TRYING, Step(PENDING, attempts=9, next_ms=TIMEOUT_MS + 1), TRIED)
    assert wake_at(tx, 50, POLICY, calls_out=False) == TIMEOUT_MS
    soon = transaction(State.TRYING, Step(PENDING, attempts=1, next_ms=90), TRIED)
    assert wake_at(soon, 50, POLICY, calls_out=False) == 90


# --- back-off --------------------------------------------------------------------------------------------------------

xids = st.binary(min_size=16, max_size=16)


@settings(deadline=None)
@given(xids, st.integers(0, 63), st.integers(1, 10_000))
def test_back_off_lies_between_nothing_and_its_ceiling(xid: bytes, branch: int, attempt: int) -> None:
    ceiling = min(POLICY.backoff_cap_ms, POLICY.backoff_base_ms * 2 ** min(attempt - 1, 60))
    assert 0 <= backoff_ms(xid, branch, attempt, POLICY) <= ceiling


def drawn(attempt: int, branch: int = 0) -> list[int]:
    numbers = range(2_000)
    # As UUIDv7 are: the time first, then what is random.
    randoms = [(0x8000000000000000 | n * 0x9E3779B97F4A7C15 % 2**62).to_bytes(8, "big") for n in numbers]
    return [backoff_ms(XID[:8] + random, branch, attempt, POLICY) for random in randoms]


def test_back_off_grows_up_to_the_cap_and_uses_all_of_its_range() -> None:
    means = [sum(draws) / len(draws) for draws in map(drawn, range(1, 12))]
    ceilings = [min(100 * 2**n, 15_000) for n in range(11)]
    for mean, ceiling in zip(means, ceilings, strict=True):
        assert 0.45 * ceiling < mean < 0.55 * ceiling
    assert min(drawn(11)) < 300
    assert max(drawn(11)) > 14_700


def test_transactions_and_branches_do_not_come_back_together() -> None:
    assert len(set(drawn(9))) > 1_500
    together = sum(a == b for a, b in zip(drawn(9), drawn(9, branch=1), strict=True))
    assert together < 10


# --- whatever is said, in whatever order -----------------------------------------------------------------------------

BRANCHES = 3
DECIDED = {
    State.TRYING: {State.TRYING, State.CONFIRMING, State.CONFIRMED, State.CANCELLING, State.CANCELLED},
    State.CONFIRMING: {State.CONFIRMING, State.CONFIRMED},
    State.CONFIRMED: {State.CONFIRMED},
    State.CANCELLING: {State.CANCELLING, State.CANCELLED},
    State.CANCELLED: {State.CANCELLED},
}
ONWARD = {
    PENDING: set(BranchStatus),
    TRIED: {TRIED, CONFIRMED, CANCELLED},
    REFUSED: {REFUSED, CANCELLED},
    CONFIRMED: {CONFIRMED},
    CANCELLED: {CANCELLED},
}
replies = st.builds(
    Reply,
    branch=st.integers(0, BRANCHES - 1),
    phase=st.sampled_from(Phase),
    outcome=st.sampled_from((*Outcome, Outcome.DONE, Outcome.DONE)),
    fence_id=st.sampled_from(("", "db-1", "db-1", "db-2")),
    result=st.sampled_from((None, Payload(b"1"), Payload(b"2"))),
    refusal=st.sampled_from((None, Refusal("no"), Refusal("no", "never"))),
    error=st.sampled_from(("", "unavailable")),
    attention=st.booleans(),
)
rounds = st.lists(st.tuples(st.lists(replies, max_size=4), st.integers(0, 9_000)), max_size=12)


def lived(rounds: Sequence[tuple[Sequence[Reply], int]]) -> list[tuple[Transaction, int]]:
    """Every value that a transaction has had, and when."""
    now_ms = 0
    values = [(begin(spec(BRANCHES), now_ms, POLICY), now_ms)]
    for said, passed_ms in rounds:
        now_ms += passed_ms
        values.append((apply(values[-1][0], said, now_ms, POLICY), now_ms))
    return values


@settings(max_examples=400, deadline=None)
@given(rounds)
def test_apply_only_ever_goes_forward(rounds: list[tuple[list[Reply], int]]) -> None:
    for (before, _), (after, _) in pairwise(lived(rounds)):
        assert after.state in DECIDED[before.state]
        assert after.spec is before.spec
        assert (after.version, after.save_id, after.wake_ms) == (before.version, before.save_id, before.wake_ms)
        assert before.decided_ms in (0, after.decided_ms)
        if before.state is not State.TRYING:
            assert after.cancel_reason == before.cancel_reason
        for old, new in zip(before.steps, after.steps, strict=True):
            assert new.status in ONWARD[old.status]
            assert old.fence_id in ("", new.fence_id)
            if old.status is not PENDING:
                assert (new.result, new.refusal) == (old.result, old.refusal)


@settings(max_examples=400, deadline=None)
@given(rounds)
def test_no_ending_is_mixed(rounds: list[tuple[list[Reply], int]]) -> None:
    for tx, _ in lived(rounds):
        statuses = {step.status for step in tx.steps}
        assert not {CONFIRMED, CANCELLED} <= statuses
        if CONFIRMED in statuses:
            assert tx.state in (State.CONFIRMING, State.CONFIRMED)
        if CANCELLED in statuses:
            assert tx.state in (State.CANCELLING, State.CANCELLED)
        if tx.state.finished:
            assert len(statuses) == 1
        if tx.state in (State.CONFIRMING, State.CONFIRMED):
            assert statuses <= {TRIED, CONFIRMED}


@settings(max_examples=400, deadline=None)
@given(rounds)
def test_what_failed_is_kept_and_bounded(rounds: list[tuple[list[Reply], int]]) -> None:
    for (before, _), (after, now_ms) in pairwise(lived(rounds)):
        ended = {n for n, (a, b) in enumerate(zip(before.steps, after.steps, strict=True), 1) if a.status != b.status}
        known = {past.branch_id: past for past in after.past}
        assert list(known) == sorted(known)
        assert not known or ended <= known.keys()
        for branch_id, step in enumerate(after.steps, 1):
            runs = known[branch_id].runs if branch_id in known else ()
            assert len(runs) <= 8
            assert all(run.last_attempt >= run.first_attempt and run.last_ms <= now_ms for run in runs)
            whole = branch_id not in known or known[branch_id].dropped is None
            assert not (whole and step.attempts) or step.attempts in [run.last_attempt for run in runs]
            assert not (whole and step.error) or step.error in [run.error for run in runs]
            if branch_id in known:
                assert known[branch_id].ends or runs
                assert [end.status for end in known[branch_id].ends][-1:] in ([], [step.status])


@settings(max_examples=400, deadline=None)
@given(rounds)
def test_no_call_is_due_that_has_its_answer_and_somebody_will_look(rounds: list[tuple[list[Reply], int]]) -> None:
    for tx, now_ms in lived(rounds):
        calls = due(tx, now_ms, POLICY)
        assert owes(tx, now_ms) is bool(calls)
        for call in calls:
            assert OWED[tx.state][tx.steps[call.branch].status] is call.phase
            assert tx.steps[call.branch].next_ms <= now_ms
            assert 0 < call.timeout_ms <= POLICY.call_timeout_ms
        assert len({call.branch for call in calls}) == len(calls)
        wake_ms = wake_at(tx, now_ms, POLICY, calls_out=False)
        if tx.state.finished:
            assert (calls, wake_ms) == ((), None)
        else:
            assert wake_ms is not None
            # Nothing is owed before it wakes, and at its wake there is something to do: a call, or the deadline.
            assert calls or due(tx, wake_ms, POLICY) or apply(tx, (), wake_ms, POLICY) is not tx
            assert wake_ms <= now_ms + POLICY.backoff_cap_ms or tx.state is State.TRYING


@settings(max_examples=400, deadline=None)
@given(rounds, replies)
def test_a_final_answer_said_twice_is_said_once(rounds: list[tuple[list[Reply], int]], reply: Reply) -> None:
    if reply.outcome is Outcome.UNKNOWN or (reply.phase is not Phase.TRY and reply.outcome is not Outcome.DONE):
        return
    tx, now_ms = lived(rounds)[-1]
    once = apply(tx, [reply], now_ms, POLICY)
    if once.steps[reply.branch].attempts > tx.steps[reply.branch].attempts:
        return  # "done" by another fence database: no answer at all
    assert apply(once, [reply], now_ms, POLICY) is once


@settings(max_examples=200, deadline=None)
@given(st.permutations([done(n, phase) for n in range(BRANCHES) for phase in (Phase.TRY, Phase.CONFIRM)] * 2))
def test_good_answers_confirm_in_any_order(said: list[Reply]) -> None:
    tx = begin(spec(BRANCHES), 0, POLICY)
    for reply in said * 2:  # a Confirm that came before its decision counts for nothing, so all is said again
        tx = apply(tx, [reply], 1, POLICY)
    assert (tx.state, tx.attention) == (State.CONFIRMED, Attention.NONE)
