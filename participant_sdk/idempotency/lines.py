"""A line: the connection on which a run's work and its record are one local transaction, and who may end that.

A line is the run's own, or stands on what the user has handed in: a Session, a Connection, or a psycopg connection.
Those are ended in their owner's way, so that a session knows what became of its objects.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import Connection, Engine
from sqlalchemy import exc as sqlalchemy_errors
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.driver_connections import DriverConnection, is_psycopg
from participant_sdk.idempotency.guard import Guard, RunMisused
from participant_sdk.prepare import is_autocommit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(slots=True, eq=False)
class Line:
    """`connection`: what scripts run on, of the engine's flavour. `on`: what the user has handed in; None: it is ours.

    `sessions`: ORM sessions that were lent on it. `pinned`: whether the run's record was locked in it, if it has to be.
    """

    connection: Any
    on: Any = None
    sessions: list[Any] = field(default_factory=list)
    guard: Guard | None = None
    pinned: bool = False

    def watch(self, who: str) -> None:
        """From now on nobody else commits it. `who`: the work that would be misused by it."""
        theirs = isinstance(self.connection, DriverConnection)
        self.guard = Guard(self.on if theirs else self.synchronous, who, own=self.on is None)

    def may_commit(self) -> None:
        """From now on it may be committed. Raises what was raised if it was tried before."""
        if self.guard is not None:
            self.guard.over()
            if self.guard.refused is not None:
                raise self.guard.refused

    def spoilt(self) -> bool:
        """Whether its connection is to be dropped; nobody watches it any more."""
        if self.guard is None:
            return False
        self.guard.over()
        return self.guard.spoilt

    def at_rest(self) -> bool:
        """Whether giving it back asks the database nothing, so that no task can be cancelled in the middle of it.

        So it is after a COMMIT on PostgreSQL, unless somebody listens, who may ask.
        """
        connection = self.synchronous
        if self.on is not None or self.sessions or self.spoilt() or connection.closed or connection.invalidated:
            return False
        pool: Any = connection.engine.pool
        driver_connection: Any = connection.connection.driver_connection
        pgconn = getattr(driver_connection, "pgconn", None)
        if pgconn is None or pgconn.transaction_status:  # IDLE is 0
            return False
        return not (pool.dispatch.reset or pool.dispatch.checkin or connection.dispatch.rollback)

    @property
    def is_over(self) -> bool:
        """Whether its session has given the connection back, as a session does that is rolled back."""
        return self.on is not None and bool(getattr(self.synchronous, "closed", False))

    def check_there(self) -> None:
        """Raises RunMisused if what it stands on was closed or rolled back, and has not begun anything since."""
        if self.is_over and not getattr(self.on, "in_transaction", bool)():
            raise RunMisused(
                "the session that it joined was closed or rolled back before the answer, and its work with it: it is "
                "to live for as long as the run, as that of run.session() does"
            )

    def check_endable(self) -> None:
        """Raises ConfigurationError if only a `with connection.transaction()` of psycopg may end it."""
        if isinstance(self.connection, DriverConnection) and self.connection.in_block:
            raise ConfigurationError(
                "the psycopg connection is in a transaction() block, which alone may end it: join it before, or call "
                "complete(answer, connection) in the block"
            )

    def check_alone(self) -> None:
        """Raises ConfigurationError if its session has begun on another connection as well, as one of two databases."""
        session = getattr(self.on, "sync_session", self.on)
        begun = getattr(session, "get_transaction", lambda: None)()
        others = {id(entry[0]) for entry in getattr(begun, "_connections", {}).values()} - {id(self.synchronous)}
        if others:
            raise ConfigurationError(
                "the session has worked on another connection as well: that work and the record would not be one local "
                "transaction; use a session of its own for another database"
            )

    @property
    def synchronous(self) -> Connection:
        """The connection as SQLAlchemy's own, which the async flavour wraps."""
        return cast(Connection, getattr(self.connection, "sync_connection", self.connection))

    def is_on(self, other: Any) -> bool:
        """Whether it stands on `other`: the very thing, or the connection below it."""
        return other is self.on or other is self.connection or any(other is session for session in self.sessions)

    @property
    def flushes(self) -> list[Callable[[], Any]]:
        """What writes down what the sessions on it still hold back."""
        flushes = [session.flush for session in self.sessions]
        return [*flushes, self.on.flush] if hasattr(self.on, "flush") else flushes


def stand_on(on: Any, engine: Engine) -> Line:
    """A line on what a user has handed in. Raises ConfigurationError for what it cannot stand on."""
    from sqlalchemy.orm import Session, scoped_session

    if isinstance(on, Connection):
        if not on.in_transaction():  # scripts go past SQLAlchemy, which would take it for having nothing to commit
            on.begin()
        return _checked(Line(on, on))
    if isinstance(on, Session | scoped_session):
        with _bind_told():
            return _checked(Line(on.connection(), on))
    if is_psycopg(on, asynchronous=False):
        return _checked(Line(DriverConnection(on, engine.dialect), on))
    raise ConfigurationError(
        f"a run here joins a Session, a Connection or a psycopg Connection, not {type(on).__qualname__}"
    )


async def stand_on_async(on: Any, engine: AsyncEngine) -> Line:
    """As `stand_on`."""
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    if isinstance(on, AsyncConnection):
        if on.sync_connection is None:
            await on.start()
        if not on.in_transaction():
            await on.begin()
        return _checked(Line(on, on))
    if isinstance(on, AsyncSession | async_scoped_session):
        with _bind_told():
            return _checked(Line(await on.connection(), on))
    if is_psycopg(on, asynchronous=True):
        return _checked(Line(DriverConnection(on, engine.dialect), on))
    raise ConfigurationError(
        "a run here joins an AsyncSession, an AsyncConnection or a psycopg AsyncConnection, "
        f"not {type(on).__qualname__}"
    )


@contextmanager
def _bind_told() -> Iterator[None]:
    try:
        yield
    except sqlalchemy_errors.UnboundExecutionError as error:
        raise ConfigurationError(
            "a session that is joined has one engine, that of the idempotency store, as its `bind`"
        ) from error


def _checked(line: Line) -> Line:
    """Raises ConfigurationError for what commits each statement by itself."""
    connection = line.connection
    if isinstance(connection, DriverConnection):
        autocommit = connection.driver_connection.autocommit and not connection.in_transaction()
    else:
        autocommit = is_autocommit(line.synchronous)
    if autocommit:
        raise ConfigurationError(
            "what was handed in is in AUTOCOMMIT mode: the work and its record would not be one local transaction"
        )
    return line
