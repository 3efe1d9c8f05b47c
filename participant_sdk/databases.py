"""What differs between the databases that can hold a fence.

Per database: how the local transaction begins so that no wait in it outlasts the call, how the SDK's savepoint is
released, and which errors only mean "run it again". Everything else is the same SQL everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, text
from sqlalchemy import exc as sqlalchemy_errors

from participant_sdk.call import IncomingCall
from participant_sdk.errors import ConfigurationError
from participant_sdk.fence import Phase
from participant_sdk.steps import Ask, Fetch, Script, Step

Begin = Callable[[IncomingCall], Generator[Step, Any, Any]]
Restore = Callable[[Any], Generator[Step, Any, None]]

SAVEPOINT: Final = "SAVEPOINT tricord_handler"
ROLLBACK_TO: Final = "ROLLBACK TO SAVEPOINT tricord_handler"
RELEASE: Final = "RELEASE SAVEPOINT tricord_handler"

LOCK_WAIT_MIN_MS: Final = 50
PHASE2_WAIT_MIN_MS: Final = 1_000
REPLY_MARGIN_MS: Final = 100
"""Left of a call's time for answering "unknown" after a wait that was in vain."""
IDLE_MIN_MS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Database:
    """One kind of database. `one_writer`: it lets only one local transaction write at a time.

    What `begin` returns goes to `restore` after the end, when the connection goes back to the user's pool.
    """

    name: str
    begin: Begin
    restore: Restore
    release: tuple[str, ...]
    is_transient: Callable[[sqlalchemy_errors.DBAPIError], bool]
    one_writer: bool


def wait_ms(call: IncomingCall) -> int:
    """How long a statement of this call may wait for a lock, in ms: less than the coordinator waits for the reply.

    Confirm and Cancel are owed however late they are, so they always get a moment.
    """
    least = LOCK_WAIT_MIN_MS if call.phase is Phase.TRY else PHASE2_WAIT_MIN_MS
    return max(least, int(call.seconds_left() * 1000) - REPLY_MARGIN_MS)


_LIMITS: Final = text(
    "SELECT set_config('lock_timeout', :lock, true), set_config('idle_in_transaction_session_timeout', :idle, true)"
)


def _begin_postgresql(call: IncomingCall) -> Generator[Step, Any, None]:
    """Bound every wait for a lock, and how long a stopped process may hold locks, for this local transaction only."""
    lock = wait_ms(call)
    yield Fetch(_LIMITS, {"lock": str(lock), "idle": str(max(2 * lock, IDLE_MIN_MS))})


_BUSY_TIMEOUT: Final = text("PRAGMA busy_timeout")


def _restore_nothing(before: None) -> Generator[Step, Any, None]:
    yield from ()


def _begin_sqlite(call: IncomingCall) -> Generator[Step, Any, int]:
    """Take the write lock at once: a local transaction that reads first cannot wait for it later.

    The driver's own idea of when to begin (or an engine event's) is undone first, so that it cannot matter.
    """
    if (yield Ask(_in_transaction)):
        yield Script("ROLLBACK")
    before = int((yield Fetch(_BUSY_TIMEOUT))[0][0])
    yield Script(f"PRAGMA busy_timeout = {wait_ms(call)}")
    try:
        yield Script("BEGIN IMMEDIATE")
    except Exception:
        yield from _restore_sqlite(before)
        raise
    return before


def _restore_sqlite(before: int) -> Generator[Step, Any, None]:
    """Not before the COMMIT: it may have to wait for readers, and no longer than its call can."""
    yield Script(f"PRAGMA busy_timeout = {before}")


def _in_transaction(connection: Connection) -> bool:
    if not connection.in_transaction():
        connection.begin()  # the engine's "begin" event does now whatever it does
    return bool(connection.connection.driver_connection.in_transaction)  # type: ignore[union-attr]


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


def _is_transient_postgresql(error: sqlalchemy_errors.DBAPIError) -> bool:
    sqlstate = getattr(error.orig, "sqlstate", None)
    if sqlstate is None:  # no answer of the server: the connection was refused or lost
        return isinstance(error, sqlalchemy_errors.OperationalError)
    return sqlstate in _TRANSIENT_SQLSTATES or sqlstate.startswith("08")


_SQLITE_BUSY: Final = 5
_SQLITE_LOCKED: Final = 6


def _is_transient_sqlite(error: sqlalchemy_errors.DBAPIError) -> bool:
    return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in (_SQLITE_BUSY, _SQLITE_LOCKED)


POSTGRESQL: Final = Database(
    name="postgresql",
    begin=_begin_postgresql,
    restore=_restore_nothing,
    # Deferred constraints are checked now, while what fails can still be told as the handler's error.
    release=("SET CONSTRAINTS ALL IMMEDIATE", RELEASE),
    is_transient=_is_transient_postgresql,
    one_writer=False,
)

SQLITE: Final = Database(
    name="sqlite",
    begin=_begin_sqlite,
    restore=_restore_sqlite,
    release=(RELEASE,),
    is_transient=_is_transient_sqlite,
    one_writer=True,
)

_SUPPORTED: Final = {"postgresql": ({"psycopg"}, POSTGRESQL), "sqlite": ({"pysqlite", "aiosqlite"}, SQLITE)}


def database_of(dialect: str, driver: str) -> Database:
    """The database behind an engine; raises ConfigurationError for one that is not supported."""
    drivers, database = _SUPPORTED.get(dialect, (set(), None))
    if database is None:
        raise ConfigurationError(f"{dialect} is not supported yet: the fence needs PostgreSQL or SQLite")
    if driver not in drivers:
        raise ConfigurationError(
            f"the driver {dialect}+{driver} is not supported yet: use {dialect}+{' or '.join(sorted(drivers))}"
        )
    return database
