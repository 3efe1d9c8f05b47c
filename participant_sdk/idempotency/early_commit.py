"""A run's local transaction that somebody commits who is not the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from sqlalchemy import Connection, event
from sqlalchemy import exc as sqlalchemy_errors


class EarlyCommit:
    """Makes a commit() of a connection, or of a session on it, raise before it reaches the database.

    What it would commit would be done without its record, and be done again by a repeat. `error`: makes what is raised.
    """

    def __init__(self, connection: Connection, error: Callable[[], Exception]) -> None:
        self._connection = connection
        self._error = error
        self.refused: Exception | None = None
        event.listen(connection, "commit", self._commit)

    def over(self) -> None:
        """Whoever commits now may."""
        with suppress(sqlalchemy_errors.InvalidRequestError):  # it is over already
            event.remove(self._connection, "commit", self._commit)

    def _commit(self, connection: Connection) -> None:
        self.refused = self._error()
        raise self.refused
