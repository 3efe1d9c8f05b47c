"""Engines of SQLAlchemy that begin where an earlier one of the same kind has got to.

A new engine asks its database who it is, and compiles each statement anew, which is most of what a short test costs.
A process that lives for longer than a test has done both; so these share what the first of their kind has learned and
compiled. Nothing else is shared: pool, connections and event listeners are each engine's own.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Dialect, Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

_first: Final[dict[tuple[object, ...], tuple[Dialect, Any]]] = {}


def sync_engine(url: str, **options: Any) -> Engine:
    """What `create_engine` makes."""
    engine = create_engine(url, **options)
    _share(engine, options)
    return engine


def async_engine(url: str, **options: Any) -> AsyncEngine:
    """What `create_async_engine` makes."""
    engine = create_async_engine(url, **options)
    _share(engine.sync_engine, options)
    return engine


def prepared_on(engine: Engine | AsyncEngine) -> list[str]:
    """The names of what is prepared on a PostgreSQL connection, of each that is given back to the pool from now on."""
    prepared: list[str] = []

    def look(connection: Any, record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("SELECT name FROM pg_prepared_statements")
        prepared.extend(name for (name,) in cursor.fetchall())
        cursor.close()
        connection.rollback()

    event.listen(getattr(engine, "sync_engine", engine).pool, "checkin", look)
    return prepared


def _share(engine: Engine, options: dict[str, Any]) -> None:
    url = engine.url
    database = url.database if url.get_backend_name() != "sqlite" else None
    kind = (type(engine.dialect), url.host, url.port, database, repr(url.query), repr(sorted(options.items())))
    dialect, compiled = _first.get(kind, (None, None))
    if dialect is None or getattr(dialect, "server_version_info", None) is None:  # it has not connected
        _first[kind] = (engine.dialect, engine._compiled_cache)
        return
    engine.dialect.initialize = _nothing_to_ask  # type: ignore[method-assign]
    engine.dialect = engine.pool._dialect = dialect
    engine._compiled_cache = compiled


def _nothing_to_ask(connection: object) -> None:
    """The dialect in use has been told already."""
