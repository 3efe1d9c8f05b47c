"""Deletes transactions that finished long ago, a page at a time.

xids are in the order of time, so old rows lie together at one end of the primary key: a page is some hundred xids read
there, and one short local transaction deletes those of them that are finished and old enough. No index serves only
this, no insert waits for it, and rows that another coordinator holds are passed over. Unfinished rows stay, however
old.
"""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa

from .schema import labels, transactions

ROWS_MAX = 500
"""Of one page: the local transaction that deletes them stays short."""


class Page(NamedTuple):
    """What became of one page."""

    deleted: int
    last: bytes | None
    """The last xid that was looked at; None when there are no more."""


def first_xid_at(time_ms: int) -> bytes:
    """No xid made at that time or later is less: xids start with 48 bits of time."""
    return max(0, time_ms).to_bytes(6, "big") + bytes(10)


def purge_page(connection: sa.Connection, after: bytes, below: bytes, before_ms: int) -> Page:
    """Delete, among the next rows with ``after < xid < below``, those that finished before that time.

    Looking first, without locks, bounds what is read as well as what is deleted: a page full of rows that must stay
    costs no more than any other.
    """
    t = transactions
    if connection.dialect.name == "postgresql":
        # A plan made for a small table would be kept; it holds for this local transaction only.
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
    page = sa.select(t.c.xid, t.c.wake_ms, t.c.updated_ms).where(t.c.xid > after, t.c.xid < below)
    found = connection.execute(page.order_by(t.c.xid).limit(ROWS_MAX)).all()
    last = found[-1].xid if len(found) == ROWS_MAX else None
    old = [row.xid for row in found if row.wake_ms is None and row.updated_ms < before_ms]
    if not old:
        return Page(0, last)
    finished = (t.c.wake_ms.is_(None), t.c.updated_ms < before_ms)
    free = sa.select(t.c.xid).where(t.c.xid.in_(old), *finished).order_by(t.c.xid).with_for_update(skip_locked=True)
    held = list(connection.execute(free).scalars())
    connection.execute(labels.delete().where(labels.c.xid.in_(held)))
    deleted = connection.execute(t.delete().where(t.c.xid.in_(held), *finished))
    return Page(deleted.rowcount, last)
