"""What is done once at the start: the table, and the proof that the engine's local transactions can hold a record.

store = check_engine(engine, tables)
with errors_told(engine, store), engine.connect() as connection:  # or `await connection.run_sync(make_table, store)`
    make_table(connection, store)
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection, Engine, Table, delete, inspect, select, text

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

_MIGRATE: Final = (
    "Migrate it: with Alembic by participant_sdk.idempotency.metadata, or by hand (`tricord idempotency ddl` prints "
    "what it has to be). Nothing was changed"
)


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

    Raises ConfigurationError for a table of another version's shape, a replica, and an engine that cannot roll back.
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
    """Raises ConfigurationError for a table that is there in another shape, with what is wrong and what to do."""
    inspector, records = inspect(connection), tables.records
    if not inspector.has_table(records.name, tables.schema):
        return
    there = {column["name"]: column for column in inspector.get_columns(records.name, tables.schema)}
    wrong = [f"it has no column {names}"] if (names := _names(records.columns.keys() - there.keys(), records)) else []
    for column in records.columns:
        room, needed = _length(there.get(column.name)), _length({"type": column.type.dialect_impl(connection.dialect)})
        if room is not None and needed is not None and room < needed:
            wrong.append(f"column {column.name} has room for {room}, and needs {needed}")
    wrong += [f"this version does not fill column {name}" for name in there if _must_be_filled(there[name], records)]
    if wrong:
        raise ConfigurationError(
            f"table {records.fullname} is not of this version's shape: {'; '.join(wrong)}. {_MIGRATE}"
        )


def _names(names: Set[str], records: Table) -> str:
    return ", ".join(column.name for column in records.columns if column.name in names)


def _length(column: Mapping[str, Any] | None) -> int | None:
    """How much a column has room for, where the database says it."""
    length = None if column is None else getattr(column["type"], "length", None)
    return length if isinstance(length, int) else None


def _must_be_filled(column: Mapping[str, Any], records: Table) -> bool:
    """Whether a row cannot be without it, of which this version knows nothing."""
    fills_itself = any(column.get(how) for how in ("default", "computed", "identity"))
    return column["name"] not in records.columns and not column["nullable"] and not fills_itself


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
