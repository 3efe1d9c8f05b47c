"""PostgreSQL, through psycopg: one round trip before the handler and one after it.

What would be six or seven statements travels as two scripts of prepared statements, which the server runs up to the
first error and no further: a COMMIT at the end is reached only if all before it went well, and after an error that the
handler has swallowed nothing is run at all. A statement that must hit exactly one row divides by the number of rows,
so that zero is an error. That row must bear the time of this local transaction, so that none is taken for this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from sqlalchemy import Connection, Dialect

from participant_sdk.call import FINGERPRINT_ALGORITHM, IncomingCall, Refusal
from participant_sdk.databases.database import (
    RELEASE,
    ROLLBACK_TO,
    SAVEPOINT,
    Database,
    Ended,
    Finished,
    SaidNo,
    Script,
    Start,
    Withdrawn,
    idle_ms,
    most_patient,
    noted,
    wait_ms,
)
from participant_sdk.databases.driver_errors import POSTGRESQL
from participant_sdk.databases.postgresql_script import Changed, PgScript, PgSettle, Prepared
from participant_sdk.databases.postgresql_statements import (
    ONE_ROW,
    Statements,
    as_it_is,
    begun,
    bytes_as_argument,
    text_as_argument,
)
from participant_sdk.fence import Phase, Status
from participant_sdk.fence_row import MEETS_WITH, FenceRow, Meeting, RowGone, status_of
from participant_sdk.fence_tables import FenceTables
from participant_sdk.payload import Payload
from participant_sdk.steps import Look, RunAgain

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult


_ROW: Final = (
    "participant, status, finished_at IS NOT NULL, fingerprint_algorithm, encode(fingerprint, 'hex'), "
    "encode(result, 'hex'), result_content_type, refusal_reason, refusal_message, intent, lease_until_ms - {now_ms}"
)
_NOW_MS: Final = "(date_part('epoch', clock_timestamp()) * 1000)::bigint"
_THIS: Final = "xid = $1 AND branch_id = $2"
_BOUND: Final = "set_config('lock_timeout', {}, true) || set_config('idle_in_transaction_session_timeout', {}, true)"
"""Bound every wait for a lock, and how long a stopped process may hold locks, for this local transaction only."""
_BOUND_NOW: Final = f"CASE WHEN {_BOUND.format('$8', '$9')} <> '' THEN now() END"
"""The time, in the row that an insert is about to make: its own waits are bounded by the same statement."""
_FINISHED: Final = (
    "modified_at = clock_timestamp(), finished_at = clock_timestamp(), intent = NULL, lease_until_ms = NULL"
)
_MINE: Final = "status = $3 AND finished_at IS NULL AND intent IS NOT DISTINCT FROM $4"
_WRITTEN_HERE: Final = "($4 IS NOT NULL OR modified_at = now())"
"""Without an intent, by this local transaction: its time is the row's. A handler that has ended it by itself fails."""

_DEFERS: Final = "tricord.defers"
"""In the connection's `info`: whether there were constraints to defer when it was new."""
_DEFERRABLE: Final = "SELECT 1 FROM pg_constraint WHERE condeferrable LIMIT 1"


class PostgreSQL(Database):
    """See the module. Works under READ COMMITTED, REPEATABLE READ and SERIALIZABLE, whichever the engine has."""

    errors = POSTGRESQL
    _TYPES: ClassVar[dict[str, str]] = {
        "meet": "varchar, bigint, varchar, varchar, smallint, smallint, bytea, text, text",
        "meet_new": "varchar, bigint, varchar, varchar, smallint, smallint, bytea, text, text",
        "read": "varchar, bigint",
        "start": "varchar, bigint, smallint, varchar, smallint, boolean",
        "start_one": "varchar, bigint, smallint, varchar, smallint, boolean",
        "refused": "varchar, bigint, varchar, varchar, smallint, smallint, bytea, text, text, text, text",
        "finish": "varchar, bigint, smallint, varchar",
        "finish_with_result": "varchar, bigint, smallint, varchar, bytea, text",
        "refuse": "varchar, bigint, smallint, varchar, smallint, text, text",
        "lease": "varchar, bigint, smallint, varchar, varchar, bigint",
        "lapse": "varchar, bigint, smallint, varchar",
        "meet_all": "varchar[], bigint[], varchar, varchar, smallint, smallint, bytea[], bigint",
        "read_all": "varchar[], bigint[]",
        "lock_all": "varchar[], bigint[]",
        "delete_marked": "varchar, bigint, bigint",
        "clear": "varchar[], bigint[], bigint",
        "bound": "text, text",
    }

    def __init__(self, dialect: Dialect, tables: FenceTables) -> None:
        super().__init__(dialect, tables)
        row, log = _ROW.format(now_ms=_NOW_MS), as_it_is(self.log)
        # One look-up after another, in the order of the keys: a join could choose to read the whole table.
        read_all = (
            "SELECT found.* FROM (SELECT * FROM unnest($1, $2) WITH ORDINALITY AS key (x, b, place) ORDER BY place) "
            f"AS key CROSS JOIN LATERAL (SELECT xid, branch_id, {row} FROM {log} WHERE xid = key.x "
            "AND branch_id = key.b"
        )
        start = (
            f"UPDATE {log} SET status = $5, modified_at = now(), finished_at = NULL, "
            f"intent = NULL, lease_until_ms = NULL WHERE {_THIS} AND status = $3 AND intent IS NOT DISTINCT FROM $4 "
            "AND (finished_at IS NOT NULL) = $6"
        )
        unmet = "AND intent IS NULL AND finished_at IS NULL"
        end = f"UPDATE {log} SET {_FINISHED}{{more}} WHERE {_THIS} AND {_MINE}"
        finish = f"{end} AND {_WRITTEN_HERE}"
        columns = "xid, branch_id, participant, action, status, fingerprint_algorithm, fingerprint"
        insert = (
            f"INSERT INTO {log} ({columns}, created_at, modified_at{{more}}) VALUES ($1, $2, $3, $4, $5, $6, $7, "
            f"{_BOUND_NOW}, now(){{values}}) ON CONFLICT DO NOTHING RETURNING"
        )
        meet = insert.format(more="", values="")
        sql = {
            "meet_new": f"{meet} {_NOW_MS}",
            "meet": f"WITH made AS ({meet} status) "
            f"SELECT {_NOW_MS}, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM made "
            f"UNION ALL SELECT NULL, {row} FROM {log} WHERE {_THIS}",
            "refused": insert.format(
                more=", refusal_reason, refusal_message, finished_at", values=", $10, $11, clock_timestamp()"
            )
            + " 1",
            "read": f"SELECT NULL, {row} FROM {log} WHERE {_THIS}",
            "start": start,
            "start_one": ONE_ROW.format(update=start),
            "finish": ONE_ROW.format(update=finish.format(more="")),
            "finish_with_result": ONE_ROW.format(update=finish.format(more=", result = $5, result_content_type = $6")),
            "refuse": ONE_ROW.format(
                update=end.format(more=", status = $5, refusal_reason = $6, refusal_message = $7")
            ),
            "lease": ONE_ROW.format(
                update=f"UPDATE {log} SET intent = $5, lease_until_ms = {_NOW_MS} + $6 WHERE {_THIS} AND {_MINE}"
            ),
            "lapse": f"UPDATE {log} SET lease_until_ms = 0 WHERE {_THIS} AND {_MINE}",
            "meet_all": f"INSERT INTO {log} ({columns}, lease_until_ms, created_at, modified_at) "
            "SELECT new.xid, new.branch_id, $3, $4, $5, $6, new.fingerprint, $8, now(), now() "
            "FROM unnest($1, $2, $7) WITH ORDINALITY AS new (xid, branch_id, fingerprint, place) ORDER BY new.place "
            f"ON CONFLICT DO NOTHING RETURNING xid, branch_id, {_NOW_MS}",
            "read_all": f"{read_all} OFFSET 0) AS found",
            "lock_all": f"{read_all} FOR UPDATE) AS found",
            "delete_marked": ONE_ROW.format(update=f"DELETE FROM {log} WHERE {_THIS} AND lease_until_ms = $3 {unmet}"),
            "clear": f"DELETE FROM {log} WHERE (xid, branch_id) IN (SELECT * FROM unnest($1, $2)) "
            f"AND lease_until_ms = $3 {unmet}",
            "bound": f"SELECT {_BOUND.format('$1', '$2')}",
        }
        self._statements = Statements(sql, self._TYPES)
        self._prepared = self._statements.with_

    def meet(self, call: IncomingCall) -> Script[Meeting]:
        """See Database."""
        status = MEETS_WITH.get(call.phase)
        if status is None:
            return _meeting((yield from self._first(call, self._prepared("read", _this(call)), bound=False))[-1])
        # A first Try hardly ever meets a row, so that looking for one in the same statement is not worth its cost.
        first = call.phase is Phase.TRY and call.attempt <= 1
        meet = self._prepared("meet_new" if first else "meet", _new(call, status))
        results = yield from self._first(call, meet, bound=False)
        if results[-1].ntuples:
            return _meeting(results[-1])
        # There is one, or the insert has waited for another's, which that statement cannot see under READ COMMITTED.
        results = yield PgScript("", self._prepared("read", _this(call)))
        return _there(results[-1])

    def leave(self) -> Script[None]:
        """See Database. By the driver's rollback() all prepared statements would go, the user's and the fence's."""
        yield PgScript("ROLLBACK")

    def savepoint(self) -> Script[None]:
        """See Database. None is needed: what went wrong before is known by what follows."""
        yield from ()

    def start(self, call: IncomingCall, row: FenceRow, status: Status) -> Script[None]:
        """See Database."""
        arguments = (*_mine(call, row.status, row.intent), f"{status:d}", "true" if row.finished else "false")
        bound = self._prepared("bound", _limits(call))
        results = yield PgScript("", self._prepared("start", arguments), lead=(bound,))
        if results[-1].command_tuples != 1:
            raise Changed()

    def finish(self, call: IncomingCall, status: Status, result: Payload | None, intent: str | None) -> Script[None]:
        """See Database. After an error that the handler has swallowed, the server runs none of it."""
        before = _IMMEDIATELY if (yield Look(_defers)) else ""
        if intent is not None:  # what an external handler begins has a savepoint
            before += f"{RELEASE};"
        finish = self._finish(call, status, result, intent)
        yield PgScript(before, finish, ";COMMIT", RowGone, counted=before.count(";"))

    def _finish(self, call: IncomingCall, status: Status, result: Payload | None, intent: str | None) -> Prepared:
        if result is None:
            return self._prepared("finish", _mine(call, status, intent))
        arguments = (
            *_mine(call, status, intent),
            bytes_as_argument(result.data),
            text_as_argument(result.content_type),
        )
        return self._prepared("finish_with_result", arguments)

    def refuse(
        self, call: IncomingCall, refusal: Refusal, *, handled: bool, intent: str | None
    ) -> Script[Meeting | None]:
        """See Database. What the handler did goes with all of its local transaction, the row is written in another.

        Whoever was killed in between has stored nothing. Another call that was in between has stored its own row, and
        that one holds.
        """
        if not handled:
            yield PgScript("", self._refuse(call, refusal, intent), ";COMMIT", RowGone)
            return None
        told = text_as_argument(refusal.reason), text_as_argument(refusal.message)
        refused = self._prepared("refused", (*_new(call, Status.ROLLBACKED), *told))
        results = yield from self._first(call, refused, ";COMMIT", bound=False, anew=True)
        if results[-2].ntuples:
            return None
        read = self._prepared("read", _this(call))
        results = yield from self._first(call, read, ";COMMIT", bound=False, anew=True)
        return _there(results[-2])

    def _refuse(self, call: IncomingCall, refusal: Refusal, intent: str | None) -> Prepared:
        more = f"{Status.ROLLBACKED:d}", text_as_argument(refusal.reason), text_as_argument(refusal.message)
        return self._prepared("refuse", (*_mine(call, Status.TRIED, intent), *more))

    def meet_all(self, calls: Sequence[IncomingCall], mark: int) -> Script[list[Meeting]]:
        """See Database."""
        these = _these(calls)
        status = MEETS_WITH.get(calls[0].phase)
        first = most_patient(calls)
        if status is None:
            results = yield from self._first(first, self._prepared("lock_all", these))
            met = _met(results[-1])
            return [met.get(call.key, Meeting(None)) for call in calls]
        is_try = calls[0].phase is Phase.TRY
        arguments = (
            *these,
            calls[0].participant,
            calls[0].action,
            f"{status:d}",
            f"{FINGERPRINT_ALGORITHM}",
            _array(f'"\\\\x{call.fingerprint.hex()}"' for call in calls),
            str(mark) if is_try else None,
        )
        results = yield from self._first(first, self._prepared("meet_all", arguments))
        met = _made(results[-1])
        old = [call for call in calls if call.key not in met]
        if old:  # a repeat of a Try changes nothing, so that it need not lock
            results = yield PgScript("", self._prepared("read_all" if is_try else "lock_all", _these(old)))
            met |= _met(results[-1])
        if len(met) < len(calls):
            raise RunAgain("a fence row went away between two statements")
        return [met[call.key] for call in calls]

    def next_member(self, ended: Sequence[Ended], start: Start | None) -> Script[None]:
        """See Database. It runs while the handler makes up its first statement, and bars it if it fails."""
        lead = self._store(ended, (yield Look(_defers)))
        if start is not None:
            call, row = start.call, start.row
            more = f"{start.status:d}", "true" if row.finished else "false"
            lead.append(self._prepared("start_one", (*_mine(call, row.status, row.intent), *more)))
        yield PgScript("", None, SAVEPOINT, RowGone, None, lead=lead, later=True)

    def has_begun(self) -> Script[bool]:
        """See Database."""
        return bool((yield PgSettle()))

    def end_batch(self, ended: Sequence[Ended]) -> Script[None]:
        """See Database."""
        yield PgScript("", None, "COMMIT", RowGone, None, lead=self._store(ended, (yield Look(_defers))))

    def _store(self, ended: Sequence[Ended], defers: bool) -> list[str | Prepared]:
        handled = f"{_IMMEDIATELY_AND_BACK if defers else ''}{RELEASE};"
        script: list[str | Prepared] = []
        for each in ended:
            match each:
                case Finished(call, status, result):
                    script += [handled, self._finish(call, status, result, None)]
                case SaidNo(call, refusal, by_handler):
                    script += [f"{ROLLBACK_TO};{RELEASE};" if by_handler else "", self._refuse(call, refusal, None)]
                case Withdrawn(call, mark):
                    script.append(self._prepared("delete_marked", (*_this(call), str(mark))))
        return script

    def clear(self, calls: Sequence[IncomingCall], mark: int) -> Script[None]:
        """See Database."""
        clear = self._prepared("clear", (*_these(calls), str(mark)))
        yield from self._first(most_patient(calls), clear, ";COMMIT")

    def commit(self) -> Script[None]:
        """See Database."""
        yield PgScript("COMMIT")

    def lease(self, call: IncomingCall, old: str | None, new: str, milliseconds: int) -> Script[None]:
        """See Database."""
        arguments = (*_mine(call, Status.TRIED, old), new, str(milliseconds))
        yield PgScript("", self._prepared("lease", arguments), ";COMMIT", Changed)

    def begin(self, call: IncomingCall) -> Script[None]:
        """See Database. It reads a row that is not there, to see that what is needed later is prepared."""
        yield from self._first(call, self._prepared("read", ("", "0")), f";{SAVEPOINT}")

    def begin_within(self, connection: Connection, call: IncomingCall) -> None:
        """See Database. The driver begins by itself, before the first statement."""
        cursor = connection.connection.cursor()
        try:
            limits = (f"'{limit}'" for limit in _limits(call))
            cursor.execute(f"SELECT {_BOUND.format(*limits)};{SAVEPOINT}")
        finally:
            cursor.close()

    def lapse(self, call: IncomingCall, intent: str) -> Script[bool]:
        """See Database."""
        results = yield from self._first(call, self._prepared("lapse", _mine(call, Status.TRIED, intent)), ";COMMIT")
        return bool(results[-2].command_tuples)

    @property
    def _owner(self) -> tuple[str, str]:
        return self.log, self.fence_id

    def _first(
        self, call: IncomingCall, prepared: Prepared, after: str = "", *, bound: bool = True, anew: bool = False
    ) -> Script[Sequence[PGresult]]:
        """Begin (`anew`: after a rollback) and run what is `prepared`; the results of all.

        Every wait is bounded first, unless that statement does so itself or waits for nothing (`bound` is False).
        """
        lead = (self._prepared("bound", _limits(call)),) if bound else ()
        script = PgScript("", prepared, after, of=self._owner, lead=lead, anew=anew)
        return (yield from begun(script, self._make_ready))

    def _make_ready(self) -> Script[None]:
        """Prepare the statements and see that it is the right database."""
        results = yield PgScript(f"SELECT fence_id FROM {as_it_is(self.info)};{_DEFERRABLE}")
        found = results[0].get_value(0, 0) if results[0].ntuples else None
        defers = bool(results[1].ntuples)
        self.check_fence_id(None if found is None else found.decode())
        yield from self._statements.prepare(self._owner)
        yield Look(lambda connection: connection.info.update({_DEFERS: defers}))


def _defers(connection: Connection) -> bool:
    return bool(noted(connection, _DEFERS))


_IMMEDIATELY: Final = "SET CONSTRAINTS ALL IMMEDIATE;"
"""Deferred constraints are checked now, while what fails can still be told as the handler's error."""


# In a batch the next member's handler has to find the constraints as they were: what is set within a savepoint ends
# with it. At COMMIT they are checked again, which alone would do to keep what is wrong out.
_IMMEDIATELY_AND_BACK: Final = f"SAVEPOINT tricord_constraints;{_IMMEDIATELY}ROLLBACK TO SAVEPOINT tricord_constraints;"


def _limits(call: IncomingCall) -> tuple[str, str]:
    """For a lock, and for being idle, in ms."""
    lock = wait_ms(call)
    return str(lock), str(idle_ms(lock))


def _new(call: IncomingCall, status: Status) -> tuple[str, ...]:
    """The arguments of the insert of a call's new row."""
    fingerprint = bytes_as_argument(call.fingerprint)
    what = call.participant, call.action, f"{status:d}", f"{FINGERPRINT_ALGORITHM}", fingerprint
    return *_this(call), *what, *_limits(call)


def _this(call: IncomingCall) -> tuple[str, ...]:
    return call.xid, f"{call.branch_id:d}"


def _these(calls: Sequence[IncomingCall]) -> tuple[str, str]:
    return _array(f'"{call.xid}"' for call in calls), _array(f"{call.branch_id:d}" for call in calls)


def _array(items: Iterable[str]) -> str:
    return f"{{{','.join(items)}}}"


def _made(result: PGresult) -> dict[tuple[str, int], Meeting]:
    """The rows that were made, by branch."""
    met = {}
    for row in range(result.ntuples):
        xid, branch_id, now_ms = (result.get_value(row, column) or b"" for column in range(3))
        met[xid.decode(), int(branch_id)] = Meeting(None, int(now_ms))
    return met


def _met(result: PGresult) -> dict[tuple[str, int], Meeting]:
    """The rows that were there, by branch."""
    met = {}
    for row in range(result.ntuples):
        xid, branch_id, *values = (result.get_value(row, column) for column in range(result.nfields))
        met[(xid or b"").decode(), int(branch_id or 0)] = Meeting(_row_of(values))
    return met


def _mine(call: IncomingCall, status: Status, intent: str | None) -> tuple[str | None, ...]:
    return call.xid, f"{call.branch_id:d}", f"{status:d}", intent


def _there(result: PGresult) -> Meeting:
    """What was read of a row that an insert has met."""
    if not result.ntuples:  # its local transaction was rolled back, or the row was purged
        raise RunAgain("the fence row went away between two statements")
    return _meeting(result)


def _meeting(result: PGresult) -> Meeting:
    if not result.ntuples:
        return Meeting(None)
    if result.nfields == 1:
        return Meeting(None, int(result.get_value(0, 0) or 0))
    now_ms, participant, *rest = (result.get_value(0, column) for column in range(result.nfields))
    if participant is None:
        return Meeting(None, int(now_ms or 0))
    return Meeting(_row_of([participant, *rest]))


def _row_of(values: Sequence[bytes | None]) -> FenceRow:
    participant, status, finished, algorithm, fingerprint, stored, content_type, reason, message, intent, lease = values
    return FenceRow(
        participant=(participant or b"").decode(),
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
