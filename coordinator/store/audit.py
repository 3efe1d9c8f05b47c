"""What operators asked for, and what came of it: records that are added, and never changed nor deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from .history import first_xid_at
from .schema import audit


class AuditRow(NamedTuple):
    """A record as stored, in the order of the table's columns."""

    id: bytes
    """16 bytes, UUIDv7, made from ``time_ms``: records lie in the order of time."""
    time_ms: int
    action: str
    xid: bytes | None
    actor: str
    peer: str
    reason: str
    before: str
    after: str


class AuditFilter(NamedTuple):
    """Which records somebody wants to see; newest first."""

    xid: bytes = b""
    """Only what was about this transaction."""
    from_ms: int | None = None
    """Only from this time on."""
    to_ms: int | None = None
    """Only up to this time, itself included."""
    before_id: bytes | None = None
    """Only those older than this one: the keyset of the next page."""
    limit: int = 50


def append(connection: sa.Connection, rows: Sequence[AuditRow]) -> None:
    """Add records, in one local transaction. Those that are there already stay as they are.

    So this may run again after a COMMIT of unknown outcome: nobody else has these ids.
    """
    known = set(connection.execute(sa.select(audit.c.id).where(audit.c.id.in_([row.id for row in rows]))).scalars())
    new = [row._asdict() for row in rows if row.id not in known]
    if new:
        connection.execute(audit.insert(), new)


def read_page(connection: sa.Connection, which: AuditFilter) -> Sequence[AuditRow]:
    """Records, newest first; by the index of xids, or by the primary key."""
    found = sa.select(audit).order_by(audit.c.id.desc()).limit(which.limit)
    if which.xid:
        found = found.where(audit.c.xid == which.xid)
    if which.from_ms is not None:
        found = found.where(audit.c.id >= first_xid_at(which.from_ms))
    if which.to_ms is not None:
        found = found.where(audit.c.id < first_xid_at(which.to_ms + 1))
    if which.before_id is not None:
        found = found.where(audit.c.id < which.before_id)
    return [AuditRow._make(row) for row in connection.execute(found)]
