"""Calling the user's handler with what it is lent: the connection of the fence row, or an ORM session on it.

The SDK owns the local transaction. A handler that commits would make its Try final without its result, and one that
rolls back would throw the fence row away; both are stopped before they reach the database, and told in clear words.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from sqlalchemy import Connection
from sqlalchemy.engine.default import DefaultDialect

from participant_sdk import session_guard
from participant_sdk.branch_keys import handler_branch_key
from participant_sdk.context import Scope, arrived
from participant_sdk.errors import Refused
from participant_sdk.steps import CallFailed, Rollback

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session
    from sqlalchemy.pool import PoolProxiedConnection

    from participant_sdk.call import Call

_LOAN: Final = "tricord.loan"
_EXITED: Final = "the handler called sys.exit(), which ends its call and not the process"


class LocalTransactionMisused(CallFailed):
    """The handler tried to end the local transaction that it was only lent."""


@dataclass(slots=True)
class Loan:
    """A connection in the hands of a handler; in its `info` for so long.

    `begin`: how a handler begins that may do so at its first statement, or never; None: it has begun. `flushes`: how
    many flushes of its session are under way; `flush_error`: what the last one failed of.
    """

    connection: Connection
    begin: Callable[[Connection], None] | None
    misused: str | None = None
    flushes: int = 0
    flush_error: BaseException | None = None

    def refuse(self, what: str) -> NoReturn:
        """Raise LocalTransactionMisused, in the handler; and again after it, should it not let it out."""
        text = f"the handler {what}: the SDK owns the local transaction; return, or raise, instead"
        # Not a later one: a session that may not commit rolls back, which is not the handler's doing.
        self.misused = self.misused or text
        raise LocalTransactionMisused(text, attention=True)

    def has_begun(self) -> bool:
        """Whether there is something that a rollback would take away."""
        return self.begin is None or self.connection.in_transaction()

    def refuse_rollback(self) -> NoReturn:
        """As `refuse`; but a session that rolls back because its flush has failed is told the flush's own error."""
        error = sys.exception()
        if self.flushes and error is not None:
            raise error
        self.refuse("called rollback()")


@dataclass(frozen=True, slots=True)
class Handler:
    """A user's handler. `session_class` is what it wants as its second argument; None: the connection itself."""

    function: Callable[..., Any]
    session_class: Any = None


@dataclass(slots=True)
class Handle:
    """The step that calls a handler; gives what it returns, throws what it raises. `begin`: see Loan.

    Afterwards `saw_tried` holds the branches that services which it called reported tried. `repeats`: a repeat of the
    handler repeats its calls (see `branch_keys`). That is Try's; once it is decided, none can bring about a branch.
    """

    handler: Handler
    call: Call[Any]
    begin: Callable[[Connection], None] | None = None
    repeats: bool = False
    saw_tried: set[int] = field(default_factory=set)

    def perform(self, connection: Connection) -> Any:
        """See Step."""
        function, session_class = self.handler.function, self.handler.session_class
        with _Lent(self, connection) as loan:
            if session_class is None:
                return function(self.call, connection)
            session: Session = session_class(bind=connection)
            session_guard.watch(session, connection, loan)
            try:
                result = function(self.call, session)
                session_guard.check_whole(session, loan)
                session.flush()
            except Exception as error:
                if _left_open(loan, error):
                    with suppress(Exception):
                        Rollback().perform(connection)
                raise
            session.expunge_all()  # and not closed: where nothing was begun before it, it would roll back
            return result

    async def perform_async(self, connection: AsyncConnection) -> Any:
        """See Step."""
        function, session_class = self.handler.function, self.handler.session_class
        synchronous = cast(Connection, connection.sync_connection)
        with _Lent(self, synchronous) as loan:
            if session_class is None:
                return await cast(Awaitable[Any], function(self.call, connection))
            session: AsyncSession = session_class(bind=connection)
            session_guard.watch(session.sync_session, synchronous, loan)
            try:
                result = await cast(Awaitable[Any], function(self.call, session))
                session_guard.check_whole(session.sync_session, loan)
                await session.flush()
            except Exception as error:
                if _left_open(loan, error):
                    with suppress(Exception):
                        await Rollback().perform_async(connection)
                raise
            session.expunge_all()
            return result


@contextmanager
def lending(connection: Connection) -> Iterator[Loan]:
    """For a user's function that is no call's handler: its connection is marked with the loan for so long.

    Raises LocalTransactionMisused if it has tried to end the local transaction.
    """
    loan = connection.info[_LOAN] = Loan(connection, None)
    try:
        yield loan
    finally:
        if not connection.invalidated:
            connection.info.pop(_LOAN, None)
        if loan.misused is not None:
            raise LocalTransactionMisused(loan.misused, attention=True)


class _Lent:
    """While a handler runs: its connection is marked with the loan, and the running code belongs to its branch."""

    __slots__ = ("_arrived", "_info", "_loan", "_saw_tried")

    def __init__(self, handle: Handle, connection: Connection) -> None:
        self._info = connection.info
        self._loan = Loan(connection, handle.begin)
        call = handle.call
        self._saw_tried = handle.saw_tried
        self._arrived = arrived(
            Scope(
                call.xid,
                call.branch_id,
                handler_branch_key(call.branch_id) if handle.repeats else None,
                call.expires_at,
            )
        )

    def __enter__(self) -> Loan:
        self._info[_LOAN] = self._loan
        self._arrived.__enter__()
        return self._loan

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._saw_tried.update(self._arrived.seen)
        self._arrived.__exit__()
        self._info.pop(_LOAN, None)
        if self._loan.misused is not None:
            raise LocalTransactionMisused(self._loan.misused, attention=True)
        if kind is SystemExit:
            raise CallFailed(_EXITED) from error


def _left_open(loan: Loan, error: Exception) -> bool:
    """Whether SQLAlchemy takes a local transaction for rolled back that is still open, and that nobody needs now.

    A refusal is still to be stored in it.
    """
    return loan.flush_error is not None and not isinstance(error, Refused)


def guard_handlers(engine: Engine) -> None:
    """Make COMMIT and ROLLBACK by a handler, as methods or as SQL, raise before they reach the database.

    `engine` is the SDK's own view of the user's engine, which never sees this. It must have connected once, because the
    view is given a copy of its dialect. (Event listeners would cost each call as much as all the rest of the fence.)
    """
    dialect = copy.copy(engine.dialect)
    dialect.__class__ = type(f"Guarded{type(dialect).__name__}", (_Guard, type(dialect)), {})
    engine.dialect = dialect


class _Guard(DefaultDialect):
    """What a guarded dialect looks at first. It is given each COMMIT, ROLLBACK and statement before the driver is."""

    def do_begin_twophase(self, connection: Connection, xid: Any) -> None:
        if (loan := connection.info.get(_LOAN)) is not None:
            loan.refuse("called begin_twophase()")
        super().do_begin_twophase(connection, xid)

    def do_commit(self, dbapi_connection: PoolProxiedConnection) -> None:
        if (loan := dbapi_connection.info.get(_LOAN)) is not None:
            loan.refuse("called commit()")
        super().do_commit(dbapi_connection)  # type: ignore[no-untyped-call]

    def do_rollback(self, dbapi_connection: PoolProxiedConnection) -> None:
        if (loan := dbapi_connection.info.get(_LOAN)) is not None and loan.has_begun():
            loan.refuse_rollback()
        super().do_rollback(dbapi_connection)  # type: ignore[no-untyped-call]

    def do_execute(self, cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
        _look_at(statement, context)
        super().do_execute(cursor, statement, parameters, context)  # type: ignore[no-untyped-call]

    def do_execute_no_params(self, cursor: Any, statement: str, context: Any = None) -> None:
        _look_at(statement, context)
        super().do_execute_no_params(cursor, statement, context)  # type: ignore[no-untyped-call]

    def do_executemany(self, cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
        _look_at(statement, context)
        super().do_executemany(cursor, statement, parameters, context)  # type: ignore[no-untyped-call]

    def set_connection_execution_options(self, connection: Connection, opts: Any) -> None:
        if "isolation_level" in opts and (loan := connection.info.get(_LOAN)) is not None:
            loan.refuse("set the isolation level")
        super().set_connection_execution_options(connection, opts)


def _look_at(statement: str, context: Any) -> None:
    if context is None or (loan := context.root_connection.info.get(_LOAN)) is None:
        return
    if loan.begin is not None:
        connection = context.root_connection
        if not connection.in_transaction():  # what the engine's own listeners say at the beginning, such as BEGIN
            return
        loan.begin(connection)
        loan.begin = None
    if (verb := ending_verb(statement)) is not None:
        loan.refuse(f"executed {verb}")


_VERB = r"(COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION|ROLLBACK(?!\s+(?:\w+\s+)?TO\b))\b"
_SUSPICIOUS = re.compile(_VERB, re.IGNORECASE)
_ENDS = re.compile(r"\s*" + _VERB, re.IGNORECASE)
_NOT_CODE = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|(\$\w*\$).*?\1|--[^\n]*|/\*.*?\*/", re.DOTALL)
_REMEMBERED_LENGTH_MAX: Final = 1000
_DEFINES = re.compile(r"\s*CREATE\b", re.IGNORECASE)
"""The body of a trigger or function may hold BEGIN and END."""


def ending_verb(statement: str) -> str | None:
    """The word by which `statement` would begin or end a local transaction, None if it does neither."""
    return _verb_remembered(statement) if len(statement) <= _REMEMBERED_LENGTH_MAX else _verb(statement)


def _verb(statement: str) -> str | None:
    if not _SUSPICIOUS.search(statement):
        return None
    code = _NOT_CODE.sub(" ", statement)
    if _DEFINES.match(code):
        return None
    for part in code.split(";"):
        if (found := _ENDS.match(part)) is not None:
            return " ".join(found.group(1).upper().split())
    return None


_verb_remembered: Final = lru_cache(maxsize=1024)(_verb)
"""A program has few statements, and executes them often."""
