"""Whose transactions a store holds, and whether its database's history has changed since."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from .schema import UNKNOWN_INCARNATION, store_info, transactions


class Identity(NamedTuple):
    """Whose transactions these are."""

    store_id: str
    """Made at the first start."""
    changed: bool = False
    """Whether the database's history has changed since the last start."""
    flagged: Sequence[bytes] = ()
    """The xids that were given ``attention`` for it."""


def store_identity(engine: sa.Engine, incarnation: str) -> Identity:
    """The store's identity; after a change of the database's history with what it was given ``attention`` for.

    After such a change (a restored backup, a failover) decisions may be lost of which calls have left, so every
    unfinished transaction gets ``attention`` (protocol A9). Of several coordinators that start then, one does it.
    """
    found = sa.select(store_info.c.store_id, store_info.c.incarnation)
    with engine.connect() as connection:
        row = connection.execute(found).one_or_none()
    if row is None:
        with (
            contextlib.suppress(sa.exc.IntegrityError),
            engine.begin() as connection,
        ):  # another was first: its id counts
            made = store_info.insert().values(id=1, store_id=secrets.token_hex(16), incarnation=incarnation)
            connection.execute(made)
    with engine.begin() as connection:
        row = connection.execute(found).one()
        if incarnation in (row.incarnation, UNKNOWN_INCARNATION):
            return Identity(row.store_id)
        seen = store_info.c.incarnation == row.incarnation
        first = connection.execute(store_info.update().where(seen).values(incarnation=incarnation)).rowcount == 1
        if not first or row.incarnation == UNKNOWN_INCARNATION:
            return Identity(row.store_id)
        flagged = connection.execute(
            transactions.update()
            .where(transactions.c.wake_ms.is_not(None))
            .values(attention=2, version=transactions.c.version + 1, save_id=secrets.randbits(62))
            .returning(transactions.c.xid)
        )
        return Identity(row.store_id, True, flagged.scalars().all())
