"""What is judged about a transaction's decision and its end: invariants 1, 2, 8, 9 and 11."""

from __future__ import annotations

from .evidence import RANKS, SIDES, Evidence, Fact, lines
from .invariants import Findings

_PHASE_2 = ("confirm", "cancel", "suspended")
_PHASES_OF = {"CONFIRM": "confirmed", "CANCEL": "cancelled"}


def judge(tx: Evidence, findings: Findings) -> None:
    """All of them."""
    judged = [_one_decision(tx, findings), _durable_first(tx, findings), _on_record(tx, findings)]
    findings.judged[1] += any(judged)
    _no_mixed_ending(tx, findings)
    _versions(tx, findings)
    _forward(tx, findings)
    _terminates(tx, findings)


def _one_decision(tx: Evidence, findings: Findings) -> bool:
    """Whether it could be judged: so do the next two."""
    by_side: dict[str, Fact] = {}
    for fact in tx.records:
        by_side.setdefault(SIDES[fact.event.state], fact)
    if len(by_side) > 1:
        findings.add(1, tx.xid, "was decided both ways", lines(*by_side.values()))
        return True
    called = [(branch_id, fact) for branch_id, branch in tx.branches.items() for fact in branch.called]
    for side, record in by_side.items():
        for answer in tx.answers:
            if SIDES[answer.event.state] != side:
                what = f"was told to be {answer.event.state}, and is decided to be {side}"
                findings.add(1, tx.xid, what, lines(answer, record))
                break
        for branch_id, fact in called:
            if _PHASES_OF.get(fact.event.phase, side) != side:
                what = f"branch {branch_id} was called to {fact.event.phase}, and it is decided to be {side}"
                findings.add(1, tx.xid, what, lines(fact, record))
                break
    return len(tx.records) + len(tx.answers) > 1 or bool(by_side and called)


def _durable_first(tx: Evidence, findings: Findings) -> bool:
    """Phase 2 and answers come after the decision."""
    acts = [
        (f"{what} took effect at branch {branch_id}", fact)
        for branch_id, branch in tx.branches.items()
        for what in _PHASE_2
        for fact in branch.of(what)
    ]
    acts += [
        (f"branch {branch_id} was called to {fact.event.phase}", fact)
        for branch_id, branch in tx.branches.items()
        for fact in branch.called
        if fact.event.phase != "TRY"
    ]
    acts += [(f"{fact.event.state} was told", fact) for fact in tx.answers]
    decided = next((fact for fact in tx.saved if fact.event.state in SIDES), None)
    if not acts or (decided is None and not tx.has_all("saved")):
        return False
    if decided is None:
        findings.add(1, tx.xid, f"{acts[0][0]}, and no decision was ever saved", lines(acts[0][1]))
        return True
    for what, fact in acts:
        if tx.before(fact, decided):
            findings.add(1, tx.xid, f"{what} before the decision was saved", lines(fact, decided))
            break
    return True


def _on_record(tx: Evidence, findings: Findings) -> bool:
    """What has effects or was told of has a record, which is as far as what was told."""
    told, row = tx.answers[-1:], tx.rows[-1:]
    if told and row and row[0].event.state == "TRYING" and tx.before(told[0], row[0]):
        findings.add(1, tx.xid, f"was told to be {told[0].event.state}, and is TRYING", lines(*told, *row))
    if row or not tx.has_all("row") or tx.forgotten:
        return bool(told and row)
    facts = [*told, *(fact for branch in tx.branches.values() for fact in (*branch.all_effects, *branch.fences))]
    if facts:
        findings.add(1, tx.xid, "no coordinator has a record of it", lines(facts[0]))
    return bool(facts)


def _no_mixed_ending(tx: Evidence, findings: Findings) -> None:
    endings = [
        (branch_id, side, fact)
        for branch_id, branch in tx.branches.items()
        if not branch.resolved
        for side, fact in branch.endings()
    ]
    if endings and (tx.decision or len(endings) > 1):
        findings.judged[2] += 1
    by_side: dict[str, tuple[int, Fact]] = {}
    for branch_id, side, fact in endings:
        by_side.setdefault(side, (branch_id, fact))
    if len(by_side) > 1:
        (one, said), (other, contradicts) = by_side["confirmed"], by_side["cancelled"]
        findings.add(2, tx.xid, f"branch {one} is confirmed, branch {other} cancelled", lines(said, contradicts))
    elif tx.decision:
        decided, record = tx.decision
        for side, (branch_id, fact) in by_side.items():
            if side != decided:
                what = f"branch {branch_id} is {side}, and the transaction was {decided}"
                findings.add(2, tx.xid, what, lines(fact, record))
    if not any(branch.resolved for branch in tx.branches.values()):
        for row in tx.rows:
            if row.event.attention == "VIOLATION":
                findings.add(2, tx.xid, "a participant has contradicted, by the coordinator's record", lines(row))


def _versions(tx: Evidence, findings: Findings) -> None:
    by_version: dict[int, Fact] = {}
    last: Fact | None = None
    versioned = [fact for fact in tx.saved if fact.event.version]
    findings.judged[8] += len(versioned) > 1
    for fact in versioned:
        event = fact.event
        same = by_version.setdefault(event.version, fact)
        if (same.event.state, same.event.coordinator) != (event.state, event.coordinator):
            findings.add(8, tx.xid, f"version {event.version} was saved twice", lines(same, fact))
            return
        if same is not fact:  # written down again, by somebody who has read it, or was late: the first time counts
            continue
        if last is not None and event.version < last.event.version and tx.before(last, fact):
            what = f"version {event.version} was saved after version {last.event.version}"
            findings.add(8, tx.xid, what, lines(last, fact))
            return
        if last is None or event.version > last.event.version:
            last = fact


def _forward(tx: Evidence, findings: Findings) -> None:
    saved = tx.saved
    by_version = all(fact.event.version for fact in saved)
    if by_version:
        saved = sorted(saved, key=lambda fact: int(fact.event.version))
    findings.judged[9] += bool(saved) and len(saved) + len(tx.rows) > 1
    furthest: Fact | None = None
    for fact, order_is_sure in [*((fact, by_version) for fact in saved), *((row, True) for row in tx.rows)]:
        rank = RANKS[fact.event.state]
        if furthest is None or rank > RANKS[furthest.event.state]:
            furthest = fact
        elif rank < RANKS[furthest.event.state] and (order_is_sure or tx.before(furthest, fact)):
            what = f"went from {furthest.event.state} back to {fact.event.state}"
            findings.add(9, tx.xid, what, lines(furthest, fact))
            return


def _terminates(tx: Evidence, findings: Findings) -> None:
    if not tx.at_rest or tx.forgotten:
        return
    if tx.rows:
        last = tx.rows[-1]
    elif tx.saved and tx.has_all("saved"):
        last = max(tx.saved, key=lambda fact: RANKS[fact.event.state])
    else:
        return
    findings.judged[11] += 1
    if RANKS[last.event.state] < 2:
        findings.add(11, tx.xid, f"is still {last.event.state}", lines(last))
