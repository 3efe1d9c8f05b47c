"""What an error of a database says about a COMMIT that has raised it."""

from __future__ import annotations

from typing import Final

from sqlalchemy import exc as sqlalchemy_errors

_ENDED_BY_SERVER: Final = frozenset({"25P03", "57P01", "57P02", "57P03"})
_LOST_NUMBERS: Final = frozenset({0, 1053, 1927, 2002, 2003, 2006, 2013, 2055})
"""MariaDB's, and its drivers' own."""
_SQLITE_IO: Final = frozenset({10, 13, 14})
"""What a file may say in the middle of a COMMIT: an error of input or output, full, cannot be opened."""


def lost_connection(error: BaseException) -> bool:
    """Whether the database may have done what it was asked: it has not said no, its answer was lost."""
    if isinstance(error, sqlalchemy_errors.SQLAlchemyError):
        if not isinstance(error, sqlalchemy_errors.DBAPIError) or error.orig is None:
            return False  # SQLAlchemy's own, before anything was sent
        if error.connection_invalidated:
            return True
        error = error.orig
    if isinstance(error, OSError):
        return True
    if hasattr(error, "sqlstate") and type(error).__module__.startswith("psycopg"):
        state: str | None = error.sqlstate
        return state is None or state.startswith("08") or state in _ENDED_BY_SERVER
    if hasattr(error, "sqlite_errorcode"):
        return error.sqlite_errorcode & 0xFF in _SQLITE_IO
    number = error.args[0] if error.args else 0
    return not isinstance(number, int) or number in _LOST_NUMBERS


def told(error: BaseException) -> str:
    """The kind of an error; its text may hold the user's data."""
    cause = error.orig if isinstance(error, sqlalchemy_errors.DBAPIError) and error.orig is not None else error
    return type(cause).__name__
