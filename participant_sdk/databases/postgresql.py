"""PostgreSQL, through psycopg: one round trip before the handler and one after it.

What would be six or seven statements travels as two scripts of prepared statements (`EXECUTE`) in the simple query
protocol, which runs a script up to its first error and no further: a COMMIT at its end is reached only if all before
it went well. A statement that must hit exactly one row divides by the number of rows, so that zero is an error. What
is put into a script is numbers, names of known form, and everything else in hexadecimal.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus, TransactionStatus
from sqlalchemy import Connection, Dialect
from sqlalchemy import exc as sqlalchemy_errors

from participant_sdk.call import FINGERPRINT_ALGORITHM, IncomingCall, Refusal
from participant_sdk.databases.database import (
    RELEASE,
    ROLLBACK_TO,
    SAVEPOINT,
    Database,
    Script,
    idle_ms,
    is_refused_connection,
    known_to_sqlalchemy,
    wait_ms,
)
from participant_sdk.fence import Phase, Status
from participant_sdk.fence_row import MEETS_WITH, FenceRow, Meeting, RowGone, status_of
from participant_sdk.fence_tables import FenceTables
from participant_sdk.payload import Payload
from participant_sdk.steps import Look, Rollback, RunAgain, drop_if_lost

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult
    from sqlalchemy.ext.asyncio import AsyncConnection

_READY: Final = "tricord.ready"
_IN_FULL: Final = "tricord.in_full"

_ROW: Final = (
    "participant, status, finished_at IS NOT NULL, fingerprint_algorithm, encode(fingerprint, 'hex'), "
    "encode(result, 'hex'), result_content_type, refusal_reason, refusal_message, intent, lease_until_ms - {now_ms}"
)
_NOW_MS: Final = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_THIS: Final = "xid = $1 AND branch_id = $2"
_FINISHED: Final = (
    "modified_at = clock_timestamp(), finished_at = clock_timestamp(), intent = NULL, lease_until_ms = NULL"
)
_MINE: Final = "status = $3 AND finished_at IS NULL AND intent IS NOT DISTINCT FROM $4"
_ONE_ROW: Final = "WITH hit AS ({update} RETURNING 1) SELECT 1 / count(*) FROM hit"

_DIVISION_BY_ZERO: Final = "22012"
_NOT_PREPARED: Final = "26000"
_ALREADY_PREPARED: Final = "42P05"
_PLAN_OUTDATED: Final = "0A000"

_TRANSIENT_SQLSTATES: Final = frozenset(
    {
        "40001",  # serialization failure
        "40P01",  # deadlock
        "55P03",  # lock time-out
        "25P03",  # idle-in-transaction time-out: the connection is gone
        "53300",  # too many connections
        "57P01",  # the server is shutting down
        "57P02",
        "57P03",
    }
)


class NotPrepared(RunAgain):
    """The fence's prepared statements were gone. psycopg deallocates all that there are when it has rolled back."""

    def __init__(self) -> None:
        super().__init__("the fence's prepared statements were gone")


class Changed(RunAgain):
    """A row that was met is not as it was."""

    def __init__(self) -> None:
        super().__init__("the fence row was changed meanwhile")


@dataclass(slots=True)
class Prepared:
    """A statement of the fence with its arguments, as SQL."""

    name: str
    sql: str
    arguments: Sequence[str]

    def in_full(self) -> str:
        """As what runs it where nothing can be prepared."""
        return _PARAMETER.sub(lambda found: self.arguments[int(found[1]) - 1], self.sql)


_PARAMETER: Final = re.compile(r"\$(\d)")


@dataclass(slots=True)
class PgScript:
    """The step that sends a script, `prepared` between `before` and `after`; gives the result of each statement.

    `missed` is raised when the statement number `counted` (from 0), one that must hit a row, has hit none. A script
    `of` a fence begins a local transaction; on a connection that is not ready for this fence it gives None instead.
    """

    before: str
    prepared: Prepared | None = None
    after: str = ""
    missed: type[Exception] | None = None
    counted: int = 0
    of: tuple[str, str] | None = None

    def perform(self, connection: Connection) -> Sequence[PGresult] | None:
        """See Step."""
        fairy = connection.connection
        raw: psycopg.Connection[Any] = fairy.dbapi_connection  # type: ignore[assignment]
        if self.of is not None:
            if fairy.info.get(_READY) != self.of:
                return None
            known_to_sqlalchemy(connection)
        try:
            raw.pgconn.send_query(self._sql(fairy.info, raw).encode())
            results: Sequence[PGresult] = raw.wait(generators.execute(raw.pgconn))
            if results[-1].status == ExecStatus.FATAL_ERROR:
                raise self._error(results, raw)
        except psycopg.Error as error:
            raise self._told(error, connection) from error
        return results

    async def perform_async(self, connection: AsyncConnection) -> Sequence[PGresult] | None:
        """See Step."""
        synchronous = cast(Connection, connection.sync_connection)
        if synchronous.invalidated:  # it is made anew by whoever asks for it
            await connection.run_sync(lambda lost: lost.connection)
        fairy = synchronous.connection
        raw: psycopg.AsyncConnection[Any] = fairy.driver_connection  # type: ignore[assignment]
        if self.of is not None:
            if fairy.info.get(_READY) != self.of:
                return None
            await connection.run_sync(known_to_sqlalchemy)  # a listener of the engine may execute something
        try:
            raw.pgconn.send_query(self._sql(fairy.info, raw).encode())
            results: Sequence[PGresult] = await raw.wait(generators.execute(raw.pgconn))
            if results[-1].status == ExecStatus.FATAL_ERROR:
                raise self._error(results, raw)
        except psycopg.Error as error:
            raise self._told(error, synchronous) from error
        return results

    def _sql(self, info: dict[Any, Any], raw: Any) -> str:
        sql = self.before
        # It has begun if the engine has a listener that executes something at every beginning.
        if self.of is not None and raw.pgconn.transaction_status == TransactionStatus.IDLE:
            sql = _BEGIN[raw.isolation_level] + sql
        if (prepared := self.prepared) is not None:
            if raw.prepare_threshold is None or (self.of is None and _IN_FULL in info):
                sql += prepared.in_full()
            else:
                sql = f"{sql}EXECUTE {prepared.name}({','.join(prepared.arguments)})"
        return sql + self.after

    def _error(self, results: Sequence[PGresult], raw: Any) -> Exception:
        error = psycopg.errors.error_from_result(results[-1], encoding=raw.info.encoding)
        if self.missed is not None and len(results) == self.counted + 1 and error.sqlstate == _DIVISION_BY_ZERO:
            return self.missed()
        return error

    def _told(self, error: psycopg.Error, connection: Connection) -> Exception:
        """What `error` means. SQLAlchemy, past which it came, is told if the connection is lost."""
        if error.sqlstate == _NOT_PREPARED or (error.sqlstate == _PLAN_OUTDATED and "cached plan" in str(error)):
            connection.info.pop(_READY, None)
            if self.of is None:  # it happened since the beginning, and may happen each time
                connection.info[_IN_FULL] = True
            return NotPrepared()
        drop_if_lost(connection, error)
        return error


_BEGIN: Final = {None: "BEGIN;"} | {
    level: f"BEGIN ISOLATION LEVEL {level.name.replace('_', ' ')};" for level in psycopg.IsolationLevel
}
"""As the driver would say it, which leaves the engine's isolation level to that statement."""


class PostgreSQL(Database):
    """See the module. Works under READ COMMITTED, REPEATABLE READ and SERIALIZABLE, whichever the engine has."""

    _TYPES: ClassVar[dict[str, str]] = {
        "meet": "varchar, bigint, varchar, varchar, smallint, smallint, bytea",
        "meet_new": "varchar, bigint, varchar, varchar, smallint, smallint, bytea",
        "read": "varchar, bigint",
        "start": "varchar, bigint, smallint, varchar, smallint, boolean",
        "finish": "varchar, bigint, smallint, varchar",
        "finish_with_result": "varchar, bigint, smallint, varchar, bytea, text",
        "refuse": "varchar, bigint, smallint, varchar, smallint, text, text",
        "lease": "varchar, bigint, smallint, varchar, varchar, bigint",
        "lapse": "varchar, bigint, smallint, varchar",
    }

    def __init__(self, dialect: Dialect, tables: FenceTables) -> None:
        super().__init__(dialect, tables)
        row, log = _ROW.format(now_ms=_NOW_MS), _as_it_is(self.log)
        finish = f"UPDATE {log} SET {_FINISHED}{{more}} WHERE {_THIS} AND {_MINE}"
        insert = (
            f"INSERT INTO {log} (xid, branch_id, participant, action, status, fingerprint_algorithm, fingerprint, "
            "created_at, modified_at) VALUES ($1, $2, $3, $4, $5, $6, $7, clock_timestamp(), clock_timestamp()) "
            "ON CONFLICT DO NOTHING RETURNING"
        )
        self._sql = {
            "meet_new": f"{insert} {_NOW_MS}",
            "meet": f"WITH made AS ({insert} status) "
            f"SELECT {_NOW_MS}, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM made "
            f"UNION ALL SELECT NULL, {row} FROM {log} WHERE {_THIS}",
            "read": f"SELECT NULL, {row} FROM {log} WHERE {_THIS}",
            "start": f"UPDATE {log} SET status = $5, modified_at = clock_timestamp(), finished_at = NULL, "
            f"intent = NULL, lease_until_ms = NULL WHERE {_THIS} AND status = $3 AND intent IS NOT DISTINCT FROM $4 "
            "AND (finished_at IS NOT NULL) = $6",
            "finish": _ONE_ROW.format(update=finish.format(more="")),
            "finish_with_result": _ONE_ROW.format(update=finish.format(more=", result = $5, result_content_type = $6")),
            "refuse": _ONE_ROW.format(
                update=finish.format(more=", status = $5, refusal_reason = $6, refusal_message = $7")
            ),
            "lease": _ONE_ROW.format(
                update=f"UPDATE {log} SET intent = $5, lease_until_ms = {_NOW_MS} + $6 WHERE {_THIS} AND {_MINE}"
            ),
            "lapse": f"UPDATE {log} SET lease_until_ms = 0 WHERE {_THIS} AND {_MINE}",
        }
        # Named after their text: two fences, or two versions, on one connection do not take each other's.
        self._names = {key: f"tricord_{key}_{zlib.crc32(sql.encode()):08x}" for key, sql in self._sql.items()}

    def meet(self, call: IncomingCall) -> Script[Meeting]:
        """See Database."""
        status = MEETS_WITH.get(call.phase)
        if status is None:
            return _meeting((yield from self._first(call, self._prepared("read", _this(call))))[-1])
        is_try = call.phase is Phase.TRY
        arguments = (
            *_this(call),
            _word(call.participant),
            _word(call.action),
            f"{status:d}",
            f"{FINGERPRINT_ALGORITHM}",
            _bytes(call.fingerprint),
        )
        # A first Try hardly ever meets a row, so that looking for one in the same statement is not worth its cost.
        meet = self._prepared("meet_new" if is_try and call.attempt <= 1 else "meet", arguments)
        results = yield from self._first(call, meet, f";{SAVEPOINT}" if is_try else "")
        met = results[-2] if is_try else results[-1]
        if met.ntuples:
            return _meeting(met)
        # There is one, or the insert has waited for another's, which that statement cannot see under READ COMMITTED.
        results = yield PgScript("", self._prepared("read", _this(call)))
        if not results[-1].ntuples:  # its local transaction was rolled back, or the row was purged
            raise RunAgain("the fence row went away between two statements")
        return _meeting(results[-1])

    def leave(self) -> Script[None]:
        """See Database. By the driver's rollback() all prepared statements would go, the user's and the fence's."""
        yield PgScript("ROLLBACK")

    def savepoint(self) -> Script[None]:
        """It was set on the way of `meet`."""
        yield from ()

    def start(self, call: IncomingCall, row: FenceRow, status: Status) -> Script[None]:
        """See Database."""
        arguments = (*_mine(call, row.status, row.intent), f"{status:d}", "true" if row.finished else "false")
        results = yield PgScript("", self._prepared("start", arguments), f";{SAVEPOINT}")
        if results[0].command_tuples != 1:
            raise Changed()

    def finish(self, call: IncomingCall, status: Status, result: Payload | None, intent: str | None) -> Script[None]:
        """See Database."""
        if result is None:
            last = self._prepared("finish", _mine(call, status, intent))
        else:
            arguments = (*_mine(call, status, intent), _bytes(result.data), _text(result.content_type))
            last = self._prepared("finish_with_result", arguments)
        yield PgScript(_HANDLED, last, ";COMMIT", RowGone, counted=2)

    def refuse(self, call: IncomingCall, refusal: Refusal, *, handled: bool, intent: str | None) -> Script[None]:
        """See Database."""
        arguments = (
            *_mine(call, Status.TRIED, intent),
            f"{Status.ROLLBACKED:d}",
            _text(refusal.reason),
            _text(refusal.message),
        )
        back = f"{ROLLBACK_TO};" if handled else ""
        yield PgScript(back, self._prepared("refuse", arguments), ";COMMIT", RowGone, counted=int(handled))

    def commit(self) -> Script[None]:
        """See Database."""
        yield PgScript("COMMIT")

    def lease(self, call: IncomingCall, old: str | None, new: str, milliseconds: int) -> Script[None]:
        """See Database."""
        arguments = (*_mine(call, Status.TRIED, old), _word(new), str(milliseconds))
        yield PgScript("", self._prepared("lease", arguments), ";COMMIT", Changed)

    def begin(self, call: IncomingCall) -> Script[None]:
        """See Database. It reads a row that is not there, to see that what is needed later is prepared."""
        yield from self._first(call, self._prepared("read", ("''", "0")), f";{SAVEPOINT}")

    def begin_within(self, connection: Connection, call: IncomingCall) -> None:
        """See Database. The driver begins by itself, before the first statement."""
        cursor = connection.connection.cursor()
        try:
            cursor.execute(_limits(call) + SAVEPOINT)
        finally:
            cursor.close()

    def lapse(self, call: IncomingCall, intent: str) -> Script[bool]:
        """See Database."""
        results = yield from self._first(call, self._prepared("lapse", _mine(call, Status.TRIED, intent)), ";COMMIT")
        return bool(results[-2].command_tuples)

    def is_transient(self, error: BaseException) -> bool:
        """See Database."""
        if is_refused_connection(error):
            return True
        if isinstance(error, sqlalchemy_errors.DBAPIError):
            error = error.orig or error
        if not isinstance(error, psycopg.Error):
            return False
        if error.sqlstate is None:  # no answer of the server: the connection was refused or lost
            return isinstance(error, psycopg.OperationalError)
        return error.sqlstate in _TRANSIENT_SQLSTATES or error.sqlstate.startswith("08")

    def _prepared(self, key: str, arguments: Sequence[str]) -> Prepared:
        return Prepared(self._names[key], self._sql[key], arguments)

    def _first(self, call: IncomingCall, prepared: Prepared, after: str = "") -> Script[Sequence[PGresult]]:
        """Begin, bounded, and run what is `prepared`; the results of all."""
        script = PgScript(_limits(call), prepared, after, of=(self.log, self.fence_id))
        results: Sequence[PGresult] | None
        try:
            results = yield script
        except NotPrepared:  # since the driver, or the user, has deallocated all that there was
            yield Rollback()
            results = None
        if results is None:
            yield from self._make_ready()
            results = yield script
        if results is None:
            raise AssertionError("it was made ready")
        return results

    def _make_ready(self) -> Script[None]:
        """Prepare the statements and see that it is the right database."""
        results = yield PgScript(f"SELECT fence_id FROM {_as_it_is(self.info)}")
        found = results[0].get_value(0, 0) if results[0].ntuples else None
        self.check_fence_id(None if found is None else found.decode())
        prepares = yield Look(_prepares)
        for key, sql in self._sql.items() if prepares else ():
            prepare = f"PREPARE {self._names[key]}({self._TYPES[key]}) AS {sql}"
            try:
                yield PgScript(prepare)
            except psycopg.Error as error:
                if error.sqlstate != _ALREADY_PREPARED:
                    raise
                yield PgScript(f"DEALLOCATE {self._names[key]};{prepare}")  # it may be older than the table
        yield Look(lambda connection: connection.info.update({_READY: (self.log, self.fence_id)}))


def _as_it_is(name: str) -> str:
    """A table's name without what SQLAlchemy has done to it for a driver that looks for parameters in the text."""
    return name.replace("%%", "%")


def _prepares(connection: Connection) -> bool:
    raw = cast("psycopg.Connection[Any]", connection.connection.driver_connection)
    return raw.prepare_threshold is not None


# Deferred constraints are checked now, while what fails can still be told as the handler's error.
_HANDLED: Final = f"SET CONSTRAINTS ALL IMMEDIATE;{RELEASE};"


def _limits(call: IncomingCall) -> str:
    """Bound every wait for a lock, and how long a stopped process may hold locks, for this local transaction only."""
    lock = wait_ms(call)
    return f"SET LOCAL lock_timeout = {lock};SET LOCAL idle_in_transaction_session_timeout = {idle_ms(lock)};"


_WORD: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


@lru_cache(maxsize=1024)
def _word(value: str | None) -> str:
    if value is None:
        return "NULL"
    if not _WORD.fullmatch(value):  # checked at the door long before, but here it becomes SQL
        raise ValueError(f"{value!r} cannot stand in a script")
    return f"'{value}'"


def _bytes(value: bytes) -> str:
    return f"E'\\\\x{value.hex()}'"  # a literal, which costs the server less than a call of decode()


_PLAIN: Final = re.compile(r"[A-Za-z0-9 ._/;=+-]*")
"""Means itself between quotes, whatever the server's settings."""


def _text(value: str) -> str:
    return f"'{value}'" if _PLAIN.fullmatch(value) else f"convert_from({_bytes(value.encode())}, 'UTF8')"


def _this(call: IncomingCall) -> tuple[str, ...]:
    return _word(call.xid), f"{call.branch_id:d}"


def _mine(call: IncomingCall, status: Status, intent: str | None) -> tuple[str, ...]:
    return _word(call.xid), f"{call.branch_id:d}", f"{status:d}", _word(intent)


def _meeting(result: PGresult) -> Meeting:
    if not result.ntuples:
        return Meeting(None)
    if result.nfields == 1:
        return Meeting(None, int(result.get_value(0, 0) or 0))
    now_ms, participant, *rest = (result.get_value(0, column) for column in range(result.nfields))
    if participant is None:
        return Meeting(None, int(now_ms or 0))
    status, finished, algorithm, fingerprint, stored, content_type, reason, message, intent, lease = rest
    return Meeting(
        FenceRow(
            participant=participant.decode(),
            status=status_of(int(status or 0)),
            # Without a handler there is nothing to finish: SUSPENDED is whole as it was inserted.
            finished=finished == b"t" or int(status or 0) == Status.SUSPENDED,
            fingerprint_algorithm=None if algorithm is None else int(algorithm),
            fingerprint=None if fingerprint is None else bytes.fromhex(fingerprint.decode()),
            result=None if stored is None else Payload(bytes.fromhex(stored.decode()), (content_type or b"").decode()),
            refusal=None if reason is None else Refusal(reason.decode(), (message or b"").decode()),
            intent=None if intent is None else intent.decode(),
            lease_left_ms=int(lease or 0),
        )
    )
