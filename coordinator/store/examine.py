"""What the doctor reads of a store, in short local transactions, and the one thing that it may change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from . import schema
from .rows import Row, read_row

OPEN_ROWS = 100
"""Rows of one page; whole ones, with their payloads."""
RECENT_ROWS = 10_000
"""How many of the newest rows are looked through for what finished with attention: no index has these."""
RECENT_TOLD_MAX = 200

_t = schema.transactions


class After(NamedTuple):
    """Where a page ended."""

    wake_ms: int = -1
    xid: bytes = b""


def open_rows(connection: sa.Connection, after: After) -> Sequence[Row]:
    """The next unfinished rows, those first that are due first, by the index that has no finished ones in it.

    A row that is claimed meanwhile moves on and is met again; none is passed over.
    """
    keys = sa.tuple_(_t.c.wake_ms, _t.c.xid) > sa.tuple_(sa.literal(after.wake_ms), sa.literal(after.xid))
    found = sa.select(*schema.ROW).where(_t.c.wake_ms.is_not(None), _t.c.wake_ms >= after.wake_ms, keys)
    rows = connection.execute(found.order_by(_t.c.wake_ms, _t.c.xid).limit(OPEN_ROWS))
    return [read_row(row) for row in rows]


def finished_with_attention(connection: sa.Connection, states: Sequence[int]) -> Sequence[tuple[bytes, str]]:
    """Those among the newest rows that have one of these states and attention, newest first: xid, participants."""
    recent = sa.select(_t.c.xid, _t.c.state, _t.c.attention, _t.c.participants)
    recent_rows = recent.order_by(_t.c.xid.desc()).limit(RECENT_ROWS).subquery()
    found = sa.select(recent_rows.c.xid, recent_rows.c.participants)
    found = found.where(recent_rows.c.attention != 0, recent_rows.c.state.in_(states))
    rows = connection.execute(found.order_by(recent_rows.c.xid.desc()).limit(RECENT_TOLD_MAX))
    return [(row.xid, row.participants) for row in rows]


def stand(connection: sa.Connection) -> schema.Stand:
    """How far the store has been migrated."""
    return schema.read_stand(connection.engine)


def make_due(connection: sa.Connection, xid: bytes, now_ms: int) -> bool:
    """Have an unfinished row looked at now, if that lies ahead; whether it did. Never its ``version``, as a claim."""
    mine = (_t.c.xid == xid) & (_t.c.wake_ms > now_ms)
    return connection.execute(_t.update().where(mine).values(wake_ms=now_ms)).rowcount == 1
