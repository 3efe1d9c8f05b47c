"""What goes wrong in a race, and where.

A place is a point in the life of a call, named the same on every database. A fault lies in wait for the first call of
its phase that comes to its place.

    killed      the whole instance dies there, all of its calls, without a word to the database (as by SIGKILL)
    lost        the connection is cut; the process lives and has to settle what became of its local transaction
    failing     the handler raises, after it has written
    refusing    Try's handler says no, after it has written
    slow        the handler goes on when nobody else can
    expired     the call's time is up
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import psycopg

from participant_sdk.databases.postgresql_script import PgScript
from participant_sdk.fence import Phase
from participant_sdk.steps import Commit, Send, Step

BEFORE_FENCE: Final = "before the fence write"
AFTER_FENCE: Final = "after the fence write"
IN_HANDLER: Final = "in the handler"
BEFORE_COMMIT: Final = "before COMMIT"
IN_COMMIT: Final = "in COMMIT"
AFTER_COMMIT: Final = "after COMMIT"
PLACES: Final = (BEFORE_FENCE, AFTER_FENCE, IN_HANDLER, BEFORE_COMMIT, IN_COMMIT, AFTER_COMMIT)

AFTER_EFFECT: Final = "after the outside effect"
"""Of an external Try only."""

KILLED: Final = "killed"
LOST: Final = "lost"
FAILING: Final = "failing"
REFUSING: Final = "refusing"
SLOW: Final = "slow"
EXPIRED: Final = "expired"
EXPIRES_AT: Final = (BEFORE_FENCE, IN_HANDLER, BEFORE_COMMIT)


@dataclass(frozen=True)
class Fault:
    """`skip`: how many come to the place unharmed before it strikes."""

    kind: str
    place: str
    phase: Phase
    skip: int = 0

    @property
    def label(self) -> str:
        """What it is counted as."""
        return f"{self.kind} {self.place}" if self.kind in (KILLED, LOST) else self.kind


class Killed(BaseException):
    """Ends a call as the end of its process would: no `except Exception` sees it."""


class Traps:
    """The faults that have not struck yet."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._waiting = list(faults)

    def at(self, phase: Phase, place: str) -> Fault | None:
        """The fault that strikes a call of this phase at this place, once."""
        for number, fault in enumerate(self._waiting):
            if fault.phase is not phase or fault.place != place:
                continue
            if not fault.skip:
                return self._waiting.pop(number)
            self._waiting[number] = replace(fault, skip=fault.skip - 1)
        return None


FENCE_WRITE: Final = "fence write"
END: Final = "end"
COMMIT: Final = "COMMIT"
READ: Final = "read"


def kind_of(step: Step) -> str | None:
    """What a step of the fence is; None if nothing can happen between it and its neighbours."""
    if isinstance(step, Commit):
        return COMMIT
    if isinstance(step, PgScript):
        if step.before.endswith("COMMIT") or step.after.endswith("COMMIT"):
            return COMMIT
        if step.prepared is None:
            return None
        return FENCE_WRITE if step.prepared.name.startswith((b"tricord_meet", b"tricord_start")) else READ
    if isinstance(step, Send):
        if step.sql.startswith("INSERT") or (step.sql.startswith("UPDATE") and " SET status =" in step.sql):
            return FENCE_WRITE
        if step.sql.startswith(("UPDATE", "RELEASE", "ROLLBACK TO")):
            return END
        if step.sql.startswith("BEGIN") or " WHERE xid = " in step.sql:
            return READ
    return None


def places_before(kind: str) -> tuple[str, ...]:
    """The places that lie right before a step."""
    return {FENCE_WRITE: (BEFORE_FENCE,), END: (BEFORE_COMMIT,), COMMIT: (BEFORE_COMMIT,)}.get(kind, ())


def places_after(kind: str) -> tuple[str, ...]:
    """The places that lie right after a step."""
    return {FENCE_WRITE: (AFTER_FENCE,), COMMIT: (AFTER_COMMIT,)}.get(kind, ())


def is_file(raw: Any) -> bool:
    """Whether the driver's connection is an open file, and no connection to a server."""
    return "sqlite" in type(raw).__module__


def cut(raw: Any, how: int = socket.SHUT_RDWR) -> None:
    """Break the driver's connection `raw` under its hands; what it sends or waits for after that fails.

    The server sees what it sees of a process that was killed. With SHUT_RD what is sent still arrives, but its answer
    does not. SQLite has no connection: closing the file takes back what is not committed, as a crash would.
    """
    driver = type(raw).__module__.partition(".")[0]
    if driver == "aiosqlite":  # belongs to a thread of its own; whoever ends rolls back
        return
    if driver == "sqlite3":
        raw.close()
        return
    descriptor = _descriptor(driver, raw)
    if descriptor < 0:
        return
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as again:  # else it is gone already
        again.shutdown(how)


def _descriptor(driver: str, raw: Any) -> int:
    """The number of the connection's socket, -1 if it has none any more."""
    if driver == "psycopg":
        try:
            return -1 if raw.closed else int(raw.pgconn.socket)
        except psycopg.OperationalError:
            return -1
    if driver == "pymysql":
        return -1 if raw._sock is None else int(raw._sock.fileno())
    if driver == "asyncmy":
        return -1 if raw._transport is None else int(raw._transport.get_extra_info("socket").fileno())
    raise AssertionError(f"no way is known to cut a connection of {driver}")
