"""The fence's two tables, and the statements that meet a row of them.

`tcc_fence_log` holds one row per branch that was ever called here; it is written in the same local transaction as
the business rows, which is the whole point of it. `tcc_fence_info` holds the database's own id, made together with
the tables, so that an answer out of another database is recognised. Put `metadata` into your own migrations, or let
the SDK create the tables at start.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Executable,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    bindparam,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from participant_sdk.call import FINGERPRINT_ALGORITHM, IncomingCall, Refusal
from participant_sdk.errors import MESSAGE_LENGTH_MAX, REASON_LENGTH_MAX, printable
from participant_sdk.fence import Phase, Status
from participant_sdk.payload import Payload
from participant_sdk.steps import CallFailed, Change, Fetch, RunAgain, Step

metadata = MetaData()

tcc_fence_log = Table(
    "tcc_fence_log",
    metadata,
    Column("xid", String(32), primary_key=True),
    Column("branch_id", BigInteger, primary_key=True, autoincrement=False),
    Column("participant", String(64), nullable=False),
    Column("action", String(64), nullable=False),
    Column("status", SmallInteger, nullable=False),
    Column("fingerprint_algorithm", SmallInteger),
    Column("fingerprint", LargeBinary(32)),
    Column("result", LargeBinary),
    Column("result_content_type", Text),
    Column("refusal_reason", Text),
    Column("refusal_message", Text),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("modified_at", DateTime(timezone=True), nullable=False),
    Column("finished_at", DateTime(timezone=True)),
)

tcc_fence_info = Table(
    "tcc_fence_info",
    metadata,
    Column("singleton", SmallInteger, primary_key=True, autoincrement=False),
    Column("fence_id", String(32), nullable=False),
)


class database_now(FunctionElement[Any]):
    """The database's clock at this moment, not at the start of the local transaction (which may have waited)."""

    inherit_cache = True
    type = DateTime(timezone=True)


@compiles(database_now, "postgresql")
def _postgresql_now(element: database_now, compiler: SQLCompiler, **kwargs: Any) -> str:
    return "clock_timestamp()"


@compiles(database_now, "sqlite")
def _sqlite_now(element: database_now, compiler: SQLCompiler, **kwargs: Any) -> str:
    return "strftime('%Y-%m-%d %H:%M:%f', 'now')"


INSERT: Final[dict[str, Any]] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}

_NEW_ROW: Final[dict[str, Any]] = {
    name: bindparam(name)
    for name in ("xid", "branch_id", "participant", "action", "status", "fingerprint_algorithm", "fingerprint")
}

_this_row: Final = (tcc_fence_log.c.xid == bindparam("at_xid"), tcc_fence_log.c.branch_id == bindparam("at_branch_id"))

LOCK_ROW: Final = select(tcc_fence_log).where(*_this_row).with_for_update()


FENCE_ID: Final = select(tcc_fence_info.c.fence_id)


def _change(*columns: str, finished: bool) -> Executable:
    values: dict[str, Any] = {name: bindparam(name) for name in columns}
    changed = update(tcc_fence_log).where(*_this_row, tcc_fence_log.c.status == bindparam("from_status"))
    finished_at = database_now() if finished else None
    return changed.values(modified_at=database_now(), finished_at=finished_at, **values)


START: Final = _change("status", finished=False)
FINISH: Final = _change(finished=True)
FINISH_WITH_RESULT: Final = _change("result", "result_content_type", finished=True)
FINISH_REFUSED: Final = _change("status", "refusal_reason", "refusal_message", finished=True)


def insert_for(dialect: str) -> Executable:
    """The insert that wins or loses the branch's row at once: it returns a row only if it inserted one."""
    statement = INSERT[dialect](tcc_fence_log).values(**_NEW_ROW, created_at=database_now(), modified_at=database_now())
    inserted: Executable = statement.on_conflict_do_nothing().returning(tcc_fence_log.c.status)
    return inserted


@dataclass(frozen=True, slots=True)
class FenceRow:
    """What is stored about a branch, read while this local transaction holds the row locked.

    `finished`: the last statement of the call that gave the row its status is in it.
    """

    participant: str
    status: Status
    finished: bool
    fingerprint_algorithm: int | None
    fingerprint: bytes | None
    result: Payload | None
    refusal: Refusal | None

    def holds(self, call: IncomingCall) -> bool:
        """Whether `call` is about the same action and payload as the call that made this row.

        Compared under the row's own algorithm, and only if the row has one.
        """
        if self.participant != call.participant:
            return False
        if self.fingerprint is None or self.fingerprint_algorithm is None:
            return True
        if self.fingerprint_algorithm != FINGERPRINT_ALGORITHM:
            raise CallFailed(
                f"the fence row's fingerprint has algorithm {self.fingerprint_algorithm}, which this version of the "
                "SDK does not know",
                attention=True,
            )
        return bytes(self.fingerprint) == call.fingerprint


_MEETS_WITH: Final = {Phase.TRY: Status.TRIED, Phase.CANCEL: Status.SUSPENDED}


def meet(call: IncomingCall, insert: Executable) -> Generator[Step, Any, FenceRow | None]:
    """Take the branch's fence row, whoever else wants it. None: there was none (Try and Cancel have made it now).

    Try and Cancel insert first: two of them in flight together meet on the primary key, and the later one waits for
    the earlier one's local transaction. A read first would see neither. The row is then read in a new statement,
    because under READ COMMITTED a statement does not see what was committed while it waited.
    """
    status = _MEETS_WITH.get(call.phase)
    if status is not None and (yield Fetch(insert, new_row(call, status))):
        return None
    rows = yield Fetch(LOCK_ROW, _at(call))
    if rows:
        return _row(rows[0])
    if status is not None:  # it was there when the insert met it, and is gone: its local transaction has ended
        raise RunAgain("the fence row went away between two statements")
    return None


def start(call: IncomingCall, status: Status) -> Generator[Step, Any, None]:
    """Move the row from TRIED to `status`, unfinished, before the handler runs."""
    yield from _must_change(START, call, Status.TRIED, status=int(status))


def finish(call: IncomingCall, status: Status, result: Payload | None = None) -> Generator[Step, Any, None]:
    """The last statement of every call whose handler ran; stores what Try returned, for repeats and for phase 2."""
    if result is None:
        yield from _must_change(FINISH, call, status)
    else:
        values = {"result": result.data, "result_content_type": result.content_type}
        yield from _must_change(FINISH_WITH_RESULT, call, status, **values)


def finish_refused(call: IncomingCall, refusal: Refusal) -> Generator[Step, Any, None]:
    """Store why Try said no: a repeat gets the same answer, and Cancel finds nothing to undo."""
    yield from _must_change(
        FINISH_REFUSED,
        call,
        Status.TRIED,
        status=int(Status.ROLLBACKED),
        refusal_reason=refusal.reason,
        refusal_message=refusal.message,
    )


def storable(reason: str, message: str) -> Refusal:
    """A refusal within the limits of what is stored and sent."""
    return Refusal(printable(str(reason), REASON_LENGTH_MAX) or "refused", printable(str(message), MESSAGE_LENGTH_MAX))


def _must_change(
    statement: Executable, call: IncomingCall, from_status: Status, **values: Any
) -> Generator[Step, Any, None]:
    changed = yield Change(statement, {**_at(call), "from_status": int(from_status), **values})
    if changed != 1:
        raise CallFailed(f"the fence row was not there when it was written: {changed} rows changed", attention=True)


def _at(call: IncomingCall) -> dict[str, Any]:
    return {"at_xid": call.xid, "at_branch_id": call.branch_id}


def new_row(call: IncomingCall, status: Status) -> dict[str, Any]:
    """The parameters of `insert_for` for a call's new row."""
    return {
        "xid": call.xid,
        "branch_id": call.branch_id,
        "participant": call.participant,
        "action": call.action,
        "status": int(status),
        "fingerprint_algorithm": FINGERPRINT_ALGORITHM,
        "fingerprint": call.fingerprint,
    }


def _row(row: Any) -> FenceRow:
    try:
        status = Status(row.status)
    except ValueError:
        raise CallFailed(
            f"the fence row has status {row.status}, which this version of the SDK does not know", attention=True
        ) from None
    result = None if row.result is None else Payload(bytes(row.result), row.result_content_type or "")
    refusal = None if row.refusal_reason is None else Refusal(row.refusal_reason, row.refusal_message or "")
    # Without a handler there is nothing to finish: SUSPENDED is whole as it was inserted.
    finished = row.finished_at is not None or status is Status.SUSPENDED
    return FenceRow(row.participant, status, finished, row.fingerprint_algorithm, row.fingerprint, result, refusal)
