"""What the errors of each database mean, as its drivers raise them: a lost race, somebody in the way, no connection.

No driver is loaded here: work may fail in another database than the one that the fence or the idempotency store is in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import exc as sqlalchemy_errors


@dataclass(frozen=True, slots=True)
class DriverErrors:
    """What the codes of one database's errors mean.

    `codes_of`: an error's codes, the exact one first; none, if the database has not said one. `races`: the local
    transaction lost a race, and may win it if it runs again. `changed`: those of them that mean a row was changed since
    the local transaction's snapshot. `busy`: somebody, or too many, were in the way. `away`: the connection is lost.
    `unclear`: what else a COMMIT may raise that has been done.
    """

    codes_of: Callable[[Any], tuple[Any, ...]]
    races: frozenset[Any]
    changed: frozenset[Any]
    busy: frozenset[Any]
    away: frozenset[Any]
    unclear: frozenset[Any] = frozenset()

    def is_race(self, error: BaseException) -> bool:
        """Whether a local transaction lost a race, so that it may run again at once."""
        return self.says(error, self.races)

    def is_change(self, error: BaseException) -> bool:
        """Whether a row was changed since the local transaction's snapshot, which bars writing it."""
        return self.says(error, self.changed)

    def is_transient(self, error: BaseException) -> bool:
        """Whether the same may go well another time: a race, somebody in the way, or a connection that is lost."""
        if isinstance(error, sqlalchemy_errors.TimeoutError):  # no free connection in the pool
            return True
        if isinstance(error, sqlalchemy_errors.DBAPIError) and error.connection_invalidated:
            return True
        error = unwrapped(error)
        if errors_of(error) is not self:
            return False
        if not self.codes_of(error):  # no answer of the server: the connection was refused or lost
            return any(kind.__name__ == "OperationalError" for kind in type(error).__mro__)
        return self.says(error, self.races | self.busy | self.away)

    def says(self, error: BaseException, codes: frozenset[Any]) -> bool:
        """Whether it is an error of this database, with one of these codes."""
        error = unwrapped(error)
        return errors_of(error) is self and not codes.isdisjoint(self.codes_of(error))


def unwrapped(error: BaseException) -> BaseException:
    """What the driver has raised, if SQLAlchemy has wrapped it."""
    return error.orig or error if isinstance(error, sqlalchemy_errors.DBAPIError) else error


def errors_of(error: BaseException) -> DriverErrors | None:
    """Which database's driver has raised `error`; None if it is no driver's."""
    for kind in type(error).__mro__:
        if (found := _DRIVERS.get(kind.__module__.partition(".")[0])) is not None:
            return found
    return POSTGRESQL if hasattr(error, "sqlstate") else None  # another driver, which speaks its language


def leaves_doubt(error: BaseException) -> bool:
    """Whether a COMMIT that has raised this may have been done: the database has not said no, its answer was lost."""
    if isinstance(error, sqlalchemy_errors.DBAPIError) and error.connection_invalidated:
        return True
    error = unwrapped(error)
    if isinstance(error, sqlalchemy_errors.SQLAlchemyError):
        return False  # SQLAlchemy's own, before anything was sent
    errors = errors_of(error)
    if isinstance(error, OSError) or errors is None or not errors.codes_of(error):
        return True
    return errors.says(error, errors.away | errors.unclear)


def _sqlstate(error: Any) -> tuple[str, ...]:
    state = error.sqlstate
    return () if state is None else (state, state[:2])


def _number(error: Any) -> tuple[int, ...]:
    return error.args[:1] if error.args and isinstance(error.args[0], int) else ()


def _result_code(error: Any) -> tuple[int, ...]:
    code = getattr(error, "sqlite_errorcode", None)
    return () if code is None else (code, code & 0xFF)


POSTGRESQL: Final = DriverErrors(
    _sqlstate,
    races=frozenset({"40001", "40P01"}),  # serialization failure, deadlock
    changed=frozenset({"40001"}),
    busy=frozenset({"55P03", "53300"}),  # lock time-out, too many connections
    # Any connection exception; the idle-in-transaction time-out; the server is shutting down, has crashed, is starting.
    away=frozenset({"08", "25P03", "57P01", "57P02", "57P03"}),
)

LOCK_TIMEOUT: Final = 1205
MARIADB: Final = DriverErrors(
    _number,
    races=frozenset({1020, 1213}),  # the row was changed since the snapshot, deadlock: all is rolled back
    changed=frozenset({1020}),
    # Too many connections; the lock; the savepoint is gone, so is all that was written before it; interrupted.
    busy=frozenset({1040, LOCK_TIMEOUT, 1305, 1317}),
    # The server is shutting down, the connection was killed; the others are the drivers' own.
    away=frozenset({0, 1053, 1927, 2002, 2003, 2006, 2013, 2055}),
)

SQLITE: Final = DriverErrors(
    _result_code,
    races=frozenset({5, 6}),  # busy, locked
    changed=frozenset({517}),  # SQLITE_BUSY_SNAPSHOT
    busy=frozenset(),
    away=frozenset(),
    # What a file may say in the middle of a COMMIT: an error of input or output, full, cannot be opened.
    unclear=frozenset({10, 13, 14}),
)

_DRIVERS: Final = {"psycopg": POSTGRESQL, "pymysql": MARIADB, "asyncmy": MARIADB, "sqlite3": SQLITE}
