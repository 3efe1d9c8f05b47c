"""Many finished transactions in a coordinator's database, with random keys of users: old rows beside a load.

Unlike ``rows.store`` the database makes them all of one, in less time: only their sizes and the order of their xids and
keys matter here.
"""

from __future__ import annotations

import time

import psycopg

from coordinator.store.rows import Row
from coordinator.wire import read_key

from . import rows

NAMES = ("noop-1", "noop-2")
AGE_MS = 10 * 86_400_000
"""Younger than what is purged."""
_OWN = {
    # A UUIDv7 with a time of its own, so that they lie in the order of time; the keys lie in none.
    "xid": "decode(lpad(to_hex(t.created_ms + n), 12, '0') || '7' || substr(md5(n::text), 1, 3) "
    "|| '8' || substr(md5(n::text), 4, 15), 'hex')",
    "created_ms": "t.created_ms + n",
    # As `stream_load --keys` has them, so that old and new ones lie among each other.
    "key": "%(key_prefix)b || convert_to(md5(n::text), 'UTF8')",
}


def store(dsn: str, count: int) -> None:
    """Put so many rows in, and have the server write down what it has in memory."""
    template = rows.confirmed(rows.made(0, int(time.time() * 1000) - AGE_MS, NAMES))
    rows.store(dsn, [template])
    columns = ", ".join(Row._fields)
    values = ", ".join(_OWN.get(name, f"t.{name}") for name in Row._fields)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            f"INSERT INTO tricord_transaction ({columns}) SELECT {values} "
            f"FROM tricord_transaction t, generate_series(2, {count:d}) n WHERE t.xid = %(xid)b",
            {"xid": template.spec.xid, "key_prefix": read_key("x", "", [])[:-1]},
        )
        connection.execute("VACUUM ANALYZE tricord_transaction")
        connection.execute("CHECKPOINT")
