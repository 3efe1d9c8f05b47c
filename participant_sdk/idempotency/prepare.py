"""What is done once at the start: the table, and the proof that the engine's local transactions can hold a record.

store = check_engine(engine, tables)
with errors_told(engine, store), engine.connect() as connection:  # or `await connection.run_sync(make_table, store)`
    make_table(connection, store)
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Connection, Engine, delete, inspect, select, text

from participant_sdk import prepare
from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import StoreUnavailable
from participant_sdk.idempotency.record import KEY_HASH_BYTES, State
from participant_sdk.idempotency.store import Store
from participant_sdk.idempotency.stores import store_of
from participant_sdk.idempotency.tables import IdempotencyTables

_WHAT: Final = "the idempotency store"
_READ_ONLY: Final = {
    "postgresql": "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean",
    "mysql": "SELECT @@GLOBAL.read_only",
    "mariadb": "SELECT @@GLOBAL.read_only",
    "sqlite": "PRAGMA query_only",
}


def check_engine(engine: Engine, tables: IdempotencyTables) -> Store:
    """The store in the database behind `engine`; raises ConfigurationError if it cannot live there."""
    store = store_of(engine.dialect, tables)
    prepare.check_transactions(engine, _WHAT)
    return store


@contextmanager
def errors_told(engine: Engine, store: Store) -> Iterator[None]:
    """Turns what the database says into a ConfigurationError, or StoreUnavailable if it is only away."""
    try:
        with prepare.errors_told(engine, _WHAT):
            yield
    except ConfigurationError as error:
        if error.__cause__ is not None and store.is_transient(error.__cause__):
            raise StoreUnavailable(str(error)) from error.__cause__
        raise


def make_table(connection: Connection, store: Store) -> None:
    """Create the table if it is not there, and check it. Many instances may start at the same time.

    Raises ConfigurationError for a table of an older shape, a read replica, and an engine that cannot roll back.
    """
    if connection.execute(text(_READ_ONLY[connection.dialect.name])).scalar():
        raise ConfigurationError(f"the database can only be read (a replica?): {_WHAT} needs the primary")
    connection.rollback()

    def make() -> None:
        _check_columns(connection, store.tables)
        prepare.create_missing(connection, store.tables.schema, store.tables.records)
        prepare.check_key(connection, store.tables.records, {"key_hash"}, "two runs of a key would not meet")

    prepare.made_together(connection, make)
    _check_rolls_back(connection, store.tables)


def _check_columns(connection: Connection, tables: IdempotencyTables) -> None:
    inspector = inspect(connection)
    if not inspector.has_table(tables.records.name, tables.schema):
        return
    there = {column["name"] for column in inspector.get_columns(tables.records.name, tables.schema)}
    missing = [column.name for column in tables.records.columns if column.name not in there]
    if missing:
        raise ConfigurationError(
            f"table {tables.records.name} is not of this version's shape: it has no column {', '.join(missing)}"
        )


def _check_rolls_back(connection: Connection, tables: IdempotencyTables) -> None:
    """As its user would: whatever listens to the engine's statements does what it does."""
    records, key_hash = tables.records, secrets.token_bytes(KEY_HASH_BYTES)
    nothing = {"tenant": "", "operation": "", "key_hint": "", "created_ms": 0, "expires_ms": 0}
    nothing |= {"fingerprint_version": 0, "fingerprint": b"", "fence": 0, "attempt": 1, "waiters": False}
    connection.execute(records.insert(), {"key_hash": key_hash, "state": int(State.FAILED_RETRYABLE), **nothing})
    connection.rollback()
    there = connection.execute(select(records.c.state).where(records.c.key_hash == key_hash)).first() is not None
    if there:
        connection.execute(delete(records).where(records.c.key_hash == key_hash))
        connection.commit()
        raise ConfigurationError(
            "the engine has no transactions: a record that was rolled back is still there. It may be in AUTOCOMMIT "
            "mode, an event listener of it may commit, or its table may not support transactions"
        )
    connection.rollback()
