"""Counts of open transactions, for operators.

Only the index that has no finished rows in it is read, and of its rows so many at the most: finished ones may pile
up, and a backlog may too, without one look costing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from . import schema

OPEN_ROWS_MAX = 50_000
"""So many are counted at the most: those that are due first."""
LATE_MS = 5_000
"""Due for so long, a transaction is late: a coordinator looks for due work at least once a second."""


class OpenGroup(NamedTuple):
    """Open transactions of one kind."""

    state: int
    attention: int
    participants: str
    """As ``Row.participants``."""
    transactions: int
    late: int
    """How many of them have been due for more than ``LATE_MS``."""
    oldest_ms: int
    """When the oldest was created."""


class OpenRows(NamedTuple):
    """All open transactions, by kind."""

    groups: Sequence[OpenGroup]
    cut: bool
    """Whether there are more than were counted."""


def _query(now_ms: int) -> sa.Select[Any]:
    t = schema.transactions
    some = (
        sa.select(t.c.state, t.c.attention, t.c.participants, t.c.created_ms, t.c.wake_ms)
        .where(t.c.wake_ms.is_not(None))
        .order_by(t.c.wake_ms)
        .limit(OPEN_ROWS_MAX + 1)
        .subquery()
    )
    late = sa.case((some.c.wake_ms < now_ms - LATE_MS, 1), else_=0)
    kind = (some.c.state, some.c.attention, some.c.participants)
    return sa.select(*kind, sa.func.count(), sa.func.sum(late), sa.func.min(some.c.created_ms)).group_by(*kind)


def read(connection: sa.Connection, now_ms: int) -> OpenRows:
    """Count them; ``now_ms`` is the store's clock."""
    if connection.dialect.name == "postgresql":
        # Where statistics are missing or old it would rather sort the whole table than follow the index.
        connection.execute(sa.text("SET LOCAL enable_seqscan = off"))
    groups = [OpenGroup._make(found) for found in connection.execute(_query(now_ms))]
    return OpenRows(groups, sum(group.transactions for group in groups) > OPEN_ROWS_MAX)
