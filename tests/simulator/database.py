"""The ``Database`` of the simulated server: the scripts that the SDK's real steps of a call are made of.

What each script has to do is said in ``participant_sdk.databases.database``, and done here in the order that the
PostgreSQL and SQLite ones have. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from participant_sdk.call import FINGERPRINT_ALGORITHM, IncomingCall, Refusal
from participant_sdk.databases.database import (
    FENCE_CHECKED,
    Database,
    Ended,
    Finished,
    SaidNo,
    Script,
    Start,
    Withdrawn,
    idle_ms,
    most_patient,
    wait_ms,
)
from participant_sdk.databases.postgresql import PostgreSQL
from participant_sdk.fence import Phase, Status
from participant_sdk.fence_row import MEETS_WITH, FenceRow, Meeting, RowGone, status_of
from participant_sdk.fence_tables import FenceTables
from participant_sdk.payload import Payload
from participant_sdk.steps import Look, RunAgain
from tests.simulator.database_client import SimConnection, roll_back
from tests.simulator.database_server import Session, Statement
from tests.simulator.transactions import WRITER, Flavour, Key, StoredRow

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection

REAL: Final = PostgreSQL(PGDialect_psycopg(), FenceTables())  # type: ignore[no-untyped-call]
"""Judges the driver's errors."""


@dataclass(slots=True)
class Request:
    """The step that sends statements to the server, together; gives what each gave."""

    script: Sequence[Statement]
    commits: bool = False

    def perform(self, connection: Connection) -> Any:
        """Processes of the simulation are asynchronous."""
        raise NotImplementedError

    async def perform_async(self, connection: AsyncConnection) -> list[Any]:
        """See Step."""
        return await cast(SimConnection, connection).ask(*self.script, commits=self.commits)


class SimDatabase(Database):
    """See the module."""

    def __init__(self, flavour: Flavour, fence_id: str) -> None:
        self.fence_id = fence_id
        self.flavour = flavour
        self.one_writer = flavour is Flavour.ONE_WRITER  # type: ignore[misc]

    def meet(self, call: IncomingCall) -> Script[Meeting]:
        """See Database."""
        key = fence_key(call)
        yield from self._check_fence()
        status = MEETS_WITH.get(call.phase)
        if status is None:
            results = yield Request((*self._begin(call), partial(_read, key)))
            return Meeting(results[-1])
        results = yield Request((*self._begin(call), partial(_insert, key, call, status)))
        if (now_ms := results[-1]) is not None:
            return Meeting(None, now_ms)
        read = _read_for_update if self.flavour is Flavour.LOCKING else _read
        row: FenceRow | None = (yield Request((partial(read, key),)))[-1]
        if row is None:
            raise RunAgain("the fence row went away between two statements")
        return Meeting(row)

    def savepoint(self) -> Script[None]:
        """See Database."""
        yield Request((_savepoint,))

    def start(self, call: IncomingCall, row: FenceRow, status: Status) -> Script[None]:
        """See Database."""
        results = yield Request((partial(_start, fence_key(call), row, status), _savepoint))
        if not results[0]:
            raise RunAgain("the fence row was changed meanwhile")

    def finish(self, call: IncomingCall, status: Status, result: Payload | None, intent: str | None) -> Script[None]:
        """See Database."""
        change = partial(_finished, result=result)
        update = partial(_update_mine, fence_key(call), status, intent, change, RowGone)
        yield Request((_release, update, _commit), commits=True)

    def refuse(
        self, call: IncomingCall, refusal: Refusal, *, handled: bool, intent: str | None
    ) -> Script[Meeting | None]:
        """See Database."""
        if handled and self.flavour in (Flavour.READ_COMMITTED, Flavour.SERIALIZABLE):
            return (yield from self._refuse_anew(call, refusal))
        change = partial(_finished, refusal=refusal)
        update = partial(_update_mine, fence_key(call), Status.TRIED, intent, change, RowGone)
        back = (_rollback_to,) if handled else ()
        yield Request((*back, update, _commit), commits=True)
        return None

    def _refuse_anew(self, call: IncomingCall, refusal: Refusal) -> Script[Meeting | None]:
        """As PostgreSQL: in another local transaction, unless a row has come meanwhile."""
        key = fence_key(call)
        insert = partial(_insert, key, call, Status.ROLLBACKED, refusal=refusal)
        if (yield Request((*self._begin(call), insert, _commit), commits=True))[-2] is not None:
            return None
        row: FenceRow | None = (yield Request((*self._begin(call), partial(_read, key), _commit)))[-2]
        if row is None:
            raise RunAgain("the fence row went away between two statements")
        return Meeting(row)

    def commit(self) -> Script[None]:
        """See Database."""
        yield Request((_commit,), commits=True)

    def meet_all(self, calls: Sequence[IncomingCall], mark: int) -> Script[list[Meeting]]:
        """See Database."""
        yield from self._check_fence()
        status = MEETS_WITH.get(calls[0].phase)
        read = _read if calls[0].phase is Phase.TRY and self.flavour is not Flavour.LOCKING else _read_for_update
        begin = self._begin(most_patient(calls))
        if status is None:
            results = yield Request((*begin, *(partial(read, fence_key(call)) for call in calls)))
            return [Meeting(row) for row in results[len(begin) :]]
        marked = mark if status is Status.TRIED else None
        inserts = (partial(_insert, fence_key(call), call, status, mark=marked) for call in calls)
        made = (yield Request((*begin, *inserts)))[len(begin) :]
        met = []
        for call, now_ms in zip(calls, made, strict=True):
            row = None if now_ms is not None else (yield Request((partial(read, fence_key(call)),)))[-1]
            if now_ms is None and row is None:
                raise RunAgain("a fence row went away between two statements")
            met.append(Meeting(row, now_ms))
        return met

    def next_member(self, ended: Sequence[Ended], start: Start | None) -> Script[None]:
        """See Database."""
        starting = () if start is None else (partial(_start, fence_key(start.call), start.row, start.status),)
        results = yield Request((*_stored(ended), *starting, _savepoint))
        if start is not None and not results[-2]:
            raise RunAgain("the fence row was changed meanwhile")

    def end_batch(self, ended: Sequence[Ended]) -> Script[None]:
        """See Database."""
        yield Request((*_stored(ended), _commit), commits=True)

    def clear(self, calls: Sequence[IncomingCall], mark: int) -> Script[None]:
        """See Database."""
        deletes = (partial(_delete_marked, fence_key(call), mark) for call in calls)
        yield Request((*self._begin(most_patient(calls)), *deletes, _commit), commits=True)

    def lease(self, call: IncomingCall, old: str | None, new: str, milliseconds: int) -> Script[None]:
        """See Database."""
        change = partial(_leased, intent=new, milliseconds=milliseconds)
        update = partial(_update_mine, fence_key(call), Status.TRIED, old, change, _changed)
        yield Request((update, _commit), commits=True)

    def begin_within(self, connection: Connection, call: IncomingCall) -> None:
        """See Database. The handlers of the simulation's external actions leave their connection alone."""
        raise NotImplementedError

    def begin(self, call: IncomingCall) -> Script[None]:
        """See Database."""
        yield Request((*self._begin(call), _savepoint))

    def lapse(self, call: IncomingCall, intent: str) -> Script[bool]:
        """See Database."""
        update = partial(_update_mine, fence_key(call), Status.TRIED, intent, _lapsed, None)
        results = yield Request((*self._begin(call), update, _commit), commits=True)
        return bool(results[-2])

    def leave(self) -> Script[None]:
        """See Database."""
        yield Request((roll_back,))

    def is_transient(self, error: BaseException) -> bool:
        """See Database."""
        return REAL.is_transient(error)

    def _begin(self, call: IncomingCall) -> tuple[Statement, ...]:
        lock_ms = wait_ms(call)
        begin = partial(_begin, lock_ms, None if self.flavour is Flavour.ONE_WRITER else idle_ms(lock_ms))
        return (begin, _take_turn) if self.flavour is Flavour.ONE_WRITER else (begin,)

    def _check_fence(self) -> Script[None]:
        if (yield Look(lambda connection: connection.info.get(FENCE_CHECKED))) == self.fence_id:
            return
        self.check_fence_id((yield Request((fence_id,)))[0])
        yield Look(lambda connection: connection.info.update({FENCE_CHECKED: self.fence_id}))


def fence_key(call: IncomingCall) -> Key:
    """The key of the call's fence row."""
    return "fence", call.xid, call.branch_id


def fence_id(session: Session) -> str:
    """SELECT fence_id."""
    return session.server.fence_id


def row_of(stored: StoredRow | None, now_ms: int) -> FenceRow | None:
    """The row as the SDK reads it."""
    if stored is None:
        return None
    return FenceRow(
        participant=stored.participant,
        status=status_of(stored.status),
        finished=stored.finished or stored.status == Status.SUSPENDED,
        fingerprint_algorithm=stored.algorithm,
        fingerprint=stored.fingerprint,
        result=stored.result,
        refusal=stored.refusal,
        intent=stored.intent,
        lease_left_ms=0 if stored.lease_until_ms is None else stored.lease_until_ms - now_ms,
    )


# --- statements ----------------------------------------------------------------------------------------------


def _begin(lock_ms: int, idle: int | None, session: Session) -> None:
    session.server.roll_back(session)
    session.begun()
    session.lock_ms, session.idle_ms = lock_ms, idle


def _take_turn(session: Session) -> None:
    session.begun().lock(WRITER)


def _stored(ended: Sequence[Ended]) -> list[Statement]:
    """How members of a batch have ended."""
    script: list[Statement] = []
    for each in ended:
        key = fence_key(each.call)
        match each:
            case Finished(_, status, result):
                change = partial(_finished, result=result)
                script += [_release, partial(_update_mine, key, status, None, change, RowGone)]
            case SaidNo(_, refusal, handled):
                change = partial(_finished, refusal=refusal)
                back = [_rollback_to, _release] if handled else []
                script += [*back, partial(_update_mine, key, Status.TRIED, None, change, RowGone)]
            case Withdrawn(_, mark):
                script.append(partial(_delete_marked, key, mark))
    return script


def _delete_marked(key: Key, mark: int, session: Session) -> None:
    local = session.begun()
    row: StoredRow | None = local.lock(key)
    if row is not None and not row.finished and row.lease_until_ms == mark:
        local.write(key, None)


def _insert(
    key: Key,
    call: IncomingCall,
    status: Status,
    session: Session,
    mark: int | None = None,
    refusal: Refusal | None = None,
) -> int | None:
    now_ms = session.server.now_ms
    row = StoredRow(
        call.participant,
        call.action,
        int(status),
        now_ms,
        algorithm=FINGERPRINT_ALGORITHM,
        fingerprint=call.fingerprint,
        lease_until_ms=mark,
        refusal=refusal,
        finished=refusal is not None,
    )
    return now_ms if session.begun().insert(key, row) else None


def _read(key: Key, session: Session) -> FenceRow | None:
    return row_of(session.begun().read(key), session.server.now_ms)


def _read_for_update(key: Key, session: Session) -> FenceRow | None:
    return row_of(session.begun().lock(key), session.server.now_ms)


def _savepoint(session: Session) -> None:
    session.begun().savepoint()


def _release(session: Session) -> None:
    session.begun().release()


def _rollback_to(session: Session) -> None:
    waiting = session.begun()
    waiting.rollback_to()
    session.server.locks.free(waiting)


def _commit(session: Session) -> None:
    session.server.commit(session)


def _start(key: Key, met: FenceRow, status: Status, session: Session) -> bool:
    local, now_ms = session.begun(), session.server.now_ms
    row: StoredRow | None = local.lock(key)
    found = row_of(row, now_ms)
    if row is None or found is None:
        return False
    if (found.status, found.finished, found.intent) != (met.status, met.finished, met.intent):
        return False
    started = row._replace(status=int(status), finished=False, intent=None, lease_until_ms=None, modified_ms=now_ms)
    local.write(key, started)
    return True


def _update_mine(
    key: Key,
    status: Status,
    intent: str | None,
    change: Callable[[StoredRow, int], StoredRow],
    missed: Callable[[], Exception] | None,
    session: Session,
) -> bool:
    """UPDATE … WHERE it is unfinished, with this status and intent; raises what ``missed`` gives if it hits none."""
    local = session.begun()
    row: StoredRow | None = local.lock(key)
    if row is None or row.finished or (row.status, row.intent) != (status, intent):
        if missed is not None:
            raise missed()
        return False
    local.write(key, change(row, session.server.now_ms))
    return True


def _finished(row: StoredRow, now_ms: int, result: Payload | None = None, refusal: Refusal | None = None) -> StoredRow:
    return row._replace(
        status=row.status if refusal is None else int(Status.ROLLBACKED),
        finished=True,
        modified_ms=now_ms,
        result=result if result is not None else row.result,
        refusal=refusal,
        intent=None,
        lease_until_ms=None,
    )


def _leased(row: StoredRow, now_ms: int, intent: str, milliseconds: int) -> StoredRow:
    return row._replace(intent=intent, lease_until_ms=now_ms + milliseconds)


def _lapsed(row: StoredRow, _now_ms: int) -> StoredRow:
    return row._replace(lease_until_ms=0)


def _changed() -> Exception:
    return RunAgain("the fence row was changed meanwhile")
