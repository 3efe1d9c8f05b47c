"""The fence's statements for databases that take them one at a time, with parameters: MariaDB and SQLite.

The same SQL but for the clock and for the sign of a parameter; what differs more is said by the Database itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final

from sqlalchemy import Dialect

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
)
from participant_sdk.fence import Status
from participant_sdk.fence_row import FenceRow, Meeting, RowGone, status_of
from participant_sdk.fence_tables import FenceTables
from participant_sdk.payload import Payload
from participant_sdk.steps import Commit, RunAgain, Send

_COLUMNS: Final = (
    "participant, status, finished_at IS NOT NULL, fingerprint_algorithm, fingerprint, result, result_content_type, "
    "refusal_reason, refusal_message, intent, lease_until_ms - {now_ms}"
)
_CHANGED: Final = "the fence row was changed meanwhile"


class OneByOne(Database):
    """A Database that is sent one statement at a time."""

    restores: ClassVar[bool] = True
    NOW: ClassVar[str]
    """The clock at this moment, as what the table's times hold."""
    NOW_MS: ClassVar[str]
    """The same in ms since 1970."""
    SIGN: ClassVar[str]
    """A parameter."""
    SAME: ClassVar[str]
    """The comparison that finds NULL equal to NULL."""

    def __init__(self, dialect: Dialect, tables: FenceTables) -> None:
        super().__init__(dialect, tables)
        log, now, sign = self.log, self.NOW, self.SIGN
        this = f"xid = {sign} AND branch_id = {sign}"
        mine = f"{this} AND status = {sign} AND intent {self.SAME} {sign}"
        running = f"{mine} AND finished_at IS NULL"
        finish = f"UPDATE {log} SET modified_at = {now}, finished_at = {now}, intent = NULL, lease_until_ms = NULL"
        columns = "xid, branch_id, participant, action, status, fingerprint_algorithm, fingerprint"
        new = f"({', '.join([sign] * 7)}, {now}, {now})"
        self._insert = f"INSERT INTO {log} ({columns}, created_at, modified_at) VALUES {new}"
        self._insert_marked = f"INSERT INTO {log} ({columns}, lease_until_ms, created_at, modified_at) VALUES "
        self._marked = f"({', '.join([sign] * 8)}, {now}, {now})"
        self._columns = _COLUMNS.format(now_ms=self.NOW_MS)
        self._read = f"SELECT {self._columns} FROM {log} WHERE {this}"
        self._start = (
            f"UPDATE {log} SET status = {sign}, modified_at = {now}, finished_at = NULL, intent = NULL, "
            f"lease_until_ms = NULL WHERE {mine} AND (finished_at IS NOT NULL) = {sign}"
        )
        self._finish = f"{finish} WHERE {running}"
        self._finish_with_result = f"{finish}, result = {sign}, result_content_type = {sign} WHERE {running}"
        self._refuse = f"{finish}, status = {sign}, refusal_reason = {sign}, refusal_message = {sign} WHERE {running}"
        self._lease = f"UPDATE {log} SET intent = {sign}, lease_until_ms = {self.NOW_MS} + {sign} WHERE {running}"
        self._lapse = f"UPDATE {log} SET lease_until_ms = 0 WHERE {running}"
        marked = f"{this} AND lease_until_ms = {sign} AND intent IS NULL AND finished_at IS NULL"
        self._read_marked = f"SELECT 1 FROM {log} WHERE {marked}"
        self._delete_marked = f"DELETE FROM {log} WHERE {marked}"
        self._fence_id = f"SELECT fence_id FROM {self.info}"

    def savepoint(self) -> Script[None]:
        """See Database."""
        yield Send(SAVEPOINT)

    def start(self, call: IncomingCall, row: FenceRow, status: Status) -> Script[None]:
        """See Database."""
        values = (int(status), *_mine(call, row.status, row.intent), int(row.finished))
        if (yield Send(self._start, values)).hit != 1:
            raise RunAgain(_CHANGED)
        yield Send(SAVEPOINT)

    def finish(self, call: IncomingCall, status: Status, result: Payload | None, intent: str | None) -> Script[None]:
        """See Database."""
        yield from self._store_finish(call, status, result, intent)
        yield Commit()

    def _store_finish(
        self, call: IncomingCall, status: Status, result: Payload | None, intent: str | None
    ) -> Script[None]:
        yield Send(RELEASE)
        mine = _mine(call, status, intent)
        if result is None:
            answer = yield Send(self._finish, mine)
        else:
            answer = yield Send(self._finish_with_result, (result.data, result.content_type, *mine))
        if answer.hit != 1:
            raise RowGone()

    def refuse(
        self, call: IncomingCall, refusal: Refusal, *, handled: bool, intent: str | None
    ) -> Script[Meeting | None]:
        """See Database."""
        yield from self._store_refusal(call, refusal, handled, intent)
        yield Commit()
        return None

    def _store_refusal(self, call: IncomingCall, refusal: Refusal, handled: bool, intent: str | None) -> Script[None]:
        if handled:
            yield Send(ROLLBACK_TO)
        values = (int(Status.ROLLBACKED), refusal.reason, refusal.message, *_mine(call, Status.TRIED, intent))
        if (yield Send(self._refuse, values)).hit != 1:
            raise RowGone()

    def commit(self) -> Script[None]:
        """See Database."""
        yield Commit()

    def next_member(self, ended: Sequence[Ended], start: Start | None) -> Script[None]:
        """See Database."""
        yield from self._store(ended)
        if start is None:
            yield from self.savepoint()
        else:
            yield from self.start(start.call, start.row, start.status)

    def end_batch(self, ended: Sequence[Ended]) -> Script[None]:
        """See Database."""
        yield from self._store(ended)
        yield Commit()

    def _store(self, ended: Sequence[Ended]) -> Script[None]:
        for each in ended:
            match each:
                case Finished(call, status, result):
                    yield from self._store_finish(call, status, result, None)
                case SaidNo(call, refusal, handled):
                    yield from self._store_refusal(call, refusal, handled, None)
                case Withdrawn(call, mark):
                    if (yield Send(self._delete_marked, (*this(call), mark))).hit != 1:
                        raise RowGone()

    def clear(self, calls: Sequence[IncomingCall], mark: int) -> Script[None]:
        """See Database. Looked for first: a DELETE of what is not there would lock the gap on InnoDB."""
        yield from self.bounds(calls[0])
        for call in calls:
            if (yield Send(self._read_marked, (*this(call), mark))).rows:
                yield Send(self._delete_marked, (*this(call), mark))
        yield Commit()

    def lease(self, call: IncomingCall, old: str | None, new: str, milliseconds: int) -> Script[None]:
        """See Database."""
        if (yield Send(self._lease, (new, milliseconds, *_mine(call, Status.TRIED, old)))).hit != 1:
            raise RunAgain(_CHANGED)
        yield Commit()

    def lapse(self, call: IncomingCall, intent: str) -> Script[bool]:
        """See Database."""
        yield from self.begin(call)
        hit = (yield Send(self._lapse, _mine(call, Status.TRIED, intent))).hit
        yield Commit()
        return bool(hit)

    def restored(self) -> Script[None]:
        """See Database."""
        with suppress(Exception):
            yield from self.restore()

    @abstractmethod
    def bounds(self, call: IncomingCall) -> Script[None]:
        """Begin, with every wait bounded below the call's time."""

    def begin(self, call: IncomingCall) -> Script[None]:
        """See Database."""
        yield from self.bounds(call)
        yield Send(SAVEPOINT)


def new_row(call: IncomingCall, status: Status) -> tuple[Any, ...]:
    """The parameters of the insert of a call's new row."""
    return (
        call.xid,
        call.branch_id,
        call.participant,
        call.action,
        int(status),
        FINGERPRINT_ALGORITHM,
        call.fingerprint,
    )


def new_rows(calls: Sequence[IncomingCall], status: Status, mark: int) -> list[Any]:
    """The parameters of an insert of many rows, of which those of Trys are marked."""
    return [value for call in calls for value in (*new_row(call, status), mark if status is Status.TRIED else None)]


def these(calls: Sequence[IncomingCall]) -> list[Any]:
    """The parameters that name the rows of many calls."""
    return [value for call in calls for value in this(call)]


def this(call: IncomingCall) -> tuple[Any, ...]:
    """The parameters that name the call's row."""
    return call.xid, call.branch_id


def _mine(call: IncomingCall, status: Status, intent: str | None) -> tuple[Any, ...]:
    return *this(call), int(status), intent


def row_of(values: Sequence[Any]) -> FenceRow:
    """The row that was read."""
    participant, status, finished, algorithm, fingerprint, stored, content_type, reason, message, intent, lease = values
    return FenceRow(
        participant=participant,
        status=status_of(status),
        # Without a handler there is nothing to finish: SUSPENDED is whole as it was inserted.
        finished=bool(finished) or status == Status.SUSPENDED,
        fingerprint_algorithm=algorithm,
        fingerprint=None if fingerprint is None else bytes(fingerprint),
        result=None if stored is None else Payload(bytes(stored), content_type or ""),
        refusal=None if reason is None else Refusal(reason, message or ""),
        intent=intent,
        lease_left_ms=int(lease or 0),
    )
