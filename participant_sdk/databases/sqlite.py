"""SQLite, a file in WAL mode: one local transaction writes at a time, and takes the lock for it at its very start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from sqlalchemy import Connection

from participant_sdk.call import IncomingCall
from participant_sdk.databases.database import (
    FENCE_CHECKED,
    SAVEPOINT,
    Script,
    known_to_sqlalchemy,
    most_patient,
    noted,
    wait_ms,
)
from participant_sdk.databases.driver_errors import SQLITE
from participant_sdk.databases.statements import OneByOne, new_row, new_rows, row_of, these, this
from participant_sdk.fence_row import MEETS_WITH, Meeting
from participant_sdk.steps import Ask, Look, Send

_BUSY_TIMEOUT: Final = "tricord.busy_timeout"


class Sqlite(OneByOne):
    """See the module."""

    errors = SQLITE
    one_writer: ClassVar[bool] = True
    NOW: ClassVar[str] = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
    NOW_MS: ClassVar[str] = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
    SIGN: ClassVar[str] = "?"
    SAME: ClassVar[str] = "IS"

    def meet(self, call: IncomingCall) -> Script[Meeting]:
        """See Database. Nobody else can write now, so what is met here stays as it is."""
        yield from self.bounds(call)
        yield from self._check_fence()
        rows = (yield Send(self._read, this(call))).rows
        if rows:
            return Meeting(row_of(rows[0]))
        status = MEETS_WITH.get(call.phase)
        if status is None:
            return Meeting(None)
        rows = (yield Send(f"{self._insert} RETURNING {self.NOW_MS}", new_row(call, status))).rows
        return Meeting(None, int(rows[0][0]))

    def meet_all(self, calls: Sequence[IncomingCall], mark: int) -> Script[list[Meeting]]:
        """See Database. The write lock is all the rows."""
        yield from self.bounds(most_patient(calls))
        yield from self._check_fence()
        keys = ", ".join(["(?, ?)"] * len(calls))
        read = f"SELECT xid, branch_id, {self._columns} FROM {self.log} WHERE (xid, branch_id) IN (VALUES {keys})"
        rows = (yield Send(read, these(calls))).rows
        met = {(xid, branch_id): Meeting(row_of(values)) for xid, branch_id, *values in rows}
        status = MEETS_WITH.get(calls[0].phase)
        new = [call for call in calls if call.key not in met]
        if status is not None and new:
            insert = self._insert_marked + ", ".join([self._marked] * len(new))
            rows = (yield Send(f"{insert} RETURNING {self.NOW_MS}", new_rows(new, status, mark))).rows
            met |= {call.key: Meeting(None, int(rows[0][0])) for call in new}
        return [met.get(call.key, Meeting(None)) for call in calls]

    def bounds(self, call: IncomingCall) -> Script[None]:
        """Take the write lock at once: a local transaction that reads first cannot wait for it later.

        The driver's own idea of when to begin (or an engine event's) is undone first, so that it cannot matter.
        """
        if (yield Ask(in_transaction)):
            yield Send("ROLLBACK")
        if (yield Look(lambda connection: connection.info.get(_BUSY_TIMEOUT))) is None:
            before = int((yield Send("PRAGMA busy_timeout")).rows[0][0])
            yield Look(lambda connection: connection.info.update({_BUSY_TIMEOUT: before}))
        yield Send(f"PRAGMA busy_timeout = {wait_ms(call)}")
        yield Send("BEGIN IMMEDIATE")

    def begin_within(self, connection: Connection, call: IncomingCall) -> None:
        """See Database."""
        cursor = connection.connection.cursor()
        try:
            if connection.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
                cursor.execute("ROLLBACK")
            cursor.execute(f"PRAGMA busy_timeout = {wait_ms(call)}")
            cursor.execute("BEGIN IMMEDIATE")
            cursor.execute(SAVEPOINT)
        finally:
            cursor.close()

    def restore(self) -> Script[None]:
        """The user's busy_timeout; not before the COMMIT, which may have to wait for readers."""
        before = yield Look(lambda connection: noted(connection, _BUSY_TIMEOUT))
        if before is not None:
            yield Send(f"PRAGMA busy_timeout = {before}")

    def _check_fence(self) -> Script[None]:
        if (yield Look(lambda connection: connection.info.get(FENCE_CHECKED))) == self.fence_id:
            return
        rows = (yield Send(self._fence_id)).rows
        self.check_fence_id(rows[0][0] if rows else None)
        yield Look(lambda connection: connection.info.update({FENCE_CHECKED: self.fence_id}))


def in_transaction(connection: Connection) -> bool:
    known_to_sqlalchemy(connection)  # the engine's "begin" event does now whatever it does
    return bool(connection.connection.driver_connection.in_transaction)  # type: ignore[union-attr]
