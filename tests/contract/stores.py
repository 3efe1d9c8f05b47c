"""Stores for the conformance suite: SQLite, PostgreSQL, and PostgreSQL with the worst defaults an owner may choose."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import psycopg
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from coordinator.store.store import Store

from .rows import LEASE_MS, open_store

KINDS = (
    "sqlite",
    pytest.param("postgresql", marks=pytest.mark.database),
    pytest.param("postgresql-hostile", marks=pytest.mark.database),
)

HOSTILE_DEFAULTS = {
    "default_transaction_isolation": "'serializable'",
    "synchronous_commit": "off",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "deadlock_timeout": "'200ms'",
}
"""What ALTER DATABASE may set, and the coordinator's own connections must not inherit (protocol A3, A10)."""

OpenStore = Callable[..., Awaitable[Store]]


def set_hostile_defaults(dsn: str) -> None:
    """Give a database these defaults; sessions that start later have them."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        name = connection.info.dbname
        for setting, value in HOSTILE_DEFAULTS.items():
            connection.execute(f'ALTER DATABASE "{name}" SET {setting} = {value}'.encode())


def empty_store(request: pytest.FixtureRequest) -> str:
    """The address of an empty store of the kind that the fixture's parameter names."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("tmp_path") / "tricord.db")
    dsn: str = request.getfixturevalue("pg_database")
    if request.param == "postgresql-hostile":
        set_hostile_defaults(dsn)
    return dsn


@contextlib.asynccontextmanager
async def stores() -> AsyncIterator[OpenStore]:
    """Opens stores; all are closed at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_one(url: str, *, lease_ms: int = LEASE_MS) -> Store:
            store = await open_store(url, lease_ms=lease_ms)
            stack.push_async_callback(store.close)
            return store

        yield open_one


def at_revision(engine: sa.Engine, revision: str) -> None:
    """An empty store as the program of that revision made it."""
    config = Config()
    config.set_main_option("script_location", "coordinator:store/migrations")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        connection.execute(sa.text("INSERT INTO tricord_store (id, store_id, incarnation) VALUES (1, 'old', 'one')"))
