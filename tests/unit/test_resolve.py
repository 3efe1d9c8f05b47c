"""What is made of a fence's word before a branch is resolved by hand, and what a resolution makes of a transaction."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.codec import new_row, transaction
from coordinator.doctor import Reach
from coordinator.doctor_fence import FenceRow
from coordinator.fence_word import Verdict, Word, judge, refusal_of
from coordinator.model import Attention, BranchSpec, BranchStatus, Policy, Spec, State, Step, Transaction
from coordinator.orders import Denied, Resolve
from participant_sdk.fence import Phase, Progress, Status, decide
from participant_sdk.fence import Verdict as FenceVerdict

XID = bytes(range(16))
NOW_MS = 1_700_000_000_000
TRIED, COMMITTED, ROLLBACKED, SUSPENDED = Status
SETTLES = {True: Phase.SETTLE_CONFIRMED, False: Phase.SETTLE_CANCELLED}


def of_state(state: State = State.CONFIRMING, fence_id: str = "db-1", **more: Any) -> Transaction:
    """Two branches, the second of which has ended."""
    end = BranchStatus.CANCELLED if state is State.CANCELLING else BranchStatus.CONFIRMED
    steps = (Step(BranchStatus.TRIED, fence_id=fence_id), Step(end))
    spec = Spec(XID, b"", 0, 1_000, (BranchSpec("bank", "debit"), BranchSpec("shop", "credit")))
    return Transaction(spec, state, steps, decided_ms=5, **more)


def order(confirmed: bool, *, lost: bool = False) -> Resolve:
    return Resolve(1, confirmed, "alice", "by hand", lost)


def said(status: int | None, fence_id: str = "db-1", **more: Any) -> Word:
    """Somebody's answer."""
    facts: dict[str, Any] = {"action": "debit", "finished": True, "external": False, "running": False, "age_ms": 61_000}
    row = None if status is None else FenceRow(xid=XID.hex(), branch_id=1, status=status, **{**facts, **more})
    return Word("10.0.0.1:1", Reach.ANSWERED, fence_id=fence_id, row=row)


PROGRESS: dict[Progress, dict[str, Any]] = {
    Progress.FINISHED: {},
    Progress.UNFINISHED: {"finished": False},
    Progress.LEASED: {"finished": False, "external": True, "running": True},
    Progress.LAPSED: {"finished": False, "external": True},
}


@pytest.mark.parametrize("confirmed", [True, False])
@pytest.mark.parametrize("progress", Progress)
@pytest.mark.parametrize("status", [None, *Status])
def test_it_is_what_settle_would_be_answered(status: Status | None, progress: Progress, confirmed: bool) -> None:
    external = progress in (Progress.LEASED, Progress.LAPSED)
    if external and status is not TRIED:
        return  # there is no such row
    settled = decide(SETTLES[confirmed], status, same_call=True, progress=progress)
    verdict = judge(of_state(), order(confirmed), [said(status, **PROGRESS[progress])], NOW_MS).verdict
    if settled.is_violation:
        assert verdict is Verdict.CONTRADICTS
    else:
        assert verdict is (Verdict.UNCLEAR if settled is FenceVerdict.TRY_RUNS else Verdict.FITS)


def test_what_contradicts_is_told_with_its_time() -> None:
    for confirmed, status, name in (False, COMMITTED, "COMMITTED"), (True, ROLLBACKED, "ROLLBACKED"):
        judged = judge(of_state(), order(confirmed), [said(status)], NOW_MS)
        refusal = refusal_of(of_state(), order(confirmed), judged)
        assert refusal is not None
        assert refusal.reason == "FENCE_CONTRADICTS"
        assert f"contradicts: {name} since 2023-11-14T22:12:19.000Z" in str(refusal)
        assert "--force" in str(refusal)
    another = judge(of_state(), order(True), [said(TRIED, action="credit")], NOW_MS)
    assert (another.verdict, another.text) == (Verdict.CONTRADICTS, "its row is of another action, credit")


DOWN = Word("10.0.0.2:1", Reach.SILENT, "cannot be reached")
OLD = Word("10.0.0.3:1", Reach.NOT_OFFERED, "Method not found!")
BUSY = Word("10.0.0.4:1", Reach.BUSY, "another look is running")
STRANGER = Word("10.0.0.5:1", Reach.STRANGER, "this is participant 'shop'")
UNREADABLE = Word("10.0.0.6:1", Reach.UNREADABLE, "the fence cannot be read: no such table")
ELSEWHERE = said(COMMITTED, fence_id="db-2")
STRANGE = said(9)
RUNS = said(TRIED, **PROGRESS[Progress.LEASED])


@pytest.mark.parametrize(
    ("words", "text", "answers"),
    [
        ([], "it has no address at the moment", False),
        ([DOWN], "10.0.0.2:1: cannot be reached", False),
        ([STRANGER, UNREADABLE], "not", False),
        ([OLD], "does not offer GetBranch", True),
        ([DOWN, BUSY], "another look is running", True),
        ([ELSEWHERE], "it stands on fence database db-2, Try was answered by db-1", False),
        ([STRANGE], "a status that this coordinator does not know", True),
        ([RUNS], "its external Try may still be running", True),
    ],
)
def test_what_is_not_known_is_refused_and_lost_only_where_nobody_answers(
    words: list[Word], text: str, answers: bool
) -> None:
    judged = judge(of_state(), order(False), words, NOW_MS)
    assert (judged.verdict, judged.answers) == (Verdict.UNCLEAR, answers)
    assert text in judged.text
    refusal = refusal_of(of_state(), order(False), judged)
    assert refusal is not None
    assert refusal.reason == "FENCE_UNCLEAR"
    assert "--force" in str(refusal)
    assert "--lost" in str(refusal)
    lost = refusal_of(of_state(), order(False, lost=True), judged)
    assert (None if lost is None else lost.reason) == ("PARTICIPANT_ANSWERS" if answers else None)


def test_one_that_speaks_for_the_fence_is_enough() -> None:
    judged = judge(of_state(), order(True), [DOWN, ELSEWHERE, said(COMMITTED)], NOW_MS)
    assert (judged.verdict, judged.answers) == (Verdict.FITS, True)
    # Whose Try was never answered is known by no fence database: any of its participant's speaks for it.
    assert judge(of_state(fence_id=""), order(True), [ELSEWHERE], NOW_MS).verdict is Verdict.FITS


def test_lost_ends_the_branch_at_once_and_is_stored_so() -> None:
    policy = Policy()
    for state, confirmed in (State.CONFIRMING, True), (State.CONFIRMING, False), (State.CANCELLING, True):
        tx = of_state(state)
        ended = order(confirmed, lost=True).obey(tx, NOW_MS, policy)
        opposite = confirmed is not (state is State.CONFIRMING)
        assert ended.state is (State.CONFIRMED if state is State.CONFIRMING else State.CANCELLED)
        assert ended.steps[0].status is (BranchStatus.CONFIRMED if confirmed else BranchStatus.CANCELLED)
        assert (ended.mixed, ended.attention is Attention.VIOLATION) == (opposite, opposite)
        assert transaction(new_row(ended)) == ended
        assert order(confirmed, lost=True).obey(ended, NOW_MS + 1, policy) is ended  # its repeat
        for again in (order(not confirmed, lost=True), order(confirmed), order(not confirmed)):
            with pytest.raises(Denied, match="for good"):
                again.obey(ended, NOW_MS, policy)


def test_lost_may_follow_an_ordinary_one_and_mixed_stays() -> None:
    policy = Policy()
    mixed = order(False).obey(of_state(), NOW_MS, policy)
    assert (mixed.state, mixed.steps[0].status, mixed.mixed) == (State.CONFIRMING, BranchStatus.TRIED, True)
    ended = order(True, lost=True).obey(mixed, NOW_MS, policy)
    assert (ended.state, ended.mixed, ended.attention) == (State.CONFIRMED, True, Attention.VIOLATION)
    assert [(r.confirmed, r.lost) for r in ended.resolved] == [(False, False), (True, True)]
    with pytest.raises(Denied, match="TRYING"):
        order(True, lost=True).obey(of_state(State.TRYING), NOW_MS, policy)
