"""Whoever would end a run's local transaction, and is not the run, is refused before that reaches the database.

Work that is committed by itself would be done without its record, and be done again by a repeat. A rollback is let
through, since a session may need one after an error; but none that a function does which raises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from sqlalchemy import DDL, Connection, TextClause, event

from participant_sdk.handler import ending_verb
from participant_sdk.idempotency.errors import IdempotencyError

_METHODS: Final = ("commit", "execute", "exec_driver_sql")


class RunMisused(IdempotencyError):
    """A run was left without an outcome, or was given a second one; or its work would end its local transaction."""

    reason = "IDEMPOTENCY_RUN_MISUSED"


class Guard:
    """Makes a COMMIT by the work raise, as a method or as SQL, until `over`.

    `connection`: SQLAlchemy's, or the user's own of psycopg. `who`: the work, in the error's text. `own`: it is the
    run's own connection, which has begun already. A session on it does not commit what it has not begun (SQLAlchemy's
    default), so that each request is spared a listener.
    """

    def __init__(self, connection: Any, who: str, *, own: bool) -> None:
        self._connection = connection
        self._who = who
        self._lent_to: str | None = None
        self._listens = False
        self._misused: RunMisused | None = None
        self.refused: RunMisused | None = None
        self.spoilt = False
        """Whether the connection is to be dropped: SQLAlchemy takes a COMMIT that a listener refuses for done."""
        self._own = own
        self._over = False
        methods = vars(connection)
        self._outer: Guard | None = getattr(methods.get("commit"), "__self__", None)
        """Of another run on the same connection, in which this one's is nested."""
        self._watch(methods)
        if isinstance(connection, Connection) and not own:
            event.listen(connection, "commit", self._commits)

    def _watch(self, methods: dict[str, Any]) -> None:
        methods["commit"] = self._commit
        methods["execute"] = self._execute
        if isinstance(self._connection, Connection):
            methods["exec_driver_sql"] = self._exec_driver_sql

    @contextmanager
    def lent_to(self, who: str) -> Iterator[None]:
        """While a function of the user's has a run's own connection in its hands, of which more is seen.

        Raises RunMisused if the function has not raised, and has committed or rolled back.
        """
        if not self._listens:
            self._listens = True
            event.listen(self._connection, "commit", self._commits)
            event.listen(self._connection, "rollback", self._rolls_back)
        self._lent_to = who
        try:
            yield
        finally:
            self._lent_to = None
        if self._misused is not None:
            raise self._misused

    def over(self) -> None:
        """Whoever ends it now may."""
        if self._over:
            return
        self._over = True
        connection, self._connection = self._connection, None  # which knows its listeners: a ring else
        methods = vars(connection)
        if methods.get("commit") == self._commit:
            for name in _METHODS:
                methods.pop(name, None)
            outer = self._outer
            while outer is not None and outer._over:
                outer = outer._outer
            if outer is not None:
                outer._watch(methods)
        if not self._own and isinstance(connection, Connection):
            event.remove(connection, "commit", self._commits)

    def _commit(self) -> NoReturn:
        self._refuse("called commit()")

    def _commits(self, connection: Connection) -> None:
        if self._over:
            return
        self.spoilt = True
        self._refuse("called commit()")

    def _rolls_back(self, connection: Connection) -> None:
        if self._lent_to is not None and self._misused is None and not self._over:
            self._misused = self._error("called rollback(), and raised nothing")

    def _execute(self, statement: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(statement, TextClause):
            self._look_at(statement.text)
        elif isinstance(statement, DDL):
            self._look_at(statement.statement)
        elif isinstance(statement, str):
            self._look_at(statement)
        return type(self._connection).execute(self._connection, statement, *arguments, **named)

    def _exec_driver_sql(self, statement: str, *arguments: Any, **named: Any) -> Any:
        self._look_at(statement)
        return type(self._connection).exec_driver_sql(self._connection, statement, *arguments, **named)

    def _look_at(self, statement: str) -> None:
        # What the engine's own listeners say at the beginning, such as BEGIN, comes before it counts as begun.
        if (verb := ending_verb(statement)) is not None and self._has_begun():
            self._refuse(f"executed {verb}")

    def _has_begun(self) -> bool:
        if isinstance(self._connection, Connection):
            return self._connection.in_transaction()
        return bool(self._connection.info.transaction_status)

    def _refuse(self, what: str) -> NoReturn:
        self.refused = self._misused = self._error(what)
        raise self.refused

    def _error(self, what: str) -> RunMisused:
        instead = "by the run's outcome" if self._lent_to is None else "return, or raise, instead"
        return RunMisused(f"{self._lent_to or self._who} {what}: its local transaction ends with its record: {instead}")
