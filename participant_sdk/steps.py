"""The steps of a local transaction as values, and the two thin runners that carry them out.

What happens in one call is written once, as a generator that yields steps (`local_transaction`). A runner performs
each step on its connection and sends back the result, or throws in the error: one for Engine and `def` handlers, one
for AsyncEngine and `async def`. Neither decides anything, so the two flavours cannot drift apart.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from sqlalchemy import Connection, Executable, event

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncConnection

R = TypeVar("R")

_IN_HANDLER = "tricord.in_handler"
_MISUSED = "tricord.misused"
_EXITED = "the handler called sys.exit(), which ends its call and not the process"


class CallFailed(Exception):
    """The call ends UNKNOWN, with this text; all of the local transaction is rolled back."""

    def __init__(self, error: str, *, attention: bool = False) -> None:
        super().__init__(error)
        self.attention = attention


class RunAgain(CallFailed):
    """The call lost a race that it may win by running again from the start."""


class LocalTransactionMisused(CallFailed):
    """The handler tried to end the local transaction that it was only lent."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Execute; gives all rows."""

    statement: Executable
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """Execute; gives the number of rows that it hit."""

    statement: Executable
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Script:
    """Send SQL to the driver as it stands; gives nothing."""

    sql: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the synchronous connection something that needs no round trip; gives the answer."""

    question: Callable[[Connection], Any]


@dataclass(frozen=True, slots=True)
class Handle:
    """Call the user's handler with the connection; gives what it returns, throws what it raises."""

    handler: Callable[[Any, Any], Any]
    call: Any


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit; when it gives back, what was done is durable."""


Step: TypeAlias = Fetch | Change | Script | Ask | Handle | Commit


def guard_handlers(engine: Engine) -> None:
    """Make COMMIT and ROLLBACK by a handler, as methods or as SQL, raise before they reach the database.

    A handler that commits would make its Try final without its result, and one that rolls back would throw the fence
    row away. `engine` is the SDK's own view of the user's engine; the user's other work never sees this.
    """

    def refuse(verb: str) -> Callable[[Connection], None]:
        def listener(connection: Connection) -> None:
            if connection.invalidated:  # nothing can reach the database, and the savepoint is gone: RELEASE will tell
                return
            if connection.info.get(_IN_HANDLER):
                text = f"the handler called {verb}(): the SDK owns the local transaction; return, or raise, instead"
                connection.info[_MISUSED] = text
                raise LocalTransactionMisused(text, attention=True)

        return listener

    def refuse_statement(
        connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> None:
        if connection.info.get(_IN_HANDLER) and (verb := ending_verb(statement)) is not None:
            text = f"the handler executed {verb}: the SDK owns the local transaction; return, or raise, instead"
            connection.info[_MISUSED] = text
            raise LocalTransactionMisused(text, attention=True)

    event.listen(engine, "commit", refuse("commit"))
    event.listen(engine, "rollback", refuse("rollback"))
    event.listen(engine, "before_cursor_execute", refuse_statement)


_VERB = r"(COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION|ROLLBACK(?!\s+(?:\w+\s+)?TO\b))\b"
_SUSPICIOUS = re.compile(_VERB, re.IGNORECASE)
_ENDS = re.compile(r"\s*" + _VERB, re.IGNORECASE)
_NOT_CODE = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|(\$\w*\$).*?\1|--[^\n]*|/\*.*?\*/", re.DOTALL)
_DEFINES = re.compile(r"\s*CREATE\b", re.IGNORECASE)
"""The body of a trigger or function may hold BEGIN and END."""


def ending_verb(statement: str) -> str | None:
    """The word by which `statement` would begin or end a local transaction, None if it does neither."""
    if not _SUSPICIOUS.search(statement):
        return None
    code = _NOT_CODE.sub(" ", statement)
    if _DEFINES.match(code):
        return None
    for part in code.split(";"):
        if (found := _ENDS.match(part)) is not None:
            return " ".join(found.group(1).upper().split())
    return None


def _lend(connection: Connection) -> dict[Any, Any]:
    info = connection.info
    info.pop(_MISUSED, None)
    info[_IN_HANDLER] = True
    return info


def _take_back(info: dict[Any, Any]) -> None:
    info.pop(_IN_HANDLER, None)
    if (text := info.pop(_MISUSED, None)) is not None:
        raise LocalTransactionMisused(text, attention=True)


def run(steps: Generator[Step, Any, R], connection: Connection) -> R:
    """Carry out `steps` on `connection`; an error that they do not catch comes out."""
    try:
        step = next(steps)
        while True:
            try:
                answer = _perform(step, connection)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        return cast(R, stop.value)


def _perform(step: Step, connection: Connection) -> Any:
    match step:
        case Fetch(statement, parameters):
            return connection.execute(statement, parameters).fetchall()
        case Change(statement, parameters):
            return connection.execute(statement, parameters).rowcount
        case Script(sql):
            connection.exec_driver_sql(sql)
        case Ask(question):
            return question(connection)
        case Handle(handler, call):
            info = _lend(connection)
            try:
                return handler(call, connection)
            except SystemExit as error:
                raise CallFailed(_EXITED) from error
            finally:
                _take_back(info)
        case Commit():
            connection.commit()


async def run_async(steps: Generator[Step, Any, R], connection: AsyncConnection) -> R:
    """As `run`, on an AsyncConnection and with handlers that are coroutine functions."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await _perform_async(step, connection)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        return cast(R, stop.value)


async def _perform_async(step: Step, connection: AsyncConnection) -> Any:
    match step:
        case Fetch(statement, parameters):
            return (await connection.execute(statement, parameters)).fetchall()
        case Change(statement, parameters):
            return (await connection.execute(statement, parameters)).rowcount
        case Script(sql):
            await connection.exec_driver_sql(sql)
        case Ask(question):
            return await connection.run_sync(question)
        case Handle(handler, call):
            info = _lend(cast(Connection, connection.sync_connection))
            try:
                return await cast(Awaitable[Any], handler(call, connection))
            except SystemExit as error:
                raise CallFailed(_EXITED) from error
            finally:
                _take_back(info)
        case Commit():
            await connection.commit()
