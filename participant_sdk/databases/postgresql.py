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
from participant_sdk.steps import Ask, Look, RunAgain, drop_if_lost

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult
    from sqlalchemy.ext.asyncio import AsyncConnection

_PREPARED: Final = "tricord.prepared"

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


@dataclass(frozen=True, slots=True)
class Prepared:
    """A statement of the fence with its arguments, as SQL."""

    name: str
    sql: str
    arguments: Sequence[str]

    def render(self, prepares: bool) -> str:
        """The SQL that runs it; in full where the driver may not prepare, as behind a pooler of transactions."""
        if prepares:
            return f"EXECUTE {self.name}({', '.join(self.arguments)})"
        return _PARAMETER.sub(lambda found: self.arguments[int(found[1]) - 1], self.sql)


_PARAMETER: Final = re.compile(r"\$(\d)")


@dataclass(frozen=True, slots=True)
class PgScript:
    """The step that sends a script; gives the result of each statement in it.

    `missed` is raised when the statement number `counted` (from 0), one that must hit a row, has hit none.
    """

    statements: Sequence[str | Prepared]
    missed: Exception | None = None
    counted: int = 0

    def _sql(self, raw: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bytes:
        prepares = raw.prepare_threshold is not None
        return ";".join(
            statement if isinstance(statement, str) else statement.render(prepares) for statement in self.statements
        ).encode()

    def perform(self, connection: Connection) -> Sequence[PGresult]:
        """See Step."""
        raw = cast("psycopg.Connection[Any]", connection.connection.driver_connection)
        try:
            raw.pgconn.send_query(self._sql(raw))
            return self._checked(raw.wait(generators.execute(raw.pgconn)), raw)
        except psycopg.Error as error:
            raise self._told(error, connection) from error

    async def perform_async(self, connection: AsyncConnection) -> Sequence[PGresult]:
        """See Step."""
        synchronous = cast(Connection, connection.sync_connection)
        raw = cast("psycopg.AsyncConnection[Any]", synchronous.connection.driver_connection)
        try:
            raw.pgconn.send_query(self._sql(raw))
            return self._checked(await raw.wait(generators.execute(raw.pgconn)), raw)
        except psycopg.Error as error:
            raise self._told(error, synchronous) from error

    def _checked(self, results: Sequence[PGresult], raw: Any) -> Sequence[PGresult]:
        if results[-1].status != ExecStatus.FATAL_ERROR:
            return results
        error = psycopg.errors.error_from_result(results[-1], encoding=raw.info.encoding)
        if self.missed is not None and len(results) == self.counted + 1 and error.sqlstate == _DIVISION_BY_ZERO:
            raise self.missed
        raise error

    def _told(self, error: psycopg.Error, connection: Connection) -> Exception:
        """What `error` means. SQLAlchemy, past which it came, is told if the connection is lost."""
        if error.sqlstate == _NOT_PREPARED or (error.sqlstate == _PLAN_OUTDATED and "cached plan" in str(error)):
            connection.info.pop(_PREPARED, None)
            return RunAgain("the fence's prepared statements were gone")
        drop_if_lost(connection, error)
        return error


class PostgreSQL(Database):
    """See the module. Works under READ COMMITTED, REPEATABLE READ and SERIALIZABLE, whichever the engine has."""

    _TYPES: ClassVar[dict[str, str]] = {
        "meet": "varchar, bigint, varchar, varchar, smallint, smallint, bytea",
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
        row, log = _ROW.format(now_ms=_NOW_MS), self.log
        finish = f"UPDATE {log} SET {_FINISHED}{{more}} WHERE {_THIS} AND {_MINE}"
        self._sql = {
            "meet": f"WITH made AS (INSERT INTO {log} (xid, branch_id, participant, action, status, "
            "fingerprint_algorithm, fingerprint, created_at, modified_at) VALUES ($1, $2, $3, $4, $5, $6, $7, "
            "clock_timestamp(), clock_timestamp()) ON CONFLICT DO NOTHING RETURNING status) "
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
        yield from self._ready()
        status = MEETS_WITH.get(call.phase)
        begin = (*(yield Ask(_begin)), *_limits(call))
        if status is None:
            results = yield PgScript((*begin, self._prepared("read", _this(call))))
            return _meeting(results[-1])
        arguments = (
            *_this(call),
            _word(call.participant),
            _word(call.action),
            str(int(status)),
            str(FINGERPRINT_ALGORITHM),
            _bytes(call.fingerprint),
        )
        savepoint = (SAVEPOINT,) if call.phase is Phase.TRY else ()
        results = yield PgScript((*begin, self._prepared("meet", arguments), *savepoint))
        met = results[len(begin)]
        if met.ntuples:
            return _meeting(met)
        # The insert has waited for another's, which this statement cannot see under READ COMMITTED: look again.
        results = yield PgScript((self._prepared("read", _this(call)),))
        if not results[-1].ntuples:  # its local transaction was rolled back, or the row was purged
            raise RunAgain("the fence row went away between two statements")
        return _meeting(results[-1])

    def savepoint(self) -> Script[None]:
        """It was set on the way of `meet`."""
        yield from ()

    def start(self, call: IncomingCall, row: FenceRow, status: Status) -> Script[None]:
        """See Database."""
        arguments = (*_mine(call, row.status, row.intent), str(int(status)), "true" if row.finished else "false")
        results = yield PgScript((self._prepared("start", arguments), SAVEPOINT))
        if results[0].command_tuples != 1:
            raise RunAgain("the fence row was changed meanwhile")

    def finish(self, call: IncomingCall, status: Status, result: Payload | None, intent: str | None) -> Script[None]:
        """See Database."""
        if result is None:
            last = self._prepared("finish", _mine(call, status, intent))
        else:
            arguments = (*_mine(call, status, intent), _bytes(result.data), _text(result.content_type))
            last = self._prepared("finish_with_result", arguments)
        # Deferred constraints are checked now, while what fails can still be told as the handler's error.
        yield PgScript(("SET CONSTRAINTS ALL IMMEDIATE", RELEASE, last, "COMMIT"), RowGone(), counted=2)

    def refuse(self, call: IncomingCall, refusal: Refusal, *, handled: bool, intent: str | None) -> Script[None]:
        """See Database."""
        arguments = (
            *_mine(call, Status.TRIED, intent),
            str(int(Status.ROLLBACKED)),
            _text(refusal.reason),
            _text(refusal.message),
        )
        back = (ROLLBACK_TO,) if handled else ()
        yield PgScript((*back, self._prepared("refuse", arguments), "COMMIT"), RowGone(), counted=len(back))

    def commit(self) -> Script[None]:
        """See Database."""
        yield PgScript(("COMMIT",))

    def lease(self, call: IncomingCall, old: str | None, new: str, milliseconds: int) -> Script[None]:
        """See Database."""
        arguments = (*_mine(call, Status.TRIED, old), _word(new), str(milliseconds))
        changed = RunAgain("the fence row was changed meanwhile")
        yield PgScript((self._prepared("lease", arguments), "COMMIT"), changed)

    def begin(self, call: IncomingCall) -> Script[None]:
        """See Database."""
        yield PgScript((*(yield Ask(_begin)), *_limits(call), SAVEPOINT))

    def begin_within(self, connection: Connection, call: IncomingCall) -> None:
        """See Database. The driver begins by itself, before the first statement."""
        cursor = connection.connection.cursor()
        try:
            cursor.execute(";".join((*_limits(call), SAVEPOINT)))
        finally:
            cursor.close()

    def lapse(self, call: IncomingCall, intent: str) -> Script[bool]:
        """See Database."""
        results = yield PgScript((self._prepared("lapse", _mine(call, Status.TRIED, intent)),))
        return bool(results[-1].command_tuples)

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

    def _ready(self) -> Script[None]:
        """Prepare the statements and see that it is the right database, once per connection."""
        if (yield Look(lambda connection: connection.info.get(_PREPARED))) == (self.log, self.fence_id):
            return
        results = yield PgScript((f"SELECT fence_id FROM {self.info}",))
        found = results[0].get_value(0, 0) if results[0].ntuples else None
        self.check_fence_id(None if found is None else found.decode())
        prepares = yield Look(_prepares)
        for key, sql in self._sql.items() if prepares else ():
            prepare = f"PREPARE {self._names[key]}({self._TYPES[key]}) AS {sql}"
            try:
                yield PgScript((prepare,))
            except psycopg.Error as error:
                if error.sqlstate != _ALREADY_PREPARED:
                    raise
                yield PgScript((f"DEALLOCATE {self._names[key]}", prepare))  # it may be older than the table
        yield Look(lambda connection: connection.info.update({_PREPARED: (self.log, self.fence_id)}))


def _begin(connection: Connection) -> Sequence[str]:
    """BEGIN as the driver would say it, which leaves the engine's isolation level to that statement.

    Nothing if it has begun: the engine may have a listener that executes something at every beginning.
    """
    known_to_sqlalchemy(connection)
    raw = cast("psycopg.Connection[Any]", connection.connection.driver_connection)
    if raw.pgconn.transaction_status != TransactionStatus.IDLE:
        return ()
    level = raw.isolation_level
    return ("BEGIN" if level is None else f"BEGIN ISOLATION LEVEL {level.name.replace('_', ' ')}",)


def _prepares(connection: Connection) -> bool:
    raw = cast("psycopg.Connection[Any]", connection.connection.driver_connection)
    return raw.prepare_threshold is not None


def _limits(call: IncomingCall) -> tuple[str, str]:
    """Bound every wait for a lock, and how long a stopped process may hold locks, for this local transaction only."""
    lock = wait_ms(call)
    return f"SET LOCAL lock_timeout = {lock}", f"SET LOCAL idle_in_transaction_session_timeout = {idle_ms(lock)}"


_WORD: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def _word(value: str | None) -> str:
    if value is None:
        return "NULL"
    if not _WORD.fullmatch(value):  # checked at the door long before, but here it becomes SQL
        raise ValueError(f"{value!r} cannot stand in a script")
    return f"'{value}'"


def _bytes(value: bytes) -> str:
    return f"decode('{value.hex()}', 'hex')"


def _text(value: str) -> str:
    return f"convert_from(decode('{value.encode().hex()}', 'hex'), 'UTF8')"


def _this(call: IncomingCall) -> tuple[str, ...]:
    return _word(call.xid), str(int(call.branch_id))


def _mine(call: IncomingCall, status: Status, intent: str | None) -> tuple[str, ...]:
    return *_this(call), str(int(status)), _word(intent)


def _meeting(result: PGresult) -> Meeting:
    if not result.ntuples:
        return Meeting(None)
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
