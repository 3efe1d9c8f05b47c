"""Deleting records: by whole key, those alone of which a condition still holds, and that nobody is about to change.

The rows are locked first, but for those that somebody else has locked, and looked at once more under the lock. A range
in place of keys would lock InnoDB's gaps, and bar others' inserts. Whoever comes with a key at the very moment at which
its record goes is told that it is in progress, and comes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from participant_sdk.databases.database import Script
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.stored import lock_number
from participant_sdk.idempotency.words import Words
from participant_sdk.steps import Commit, Send

EXPIRES: Final = frozenset(State) - {State.PROCESSING, State.UNKNOWN}
"""What may expire. Of the others nobody knows yet what became of them, however long that takes."""


@dataclass(frozen=True, slots=True)
class Where:
    """A condition on a record, and its parameters."""

    sql: str
    parameters: tuple[Any, ...] = ()

    def __and__(self, other: Where) -> Where:
        """Both."""
        return Where(f"{self.sql} AND {other.sql}", (*self.parameters, *other.parameters))


def not_open() -> Where:
    """Records of which the outcome is known."""
    return Where(f"state IN ({', '.join(str(int(state)) for state in sorted(EXPIRES))})")


def not_live(words: Words) -> Where:
    """Records that nobody is known to be running."""
    return Where(f"(state <> {int(State.PROCESSING)} OR lease_until_ms <= {words.now_ms})")


def expired(words: Words) -> Where:
    """Records that stand in nobody's way any more."""
    return not_open() & Where(f"expires_ms IS NOT NULL AND expires_ms <= {words.now_ms}")


def delete(words: Words, keys: Sequence[bytes], where: Where) -> Script[int]:
    """Delete those of these records of which `where` holds and that nobody has locked; how many it has deleted."""
    match words.dialect:
        case "postgresql":
            deleted = yield from _at_once(words, keys, where)
        case "mariadb":
            deleted = yield from _one_by_one(words, keys, where)
        case _:
            sql = f"DELETE FROM {words.table} WHERE key_hash IN ({words.signs(len(keys))}) AND {where.sql}"
            deleted = (yield Send(sql, (*keys, *where.parameters))).hit
    yield Commit()
    return deleted


def _at_once(words: Words, keys: Sequence[bytes], where: Where) -> Script[int]:
    """Not what an atomic run has met, which holds the lock on its key only: it is going to write over it."""
    locked = (
        f"SELECT r.key_hash FROM unnest(%s::bytea[], %s::bigint[]) AS each (key, number) JOIN {words.table} AS r "
        f"ON r.key_hash = each.key WHERE {where.sql} AND pg_try_advisory_xact_lock(each.number) "
        "FOR UPDATE OF r SKIP LOCKED"
    )
    sql = f"DELETE FROM {words.table} WHERE key_hash = ANY(ARRAY({locked})) AND {where.sql}"
    numbers = [lock_number(key) for key in keys]
    return int((yield Send(sql, (list(keys), numbers, *where.parameters, *where.parameters))).hit)


def _one_by_one(words: Words, keys: Sequence[bytes], where: Where) -> Script[int]:
    """The index is named: for a small table the whole of it may seem cheaper, and would be locked."""
    locked = (
        f"SELECT key_hash FROM {words.table} FORCE INDEX (PRIMARY) WHERE key_hash IN ({words.signs(len(keys))}) "
        f"AND {where.sql} FOR UPDATE SKIP LOCKED"
    )
    sql = f"DELETE FROM {words.table} WHERE key_hash = %s AND {where.sql}"
    deleted = 0
    for (key_hash,) in (yield Send(locked, (*keys, *where.parameters))).rows:
        deleted += (yield Send(sql, (bytes(key_hash), *where.parameters))).hit
    return deleted
