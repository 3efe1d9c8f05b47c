"""The store by statements that are sent one at a time, in the driver's own style of parameters."""

from __future__ import annotations

import hashlib
import secrets
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, TypeVar

from sqlalchemy import Dialect

from participant_sdk.databases.database import Script, known_to_sqlalchemy
from participant_sdk.idempotency import sql
from participant_sdk.idempotency.errors import LeaseLost
from participant_sdk.idempotency.machine import has_expired
from participant_sdk.idempotency.record import KEY_HASH_BYTES, Record, State
from participant_sdk.idempotency.sql import Sql, Values
from participant_sdk.idempotency.store import Claim, Held, Outcome, Store
from participant_sdk.idempotency.stored import COLUMNS, check, check_outcome, check_point, record_of
from participant_sdk.idempotency.tables import IdempotencyTables
from participant_sdk.steps import Ask, Commit, Rollback, Send

R = TypeVar("R")

RUNS_MAX: Final = 20
"""How often a local transaction of the store's own is begun, if each loses a race."""
IDENTITY_KEY: Final = hashlib.sha256(b"tricord idempotency store").digest()
"""Of the row that is about the store itself: its identity is its fingerprint, its lease the sweeper's turn."""
TAKEN_OVER: Final = "another run has taken over; nothing of this one stays"
BARRED: Final = (
    "its record was changed after the snapshot of its local transaction, by a renewal of its lease or by another run: "
    "nothing of it stays; join a local transaction before its first statement, or work under READ COMMITTED"
)
WRITTEN: Final = "another run has written the record; nothing of this one stays"


class SentStore(Store):
    """See the module. Each database has its words, and what differs more."""

    NOW_MS: ClassVar[str]
    """The clock at this moment, ms since 1970."""
    NOW_US: ClassVar[str]
    SIGN: ClassVar[str]
    """A parameter."""
    GREATEST: ClassVar[str] = "GREATEST"
    SKIP_LOCKED: ClassVar[str] = ""
    """For a read: lock the row, and take one that somebody else has locked for not there."""

    def __init__(self, dialect: Dialect, tables: IdempotencyTables) -> None:
        super().__init__(tables)
        self.table = dialect.identifier_preparer.format_table(tables.records)
        self._read = self._sql(sql.READ)
        self._insert_claim = self._sql(sql.INSERT_CLAIM)
        self._insert_ended = self._sql(sql.INSERT_ENDED)
        self._insert_identity = self._sql(sql.INSERT_IDENTITY)
        self._take_over = self._sql(sql.TAKE_OVER)
        self._replace = self._sql(sql.REPLACE)
        self._write_over = self._sql(sql.WRITE_OVER)
        self._write_anew = self._sql(sql.WRITE_ANEW)
        self._complete = self._sql(sql.COMPLETE)
        self._settle = self._sql(sql.SETTLE)
        self._give_up = self._sql(sql.GIVE_UP)
        self._seize = self._sql(sql.SEIZE)
        self._reach = self._sql(sql.REACH)
        self._lock = self._sql(sql.LOCK)
        self._held = self._sql(sql.HELD)
        self._pin = self._sql(sql.PIN)

    def _sql(self, template: str) -> Sql:
        return Sql.signed(template, self.SIGN, self._words)

    @property
    def _words(self) -> dict[str, str]:
        return {
            "table": self.table,
            "columns": COLUMNS.format(now_ms=self.NOW_MS),
            "now_ms": self.NOW_MS,
            "now_us": self.NOW_US,
            "greatest": self.GREATEST,
            "skip_locked": self.SKIP_LOCKED,
        }

    # What differs between the databases.

    def lost_race(self, error: BaseException) -> bool:
        """Whether a local transaction of the store's own has only lost a race, so that running it again may do."""
        return self.errors.is_race(error)

    def changed_under(self, error: BaseException) -> bool:
        """Whether the record was changed since the local transaction's snapshot, which bars writing it."""
        return self.errors.is_change(error)

    def _begin(self) -> Script[None]:
        """Begin a local transaction of the store's own, which is going to write."""
        yield Ask(known_to_sqlalchemy)

    @abstractmethod
    def _insert(self, insert: Sql, values: Values) -> Script[bool]:
        """Insert; False if the key has a record."""

    def _end(self, update: Sql, values: Values) -> Script[tuple[bool, bool]]:
        """Update the record to its end; whether it was hit, and whether anybody waits for that."""
        return (yield from self._hits(update, values)), False

    @abstractmethod
    def _renewed(self, held: Sequence[tuple[Held, int]]) -> Script[frozenset[bytes]]:
        """One local transaction of `renew`."""

    # The scripts.

    def identity(self) -> Script[bytes]:
        """See Store."""
        return (yield from self._again(self._identity))

    def _identity(self) -> Script[bytes]:
        while True:
            there = yield from self._found(IDENTITY_KEY)
            yield Rollback()
            if there is not None:
                return there.fingerprint.digest
            yield from self._begin()
            values = {"key_hash": IDENTITY_KEY, "digest": secrets.token_bytes(KEY_HASH_BYTES)}
            yield Commit() if (yield from self._insert(self._insert_identity, values)) else Rollback()

    def claim(self, claim: Claim) -> Script[Held | Record]:
        """See Store. Read first: a repeat is as likely as not, and writes nothing then."""
        check(claim)
        return (yield from self._again(lambda: self._claim(claim)))

    def _claim(self, claim: Claim) -> Script[Held | Record]:
        while True:
            met = yield from self.read(claim.key_hash)
            if met is not None:
                return met
            yield from self._begin()
            if (yield from self._insert(self._insert_claim, sql.who(claim))):
                held = yield from self._now_held(claim.key_hash)
                yield Commit()
                return held
            yield Rollback()  # another was faster: what it wrote is seen by a new statement

    def take_over(self, claim: Claim, met: Record) -> Script[Held | None]:
        """See Store."""
        check(claim)
        return (yield from self._again(lambda: self._take(claim, met)))

    def _take(self, claim: Claim, met: Record) -> Script[Held | None]:
        update = self._replace if has_expired(met) else self._take_over
        yield from self._begin()
        if (yield from self._is_free(met)) and (yield from self._hits(update, sql.who(claim) | sql.this(met))):
            held = yield from self._now_held(met.key_hash)
            yield Commit()
            return held
        yield Rollback()
        return None

    def _is_free(self, met: Record) -> Script[bool]:
        """Whether nobody else has the record locked, and it is as it was met."""
        return bool((yield Send(self._lock.text, self._lock.values(sql.this(met)))).rows)

    def _hits(self, update: Sql, values: Values) -> Script[bool]:
        return bool((yield Send(update.text, update.values(values))).hit == 1)

    def _now_held(self, key_hash: bytes) -> Script[Held]:
        fence, attempt = (yield Send(self._held.text, (key_hash,))).rows[0]
        return Held(key_hash, int(fence), int(attempt))

    def renew(self, held: Sequence[tuple[Held, int]]) -> Script[frozenset[bytes]]:
        """See Store."""
        return (yield from self._again(lambda: self._renewed(held))) if held else frozenset()

    def _pin_it(self, held: Held, again: bool) -> Script[None]:
        """See Store.pin, where it has to be."""
        yield from (self._again(lambda: self._pin_once(held)) if again else self._pin_once(held))

    def _pin_once(self, held: Held) -> Script[None]:
        yield Ask(known_to_sqlalchemy)
        yield Send(self._pin.text, self._pin.values(sql.this(held)))

    def settle(self, held: Held, outcome: Outcome) -> Script[bool]:
        """See Store."""
        check_outcome(outcome, State.PROCESSING)
        return (yield from self._again(lambda: self._settled(held, outcome)))

    def _settled(self, held: Held, outcome: Outcome) -> Script[bool]:
        yield from self._begin()
        # What is UNKNOWN already is not to be said so again: by whom, and why, stays.
        update = self._complete if outcome.state is State.UNKNOWN else self._settle
        hit, _ = yield from self._end(update, sql.ended(outcome) | sql.this(held))
        yield Commit() if hit else Rollback()
        return hit

    def give_up(self, met: Record, reason: str) -> Script[bool]:
        """See Store."""
        unknown = Outcome(State.UNKNOWN, None, None, reason)
        return (yield from self._again(lambda: self._ended_for_it(self._give_up, met, unknown)))

    def seize(self, met: Record, outcome: Outcome) -> Script[bool]:
        """See Store."""
        check_outcome(outcome, State.PROCESSING)
        return (yield from self._again(lambda: self._ended_for_it(self._seize, met, outcome)))

    def _ended_for_it(self, update: Sql, met: Record, outcome: Outcome) -> Script[bool]:
        yield from self._begin()
        hit = met.state is State.PROCESSING and (yield from self._is_free(met))
        if hit:
            hit, _ = yield from self._end(update, sql.ended(outcome) | sql.this(met))
        yield Commit() if hit else Rollback()
        return hit

    def read(self, key_hash: bytes) -> Script[Record | None]:
        """See Store."""
        record = yield from self._found(key_hash)
        yield Rollback()
        return record

    def _found(self, key_hash: bytes) -> Script[Record | None]:
        rows = (yield Send(self._read.text, (key_hash,))).rows
        return record_of(key_hash, rows[0]) if rows else None

    def await_end(self, held: Record) -> Script[None]:
        """See Store. Here nobody could be told."""
        yield from ()

    def complete(self, held: Held, outcome: Outcome, *, commit: bool = False) -> Script[bool]:
        """See Store."""
        check_outcome(outcome, State.PROCESSING)
        try:
            hit, awaited = yield from self._end(self._complete, sql.ended(outcome) | sql.this(held))
        except Exception as error:
            raise self._told(error) from error
        if not hit:
            raise LeaseLost(TAKEN_OVER)
        if commit:
            yield Commit()
        return awaited

    def reach(
        self, held: Held, point: str, phase_data: bytes, *, lease_ms: int = 0, commit: bool = False
    ) -> Script[None]:
        """See Store."""
        check_point(point)
        values = {"point": point, "phase_data": phase_data, "lease_ms": lease_ms, **sql.this(held)}
        try:
            hit = yield from self._hits(self._reach, values)
        except Exception as error:
            raise self._told(error) from error
        if not hit:
            raise LeaseLost(TAKEN_OVER)
        if commit:
            yield Commit()

    def _told(self, error: Exception) -> Exception:
        return LeaseLost(BARRED) if self.changed_under(error) else error

    def write(self, claim: Claim, met: Record | None, outcome: Outcome, *, commit: bool = False) -> Script[None]:
        """See Store."""
        check(claim)
        check_outcome(outcome, None)
        try:
            written = yield from self._written(claim, met, outcome)
        except Exception as error:
            if not self.changed_under(error):
                raise
            written = False
        if not written:
            raise LeaseLost(WRITTEN)
        if commit:
            yield Commit()

    def _written(self, claim: Claim, met: Record | None, outcome: Outcome) -> Script[bool]:
        values = sql.who(claim) | sql.ended(outcome)
        if met is None:
            return (yield from self._insert(self._insert_ended, values))
        update = self._write_anew if has_expired(met) else self._write_over
        return (yield from self._hits(update, values | sql.this(met)))

    def _again(self, script: Callable[[], Script[R]]) -> Script[R]:
        """Run a local transaction of the store's own; again, if it has lost a race."""
        for run in range(1, RUNS_MAX + 1):
            try:
                return (yield from script())
            except Exception as error:
                yield Rollback()
                if run == RUNS_MAX or not self.lost_race(error):
                    raise
        raise AssertionError("unreachable")
