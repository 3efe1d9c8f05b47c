"""The steps of a local transaction as values, and the two thin runners that carry them out.

What happens in one call is written once, as a generator that yields steps (`local_transaction`). A runner performs
each step on its connection and sends back the result, or throws in the error: one for Engine and `def` handlers, one
for AsyncEngine and `async def`. Neither decides anything, so the two flavours cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from sqlalchemy import Connection

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

R = TypeVar("R")


class CallFailed(Exception):
    """The call ends UNKNOWN, with this text; all of the local transaction is rolled back."""

    def __init__(self, error: str, *, attention: bool = False) -> None:
        super().__init__(error)
        self.attention = attention


class RunAgain(CallFailed):
    """The call lost a race that it may win by running again from the start."""


class Step(Protocol):
    """Something to do on the call's connection. What it gives is sent back into the generator."""

    def perform(self, connection: Connection) -> Any:
        """Do it on a Connection."""

    async def perform_async(self, connection: AsyncConnection) -> Any:
        """Do it on an AsyncConnection."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the synchronous connection something; gives the answer."""

    question: Callable[[Connection], Any]

    def perform(self, connection: Connection) -> Any:
        """See Step."""
        return self.question(connection)

    async def perform_async(self, connection: AsyncConnection) -> Any:
        """See Step."""
        return await connection.run_sync(self.question)


@dataclass(slots=True)
class Look:
    """As Ask, where the question surely needs no round trip; costs an asyncio program nothing."""

    question: Callable[[Connection], Any]

    def perform(self, connection: Connection) -> Any:
        """See Step."""
        return self.question(connection)

    async def perform_async(self, connection: AsyncConnection) -> Any:
        """See Step."""
        synchronous = cast(Connection, connection.sync_connection)
        if synchronous.invalidated:  # a connection that was lost is made anew by whatever asks for it
            return await connection.run_sync(self.question)
        return self.question(synchronous)


@dataclass(slots=True)
class Answer:
    """What a statement gave: its rows, and how many rows it hit."""

    rows: Sequence[Sequence[Any]]
    hit: int


@dataclass(slots=True)
class Send:
    """Send one statement to the driver as it stands, in the driver's own style of parameters; gives an Answer.

    Past SQLAlchemy's compilation and result objects, which cost several times what the fence's short statements do.
    """

    sql: str
    parameters: Sequence[Any] = ()

    def perform(self, connection: Connection) -> Answer:
        """See Step."""
        driver = connection.connection
        cursor = driver.cursor()
        try:
            cursor.execute(self.sql, self.parameters)
            rows = cursor.fetchall() if cursor.description is not None else ()
            return Answer(rows, cursor.rowcount)
        except Exception as error:
            drop_if_lost(connection, error)
            raise
        finally:
            if not connection.invalidated:
                cursor.close()

    async def perform_async(self, connection: AsyncConnection) -> Any:
        """See Step."""
        return await connection.run_sync(self.perform)


def drop_if_lost(connection: Connection, error: BaseException) -> None:
    """Take the connection out of its pool if `error`, raised by the driver itself, says that it is lost."""
    dialect = connection.dialect
    if isinstance(error, dialect.loaded_dbapi.Error) and dialect.is_disconnect(error, connection.connection, None):
        connection.invalidate(error)


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit; when it gives back, what was done is durable."""

    def perform(self, connection: Connection) -> None:
        """See Step."""
        if connection.in_transaction():
            connection.commit()
            return
        try:
            connection.connection.commit()
        except Exception as error:
            drop_if_lost(connection, error)
            raise

    async def perform_async(self, connection: AsyncConnection) -> None:
        """See Step."""
        await connection.run_sync(self.perform)


@dataclass(frozen=True, slots=True)
class Rollback:
    """Roll back, whoever has begun."""

    def perform(self, connection: Connection) -> None:
        """See Step."""
        connection.rollback()  # also where SQLAlchemy takes its transaction for ended, and has not closed it
        try:
            connection.connection.rollback()
        except Exception as error:
            drop_if_lost(connection, error)
            if not connection.invalidated:
                raise

    async def perform_async(self, connection: AsyncConnection) -> None:
        """See Step."""
        await connection.run_sync(self.perform)


def run(steps: Generator[Step, Any, R], connection: Connection) -> R:
    """Carry out `steps` on `connection`; an error that they do not catch comes out."""
    try:
        step = next(steps)
        while True:
            try:
                answer = step.perform(connection)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        result: R = stop.value
        return result


async def run_async(steps: Generator[Step, Any, R], connection: AsyncConnection) -> R:
    """As `run`, on an AsyncConnection and with handlers that are coroutine functions."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await step.perform_async(connection)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        result: R = stop.value
        return result
