"""The store in PostgreSQL, through psycopg.

What every request does is a script of prepared statements, which is one round trip: the beginning of an atomic run
with its lock and its read, a claim with its COMMIT, the end of a run with its COMMIT, a read by itself. All else, and
what happens in a local transaction of the user's, is sent one statement at a time.

A key is barred by an advisory lock, which ends with its local transaction. Claims and the like are READ COMMITTED
whatever the engine is. Under REPEATABLE READ and SERIALIZABLE a local transaction may not write a row that was changed
since its first statement: the work's begins by locking the record, so that no lease is renewed under it (`pin`); and a
second run that got the lock at the moment of the first one's COMMIT learns from its own write that it came too late
(LeaseLost).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import psycopg
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Dialect

from participant_sdk.databases.database import Script
from participant_sdk.databases.driver_errors import POSTGRESQL, unwrapped
from participant_sdk.databases.postgresql_script import NotPrepared, PgScript, Prepared
from participant_sdk.databases.postgresql_statements import Statements, as_it_is, begun
from participant_sdk.idempotency import sql, sql_postgresql
from participant_sdk.idempotency.errors import LeaseLost
from participant_sdk.idempotency.machine import has_expired
from participant_sdk.idempotency.record import Record, State
from participant_sdk.idempotency.sql import Sql, Values
from participant_sdk.idempotency.statements import BARRED, TAKEN_OVER, WRITTEN, SentStore
from participant_sdk.idempotency.store import Claim, Held, Met, Outcome
from participant_sdk.idempotency.stored import COLUMNS_IN_HEX, check, check_outcome, lock_number, record_of_texts
from participant_sdk.idempotency.tables import IdempotencyTables
from participant_sdk.steps import Commit, Look, Send

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

_UNIQUE: Final = "23505"
_CHANNEL_BYTES_MAX: Final = 63
_READ_COMMITTED: Final = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
_BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED;"
_LEVEL: Final = "tricord.level"
_SNAPSHOTS: Final = (IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE, b"repeatable read", b"serializable")
_SAVEPOINT: Final = "SAVEPOINT tricord_end;"
_ROLLBACK_TO: Final = "ROLLBACK TO SAVEPOINT tricord_end;"


class PostgreSQLStore(SentStore):
    """See the module."""

    errors = POSTGRESQL
    NOW_MS: ClassVar[str] = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
    NOW_US: ClassVar[str] = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
    SIGN: ClassVar[str] = "%s"
    SKIP_LOCKED: ClassVar[str] = " FOR UPDATE SKIP LOCKED"

    def __init__(self, dialect: Dialect, tables: IdempotencyTables) -> None:
        super().__init__(dialect, tables)
        self.channel = _channel(tables.records_name)
        ends = (
            (self._complete, sql.COMPLETE),
            (self._settle, sql.SETTLE),
            (self._give_up, sql.GIVE_UP),
            (self._seize, sql.SEIZE),
        )
        self._telling = {end: self._sql(sql_postgresql.TELL.format(update)) for end, update in ends}
        self._renew = self._sql(sql_postgresql.RENEW)
        self._owner = ("idempotency", self.table)
        words = {**self._words, "table": as_it_is(self.table), "columns": COLUMNS_IN_HEX.format(now_ms=self.NOW_MS)}
        self._prepared = {key: Sql.numbered(template, words) for key, template in sql_postgresql.PREPARED.items()}
        self._writers = {
            key: [(name, sql_postgresql.AS_ARGUMENT[name]) for name in each.names]
            for key, each in self._prepared.items()
        }
        self._statements = Statements(
            {key: each.text for key, each in self._prepared.items()},
            {key: ", ".join(sql_postgresql.TYPES[name] for name in each.names) for key, each in self._prepared.items()},
        )

    def is_transient(self, error: BaseException) -> bool:
        """See Store."""
        return isinstance(error, NotPrepared) or super().is_transient(error)

    def lost_race(self, error: BaseException) -> bool:
        """See SentStore."""
        return isinstance(error, NotPrepared) or super().lost_race(error)

    def changed_under(self, error: BaseException) -> bool:
        """See SentStore. Not meant are the failures of SERIALIZABLE's own making, which say nothing of the row."""
        driver_error: Any = unwrapped(error)
        return super().changed_under(error) and driver_error.diag.source_file != "predicate.c"

    # What every request does.

    def _claim(self, claim: Claim) -> Script[Held | Record]:
        before = "" if claim.durable else "SET LOCAL synchronous_commit = off;"
        script = PgScript(before, self._with("claim", sql.who(claim)), ";COMMIT", of=self._owner, begin=_BEGIN)
        while True:
            found = (yield from begun(script, self._make_ready))[-2]
            if found.ntuples:  # else it has waited for another's claim, which that statement cannot see
                fence, *values = _row(found)
                if fence is not None:
                    return Held(claim.key_hash, int(fence), 1)
                return record_of_texts(claim.key_hash, values)

    def read(self, key_hash: bytes) -> Script[Record | None]:
        """See Store."""
        script = PgScript("", self._with("read", {"key_hash": key_hash}), of=self._owner, begin=None)
        return _record(key_hash, (yield from begun(script, self._make_ready))[-1])

    def meet(self, key_hash: bytes, wait_ms: int) -> Script[Met]:
        """See Store."""
        number = lock_number(key_hash)
        if (yield Look(_in_transaction)):  # the user's, which preparing must not break
            free = bool((yield Send("SELECT pg_try_advisory_xact_lock(%s::bigint)", (number,))).rows[0][0])
            return Met(free, (yield from self._found(key_hash)))
        lock, read = self._with("lock", {"number": number}), self._with("read", {"key_hash": key_hash})
        results = yield from begun(PgScript("", read, of=self._owner, lead=(lock,), as_text=True), self._make_ready)
        return Met(results[-2].get_value(0, 0) == b"t", _record(key_hash, results[-1]))

    def leave(self) -> Script[None]:
        """See Store. By the driver's rollback() all prepared statements might go, the user's and these."""
        yield PgScript("ROLLBACK")

    def complete(self, held: Held, outcome: Outcome, *, commit: bool = False) -> Script[bool]:
        """See Store."""
        if not commit:
            return (yield from super().complete(held, outcome))
        check_outcome(outcome, State.PROCESSING)
        values = sql.ended(outcome) | sql.this(held) | self._whom(held.key_hash)
        results = yield from self._end_with_commit(self._with("complete", values), TAKEN_OVER)
        return results[-2].get_value(0, 1) == b"t"

    def write(self, claim: Claim, met: Record | None, outcome: Outcome, *, commit: bool = False) -> Script[None]:
        """See Store."""
        if not commit:
            yield from super().write(claim, met, outcome)
            return
        check(claim)
        check_outcome(outcome, None)
        values = sql.who(claim) | sql.ended(outcome)
        if met is None:
            prepared = self._with("insert", values)
        else:
            prepared = self._with("write_anew" if has_expired(met) else "write_over", values | sql.this(met))
        try:
            yield from self._end_with_commit(prepared, WRITTEN)
        except psycopg.Error as error:
            if error.sqlstate == _UNIQUE and error.diag.table_name == self.tables.records.name:
                raise LeaseLost(WRITTEN) from error
            raise

    def _end_with_commit(self, prepared: Prepared, lost: str) -> Script[Sequence[PGresult]]:
        """The last statement of a run, and COMMIT. The work is not to be lost because a statement is not prepared."""
        script = PgScript(_SAVEPOINT, prepared, ";COMMIT", _Missed, counted=1, begin=_BEGIN)  # if there was no work
        try:
            try:
                return (yield script)  # type: ignore[no-any-return]
            except NotPrepared:
                script = PgScript(_ROLLBACK_TO, prepared, ";COMMIT", _Missed, counted=1)  # now in full
                return (yield script)  # type: ignore[no-any-return]
        except _Missed as error:
            raise LeaseLost(lost) from error
        except psycopg.Error as error:
            if self.changed_under(error):
                raise LeaseLost(BARRED) from error
            raise

    def _with(self, key: str, values: Values) -> Prepared:
        return self._statements.with_(key, [written(values[name]) for name, written in self._writers[key]])

    def _whom(self, key_hash: bytes) -> dict[str, Any]:
        return {"channel": self.channel, "key_in_hex": key_hash.hex()}

    def _make_ready(self) -> Script[None]:
        yield from self._statements.prepare(self._owner)

    # What only some do.

    def pin(self, held: Held, *, again: bool) -> Script[None]:
        """See Store."""
        level = yield Look(_known_level)
        if level is None:
            level = (yield PgScript("SHOW transaction_isolation"))[0].get_value(0, 0)
            yield Look(lambda connection: connection.info.update({_LEVEL: level}))
        if level in _SNAPSHOTS:
            yield from self._pin_it(held, again)

    def _begin(self) -> Script[None]:
        yield from super()._begin()
        if not (yield Look(_in_transaction)):  # else a listener of the engine has executed something
            yield Send(_READ_COMMITTED)

    def _insert(self, insert: Sql, values: Values) -> Script[bool]:
        return bool((yield Send(f"{insert.text} ON CONFLICT DO NOTHING", insert.values(values))).hit == 1)

    def _end(self, update: Sql, values: Values) -> Script[tuple[bool, bool]]:
        telling = self._telling[update]
        rows = (yield Send(telling.text, telling.values({**values, **self._whom(values["key_hash"])}))).rows
        return bool(rows), bool(rows and rows[0][0])

    def _renewed(self, held: Sequence[tuple[Held, int]]) -> Script[frozenset[bytes]]:
        """One that is locked is about to end: there is nothing to renew, and nobody to wait for."""
        keys, fences = [one.key_hash for one, _ in held], [one.fence for one, _ in held]
        yield from self._begin()
        rows = (yield Send(self._renew.text, (keys, fences, [lease_ms for _, lease_ms in held]))).rows
        yield Commit()
        return frozenset(bytes(key) for (key,) in rows)

    def await_end(self, held: Record) -> Script[None]:
        """See Store.

        Not where the engine's local transactions see one snapshot: a completion would be barred by what is noted here.
        """
        yield from self._again(lambda: self._awaited(held))

    def _awaited(self, held: Record) -> Script[None]:
        yield from SentStore._begin(self)
        level = (yield Send("SHOW transaction_isolation")).rows[0][0]
        if level == "read committed" and held.state is State.PROCESSING and (yield from self._is_free(held)):
            yield Send(f"UPDATE {self.table} SET waiters = true WHERE key_hash = %s AND NOT waiters", (held.key_hash,))
        yield Commit()


class _Missed(Exception):
    """The statement that has to hit the record has hit none."""


def _channel(records_name: str) -> str:
    name = f"{records_name}_ended"
    return name if len(name.encode()) <= _CHANNEL_BYTES_MAX else f"tricord_{zlib.crc32(name.encode()):08x}_ended"


def _row(found: PGresult) -> list[bytes | None]:
    return [found.get_value(0, column) for column in range(found.nfields)]


def _record(key_hash: bytes, found: PGresult) -> Record | None:
    return record_of_texts(key_hash, _row(found)) if found.ntuples else None


def _known_level(connection: Connection) -> Any:
    """What the engine says, or what the server has said: the isolation level of its local transactions."""
    raw: Any = connection.connection.driver_connection
    return connection.info.get(_LEVEL) if raw.isolation_level is None else raw.isolation_level


def _in_transaction(connection: Connection) -> bool:
    raw: Any = connection.connection.driver_connection
    return bool(raw.pgconn.transaction_status != TransactionStatus.IDLE)
