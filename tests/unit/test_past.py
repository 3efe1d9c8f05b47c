"""What a transaction keeps of the attempts that failed: what, when, how many, and never more than so much."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coordinator.codec import saved_row
from coordinator.machine import ERROR_CHARS_MAX, apply, begin
from coordinator.model import (
    BranchSpec,
    BranchStatus,
    Dropped,
    End,
    Outcome,
    Past,
    Phase,
    Policy,
    Refusal,
    Reply,
    Run,
    Spec,
    State,
    Step,
    Transaction,
)
from coordinator.orders import Resolve
from coordinator.past import RUNS_MAX, RUNS_OF_ALL_MAX

POLICY = Policy()
XID = bytes.fromhex("01980000000070008a5c3e1f7b9d2460")
CONFIRM, CANCEL, TRY = Phase.CONFIRM, Phase.CANCEL, Phase.TRY


def begun(branches: int = 1) -> Transaction:
    return begin(Spec(XID, b"", 0, 30_000, (BranchSpec("bank", "debit"),) * branches), 0, POLICY)


def confirming(branches: int = 1) -> Transaction:
    return begun(branches)._replace(
        state=State.CONFIRMING, steps=(Step(BranchStatus.TRIED),) * branches, decided_ms=1
    )  # fmt: skip


def done(branch: int, phase: Phase = CONFIRM) -> Reply:
    return Reply(branch, phase, Outcome.DONE)


def unknown(branch: int = 0, error: str = "gone", phase: Phase = CONFIRM, *, attention: bool = False) -> Reply:
    return Reply(branch, phase, Outcome.UNKNOWN, error=error, attention=attention)


def failing(tx: Transaction, errors: Sequence[str], start_ms: int = 10) -> Transaction:
    """The transaction after its first branch has failed so, one ms after another."""
    for now_ms, error in enumerate(errors, start_ms):
        tx = apply(tx, [unknown(error=error)], now_ms, POLICY)
    return tx


def test_equal_failures_are_one_run() -> None:
    tx = failing(confirming(), ["gone", "gone", "no answer", "gone"])
    assert tx.past == (
        Past(
            1,
            (
                Run(CONFIRM, "gone", False, 1, 2, 10, 11),
                Run(CONFIRM, "no answer", False, 3, 3, 12, 12),
                Run(CONFIRM, "gone", False, 4, 4, 13, 13),
            ),
        ),
    )


def test_what_needs_attention_by_itself_is_another_run() -> None:
    """But not what only fails for the tenth time."""
    tx = failing(confirming(), ["gone"] * 12)
    tx = apply(tx, [unknown(attention=True)], 30, POLICY)
    tx = apply(tx, [Reply(0, CONFIRM, Outcome.VIOLATION, error="gone")], 31, POLICY)
    assert [run[1:5] for run in tx.past[0].runs] == [("gone", False, 1, 12), ("gone", True, 13, 14)]


def test_days_of_failures_take_no_more_room() -> None:
    tx = failing(confirming(), ["gone"] * 5_000)
    assert tx.past == (Past(1, (Run(CONFIRM, "gone", False, 1, 5_000, 10, 5_009),)),)
    tx = failing(tx, ["gone", "no answer"] * 2_000, start_ms=6_000)
    (past,) = tx.past
    assert len(past.runs) == RUNS_MAX
    half = RUNS_MAX // 2
    assert [run.first_attempt for run in past.runs] == [1, 5_002, 5_003, 5_004, *range(9_001 - half, 9_001)]
    assert past.dropped == Dropped(3_999 - 7, 3_999 - 7, 6_004, 9_999 - half)
    assert sum(run.attempts for run in past.runs) + past.dropped.attempts == tx.steps[0].attempts == 9_000


def test_the_more_branches_the_fewer_runs_of_each() -> None:
    texts = [f"{n}" + "x" * ERROR_CHARS_MAX for n in range(40)]
    sizes = {}
    for branches in (1, 16, 32, 64):
        tx = confirming(branches)
        for now_ms, text in enumerate(texts):
            tx = apply(tx, [unknown(n, text) for n in range(branches)], now_ms, POLICY)
        sizes[branches] = {len(past.runs) for past in tx.past}
        assert len(saved_row(tx).progress) < RUNS_OF_ALL_MAX * ERROR_CHARS_MAX + branches * 700
    assert sizes == {1: {8}, 16: {8}, 32: {4}, 64: {2}}
    assert [run.error[:2] for run in tx.past[63].runs] == ["0x", "39"]


def test_a_branch_that_is_added_takes_runs_from_the_others() -> None:
    tx = failing(confirming(), [str(n) for n in range(20)])
    steps = tx.steps + (Step(BranchStatus.TRIED),) * 31
    tx = failing(tx._replace(steps=steps, spec=confirming(32).spec), ["20"], start_ms=30)
    assert [run.error for run in tx.past[0].runs] == ["0", "1", "19", "20"]
    assert tx.past[0].dropped == Dropped(17, 17, 12, 28)


def test_an_error_is_cut() -> None:
    tx = failing(confirming(), ["x" * 10_000])
    assert tx.past[0].runs[0].error == tx.steps[0].error == "x" * ERROR_CHARS_MAX


def test_a_smooth_transaction_has_no_past() -> None:
    tx = apply(begun(2), [done(0, TRY), done(1, TRY)], 5, POLICY)
    tx = apply(tx, [done(0)], 6, POLICY)
    tx = apply(tx, [done(1)], 600, POLICY)
    assert (tx.state, tx.past) == (State.CONFIRMED, ())


def test_a_refusal_is_no_failure() -> None:
    refused = Reply(0, TRY, Outcome.REFUSED, refusal=Refusal("no funds"))
    assert apply(begun(), [refused], 5, POLICY).past == ()


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(0, CONFIRM, Outcome.VIOLATION, error="never tried"), "never tried"),
        (
            Reply(0, CONFIRM, Outcome.REFUSED, refusal=Refusal("no funds")),
            "refused CONFIRM, which cannot be refused: no funds",
        ),
        (Reply(0, CONFIRM, Outcome.DONE, "f2"), "CONFIRM was answered by fence database f2, Try by f1"),
    ],
)
def test_what_contradicts_the_protocol_is_a_failure(reply: Reply, error: str) -> None:
    tx = confirming()._replace(steps=(Step(BranchStatus.TRIED, fence_id="f1"),))
    assert apply(tx, [reply], 7, POLICY).past == (Past(1, (Run(CONFIRM, error, True, 1, 1, 7, 7),)),)


def test_a_try_that_contradicts_has_failed_and_ended() -> None:
    tx = apply(begun(), [Reply(0, TRY, Outcome.VIOLATION, error="another payload")], 7, POLICY)
    run = Run(TRY, "another payload", True, 1, 1, 7, 7)
    assert tx.past == (Past(1, (run,), None, (End(BranchStatus.REFUSED, 7),)),)


def test_ends_are_kept_from_the_first_failure_on() -> None:
    tx = apply(begun(3), [done(0, TRY)], 5, POLICY)
    tx = apply(tx, [unknown(1, phase=TRY), done(2, TRY)], 6, POLICY)
    tx = apply(tx, [done(1, TRY)], 8, POLICY)
    tx = apply(tx, [done(1), done(2)], 9, POLICY)
    tx = apply(tx, [done(0)], 11, POLICY)
    tried, confirmed = BranchStatus.TRIED, BranchStatus.CONFIRMED
    assert tx.state is State.CONFIRMED
    assert [(past.branch_id, past.ends) for past in tx.past] == [
        (1, (End(confirmed, 11),)),
        (2, (End(tried, 8), End(confirmed, 9))),
        (3, (End(tried, 6), End(confirmed, 9))),
    ]


def test_each_phase_counts_anew() -> None:
    tx = apply(begun(2), [unknown(phase=TRY), done(1, TRY)], 5, POLICY)
    tx = apply(tx, [], 30_000, POLICY)
    assert tx.state is State.CANCELLING
    tx = apply(tx, [unknown(phase=CANCEL)], 30_010, POLICY)
    tx = apply(tx, [unknown(phase=CANCEL)], 30_020, POLICY)
    assert [(run.phase, run.first_attempt, run.last_attempt) for run in tx.past[0].runs] == [
        (TRY, 1, 1),
        (CANCEL, 1, 2),
    ]


def test_a_try_that_fails_after_the_decision_is_told() -> None:
    """Its attempts are not counted any more then: it comes after those that were."""
    tx = apply(begun(), [unknown(phase=TRY)], 5, POLICY)
    tx = apply(tx, [], 30_000, POLICY)
    tx = apply(tx, [unknown(phase=TRY, error="no answer")], 30_001, POLICY)
    assert [(run.error, run.first_attempt) for run in tx.past[0].runs] == [("gone", 1), ("no answer", 2)]
    assert tx.steps[0].error == "gone"
    tx = apply(tx, [done(0, CANCEL)], 30_002, POLICY)
    assert apply(tx, [unknown(phase=TRY, error="no answer")], 30_003, POLICY) is tx


def test_a_resolution_counts_anew() -> None:
    tx = failing(confirming(), ["gone", "gone"])
    tx = Resolve(1, True, "alice", "by hand").obey(tx, 20, POLICY)
    for now_ms in (21, 22):
        tx = apply(tx, [unknown(phase=Phase.SETTLE_CONFIRMED)], now_ms, POLICY)
    tx = Resolve(1, False, "bob", "no, back").obey(tx, 30, POLICY)
    tx = Resolve(1, True, "alice", "it was").obey(tx, 31, POLICY)
    tx = apply(tx, [unknown(phase=Phase.SETTLE_CONFIRMED)], 40, POLICY)
    tx = apply(tx, [done(0, Phase.SETTLE_CONFIRMED)], 41, POLICY)
    assert [(run.phase.name, run.first_attempt, run.last_attempt) for run in tx.past[0].runs] == [
        ("CONFIRM", 1, 2), ("SETTLE_CONFIRMED", 1, 2), ("SETTLE_CONFIRMED", 1, 1),
    ]  # fmt: skip
    assert tx.past[0].ends == (End(BranchStatus.CONFIRMED, 41),)
