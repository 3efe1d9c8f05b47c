"""What is judged about the effects at participants: invariants 3, 4, 5 (what is reserved) and 10."""

from __future__ import annotations

from collections import Counter

from .evidence import RANKS, Branch, Evidence, Fact, lines
from .invariants import Findings


def judge(tx: Evidence, findings: Findings) -> None:
    """All of them."""
    for branch_id, branch in tx.branches.items():
        who = f"branch {branch_id} at {branch.participant}" if branch.participant else f"branch {branch_id}"
        _once(tx, branch, who, findings)
        if not _no_late_try(tx, branch, who, findings):
            _nothing_reserved(tx, branch, who, findings)
        _not_purged_early(tx, branch, who, findings)
    _all_that_were_asked(tx, findings)
    _all_have_ended(tx, findings)


def _once(tx: Evidence, branch: Branch, who: str, findings: Findings) -> None:
    if not branch.effects:
        return
    findings.judged[3] += 1
    for what in ("try", "confirm", "cancel"):
        if len(branch.of(what)) > 1:
            findings.add(3, tx.xid, f"{who}: {what} took effect {len(branch.of(what))} times", lines(*branch.of(what)))
    if tx.has_all("fence") and not (branch.fences or branch.purged):
        findings.add(3, tx.xid, f"{who} has effects and no fence row", lines(*branch.all_effects))
    if not tx.has_all("effect"):
        return
    for what in ("confirm", "cancel"):
        if branch.of(what) and not branch.of("try"):
            findings.add(3, tx.xid, f"{who}: {what} took effect, try did not", lines(*branch.of(what)))
    if tx.decision and branch.of("try") and not (branch.of("confirm") or branch.resolved):
        decided, record = tx.decision
        if decided == "confirmed":
            what = f"{who} was tried and never confirmed, and the transaction was confirmed"
            findings.add(3, tx.xid, what, lines(branch.of("try")[0], record))


def _all_that_were_asked(tx: Evidence, findings: Findings) -> None:
    """Every branch that was asked for is confirmed where the transaction is."""
    if not (tx.has_all("effect") or tx.has_all("fence")) or tx.decision is None or tx.decision[0] != "confirmed":
        return
    asks = [fact for fact in tx.asked if fact.event.participants]
    if not asks or len({(fact.event.fingerprint, tuple(fact.event.participants)) for fact in asks}) > 1:
        return  # which of them it was is not known
    confirmed = Counter(
        branch.participant
        for branch in tx.branches.values()
        if branch.resolved or branch.purged or any(side == "confirmed" for side, _ in branch.endings())
    )
    findings.judged[3] += 1
    missing = Counter(asks[0].event.participants) - confirmed
    for participant in missing:
        if not any(branch.participant == participant and branch.of("try") for branch in tx.branches.values()):
            what = f"was confirmed without {participant}"
            findings.add(3, tx.xid, what, lines(asks[0], tx.decision[1]))


def _all_have_ended(tx: Evidence, findings: Findings) -> None:
    """Every branch on record of a cancelled transaction has heard of it, so that a late Try finds its mark."""
    row = tx.rows[-1] if tx.rows else None
    if row is None or row.event.state != "CANCELLED" or not row.event.participants or not tx.has_all("fence"):
        return
    ended = Counter(branch.participant for branch in tx.branches.values() if branch.fences or branch.purged)
    for participant in Counter(row.event.participants) - ended:
        findings.add(11, tx.xid, f"was cancelled, and {participant} has no fence row of it", lines(row))


def _no_late_try(tx: Evidence, branch: Branch, who: str, findings: Findings) -> bool:
    """Whether a late Try was found."""
    tries, cancels = branch.of("try"), branch.of("cancel")
    marks = [*branch.of("suspended"), *(fact for fact in branch.fences if fact.event.status == "SUSPENDED")]
    if not branch.effects or not (cancels or marks):
        return False
    findings.judged[4] += 1
    if not tries:
        return False
    if marks and not cancels:
        # In whichever order: a Cancel that came after the Try would have undone it, and left no such mark.
        findings.add(4, tx.xid, f"{who}: the effect of a late try stands", lines(tries[-1], marks[0]))
        return True
    late = [fact for fact in tries if all(_came_before(tx, cancel, fact) for cancel in cancels)]
    if late:
        findings.add(4, tx.xid, f"{who}: try took effect after cancel", lines(cancels[-1], late[0]))
    return bool(late)


def _came_before(tx: Evidence, one: Fact, other: Fact) -> bool:
    """Of two effects of one branch: by their places in its database, if they are known."""
    if one.event.place and other.event.place:
        return bool(one.event.place < other.event.place)
    return tx.before(one, other)


def _nothing_reserved(tx: Evidence, branch: Branch, who: str, findings: Findings) -> None:
    if branch.fences:
        findings.judged[5] += 1
    for fact in branch.fences:
        if fact.event.status == "TRIED":
            findings.add(5, tx.xid, f"{who} is TRIED at rest: what it has reserved is left", lines(fact))
            return
    if not tx.has_all("effect") or tx.decision is None or not branch.of("try") or branch.resolved:
        return
    findings.judged[5] += not branch.fences
    decided, record = tx.decision
    if decided == "cancelled" and not branch.of("cancel") and not branch.of("confirm"):
        what = f"{who} was tried and never cancelled, and the transaction was cancelled"
        findings.add(5, tx.xid, what, lines(branch.of("try")[0], record))


def _not_purged_early(tx: Evidence, branch: Branch, who: str, findings: Findings) -> None:
    if not branch.purged:
        return
    findings.judged[10] += 1
    purged = branch.purged[0]
    for fact in (*branch.called, *branch.all_effects):
        if tx.before(purged, fact):
            did = "was called" if hasattr(fact.event, "phase") else f"{fact.event.what} took effect"
            findings.add(10, tx.xid, f"{who}: {did} after its fence row was purged", lines(purged, fact))
            return
    finished = [fact for fact in (*tx.saved, *tx.rows) if RANKS[fact.event.state] == 2]
    unfinished = [fact for fact in (*tx.saved, *tx.rows) if RANKS[fact.event.state] < 2]
    if any(tx.before(purged, fact) for fact in unfinished) or (unfinished and not finished and tx.at_rest):
        what = f"{who}: its fence row was purged while the transaction was unfinished"
        findings.add(10, tx.xid, what, lines(purged, unfinished[-1]))
