"""A user's own psycopg connection, dressed so that the steps of scripts can be performed on it.

The steps ask of a connection of SQLAlchemy what is here, and nothing more. The connection stays the user's: what is
begun for it would begin by itself at its next statement, and nothing is taken out of any pool.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import isawaitable
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Dialect
from sqlalchemy.util import await_only, greenlet_spawn

R = TypeVar("R")

_INFO: Final[WeakKeyDictionary[Any, dict[Any, Any]]] = WeakKeyDictionary()
"""What is known of each, as of a connection in a pool of SQLAlchemy's."""


def is_psycopg(thing: Any, *, asynchronous: bool) -> bool:
    """Whether it is a connection of psycopg, of that flavour."""
    psycopg = sys.modules.get("psycopg")
    return psycopg is not None and isinstance(thing, psycopg.AsyncConnection if asynchronous else psycopg.Connection)


class DriverConnection:
    """What a Connection, or an AsyncConnection, is to the steps; and what a pool's connection is to them."""

    def __init__(self, raw: Any, dialect: Dialect) -> None:
        self.driver_connection = raw
        self.dbapi_connection = _as_dbapi(raw, dialect)
        self.dialect = dialect
        self.info = _INFO.setdefault(raw, {})

    @property
    def connection(self) -> DriverConnection:
        """The connection of the pool."""
        return self

    @property
    def sync_connection(self) -> DriverConnection:
        """The connection below an AsyncConnection."""
        return self

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more."""
        return bool(self.driver_connection.closed)

    broken = invalidated = closed

    def in_transaction(self) -> bool:
        """Whether a COMMIT would have something to commit."""
        return bool(self.driver_connection.info.transaction_status)

    @property
    def in_block(self) -> bool:
        """Whether it is in a block of psycopg's `transaction()`, where it refuses commit() and rollback()."""
        return bool(getattr(self.driver_connection, "_num_transactions", 0))

    def begin(self) -> None:
        """The driver does, before its first statement."""

    def begin_now(self) -> None:
        """As the driver does: a `transaction()` block that begins by itself would commit by itself."""
        begun = self.driver_connection.wait(self.driver_connection._start_query())
        if isawaitable(begun):
            await_only(begun)

    def cursor(self) -> Any:
        """The driver's."""
        return self.dbapi_connection.cursor()

    def commit(self) -> None:
        """The driver's."""
        self.dbapi_connection.commit()

    def rollback(self) -> None:
        """The driver's."""
        self.dbapi_connection.rollback()

    def invalidate(self, error: BaseException | None = None) -> None:
        """It is the user's, who will see that it is lost."""

    async def run_sync(self, function: Callable[..., R], *arguments: Any) -> R:
        """As AsyncConnection's."""
        return await greenlet_spawn(function, self, *arguments)


def _as_dbapi(raw: Any, dialect: Dialect) -> Any:
    if not dialect.is_async:
        return raw
    from sqlalchemy.dialects.postgresql.psycopg import AsyncAdapt_psycopg_connection

    return AsyncAdapt_psycopg_connection(dialect.loaded_dbapi, raw)
