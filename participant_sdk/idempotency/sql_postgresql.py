"""What `sql` says, in the form that PostgreSQL's scripts need: what is prepared, and how arguments are written.

A statement that must hit the record divides by the number of rows, so that none is an error, and what stands behind
it in the script (COMMIT) is not reached.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from participant_sdk.databases.postgresql_statements import (
    ONE_ROW,
    as_argument,
    bytes_as_argument,
    text_as_argument,
)
from participant_sdk.idempotency import sql
from participant_sdk.idempotency.stored import COLUMNS_COUNT

TELL: Final = (
    "WITH hit AS ({} RETURNING waiters) "
    "SELECT waiters, CASE WHEN waiters THEN pg_notify(:channel, :key_in_hex) END IS NULL FROM hit"
)
RENEW: Final = (
    "WITH mine AS (SELECT key_hash, each.lease_ms "
    "FROM unnest(:keys::bytea[], :fences::bigint[], :leases_ms::bigint[]) AS each (key, fence, lease_ms) "
    "JOIN {table} AS r ON r.key_hash = each.key AND r.fence = each.fence AND r.state = 0), "
    "free AS (SELECT key_hash FROM {table} WHERE key_hash IN (SELECT key_hash FROM mine) AND state = 0{skip_locked}), "
    "renewed AS (UPDATE {table} AS r SET lease_until_ms = {now_ms} + mine.lease_ms FROM mine "
    "WHERE r.key_hash = mine.key_hash AND r.key_hash IN (SELECT key_hash FROM free)) SELECT key_hash FROM mine"
)
_NOTHING: Final = ", ".join(["NULL"] * COLUMNS_COUNT)
PREPARED: Final = {
    "lock": "SELECT pg_try_advisory_xact_lock(:number)",
    "read": sql.READ,
    # Read first, in the same statement: an insert would wait for whoever is changing what is there already.
    "claim": f"WITH met AS ({sql.READ}), "
    f"made AS ({sql.INSERT_CLAIM_UNLESS_MET} ON CONFLICT DO NOTHING RETURNING fence) "
    f"SELECT fence, {_NOTHING} FROM made UNION ALL SELECT NULL, * FROM met",
    "insert": sql.INSERT_ENDED,
    "write_over": ONE_ROW.format(update=sql.WRITE_OVER),
    "write_anew": ONE_ROW.format(update=sql.WRITE_ANEW),
    "complete": f"WITH hit AS ({sql.COMPLETE} RETURNING waiters) SELECT 1 / count(*), bool_or(waiters), "
    "count(CASE WHEN waiters THEN pg_notify(:channel, :key_in_hex) END) FROM hit",
}
TYPES: Final = {
    **dict.fromkeys(("number", "fence", "ttl_ms", "lease_ms"), "bigint"),
    **dict.fromkeys(("key_hash", "digest", "headers", "body"), "bytea"),
    **dict.fromkeys(("tenant", "operation", "key_hint", "owner"), "varchar"),
    **dict.fromkeys(("version", "state", "met_state", "codec"), "smallint"),
    **dict.fromkeys(("reason", "channel", "key_in_hex"), "text"),
    "status": "integer",
}
_short: Final = lru_cache(maxsize=1024)(text_as_argument)
AS_ARGUMENT: Final[dict[str, Callable[[Any], str | None]]] = {
    **dict.fromkeys(TYPES, as_argument),
    **dict.fromkeys(("number", "fence", "lease_ms", "version", "state", "met_state"), "{:d}".format),
    **dict.fromkeys(("key_hash", "digest"), bytes_as_argument),
    **dict.fromkeys(("tenant", "operation", "owner", "channel"), _short),
    **dict.fromkeys(("ttl_ms", "codec", "status"), lambda number: None if number is None else f"{number:d}"),
}
"""What each is written by, the commonest without looking at what it is."""
