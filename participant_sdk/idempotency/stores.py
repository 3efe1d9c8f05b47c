"""The store behind an engine.

store              what is asked of a database, as scripts of steps
statements         the SQL that all three share, sent one statement at a time
store_postgresql   prepared statements; a run's beginning and its end are one round trip each
store_mariadb      MariaDB, and MySQL by the same statements
store_sqlite       a file in WAL mode
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

from sqlalchemy import Dialect

from participant_sdk.databases import module_of
from participant_sdk.idempotency.store import Store
from participant_sdk.idempotency.tables import IdempotencyTables

_CLASSES: Final = {"postgresql": "PostgreSQLStore", "mariadb": "MariaDbStore", "sqlite": "SqliteStore"}


def store_of(dialect: Dialect, tables: IdempotencyTables) -> Store:
    """The store in the database behind an engine; raises ConfigurationError for one that is not supported."""
    module = module_of(dialect, "the idempotency store")
    made: Store = getattr(import_module(f"participant_sdk.idempotency.store_{module}"), _CLASSES[module])(
        dialect, tables
    )
    return made


__all__ = ["Store", "store_of"]
