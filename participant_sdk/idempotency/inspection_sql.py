"""What operators want to know of the records, and to change by hand, as scripts; each has its own connection.

A list is walked in the order of the key hashes, which says nothing of when a record was made: an index on that would
cost every insert (see `sweeping_sql`). What is read does not lock; the statement that looks for rare records may have
to read the whole table once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from participant_sdk.databases.database import Script
from participant_sdk.idempotency.deleting import Where, delete, expired, not_live, not_open
from participant_sdk.idempotency.record import Codec, State
from participant_sdk.idempotency.stored import known
from participant_sdk.idempotency.words import Words
from participant_sdk.steps import Commit, Rollback, Send

_COLUMNS: Final = (
    "key_hash, tenant, operation, key_hint, state, fence, attempt, {now_ms} - created_ms, lease_until_ms - {now_ms}, "
    "expires_ms - {now_ms}, {now_ms} - completed_ms, owner, recovery_point, codec, status, length(body), reason"
)
_REAL: Final = "operation <> ''"
"""Not the row that holds the store's identity, nor one that stands in for a record."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record as operators see it: without the answer's bytes, and of the key only its first characters."""

    key_hash: bytes
    tenant: str
    operation: str
    key_hint: str
    state: State
    fence: int
    attempt: int
    age_ms: int
    """Since the record was made."""
    lease_left_ms: int | None
    """Of a run that is PROCESSING; below 0: it has been over for so long."""
    expires_left_ms: int | None
    completed_ago_ms: int | None
    owner: str
    """Who has run it, or runs it."""
    recovery_point: str | None
    codec: Codec | None
    """Of the stored answer; None: there is none."""
    status: int | None
    body_bytes: int
    reason: str

    @property
    def lapsed(self) -> bool:
        """Whether its run's lease has ended without an outcome."""
        return self.state is State.PROCESSING and (self.lease_left_ms or 0) <= 0

    @property
    def live(self) -> bool:
        """Whether it is being run, as far as is known."""
        return self.state is State.PROCESSING and not self.lapsed

    @property
    def expired(self) -> bool:
        """Whether it stands in nobody's way any more."""
        open_ = self.state in (State.PROCESSING, State.UNKNOWN)
        return not open_ and self.expires_left_ms is not None and self.expires_left_ms <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which records. All that is said must hold."""

    states: tuple[State, ...] = ()
    operation: str | None = None
    tenant: str | None = None
    older_than_ms: int | None = None
    """Since they were made."""
    lapsed: bool = False
    """Only runs of which the lease has ended without an outcome."""

    def where(self, words: Words) -> Where:
        """As a condition."""
        sql, parameters = [_REAL], list[Any]()
        if self.states:
            sql.append(f"state IN ({', '.join(str(int(state)) for state in self.states)})")
        for column, text in (("operation", self.operation), ("tenant", self.tenant)):
            if text is not None:
                sql.append(f"{column} = {words.sign}")
                parameters.append(text)
        if self.older_than_ms is not None:
            sql.append(f"created_ms <= {words.now_ms} - {words.sign}")
            parameters.append(int(self.older_than_ms))
        if self.lapsed:
            sql.append(f"state = {int(State.PROCESSING)} AND lease_until_ms <= {words.now_ms}")
        return Where(" AND ".join(sql), tuple(parameters))


@dataclass(frozen=True, slots=True)
class Counted:
    """How many records are in a state. `oldest_ms`: since the first of them was made."""

    state: State
    records: int
    oldest_ms: int
    expired: int
    lapsed: int


class InspectionSql:
    """The scripts."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self._select = f"SELECT {_COLUMNS.format(now_ms=words.now_ms)} FROM {words.table} WHERE "

    def page(self, which: Filter, after: bytes, rows: int) -> Script[list[Entry]]:
        """So many of them, after a key hash, in the order of these."""
        where = Where(f"key_hash > {self.words.sign}", (after,)) & which.where(self.words)
        return (yield from self._read(where, f" ORDER BY key_hash LIMIT {int(rows)}"))

    def one(self, key_hash: bytes) -> Script[Entry | None]:
        """The record; None if there is none."""
        found = yield from self._read(Where(f"key_hash = {self.words.sign}", (key_hash,)))
        return found[0] if found else None

    def oldest(self, state: State) -> Script[Entry | None]:
        """The record that has been in the table for longest, of those in that state."""
        found = yield from self._read(Where(f"state = {int(state)}"), " ORDER BY created_ms LIMIT 1")
        return found[0] if found else None

    def counts(self) -> Script[list[Counted]]:
        """How many records there are in each state that any is in."""
        words = self.words
        lapsed = f"state = {int(State.PROCESSING)} AND lease_until_ms <= {words.now_ms}"
        sql = (
            f"SELECT state, count(*), max({words.now_ms} - created_ms), sum(CASE WHEN {expired(words).sql} THEN 1 "
            f"ELSE 0 END), sum(CASE WHEN {lapsed} THEN 1 ELSE 0 END) FROM {words.table} WHERE {_REAL} GROUP BY state "
            "ORDER BY state"
        )
        rows = (yield Send(sql)).rows
        yield Rollback()
        return [Counted(known(State, state), int(n), int(age or 0), int(e), int(a)) for state, n, age, e, a in rows]

    def delete(self, keys: Sequence[bytes], which: Filter, *, unfinished: bool) -> Script[int]:
        """Delete those that `which` says and that are not live; without `unfinished`, of known outcome only."""
        return (yield from delete(self.words, keys, self._deletable(unfinished) & which.where(self.words)))

    def deletable(self, which: Filter, after: bytes, rows: int, *, unfinished: bool) -> Script[dict[bytes, int]]:
        """The keys of so many that `delete` would delete, in their order, with their fences."""
        after_key = Where(f"key_hash > {self.words.sign}", (after,))
        where = after_key & self._deletable(unfinished) & which.where(self.words)
        sql = f"SELECT key_hash, fence FROM {self.words.table} WHERE {where.sql} ORDER BY key_hash LIMIT {int(rows)}"
        yield from self.words.page_begun()
        found = (yield Send(sql, where.parameters)).rows
        yield Rollback()
        return {bytes(key_hash): int(fence) for key_hash, fence in found}

    def extend(self, entry: Entry, ttl_ms: int) -> Script[bool]:
        """Let it expire not before so many ms from now, if it has not changed and not expired; whether that is so."""
        words, until = self.words, f"{self.words.now_ms} + {int(ttl_ms)}"
        sql = (
            f"UPDATE {words.table} SET expires_ms = CASE WHEN expires_ms > {until} THEN expires_ms ELSE {until} END "
            f"WHERE key_hash = {words.sign} AND fence = {words.sign} AND {not_open().sql} "
            f"AND expires_ms > {words.now_ms}"
        )
        hit = (yield Send(sql, (entry.key_hash, entry.fence))).hit
        yield Commit()
        return bool(hit)

    def _deletable(self, unfinished: bool) -> Where:
        return not_live(self.words) if unfinished else not_open()

    def _read(self, where: Where, rest: str = "") -> Script[list[Entry]]:
        where &= Where(_REAL)
        rows = (yield Send(f"{self._select}{where.sql}{rest}", where.parameters)).rows
        yield Rollback()
        return [_entry(row) for row in rows]


def _entry(row: Sequence[Any]) -> Entry:
    key_hash, tenant, operation, hint, state, fence, attempt, age, lease, expires, completed, *rest = row
    owner, recovery_point, codec, status, body_bytes, reason = rest
    return Entry(
        bytes(key_hash), tenant, operation, hint, known(State, state), int(fence), int(attempt), int(age),
        _number(lease), _number(expires), _number(completed), owner or "", recovery_point,
        None if codec is None else known(Codec, codec), _number(status), int(body_bytes or 0), reason or "",
    )  # fmt: skip


def _number(value: Any) -> int | None:
    return None if value is None else int(value)
