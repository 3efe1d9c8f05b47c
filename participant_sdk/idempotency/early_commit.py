"""A run's local transaction that somebody commits who is not the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from sqlalchemy import Connection, event
from sqlalchemy import exc as sqlalchemy_errors


class EarlyCommit:
    """Makes a commit() of a connection, or of a session on it, raise before it reaches the database.

    What it would commit would be done without its record, and be done again by a repeat. `error`: makes what is raised.
    `own`: it is the run's own connection, which has begun already. A session on it does not commit what it has not
    begun (SQLAlchemy's default), so that its own method is the only way, and each request is spared a listener.
    """

    def __init__(self, connection: Connection, error: Callable[[], Exception], *, own: bool) -> None:
        self._connection = connection
        self._error = error
        self._own = own
        self.refused: Exception | None = None
        if own:
            vars(connection)["commit"] = self._refuse
        else:
            event.listen(connection, "commit", self._refuse)

    def over(self) -> None:
        """Whoever commits now may."""
        if self._own:
            vars(self._connection).pop("commit", None)
            return
        with suppress(sqlalchemy_errors.InvalidRequestError):  # it is over already
            event.remove(self._connection, "commit", self._refuse)

    def _refuse(self, *connection: Any) -> NoReturn:
        self.refused = self._error()
        raise self.refused
