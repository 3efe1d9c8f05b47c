"""What differs between the databases that can hold a fence.

    database        what the fence asks of a database, as scripts of steps
    postgresql      one round trip before the handler and one after it
    mariadb         MariaDB, and MySQL by the same statements
    sqlite          a file in WAL mode
    driver_errors   what the drivers' errors mean: a lost race, a lost connection; the idempotency store asks it, too

`local_transaction` decides what happens in a call; a Database knows in which statements.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

from sqlalchemy import Dialect

from participant_sdk.databases.database import Database
from participant_sdk.errors import ConfigurationError
from participant_sdk.fence_tables import FenceTables

_DRIVERS: Final = {
    "postgresql": ("postgresql", ("psycopg",)),
    "mysql": ("mariadb", ("pymysql", "asyncmy")),
    "mariadb": ("mariadb", ("pymysql", "asyncmy")),
    "sqlite": ("sqlite", ("pysqlite", "aiosqlite")),
}
_CLASSES: Final = {"postgresql": "PostgreSQL", "mariadb": "MariaDb", "sqlite": "Sqlite"}


def module_of(dialect: Dialect, what: str) -> str:
    """Which of the three it is; raises ConfigurationError, on behalf of `what`, for one that is not supported."""
    if dialect.name not in _DRIVERS:
        raise ConfigurationError(f"{dialect.name} is not supported: {what} needs PostgreSQL, MariaDB or SQLite")
    module, drivers = _DRIVERS[dialect.name]
    if dialect.driver not in drivers:
        wanted = " or ".join(f"{dialect.name}+{driver}" for driver in drivers)
        raise ConfigurationError(f"the driver {dialect.name}+{dialect.driver} is not supported: use {wanted}")
    return module


def database_of(dialect: Dialect, tables: FenceTables) -> Database:
    """The database behind an engine; raises ConfigurationError for one that is not supported."""
    module = module_of(dialect, "the fence")
    made: Database = getattr(import_module(f"participant_sdk.databases.{module}"), _CLASSES[module])(dialect, tables)
    return made


__all__ = ["Database", "database_of", "module_of"]
