"""The audit as operators see it: what is written down of an action, and how records are shown.

Whatever an operator changes is written down twice: an "asked" record, durable before anything is done, and what came
of it afterwards. Action and record cannot share one local transaction: the row is saved by the group commit, possibly
on top of another coordinator's. A crash in between leaves an "asked" record alone, never an action without any; the
row then tells whether the action was carried out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tricord.v1 import operator_pb2 as pb

from .errors import Violation
from .ids import new_xid
from .model import Transaction
from .store.audit import AuditRow
from .wire import timestamp

ACTOR_CHARS_MAX = 64
REASON_CHARS_MAX = 500
PEER_CHARS_MAX = 200
ASKED, DONE, REFUSED, UNKNOWN = "asked", "done", "refused", "unknown"

_OUTCOMES = {
    ASKED: pb.AUDIT_OUTCOME_ASKED,
    DONE: pb.AUDIT_OUTCOME_DONE,
    REFUSED: pb.AUDIT_OUTCOME_REFUSED,
    UNKNOWN: pb.AUDIT_OUTCOME_UNKNOWN,
}


class Asker(NamedTuple):
    """Who asks for an action, from where, and why. Nothing of it is proven."""

    actor: str
    peer: str
    reason: str


def read_asker(actor: str, reason: str, peer: str, wrong: list[Violation], *, needs_reason: bool = False) -> Asker:
    """Who asks; what is wrong with it is added to ``wrong``."""
    if not 0 < len(actor) <= ACTOR_CHARS_MAX or not actor.isprintable() or actor.isspace():
        wrong.append(Violation("actor", f"needs 1 to {ACTOR_CHARS_MAX} printable characters"))
    if len(reason) > REASON_CHARS_MAX:
        wrong.append(Violation("reason", f"has {len(reason)} characters; the limit is {REASON_CHARS_MAX}"))
    elif not reason.isprintable():
        wrong.append(Violation("reason", "has control or other unprintable characters"))
    elif needs_reason and not reason.strip():
        wrong.append(Violation("reason", f"is needed: 1 to {REASON_CHARS_MAX} printable characters"))
    return Asker(actor, peer[:PEER_CHARS_MAX], reason)


# --- what is written down ---------------------------------------------------------------------------------


def asked_row(now_ms: int, action: str, xid: bytes | None, asker: Asker, before: Mapping[str, object]) -> AuditRow:
    """The record that is stored before anything is done."""
    return AuditRow(new_xid(now_ms), now_ms, action, xid, *asker, json.dumps(before), "")


def outcome_row(asked: AuditRow, now_ms: int, outcome: str, after: Mapping[str, object]) -> AuditRow:
    """What came of it; later than what was asked for, whatever the clock says."""
    time_ms = max(now_ms, asked.time_ms + 1)
    text = json.dumps({"outcome": outcome, "asked_id": asked.id.hex(), **after})
    return asked._replace(id=new_xid(time_ms), time_ms=time_ms, after=text)


def snapshot(tx: Transaction) -> dict[str, object]:
    """How far a transaction is, as the audit keeps it."""
    return {
        "state": tx.state.name,
        "version": tx.version,
        "attention": tx.attention.name,
        "branches": [
            {
                "branch_id": n,
                "participant": branch.participant,
                "state": step.status.name,
                "attempts": step.attempts,
                **_resolution(tx, n - 1),
            }
            for n, (branch, step) in enumerate(zip(tx.spec.branches, tx.steps, strict=True), 1)
        ],
    }


def _resolution(tx: Transaction, branch: int) -> dict[str, object]:
    resolution = tx.resolution_of(branch)
    if resolution is None:
        return {}
    lost = {"lost": True} if resolution.lost else {}
    return {"resolved_as": "CONFIRMED" if resolution.confirmed else "CANCELLED", **lost}


# --- how it is shown --------------------------------------------------------------------------------------


def record_message(row: AuditRow) -> pb.AuditRecord:
    """A record on the wire."""
    after = read_outcome(row)
    return pb.AuditRecord(
        id=row.id.hex(),
        time=timestamp(row.time_ms),
        action=row.action,
        outcome=_OUTCOMES.get(after.get("outcome", ASKED), pb.AUDIT_OUTCOME_UNSPECIFIED),
        asked_id=str(after.get("asked_id", "")),
        xid=(row.xid or b"").hex(),
        actor=row.actor,
        peer=row.peer,
        reason=row.reason,
        before=row.before,
        after=row.after,
    )


def read_outcome(row: AuditRow) -> dict[str, Any]:
    """What came of it, by name; empty in a record of what was asked for."""
    found = json.loads(row.after) if row.after else {}
    return found if isinstance(found, dict) else {}
