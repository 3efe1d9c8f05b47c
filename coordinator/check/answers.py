"""What is judged about what initiators asked and were told: invariants 6, 7, and 11 where nobody answers."""

from __future__ import annotations

from .events import History
from .evidence import SIDES, Evidence, Fact, lines, surely_before
from .invariants import Findings


class Key:
    """All that is said about one idempotency key."""

    def __init__(self) -> None:
        self.asked: list[Fact] = []
        self.told: list[Fact] = []
        self.rows: list[Fact] = []

    @property
    def xids(self) -> dict[str, Fact]:
        """The transactions under it, and who speaks of them first."""
        found: dict[str, Fact] = {}
        for fact in (*self.rows, *self.told):
            if fact.event.xid:
                found.setdefault(fact.event.xid, fact)
        return found


def judge(tx: Evidence, findings: Findings) -> None:
    """Whether all were told the same about a transaction."""
    if len(tx.told) > 1:
        findings.judged[6] += 1
    by_side: dict[str, Fact] = {}
    for fact in tx.answers:
        by_side.setdefault(SIDES[fact.event.state], fact)
    if len(by_side) > 1:
        findings.add(6, tx.xid, "was told to be confirmed, and to be cancelled", lines(*by_side.values()))
    results: dict[str, Fact] = {}
    for fact in tx.told:
        for branch_id, result in fact.event.results.items():
            first = results.setdefault(branch_id, fact)
            if first.event.results[branch_id] != result:
                what = f"two results of branch {branch_id} were told"
                findings.add(6, tx.xid, what, lines(first, fact))
                return


def judge_key(name: str, key: Key, history: History, findings: Findings, *, ended: bool) -> None:
    """Whether one request ran under a key, once, and was answered."""
    who = f"key {name}"
    xids = key.xids
    ran = [fact for fact in key.told if fact.event.state]
    if len(ran) > 1:
        findings.judged[6] += 1
    fingerprints: dict[str, Fact] = {}
    for fact in ran:
        if fact.event.fingerprint:
            fingerprints.setdefault(fact.event.fingerprint, fact)
    asked = {fact.event.fingerprint for fact in key.asked if fact.event.fingerprint}
    if xids and (asked or len(fingerprints) + len(xids) > 1):
        findings.judged[7] += 1
    if len(fingerprints) > 1:
        findings.add(7, who, "two requests were answered as if each had run", lines(*fingerprints.values()))
    elif len(xids) > 1:
        number, what = (7, "two requests have run") if len(asked) > 1 else (6, "one request has run twice")
        findings.add(number, who, f"{what}: {', '.join(xids)}", lines(*xids.values()))
    for fact in key.told:
        answered = fingerprints.get(fact.event.fingerprint)
        if fact.event.rejected and answered and surely_before(history, answered, fact):
            findings.add(6, who, "was turned down when it had run", lines(answered, fact))
            break
    if ended and "asked" in history.complete and key.rows and not key.asked:
        findings.judged[7] += 1
        findings.add(7, who, "a transaction is on record that nobody has asked for", lines(key.rows[0]))
    if ended and "told" in history.complete and key.asked:
        findings.judged[11] += 1
        if not any(fact.event.state or fact.event.rejected for fact in key.told):
            told = f"was told only: {key.told[-1].event.error}" if key.told else "was never answered"
            findings.add(11, who, told, lines(key.asked[0], *key.told[-1:]))
