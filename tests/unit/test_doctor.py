"""The doctor's judgement of a fence row beside the record of its transaction, and of clocks and retentions."""

import re
from pathlib import Path

import pytest

from coordinator.alerts import document
from coordinator.doctor import (
    ALIKE_MAX,
    Answer,
    FenceFacts,
    Finding,
    Limits,
    Overflow,
    Reach,
    Registered,
    Severity,
    length,
    of_answer,
)
from coordinator.doctor_fence import FenceRow, is_suspect, of_row
from coordinator.doctor_open import OpenFacts, OpenTally
from coordinator.model import (
    WHY_STUCK,
    Attention,
    BranchSpec,
    BranchStatus,
    Resolution,
    Spec,
    State,
    Step,
    Transaction,
)

DAY_MS = 86_400_000
NOW_MS = 1_800_000_000_000
LIMITS = Limits(NOW_MS, 300_000, 10_000, 120_000, 30 * DAY_MS)
XID = f"{NOW_MS - DAY_MS:012x}7000800000000000"

TRIED, COMMITTED, ROLLBACKED, SUSPENDED = 1, 2, 3, 4

FITS = ""
EXPECTED = {
    # state:                TRIED              COMMITTED                   ROLLBACKED                  SUSPENDED
    None: ("ORPHAN_UNKNOWN", "RECORD_MISSING", "RECORD_MISSING", "RECORD_MISSING"),
    State.TRYING: (FITS, "CONFIRMED_AGAINST_RECORD", FITS, "CANCELLED_AGAINST_RECORD"),
    State.CONFIRMING: (FITS, FITS, "CANCELLED_AGAINST_RECORD", "CANCELLED_AGAINST_RECORD"),
    State.CONFIRMED: ("ORPHAN_FINISHED", FITS, "CANCELLED_AGAINST_RECORD", "CANCELLED_AGAINST_RECORD"),
    State.CANCELLING: (FITS, "CONFIRMED_AGAINST_RECORD", FITS, FITS),
    State.CANCELLED: ("ORPHAN_FINISHED", "CONFIRMED_AGAINST_RECORD", FITS, FITS),
}


def row(status: int, *, xid: str = XID, branch_id: int = 1, **progress: bool) -> FenceRow:
    facts = {"finished": True, "external": False, "running": False, **progress}
    return FenceRow(xid, branch_id, "debit", status, **facts, age_ms=3_600_000)


def record(state: State, *, updated_ms: int = NOW_MS - DAY_MS, step: BranchStatus = BranchStatus.TRIED) -> Transaction:
    spec = Spec(bytes.fromhex(XID), b"", NOW_MS - DAY_MS, 30_000, (BranchSpec("bank", "debit"),))
    return Transaction(spec, state, (Step(step),), wake_ms=NOW_MS, updated_ms=updated_ms)


def judged(fence_row: FenceRow, tx: Transaction | None, limits: Limits = LIMITS) -> str:
    """The code of what is found, by the same two looks as in an examination."""
    if not is_suspect(fence_row, None if tx is None else int(tx.state)):
        return FITS
    finding = of_row("bank", fence_row, tx, limits)
    return FITS if finding is None else finding.code


@pytest.mark.parametrize("status", [TRIED, COMMITTED, ROLLBACKED, SUSPENDED])
@pytest.mark.parametrize("state", EXPECTED)
def test_every_status_beside_every_state(status: int, state: State | None) -> None:
    tx = None if state is None else record(state)
    assert judged(row(status), tx) == EXPECTED[state][status - 1]


def test_what_has_finished_only_now_may_still_be_on_its_way() -> None:
    assert judged(row(TRIED), record(State.CONFIRMED, updated_ms=NOW_MS - 1_000)) == FITS


def test_a_refused_branch_of_a_confirmed_transaction_fits() -> None:
    assert judged(row(ROLLBACKED), record(State.CONFIRMED, step=BranchStatus.REFUSED)) == FITS


@pytest.mark.parametrize("state", [State.CONFIRMING, State.CONFIRMED, State.CANCELLING, State.CANCELLED])
@pytest.mark.parametrize("confirmed", [True, False])
def test_what_was_resolved_by_hand_fits_whatever_was_decided(state: State, confirmed: bool) -> None:
    opposite = confirmed is not (state in (State.CONFIRMING, State.CONFIRMED))
    tx = record(state)._replace(resolved=(Resolution(1, confirmed, "alice", "ticket 17", NOW_MS, opposite),))
    assert judged(row(COMMITTED if confirmed else ROLLBACKED), tx) == FITS
    assert judged(row(SUSPENDED), tx) == FITS
    found = judged(row(ROLLBACKED if confirmed else COMMITTED), tx)
    assert (found != FITS) is not opposite  # it is held against the decision as ever


def test_a_record_that_was_purged_is_not_missed() -> None:
    old = f"{NOW_MS - 31 * DAY_MS:012x}7000800000000000"
    assert judged(row(COMMITTED, xid=old), None) == FITS
    assert judged(row(COMMITTED, xid=old), None, LIMITS._replace(retention_ms=0)) == "RECORD_MISSING"
    assert judged(row(TRIED, xid=old), None) == "ORPHAN_UNKNOWN"


@pytest.mark.parametrize("status", [TRIED, COMMITTED, ROLLBACKED])
def test_what_has_committed_by_itself_is_half_done(status: int) -> None:
    for tx in (None, record(State.CONFIRMED), record(State.TRYING)):
        assert judged(row(status, finished=False), tx) == "HALF_DONE"


def test_an_external_try_that_has_not_ended_is_left_to_its_cancel() -> None:
    lapsed = row(TRIED, finished=False, external=True)
    assert judged(lapsed, record(State.CANCELLING)) == FITS
    assert judged(lapsed, record(State.CANCELLED)) == "ORPHAN_FINISHED"
    assert judged(lapsed, None) == "ORPHAN_UNKNOWN"
    for tx in (None, record(State.CANCELLED)):
        assert judged(lapsed._replace(running=True), tx) == FITS


def test_who_is_stuck_is_told_in_the_same_words_as_by_alerts() -> None:
    tx = record(State.CONFIRMING)._replace(attention=Attention.STUCK)
    (found,) = OpenTally({}, LIMITS).take(OpenFacts(XID, 1, NOW_MS, tx))
    assert found.problem == document(tx, None, "c1", 0)["message"] == WHY_STUCK


def test_a_status_of_a_newer_version_is_no_contradiction() -> None:
    for finished in (True, False):
        assert judged(row(0, finished=finished), record(State.CONFIRMED)) == "STATUS_UNKNOWN"


def test_a_branch_that_its_transaction_has_not() -> None:
    assert judged(row(COMMITTED, branch_id=2), record(State.CANCELLED)) == "BRANCH_UNKNOWN"
    finding = of_row("shop", row(COMMITTED), record(State.CANCELLED), LIMITS)
    assert finding is not None
    assert finding.code == "BRANCH_UNKNOWN"


@pytest.mark.parametrize(
    ("skew_ms", "doubt_ms", "severity"),
    [
        (1_000, 0, None),
        (-1_000, 0, None),
        (1_001, 0, Severity.WARNING),
        (-1_001, 0, Severity.WARNING),
        (1_500, 500, None),
        (10_000, 0, Severity.WARNING),
        (10_001, 0, Severity.ERROR),
        (-3_600_000, 100, Severity.ERROR),
    ],
)
def test_clocks_that_are_apart(skew_ms: int, doubt_ms: int, severity: Severity | None) -> None:
    answer = Answer("bank", "b:1", Reach.ANSWERED, 3, "", FenceFacts("f", DAY_MS, skew_ms, doubt_ms))
    known = Registered(frozenset({"debit"}), frozenset(), ("b:1",), frozenset({"f"}))
    found = list(of_answer(answer, known, LIMITS))
    assert [(each.code, each.severity) for each in found] == ([("CLOCK_SKEW", severity)] if severity else [])


def test_who_may_wake_late() -> None:
    known = {"bank": Registered(frozenset({"debit"}), frozenset(), ("b:1",), frozenset())}
    for tx, wake_ms, codes in (
        (record(State.CONFIRMING), NOW_MS + LIMITS.far_ms, []),
        (record(State.CONFIRMING), NOW_MS + LIMITS.far_ms + 1, ["WAKES_LATE"]),
        (record(State.TRYING)._replace(renewed_ms=NOW_MS + DAY_MS), NOW_MS + DAY_MS, []),
        (record(State.TRYING)._replace(renewed_ms=NOW_MS + DAY_MS), NOW_MS + 2 * DAY_MS, ["WAKES_LATE"]),
    ):
        found = OpenTally(known, LIMITS).take(OpenFacts(XID, 1, wake_ms, tx))
        assert [each.code for each in found] == codes


def test_a_flood_is_counted() -> None:
    overflow = Overflow()
    alike = Finding(Severity.ERROR, "A", "p", "a", "bank", "x", 1, mendable=True)
    assert sum(overflow.admits(alike) for _ in range(ALIKE_MAX + 7)) == ALIKE_MAX
    assert overflow.admits(alike._replace(code="B"))
    (rest,) = overflow.rest()
    assert rest == alike._replace(problem="and 7 more of that kind", xid="", branch_id=0, mendable=False)


def test_lengths_for_people() -> None:
    assert [length(ms) for ms in (0, 999, 1_000, 90_000, 5_400_000, 3 * DAY_MS)] == [
        "0 ms", "999 ms", "1 s", "1.5 min", "1.5 h", "3 d",
    ]  # fmt: skip


def test_the_guide_has_every_code() -> None:
    root = Path(__file__).resolve().parents[2]
    code = "".join(path.read_text() for path in (root / "coordinator").glob("doctor*.py"))
    codes = {name for name in re.findall(r'"([A-Z]+_?[A-Z_]*)"', code) if name != "UTF"}
    assert codes == set(re.findall(r"^\| `([A-Z_]+)` \|", (root / "docs" / "doctor.md").read_text(), re.MULTILINE))
