"""While a user's function has the run's local transaction in its hands: it is not the function's to end."""

from __future__ import annotations

from typing import Any, NoReturn

from sqlalchemy import Connection, event

from participant_sdk.handler import ending_verb
from participant_sdk.idempotency.run_state import RunMisused


class Guard:
    """Makes a COMMIT by the user's function raise before it reaches the database, as a method or as SQL.

    Work that it committed by itself would be done without its record, and be done again by a repeat. A rollback is let
    through, since a session may need one after an error; but no success follows it.
    """

    def __init__(self, who: str, connection: Connection) -> None:
        self._who = who
        self._watches = True
        self._misused: RunMisused | None = None
        self._refused = False
        event.listen(connection, "commit", self._commit)
        event.listen(connection, "rollback", self._rollback)
        event.listen(connection, "before_cursor_execute", self._execute)

    def over(self) -> bool:
        """The function has ended. Whether the connection is to be dropped: SQLAlchemy takes a COMMIT for done."""
        self._watches = False
        return self._refused

    def check(self) -> None:
        """Raises RunMisused if a function that has not raised has done what it may not."""
        if self._misused is not None:
            raise self._misused

    def _commit(self, connection: Connection) -> None:
        if self._watches:
            self._refuse("called commit()")

    def _rollback(self, connection: Connection) -> None:
        if self._watches and self._misused is None:
            self._misused = self._error("called rollback(), and raised nothing")

    def _execute(self, connection: Connection, cursor: Any, statement: str, *rest: Any) -> None:
        if self._watches and (verb := ending_verb(statement)) is not None:
            self._refuse(f"executed {verb}")

    def _refuse(self, what: str) -> NoReturn:
        self._misused = self._error(what)
        self._refused = True
        raise self._misused

    def _error(self, what: str) -> RunMisused:
        return RunMisused(f"{self._who} {what}: its local transaction ends with its record; return, or raise, instead")
