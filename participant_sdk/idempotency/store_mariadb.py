"""The store in MariaDB's InnoDB, through PyMySQL or asyncmy; MySQL is spoken to in the same words, but not tested.

What differs from PostgreSQL:
* Nobody is told of a run's end: whoever waits looks again from time to time.
* There is no lock on a key that ends with the local transaction, so that an atomic run first inserts a row of its own
  that stands in for the record; a crash or a rollback takes it away. It looks like a record that has expired: should
  its local transaction commit without the record, then nothing bars the key. On MySQL, which cannot be told not to
  wait for one statement, a second run of the key waits for the first, up to innodb_lock_wait_timeout.
* A new fence is read back with the row still locked: there is no UPDATE ... RETURNING.
* From MariaDB 11.6 on, REPEATABLE READ (the default) bars what was changed since the first read (error 1020), as
  PostgreSQL's does. `innodb_snapshot_isolation` says so, and the work's local transaction locks the record first then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from sqlalchemy import Connection, Dialect

from participant_sdk.databases.database import Script
from participant_sdk.databases.driver_errors import LOCK_TIMEOUT, MARIADB
from participant_sdk.databases.mariadb import DUPLICATE, MariaDb, number_of
from participant_sdk.idempotency import sql
from participant_sdk.idempotency.record import Record
from participant_sdk.idempotency.sql import Sql, Values
from participant_sdk.idempotency.statements import SentStore
from participant_sdk.idempotency.store import Claim, Held, Met, Outcome
from participant_sdk.idempotency.stored import record_of
from participant_sdk.idempotency.tables import IdempotencyTables
from participant_sdk.steps import Commit, Look, Rollback, Send

_BARS: Final = "tricord.bars"
_NOT_NOW: Final = frozenset({LOCK_TIMEOUT, 3572})
"""The row is locked, and nobody wanted to wait. The local transaction goes on."""

_PATIENCE_0: Final = "/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */ "
_PATIENCE_1: Final = "/*M! SET STATEMENT innodb_lock_wait_timeout = 1 FOR */ "
"""How long a statement waits for a lock, in seconds; MySQL takes it for a comment."""
# One that is there is locked as firmly as a new one, so that nobody has to lock it a second time.
_STAND_IN: Final = (
    "INSERT INTO {table} (key_hash, tenant, operation, key_hint, fingerprint_version, fingerprint, created_ms, fence, "
    "attempt, state, waiters, expires_ms) VALUES (:key_hash, '', '', '', 0, '', {now_ms}, {now_us}, 1, 3, false, 0) "
    "ON DUPLICATE KEY UPDATE key_hash = {table}.key_hash"
)


class MariaDbStore(SentStore):
    """See the module. Works under READ COMMITTED and under the default REPEATABLE READ."""

    errors = MARIADB
    NOW_MS: ClassVar[str] = MariaDb.NOW_MS
    NOW_US: ClassVar[str] = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    SIGN: ClassVar[str] = MariaDb.SIGN
    SKIP_LOCKED: ClassVar[str] = " FOR UPDATE SKIP LOCKED"

    def __init__(self, dialect: Dialect, tables: IdempotencyTables) -> None:
        super().__init__(dialect, tables)
        self._settle = self._sql(_PATIENCE_1 + sql.SETTLE)
        self._insert_claim = self._sql(_PATIENCE_1 + sql.INSERT_CLAIM)
        self._stand_in = self._sql(_PATIENCE_0 + _STAND_IN)
        self._read_locked = self._sql(f"{sql.READ} FOR UPDATE")

    def lost_race(self, error: BaseException) -> bool:
        """See SentStore. Its statements are too impatient for a time-out to mean more."""
        return super().lost_race(error) or number_of(error) == LOCK_TIMEOUT

    def _insert(self, insert: Sql, values: Values) -> Script[bool]:
        try:
            yield Send(insert.text, insert.values(values))
        except Exception as error:
            if number_of(error) != DUPLICATE:
                raise
            return False
        return True

    def _renewed(self, held: Sequence[tuple[Held, int]]) -> Script[frozenset[bytes]]:
        fences = {one.key_hash: one.fence for one, _ in held}
        signs = ", ".join(["%s"] * len(fences))
        mine = f"FROM {self.table} FORCE INDEX (PRIMARY) WHERE key_hash IN ({signs}) AND state = 0"
        read = f"SELECT key_hash, fence {mine}"
        yield from self._begin()
        still = {bytes(key) for key, fence in (yield Send(read, (*fences,))).rows if fences[bytes(key)] == int(fence)}
        yield Rollback()
        # One that is locked is about to end: there is nothing to renew, and nobody to wait for.
        yield from self._begin()
        rows = (yield Send(f"{read}{self.SKIP_LOCKED}", (*fences,))).rows
        free = {bytes(key) for key, fence in rows if fences[bytes(key)] == int(fence)}
        for lease_ms in sorted({lease_ms for _, lease_ms in held}):
            keys = [one.key_hash for one, each_ms in held if each_ms == lease_ms and one.key_hash in free]
            if keys:
                signs = ", ".join(["%s"] * len(keys))
                update = f"UPDATE {self.table} SET lease_until_ms = {self.NOW_MS} + %s WHERE key_hash IN ({signs})"
                yield Send(update, (lease_ms, *keys))
        yield Commit()
        return frozenset(still | free)

    def pin(self, held: Held, *, again: bool) -> Script[None]:
        """See Store."""
        bars = yield Look(_is_known_to_bar)
        if bars is None:
            rows = (yield Send("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'")).rows
            bars = bool(rows) and rows[0][1] == "ON"
            yield Look(lambda connection: connection.info.update({_BARS: bars}))
        if bars:
            yield from self._pin_it(held, again)

    def meet(self, key_hash: bytes, wait_ms: int) -> Script[Met]:
        """See Store."""
        yield from self._begin()
        try:
            yield Send(self._stand_in.text, (key_hash,))
        except Exception as error:
            if number_of(error) not in _NOT_NOW:
                raise
            return Met(False, (yield from self._found(key_hash)))
        return Met(True, _not_a_stand_in((yield from self._locked(key_hash))))

    def _locked(self, key_hash: bytes) -> Script[Record | None]:
        rows = (yield Send(self._read_locked.text, (key_hash,))).rows
        return record_of(key_hash, rows[0]) if rows else None

    def _written(self, claim: Claim, met: Record | None, outcome: Outcome) -> Script[bool]:
        if met is None:
            there = yield from self._locked(claim.key_hash)
            if there is not None and _not_a_stand_in(there) is None:
                met = there
        return (yield from super()._written(claim, met, outcome))


def _is_known_to_bar(connection: Connection) -> bool | None:
    """Whether its local transactions are barred from what was changed since their snapshot; None: not asked yet."""
    default = getattr(connection.dialect, "_on_connect_isolation_level", None)
    level = connection.get_execution_options().get("isolation_level", default)
    return False if level == "READ COMMITTED" else connection.info.get(_BARS)


def _not_a_stand_in(record: Record | None) -> Record | None:
    return None if record is None or not record.operation else record
