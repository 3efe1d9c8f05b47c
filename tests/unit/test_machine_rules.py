"""Smaller rules of the machine: texts, clocks, and the edges of what waits, rests and wakes."""

from __future__ import annotations

import pytest

from coordinator import machine
from coordinator.machine import (
    Event,
    apply,
    backoff_ms,
    begin,
    call_of,
    called,
    due,
    from_registered,
    move,
    named,
    owes,
    rests,
    visitors_wake_at,
    waits,
    wake_at,
)
from coordinator.model import (
    Attention,
    BranchSpec,
    BranchStatus,
    Joined,
    Outcome,
    Payload,
    Phase,
    Policy,
    Refusal,
    Reply,
    Resolution,
    Seen,
    Spec,
    State,
    Step,
    Transaction,
)

POLICY = Policy()
XID = bytes.fromhex("01980000000070008a5c3e1f7b9d2460")
PENDING, TRIED, REFUSED = BranchStatus.PENDING, BranchStatus.TRIED, BranchStatus.REFUSED
CONFIRMED, CANCELLED = BranchStatus.CONFIRMED, BranchStatus.CANCELLED


def spec(branches: int = 2, *, ordered: bool = False, interactive: bool = False) -> Spec:
    names = tuple(BranchSpec(f"bank-{n}", "debit") for n in range(branches))
    return Spec(XID, b"", 1_000, 30_000, names, ordered=ordered, interactive=interactive)


def transaction(state: State, *steps: Step | BranchStatus, ordered: bool = False) -> Transaction:
    made = tuple(step if isinstance(step, Step) else Step(step) for step in steps)
    return Transaction(spec(len(made), ordered=ordered), state, made, wake_ms=10_000)


def done(branch: int, phase: Phase) -> Reply:
    return Reply(branch, phase, Outcome.DONE, "db")


def test_an_error_is_kept_up_to_500_characters() -> None:
    for chars in (499, 500, 501):
        failed = Reply(0, Phase.CONFIRM, Outcome.UNKNOWN, error="x" * chars)
        tx = apply(transaction(State.CONFIRMING, TRIED), [failed], 5, POLICY)
        assert len(tx.steps[0].error) == min(chars, 500)


@pytest.mark.parametrize("interactive", [True, False])
def test_a_transaction_is_as_old_as_its_begin(*, interactive: bool) -> None:
    assert begin(spec(0 if interactive else 1, interactive=interactive), 1_007, POLICY).updated_ms == 1_007


@pytest.mark.parametrize("interactive", [True, False])
def test_it_begins_with_the_save_id_that_it_is_given(*, interactive: bool) -> None:
    asked = spec(0 if interactive else 1, interactive=interactive)
    assert (begin(asked, 1_007, POLICY, 7).save_id, begin(asked, 1_007, POLICY).save_id) == (7, 0)


def test_a_branch_that_is_owed_no_call_has_none() -> None:
    with pytest.raises(ValueError, match="branch 2 is owed no call"):
        call_of(transaction(State.TRYING, PENDING, TRIED), 1, 5, POLICY)


def test_in_order_each_branch_waits_for_the_one_before_and_an_added_one_for_none() -> None:
    tx = transaction(State.TRYING, TRIED, PENDING, PENDING, PENDING, ordered=True)
    assert [called(tx, branch) for branch in range(4)] == [None, Phase.TRY, None, None]
    tx = tx._replace(joined=(Joined("a"),))
    assert [called(tx, branch) for branch in range(4)] == [None, Phase.TRY, None, Phase.TRY]


def test_a_branch_waits_that_has_failed_and_is_owed_another_attempt_later() -> None:
    failed = Step(TRIED, attempts=1, next_ms=700)
    tx = transaction(State.CONFIRMING, failed, failed._replace(status=CONFIRMED), failed._replace(attempts=0))
    assert [waits(tx, branch, 699) for branch in range(3)] == [True, False, False]
    assert [waits(tx, branch, 700) for branch in range(3)] == [False, False, False]
    assert rests(transaction(State.CONFIRMING, failed, CONFIRMED), 699)
    assert not rests(transaction(State.CONFIRMING, failed, CONFIRMED), 700)
    assert not rests(transaction(State.CONFIRMING, failed, TRIED), 699)


def test_time_alone_takes_no_attention_away() -> None:
    tx = transaction(State.CONFIRMING, TRIED)._replace(attention=Attention.STUCK)
    assert apply(tx, (), 5, POLICY) is tx


def test_the_error_of_a_late_try_is_cut() -> None:
    late = Reply(0, Phase.TRY, Outcome.UNKNOWN, error="x" * 501)
    tx = apply(transaction(State.CANCELLING, PENDING), [late], 5, POLICY)
    assert tx.steps[0].error == tx.past[0].runs[0].error == "x" * 500


def test_what_a_call_saw_counts_once_it_is_tried() -> None:
    tx = transaction(State.TRYING, PENDING, PENDING)
    said = Reply(0, Phase.TRY, Outcome.UNKNOWN, seen=(2,))
    assert apply(tx, [said], 5, POLICY).seen == ()
    assert apply(tx, [said._replace(outcome=Outcome.DONE)], 5, POLICY).seen == (Seen(1, 2),)


# --- leases ----------------------------------------------------------------------------------------------------------

LATER = Step(TRIED, attempts=1, next_ms=700)


@pytest.mark.parametrize(
    ("now_ms", "wake_ms", "expected"),
    [
        (30_000, 30_999, 32_000),  # shorter than the calls that are out, which the deadline at 31,000 bounds
        (30_000, 31_000, 31_000),
        (30_000, 32_000, 32_000),
        (30_000, 32_001, 32_000),  # longer than any lease need be
        (31_500, 50_000, 32_500),
    ],
)
def test_the_lease_of_an_undecided_transaction_ends_after_its_deadline(
    now_ms: int, wake_ms: int, expected: int
) -> None:
    tx = transaction(State.TRYING, PENDING)._replace(wake_ms=wake_ms)
    assert wake_at(tx, now_ms, POLICY, calls_out=True) == expected


def test_a_lease_outlasts_the_longest_call_by_its_margin() -> None:
    tx = transaction(State.CONFIRMING, TRIED)._replace(wake_ms=None)
    assert wake_at(tx, 50, POLICY._replace(lease_ms=2_000), calls_out=True) == 50 + 5_000 + 1_000
    assert wake_at(tx._replace(wake_ms=10_051), 50, POLICY, calls_out=True) == 10_050


def test_a_visitor_leaves_others_under_the_lease_that_stands() -> None:
    tx = transaction(State.CONFIRMING, LATER, TRIED)
    assert visitors_wake_at(tx, (), 50, POLICY) == 10_000
    assert visitors_wake_at(tx._replace(wake_ms=20), (), 50, POLICY) == 50
    assert visitors_wake_at(tx._replace(wake_ms=None), (), 50, POLICY) == 50
    due_now = transaction(State.CONFIRMING, LATER, Step(TRIED, next_ms=50))
    assert visitors_wake_at(due_now, (), 50, POLICY) == 10_000
    assert visitors_wake_at(transaction(State.CONFIRMED, CONFIRMED), (), 50, POLICY) is None


def test_where_nothing_is_out_a_visitor_wakes_it_for_the_next_attempt() -> None:
    tx = transaction(State.CONFIRMING, LATER, LATER._replace(next_ms=600), Step(CONFIRMED, next_ms=10))
    assert visitors_wake_at(tx, (), 50, POLICY) == 600


def test_a_visitors_own_call_has_a_lease_of_its_own() -> None:
    tx = transaction(State.CONFIRMING, TRIED)
    assert visitors_wake_at(tx, (0,), 50, POLICY) == 50 + 5_000 + 1_000
    slow = POLICY._replace(call_timeouts_ms={"bank-0": 20_000})
    assert visitors_wake_at(tx, (0,), 50, slow) == 50 + 20_000 + 1_000
    assert visitors_wake_at(transaction(State.CONFIRMING, Step(TRIED, next_ms=9_000)), (0,), 50, POLICY) == 9_000
    assert visitors_wake_at(transaction(State.CONFIRMING, TRIED, LATER), (0,), 50, POLICY) == 700
    assert visitors_wake_at(transaction(State.CONFIRMING, LATER, TRIED), (1,), 50, POLICY) == 700


def test_a_visitor_wakes_an_undecided_one_at_its_deadline_or_when_its_own_call_is_over() -> None:
    tx = transaction(State.TRYING, Step(PENDING, next_ms=40_000))
    assert visitors_wake_at(tx, (), 50, POLICY) == 31_000
    assert visitors_wake_at(tx, (0,), 50, POLICY) == 32_000
    assert visitors_wake_at(tx, (), 31_005, POLICY) == 31_005


def test_the_first_lease_ends_after_the_deadline() -> None:
    assert begin(spec(1)._replace(timeout_ms=2_000), 1_000, POLICY).wake_ms == 4_000


# --- moves -----------------------------------------------------------------------------------------------------------


def test_an_end_is_an_update() -> None:
    assert move(transaction(State.CONFIRMING, CONFIRMED), Event.ALL_CONFIRMED, 7).updated_ms == 7


def test_a_decision_forgets_attempts_that_an_operator_has_made_due() -> None:
    hurried = Step(TRIED, attempts=3, next_ms=0)
    assert move(transaction(State.TRYING, hurried), Event.ALL_TRIED, 7).steps == (Step(TRIED),)


# --- back-off --------------------------------------------------------------------------------------------------------


def test_back_off_doubles_twenty_times_at_the_most() -> None:
    endless = POLICY._replace(backoff_base_ms=1, backoff_cap_ms=2**60)
    for attempt in (21, 22, 23, 1_000):
        longest = max(backoff_ms(n.to_bytes(16, "big"), 0, attempt, endless) for n in range(2_000))
        assert 0.98 * 2**20 < longest <= 2**20


def test_back_off_goes_by_the_random_half_of_the_xid() -> None:
    assert backoff_ms(bytes(8) + XID[8:], 0, 9, POLICY) == backoff_ms(b"\xff" * 8 + XID[8:], 0, 9, POLICY)
    drawn = {backoff_ms(XID[:-1] + bytes([last]), 0, 9, POLICY) for last in range(20)}
    assert len(drawn) > 15


@pytest.mark.parametrize("last", [b"\x00", b"\xff"])
def test_each_attempt_draws_anew(last: bytes) -> None:
    drawn = {backoff_ms(XID[:-1] + last, 0, attempt, POLICY) for attempt in range(9, 29)}
    assert len(drawn) > 15


# --- steps that many branches share ----------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("fence_id", ["", "db-1", "db-2"])
@pytest.mark.parametrize("registered", ["", "db-1"])
def test_an_answer_from_another_database_than_the_registered_one(
    outcome: Outcome, fence_id: str, registered: str
) -> None:
    """Nothing of it counts, where it is an answer and one is registered (C3)."""
    reply = Reply(1, Phase.TRY, outcome, fence_id, Payload(b"x"), error="why", seen=(3,))
    judged = from_registered(reply, registered)
    if registered and fence_id != "db-1" and outcome in (Outcome.DONE, Outcome.REFUSED):
        error = f"answered by fence database {fence_id or '(none named)'}, registered is db-1"
        assert judged == Reply(1, Phase.TRY, Outcome.VIOLATION, fence_id, error=error)
    else:
        assert judged is reply


def tried_in(fence_id: str) -> Step:
    return apply(transaction(State.TRYING, PENDING), [Reply(0, Phase.TRY, Outcome.DONE, fence_id)], 5, POLICY).steps[0]


def test_plain_steps_are_made_once_and_not_kept_without_end() -> None:
    assert tried_in("db-1") is tried_in("db-1")
    assert tried_in("db-1") == Step(TRIED, fence_id="db-1")
    machine._PLAIN.clear()
    kept = []
    for number in range(12_000):
        tried_in(f"database {number}")
        kept.append(len(machine._PLAIN))
    assert 9_000 < max(kept) < 11_000
    assert min(kept[-1_000:]) < 3_000
    machine._PLAIN.clear()


def test_a_refusal_outlives_its_cancel() -> None:
    refused = Step(REFUSED, refusal=Refusal("no"), fence_id="db")
    tx = apply(transaction(State.CANCELLING, refused), [done(0, Phase.CANCEL)], 5, POLICY)
    assert tx.steps == (refused._replace(status=CANCELLED),)


# --- late answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.CANCELLING, State.CANCELLED])
def test_a_late_try_of_a_cancelled_one_tells_its_database(state: State) -> None:
    status = CANCELLED if state.finished else PENDING
    tx = transaction(state, status)
    assert apply(tx, [done(0, Phase.TRY)], 5, POLICY).steps == (Step(status, fence_id="db"),)


@pytest.mark.parametrize(
    ("state", "status", "reply"),
    [
        (State.TRYING, TRIED, done(0, Phase.TRY)),
        (State.CONFIRMING, TRIED, done(0, Phase.TRY)),
        (State.CANCELLING, TRIED, done(0, Phase.CONFIRM)),
        (State.CANCELLED, CANCELLED, done(0, Phase.CANCEL)),
        (State.CANCELLING, PENDING, done(0, Phase.TRY)._replace(outcome=Outcome.REFUSED)),
    ],
)
def test_no_other_late_answer_does(state: State, status: BranchStatus, reply: Reply) -> None:
    assert apply(transaction(state, status), [reply], 5, POLICY).steps == (Step(status),)


@pytest.mark.parametrize("confirmed", [True, False])
def test_what_was_resolved_is_settled_by_the_database_that_tried_it(*, confirmed: bool) -> None:
    phase = Phase.SETTLE_CONFIRMED if confirmed else Phase.SETTLE_CANCELLED
    resolution = Resolution(1, confirmed, "alice", "by hand", 3, not confirmed)
    tx = transaction(State.CONFIRMING, Step(TRIED, fence_id="db"))._replace(resolved=(resolution,))
    other = apply(tx, [done(0, phase)._replace(fence_id="db-2")], 5, POLICY)
    assert (other.state, other.attention, other.steps[0].status) == (State.CONFIRMING, Attention.VIOLATION, TRIED)
    assert apply(tx, [done(0, phase)], 5, POLICY).state is State.CONFIRMED


def unknown(phase: Phase) -> Reply:
    return Reply(0, phase, Outcome.UNKNOWN, error="no answer")


@pytest.mark.parametrize(
    ("state", "status", "reply"),
    [
        (State.CONFIRMING, TRIED, done(0, Phase.TRY)),  # the first that names a database, where none was known
        (State.CANCELLING, REFUSED, unknown(Phase.TRY)),
        (State.CANCELLING, PENDING, unknown(Phase.CONFIRM)),
        (State.CANCELLED, CANCELLED, unknown(Phase.CONFIRM)),
        (State.CONFIRMED, CONFIRMED, unknown(Phase.CANCEL)),
        (State.CONFIRMED, CONFIRMED, done(0, Phase.SETTLE_CANCELLED)),  # whoever resolved it knows
    ],
)
def test_a_late_answer_that_tells_nothing_new_changes_nothing(state: State, status: BranchStatus, reply: Reply) -> None:
    tx = transaction(state, status)
    assert apply(tx, [reply], 5, POLICY) is tx


def test_a_refusal_that_comes_twice_at_once_is_no_contradiction() -> None:
    refused = done(0, Phase.TRY)._replace(outcome=Outcome.REFUSED, refusal=Refusal("no"))
    tx = apply(transaction(State.TRYING, PENDING), [refused, refused], 5, POLICY)
    assert (tx.state, tx.attention) == (State.CANCELLING, Attention.NONE)


# --- who is named, and why it was cancelled --------------------------------------------------------------------------


def test_only_what_somebody_saw_who_is_named_himself_is_named() -> None:
    tx = transaction(State.TRYING, TRIED, TRIED, TRIED, TRIED)._replace(seen=(Seen(3, 4), Seen(1, 2)))
    assert named(tx, [1]) == {1, 2}
    assert named(tx, [1, 3]) == {1, 2, 3, 4}


def test_nobody_is_missed_while_one_that_may_still_name_him_is_not_tried() -> None:
    tx = transaction(State.TRYING, TRIED, PENDING, TRIED)._replace(joined=(Joined("a", enlisted=True),))
    assert apply(tx, (), 5, POLICY) is tx
    assert apply(tx, [done(1, Phase.TRY)], 5, POLICY).state is State.CANCELLING


def test_a_moved_deadline_is_told_from_the_beginning() -> None:
    tx = transaction(State.TRYING, PENDING)._replace(renewed_ms=41_000)
    late = apply(tx, (), 41_000, POLICY)
    assert late.cancel_reason == "undecided at its deadline, 40000 ms after its beginning"


def test_why_a_branch_has_refused_is_told_as_far_as_it_is_known() -> None:
    violation = Reply(0, Phase.TRY, Outcome.VIOLATION)
    tx = apply(transaction(State.TRYING, PENDING), [violation], 5, POLICY)
    assert tx.cancel_reason == "branch 1 (bank-0.debit) refused: no reason given"
    assert move(transaction(State.TRYING, TRIED), Event.REFUSED, 5).cancel_reason == ""


@pytest.mark.parametrize("now_ms", [0, 29_999, 30_000, 30_001])
@pytest.mark.parametrize("state", [State.TRYING, State.CANCELLING])
def test_owing_is_having_something_due(state: State, now_ms: int) -> None:
    tx = begin(Spec(bytes(16), b"", 0, 30_000, (BranchSpec("bank", "debit"),) * 2), 0, POLICY)
    tx = tx if state is State.TRYING else move(tx, Event.DEADLINE, 0)
    assert owes(tx, now_ms) is bool(due(tx, now_ms, POLICY)) is (state is State.CANCELLING or now_ms < 30_000)
    later = tx._replace(steps=(Step(BranchStatus.CANCELLED), Step(next_ms=now_ms)))
    assert owes(later, now_ms) is bool(due(later, now_ms, POLICY))
    assert owes(later, now_ms - 1) is bool(due(later, now_ms - 1, POLICY)) is False
