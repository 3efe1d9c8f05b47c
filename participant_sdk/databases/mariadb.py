"""MariaDB's InnoDB, through PyMySQL or asyncmy; MySQL is spoken to in the same words, but not tested.

InnoDB locks gaps: whoever looks for a row that is not there, with a lock, bars others' inserts beside it. So every
call that may insert inserts first, and the duplicate's error (1062) says that there is a row, which is then read with
a lock: under REPEATABLE READ a plain read could still be looking at an older snapshot. What deadlocks remain between
waiters for one row are run again (rule C8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from sqlalchemy import Connection, Dialect

from participant_sdk.call import IncomingCall
from participant_sdk.databases.database import (
    FENCE_CHECKED,
    SAVEPOINT,
    Script,
    idle_ms,
    known_to_sqlalchemy,
    most_patient,
    noted,
    wait_ms,
)
from participant_sdk.databases.driver_errors import MARIADB, unwrapped
from participant_sdk.databases.statements import OneByOne, new_row, new_rows, row_of, these, this
from participant_sdk.fence_row import MEETS_WITH, Meeting
from participant_sdk.fence_tables import FenceTables
from participant_sdk.steps import Ask, Look, Rollback, RunAgain, Send

_LIMITS: Final = "tricord.limits"

DUPLICATE: Final = 1062


class MariaDb(OneByOne):
    """See the module. Works under READ COMMITTED and under the default REPEATABLE READ."""

    errors = MARIADB
    NOW: ClassVar[str] = "UTC_TIMESTAMP(6)"
    NOW_MS: ClassVar[str] = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) DIV 1000"
    SIGN: ClassVar[str] = "%s"
    SAME: ClassVar[str] = "<=>"

    def __init__(self, dialect: Dialect, tables: FenceTables) -> None:
        super().__init__(dialect, tables)
        self._read_locked = f"{self._read} FOR UPDATE"
        self._now_ms = f"SELECT {self.NOW_MS}"

    def meet(self, call: IncomingCall) -> Script[Meeting]:
        """See Database."""
        yield from self._check_fence()
        yield from self.bounds(call)
        status = MEETS_WITH.get(call.phase)
        if status is not None:
            try:
                yield Send(self._insert, new_row(call, status))
            except Exception as error:
                if number_of(error) != DUPLICATE:
                    raise
            else:
                # Not with the insert, whose clock is that of its start, before it waited.
                return Meeting(None, int((yield Send(self._now_ms)).rows[0][0]))
        rows = (yield Send(self._read_locked, this(call))).rows
        if rows:
            return Meeting(row_of(rows[0]))
        if status is not None:  # it was there when the insert met it: its local transaction was rolled back since
            raise RunAgain("the fence row went away between two statements")
        return Meeting(None)

    def meet_all(self, calls: Sequence[IncomingCall], mark: int) -> Script[list[Meeting]]:
        """See Database.

        The insert locks what is there already as firmly as what it makes, so that nobody has to wait twice for a row:
        two that share a lock after a duplicate's error would deadlock. It does not tell which is which; the mark does.
        """
        yield from self._check_fence()
        yield from self.bounds(most_patient(calls))
        status = MEETS_WITH.get(calls[0].phase)
        if status is not None:
            insert = self._insert_marked + ", ".join([self._marked] * len(calls))
            yield Send(f"{insert} ON DUPLICATE KEY UPDATE xid = {self.log}.xid", new_rows(calls, status, mark))
        keys = ", ".join(["(%s, %s)"] * len(calls))
        # Named, since for a small table the whole of it may seem cheaper, and would be locked.
        read = (
            f"SELECT xid, branch_id, lease_until_ms <=> %s AND intent IS NULL, {self.NOW_MS}, {self._columns} "
            f"FROM {self.log} FORCE INDEX (PRIMARY) WHERE (xid, branch_id) IN ({keys}) "
            "ORDER BY xid, branch_id FOR UPDATE"
        )
        met = {}
        for xid, branch_id, is_new, now_ms, *values in (yield Send(read, [mark, *these(calls)])).rows:
            met[xid, branch_id] = Meeting(None, int(now_ms)) if is_new else Meeting(row_of(values))
        if len(met) < len(calls):  # the gaps are locked now: whoever inserts there would wait for all of the batch
            raise RunAgain("a branch has no fence row")
        return [met[call.key] for call in calls]

    def bounds(self, call: IncomingCall) -> Script[None]:
        """The driver begins by itself; the limits are the session's, so `restore` gives back the user's."""
        if (yield Look(lambda connection: connection.info.get(_LIMITS))) is None:
            before = (yield Send(_own_limits((yield Look(is_mariadb))))).rows[0]
            yield Rollback()
            yield Look(lambda connection: connection.info.update({_LIMITS: tuple(before)}))
        has_idle = (yield Look(lambda connection: connection.info[_LIMITS]))[1] is not None
        yield Send(_limits(call, has_idle))
        yield Ask(known_to_sqlalchemy)  # a listener of the engine may execute something

    def begin_within(self, connection: Connection, call: IncomingCall) -> None:
        """See Database. The connection may be a new one, if the handler has lost the call's."""
        cursor = connection.connection.cursor()
        try:
            if _LIMITS not in connection.info:
                cursor.execute(_own_limits(is_mariadb(connection)))
                connection.info[_LIMITS] = tuple(cursor.fetchall()[0])
            cursor.execute(_limits(call, connection.info[_LIMITS][1] is not None))
            cursor.execute(SAVEPOINT)
        finally:
            cursor.close()

    def restore(self) -> Script[None]:
        """See Database."""
        before = yield Look(lambda connection: noted(connection, _LIMITS))
        if before is not None:
            yield Send(_set(before[0], before[1]))

    def _check_fence(self) -> Script[None]:
        if (yield Look(lambda connection: connection.info.get(FENCE_CHECKED))) == self.fence_id:
            return
        rows = (yield Send(self._fence_id)).rows
        self.check_fence_id(rows[0][0] if rows else None)
        yield Rollback()  # the read has taken a snapshot, which is not to be the call's
        yield Look(lambda connection: connection.info.update({FENCE_CHECKED: self.fence_id}))


def _own_limits(is_mariadb: bool) -> str:
    """Reads the user's limits; the second is NULL where there is none."""
    return f"SELECT @@innodb_lock_wait_timeout, {'@@idle_transaction_timeout' if is_mariadb else 'NULL'}"


def is_mariadb(connection: Connection) -> bool:
    """Whether the server is MariaDB, and not MySQL's own."""
    return bool(getattr(connection.dialect, "is_mariadb", False))


def _limits(call: IncomingCall, has_idle: bool) -> str:
    lock = wait_ms(call)
    # Whole seconds, rounded down: less than one is no wait at all, which MySQL's own server does not know.
    return _set(lock // 1000, idle_ms(lock) // 1000) if has_idle else _set(max(1, lock // 1000), None)


def _set(lock_seconds: int, idle_seconds: int | None) -> str:
    idle = "" if idle_seconds is None else f", idle_transaction_timeout = {idle_seconds}"
    return f"SET SESSION innodb_lock_wait_timeout = {lock_seconds}{idle}"


def number_of(error: BaseException) -> int:
    """The server's or the driver's number of an error, 0 if it has none."""
    numbers = MARIADB.codes_of(unwrapped(error))
    return numbers[0] if numbers else 0
