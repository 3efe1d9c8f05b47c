"""The sweeper's statements: short reads by the primary key, which lock nothing, and deletes by whole key.

There is no index on when a record expires, as every completion would pay for it: PostgreSQL would write all indexes
anew with each. One on when it was made would cost every insert, and help little where records of long and short lives
lie side by side; and a BRIN on that goes blind when the space of what was deleted is used again. So the table is
walked in the order of its key, page by page, at a pace of the sweeper's choice. The keys are hashes: what is deleted
lies anywhere, and nothing gathers at one end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from participant_sdk.databases.database import Script
from participant_sdk.idempotency.deleting import delete, expired
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.statements import IDENTITY_KEY
from participant_sdk.idempotency.store import Store
from participant_sdk.idempotency.words import Words
from participant_sdk.steps import Commit, Rollback, Send

FIRST: Final = b""
"""Sorts before every key hash."""


@dataclass(frozen=True, slots=True)
class SweptPage:
    """What the sweeper has seen on one page; `end`: after which key the next begins, None: there is none."""

    rows: int
    expired: Sequence[bytes]
    end: bytes | None
    processing: int = 0
    lapsed: int = 0
    oldest_processing_ms: int = 0
    unknown: int = 0
    oldest_unknown_ms: int = 0


class SweepingSql:
    """The scripts of the sweeper; each has its own connection."""

    def __init__(self, words: Words, store: Store) -> None:
        self._words = words
        self._store = store
        now_ms = words.now_ms
        self._expired = expired(words)
        self._page = (
            f"SELECT key_hash, state, CASE WHEN {self._expired.sql} THEN 1 ELSE 0 END, {now_ms} - created_ms, "
            f"CASE WHEN lease_until_ms <= {now_ms} THEN 1 ELSE 0 END "
            f"FROM {words.table} WHERE key_hash > {words.sign} ORDER BY key_hash LIMIT "
        )

    def page(self, after: bytes, rows: int) -> Script[SweptPage]:
        """The next so many records: which of them have expired, and how many are not over."""
        yield from self._words.page_begun()
        found = (yield Send(f"{self._page}{int(rows)}", (after,))).rows
        yield Rollback()
        ages = [(int(state), int(age or 0), bool(over)) for _, state, _, age, over in found]
        processing = [(age, over) for state, age, over in ages if state == State.PROCESSING]
        unknown = [age for state, age, _ in ages if state == State.UNKNOWN]
        return SweptPage(
            rows=len(found),
            expired=[bytes(key_hash) for key_hash, _, expired, _, _ in found if expired],
            end=bytes(found[-1][0]) if len(found) == rows else None,
            processing=len(processing),
            lapsed=sum(over for _, over in processing),
            oldest_processing_ms=max((age for age, _ in processing), default=0),
            unknown=len(unknown),
            oldest_unknown_ms=max(unknown, default=0),
        )

    def take_turn(self, name: str, ms: int) -> Script[bool]:
        """Have the turn for so long, if nobody has it; whether that is so."""
        words = self._words
        free = f"key_hash = {words.sign} AND COALESCE(lease_until_ms, 0) <= {words.now_ms}"
        yield from self._store.identity()  # its row is there from then on
        is_free = (yield Send(f"SELECT 1 FROM {words.table} WHERE {free}", (IDENTITY_KEY,))).rows
        yield Rollback()
        if not is_free:  # who has to wait writes nothing
            return False
        return (yield from self._turn(name, ms, free, (IDENTITY_KEY,)))

    def keep_turn(self, name: str, ms: int) -> Script[bool]:
        """Have it for so long from now on, if it is still that one's; whether it is."""
        mine = f"key_hash = {self._words.sign} AND owner = {self._words.sign}"
        return (yield from self._turn(name, ms, mine, (IDENTITY_KEY, name)))

    def _turn(self, name: str, ms: int, where: str, values: tuple[Any, ...]) -> Script[bool]:
        words = self._words
        sql = (
            f"UPDATE {words.table} SET owner = {words.sign}, lease_until_ms = {words.now_ms} + {int(ms)} WHERE {where}"
        )
        hit = (yield Send(sql, (name, *values))).hit
        yield Commit()
        return bool(hit)

    def delete(self, keys: Sequence[bytes]) -> Script[int]:
        """Delete those of these records that have expired and that nobody has locked; how many it has deleted."""
        return (yield from delete(self._words, keys, self._expired))
