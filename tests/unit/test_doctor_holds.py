"""What the doctor makes of a participant's comparison of its holds with its fence."""

from coordinator.doctor import Finding, Overflow, Severity
from coordinator.doctor_holds import HoldFacts, HoldSum, Mismatch, left_out, of_holds

XID = "01a3185c500070008000000000000000"


def leak(status: int = 0, owner: str = "", action: str = "") -> HoldFacts:
    return HoldFacts(leaked=1, mismatches=[Mismatch(True, XID, 2, action, status, owner, "5", "kg")])


def only(facts: HoldFacts) -> Finding:
    (finding,) = of_holds("bank", facts)
    return finding


def test_nothing_declared_or_nothing_wrong_is_no_finding() -> None:
    assert list(of_holds("bank", HoldFacts())) == []
    assert list(of_holds("bank", HoldFacts(compared="some", sums=[HoldSum("kg", "1", "1")]))) == []


def test_a_leak_says_what_its_branch_is() -> None:
    words = {
        "5 kg are held for branch 2, which its fence does not know": leak(),
        "5 kg are held for branch 2 (lend), which is COMMITTED: its Confirm has left them": leak(2, "bank", "lend"),
        "5 kg are held for branch 2 (lend), which is ROLLBACKED: its Cancel has left them": leak(3, "bank", "lend"),
        "5 kg are held for branch 2 (lend), which is SUSPENDED": leak(4, "bank", "lend"),
        "5 kg are held for branch 2 (lend), which is of a status not known here": leak(0, "bank", "lend"),
        "5 kg are held for branch 2 (lend), which is shop's": leak(1, "shop", "lend"),
    }
    for problem, facts in words.items():
        finding = only(facts)
        assert (finding.problem, finding.code, finding.severity) == (problem, "HOLD_LEAKED", Severity.ERROR)
        assert (finding.participant, finding.xid, finding.branch_id, finding.mendable) == ("bank", XID, 2, False)
    assert only(leak(1, "shop")).advice.startswith("let the query of holds() leave out what shop holds")


def test_sums_that_differ() -> None:
    finding = only(HoldFacts(sums=[HoldSum("", "7", "2"), HoldSum("kg", "1", "1")]))
    assert finding.problem == "7 are reserved in its tables, only 2 of this by branches that are TRIED"
    assert (finding.code, finding.severity) == ("HOLDS_DIFFER", Severity.ERROR)


def test_errors_of_the_query_are_told_apart() -> None:
    assert only(HoldFacts("holds(): no", is_query=True)).code == "HOLDS_FAILED"
    assert only(HoldFacts("busy")).code == "NOT_COMPARED"
    assert only(HoldFacts(until=XID)).problem.endswith(f"up to {XID} were compared with its fence")


def test_what_was_counted_and_not_told() -> None:
    assert dict(left_out(leak()._replace(leaked=9, missing=4))) == {"HOLD_LEAKED": 8, "HOLD_MISSING": 4}
    overflow = Overflow()
    assert overflow.admits(only(leak()))
    for code, count in left_out(leak()._replace(leaked=9, missing=4)):
        overflow.leave_out(code, "bank", count)
    (rest,) = overflow.rest()  # of what was never told there is nothing to go by
    assert (rest.code, rest.problem) == ("HOLD_LEAKED", "and 8 more of that kind")
