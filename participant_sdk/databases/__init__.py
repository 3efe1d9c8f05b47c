"""What differs between the databases that can hold a fence.

    database     what the fence asks of a database, as scripts of steps
    postgresql   one round trip before the handler and one after it
    mariadb      MariaDB, and MySQL by the same statements
    sqlite       a file in WAL mode

`local_transaction` decides what happens in a call; a Database knows in which statements.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

from sqlalchemy import Dialect

from participant_sdk.databases.database import Database
from participant_sdk.errors import ConfigurationError
from participant_sdk.fence_tables import FenceTables

_SUPPORTED: Final = {
    "postgresql": ("postgresql", "PostgreSQL", ("psycopg",)),
    "mysql": ("mariadb", "MariaDb", ("pymysql", "asyncmy")),
    "mariadb": ("mariadb", "MariaDb", ("pymysql", "asyncmy")),
    "sqlite": ("sqlite", "Sqlite", ("pysqlite", "aiosqlite")),
}


def database_of(dialect: Dialect, tables: FenceTables) -> Database:
    """The database behind an engine; raises ConfigurationError for one that is not supported."""
    if dialect.name not in _SUPPORTED:
        raise ConfigurationError(f"{dialect.name} is not supported: the fence needs PostgreSQL, MariaDB or SQLite")
    module, name, drivers = _SUPPORTED[dialect.name]
    if dialect.driver not in drivers:
        wanted = " or ".join(f"{dialect.name}+{driver}" for driver in drivers)
        raise ConfigurationError(f"the driver {dialect.name}+{dialect.driver} is not supported: use {wanted}")
    made: Database = getattr(import_module(f"participant_sdk.databases.{module}"), name)(dialect, tables)
    return made


__all__ = ["Database", "database_of"]
