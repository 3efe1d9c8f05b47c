"""What a process has of its database: an engine with a pool of connections, as far as the SDK looks at one.

The SDK's own ``AsyncEngineFence`` and ``run_async`` work on these. A connection that was lost is thrown away; one that
goes back to the pool in the middle of a local transaction is rolled back, as a real pool does it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psycopg

from participant_sdk.steps import Rollback
from tests.simulator.database_server import DatabaseServer, Session, Statement
from tests.simulator.transactions import lost

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class SimEngine:
    """The engine of one process. ``server`` may be exchanged: new connections lead to the other one then."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: DatabaseServer) -> None:
        self.loop = loop
        self.server = server
        self._pool: list[SimConnection] = []
        self._all: dict[SimConnection, None] = {}

    def execution_options(self, **_options: object) -> SimEngine:
        """There are none."""
        return self

    def connect(self) -> _CheckedOut:
        """``async with engine.connect() as connection``."""
        return _CheckedOut(self)

    def take(self) -> SimConnection:
        """One out of the pool, or a new one; raises OperationalError."""
        while self._pool:
            connection = self._pool.pop()
            if connection.session.server is self.server:
                return connection
            self.drop(connection)
        connection = SimConnection(self, self.server.connect())
        self._all[connection] = None
        return connection

    def give_back(self, connection: SimConnection) -> None:
        """It is free."""
        self._pool.append(connection)

    def drop(self, connection: SimConnection) -> None:
        """Close it: the server notices soon, or late."""
        if self._all.pop(connection, self) is None:
            connection.session.server.client_gone(connection.session)

    def crashed(self) -> None:
        """The process is dead: its connections go as the server notices."""
        for connection in list(self._all):
            self.drop(connection)


class _CheckedOut:
    """The time for which a connection is out of the pool."""

    __slots__ = ("_connection", "_engine")

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._connection: SimConnection | None = None

    async def __aenter__(self) -> SimConnection:
        self._connection = self._engine.take()
        return self._connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection = self._connection
        assert connection is not None
        if kind is GeneratorExit:  # the process has crashed, and this is what is left of it
            return
        if connection.in_transaction() and not connection.invalidated:
            try:
                await connection.ask(roll_back)
            except psycopg.OperationalError:
                pass
            except BaseException:
                self._engine.drop(connection)
                raise
        if connection.invalidated:
            self._engine.drop(connection)
        else:
            self._engine.give_back(connection)


class SimConnection:
    """A connection as the SDK's steps and the handlers see it; its own ``sync_connection`` and driver, too."""

    def __init__(self, engine: SimEngine, session: Session) -> None:
        self._engine = engine
        self.session = session
        self.info: dict[str, Any] = {}
        self.invalidated = False
        self.closed = False
        self._rolled_back = False

    @property
    def sync_connection(self) -> Self:
        """Itself."""
        return self

    @property
    def connection(self) -> Self:
        """Itself, as the driver's connection."""
        return self

    def in_transaction(self) -> bool:
        """Whether a local transaction is open, as the driver knows it."""
        return self.session.local is not None

    async def ask(self, *script: Statement, commits: bool = False) -> list[Any]:
        """Have the server carry out a script; gives what each statement gave, raises the first error."""
        self._made_anew()
        future: asyncio.Future[list[Any]] = self._engine.loop.create_future()

        def on_answer(value: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(value)
                return
            if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
                self.invalidated = True
            future.set_exception(error)

        self.session.server.send(self.session, script, on_answer, commits)
        return await future

    async def run_sync(self, function: Callable[..., T], *arguments: Any) -> T:
        """What the SDK asks so is its Rollback, or in no need of the server."""
        if not isinstance(getattr(function, "__self__", None), Rollback):
            self._made_anew()
        elif not self.invalidated:
            await self.ask(roll_back)
        return function(self, *arguments)

    def rollback(self) -> None:
        """Of what there was; ``run_sync`` has told the server."""
        self._rolled_back = True

    def _made_anew(self) -> None:
        """One that was lost connects again when it is used, but not before somebody has rolled back."""
        if not self.invalidated:
            self._rolled_back = False
            return
        if not self._rolled_back:
            raise lost("and not rolled back yet")
        self.session.server.client_gone(self.session)
        self.session = self._engine.server.connect()
        self.info = {}
        self.invalidated = False

    async def invalidate(self) -> None:
        """Have it thrown away."""
        self.invalidated = True


def roll_back(session: Session) -> None:
    """ROLLBACK."""
    session.server.roll_back(session)
