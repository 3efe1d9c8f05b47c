"""Calling the user's handler with what it is lent: the connection of the fence row, or an ORM session on it.

The SDK owns the local transaction. A handler that commits would make its Try final without its result, and one that
rolls back would throw the fence row away; both are stopped before they reach the database, and told in clear words.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import Connection, event

from participant_sdk.context import bound
from participant_sdk.steps import CallFailed

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

    from participant_sdk.call import Call

_IN_HANDLER: Final = "tricord.in_handler"
_MISUSED: Final = "tricord.misused"
_BEGIN: Final = "tricord.begin"
_EXITED: Final = "the handler called sys.exit(), which ends its call and not the process"


class LocalTransactionMisused(CallFailed):
    """The handler tried to end the local transaction that it was only lent."""


@dataclass(frozen=True, slots=True)
class Handler:
    """A user's handler. `session_class` is what it wants as its second argument; None: the connection itself."""

    function: Callable[..., Any]
    session_class: Any = None


@dataclass(frozen=True, slots=True)
class Handle:
    """The step that calls a handler; gives what it returns, throws what it raises.

    `begin`: how its first statement begins a local transaction, where none has been begun for it.
    """

    handler: Handler
    call: Call[Any]
    begin: Callable[[Connection], None] | None = None

    def perform(self, connection: Connection) -> Any:
        """See Step."""
        function, session_class = self.handler.function, self.handler.session_class
        with self._lent(connection) as refuse_commit:
            if session_class is None:
                return function(self.call, connection)
            session: Session = session_class(bind=connection)
            event.listen(session, "before_commit", refuse_commit)
            result = function(self.call, session)
            session.flush()
            session.expunge_all()  # and not closed: where nothing was begun before it, it would roll back
            return result

    async def perform_async(self, connection: AsyncConnection) -> Any:
        """See Step."""
        function, session_class = self.handler.function, self.handler.session_class
        with self._lent(cast(Connection, connection.sync_connection)) as refuse_commit:
            if session_class is None:
                return await cast(Awaitable[Any], function(self.call, connection))
            session: AsyncSession = session_class(bind=connection)
            event.listen(session.sync_session, "before_commit", refuse_commit)
            result = await cast(Awaitable[Any], function(self.call, session))
            await session.flush()
            session.expunge_all()
            return result

    @contextmanager
    def _lent(self, connection: Connection) -> Iterator[Callable[[Any], None]]:
        info = connection.info
        info.pop(_MISUSED, None)
        info[_IN_HANDLER] = True
        if self.begin is not None:
            info[_BEGIN] = self.begin

        def refuse_commit(session: Session) -> None:
            if not session.in_nested_transaction():
                _refuse(info, "called commit()")

        try:
            with bound(self.call.xid, self.call.branch_id):
                yield refuse_commit
        except SystemExit as error:
            raise CallFailed(_EXITED) from error
        finally:
            info.pop(_IN_HANDLER, None)
            info.pop(_BEGIN, None)
            if (text := info.pop(_MISUSED, None)) is not None:
                raise LocalTransactionMisused(text, attention=True)


def guard_handlers(engine: Engine) -> None:
    """Make COMMIT and ROLLBACK by a handler, as methods or as SQL, raise before they reach the database.

    `engine` is the SDK's own view of the user's engine; the user's other work never sees this.
    """

    def refuse(verb: str) -> Callable[[Connection], None]:
        def listener(connection: Connection) -> None:
            if connection.invalidated:  # nothing can reach the database, and the savepoint is gone: RELEASE will tell
                return
            if connection.info.get(_IN_HANDLER):
                _refuse(connection.info, f"called {verb}()")

        return listener

    def refuse_statement(
        connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> None:
        if connection.info.get(_IN_HANDLER) and (verb := ending_verb(statement)) is not None:
            _refuse(connection.info, f"executed {verb}")

    def begin_lazily(connection: Connection) -> None:
        if (begin := connection.info.pop(_BEGIN, None)) is not None:
            begin(connection)

    event.listen(engine, "begin", begin_lazily)
    event.listen(engine, "commit", refuse("commit"))
    event.listen(engine, "rollback", refuse("rollback"))
    event.listen(engine, "before_cursor_execute", refuse_statement)


def _refuse(info: dict[Any, Any], what: str) -> None:
    text = f"the handler {what}: the SDK owns the local transaction; return, or raise, instead"
    info[_MISUSED] = text
    raise LocalTransactionMisused(text, attention=True)


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
