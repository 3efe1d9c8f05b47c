"""Time that goes by for a record: its row is changed as if it had, by the database's own clock. Nobody waits.

    lapse(store, drawing, "r-1")     # the lease of the run under that key has ended: a repeat may take over
    expire(store, transfers, "t-1")  # the answer is over its `ttl_s`: a repeat runs again

A run whose heartbeat is alive renews a lease that has ended and that nobody has taken: let its process die first
(`crash_at`), or take an operation without a heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sqlalchemy import ColumnElement, Connection, Update, literal_column, update

from participant_sdk.idempotency.asking import hash_of
from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.setup import Setup
from participant_sdk.idempotency.words import words_of

if TYPE_CHECKING:
    from participant_sdk.idempotency.operation import Operation
    from participant_sdk.idempotency.tables import IdempotencyTables

LEASE: Final = "lease_until_ms"
EXPIRY: Final = "expires_ms"
TimeGoesBy: TypeAlias = Callable[..., None]
"""The type of `lapse` and `expire` where they are fixtures, for one store: operation, key and tenant."""
_ENDLESS: Final = (int(State.PROCESSING), int(State.UNKNOWN))


def lapse(store: Idempotency, operation: Operation, key: str, tenant: str = "") -> None:
    """The lease of the run under that key has ended. Raises LookupError if none is in progress there."""
    key_hash = hash_of(store.setup, operation, key, tenant)
    with store.engine.begin() as connection:
        lapse_row(connection, store.setup.store.tables, key_hash)


async def async_lapse(store: AsyncIdempotency, operation: Operation, key: str, tenant: str = "") -> None:
    """As `lapse`."""
    key_hash = hash_of(store.setup, operation, key, tenant)
    async with store.engine.begin() as connection:
        await connection.run_sync(lapse_row, store.setup.store.tables, key_hash)


def expire(store: Idempotency, operation: Operation, key: str, tenant: str = "") -> None:
    """What is stored under that key has expired, also in the store's fronts, which are emptied.

    Raises LookupError if nothing is stored there that can expire: no record, a run in progress, UNKNOWN.
    """
    key_hash = hash_of(store.setup, operation, key, tenant)
    with store.engine.begin() as connection:
        expire_row(connection, store.setup.store.tables, key_hash)
    for flush in _flushes(store.setup):
        flush()


async def async_expire(store: AsyncIdempotency, operation: Operation, key: str, tenant: str = "") -> None:
    """As `expire`."""
    key_hash = hash_of(store.setup, operation, key, tenant)
    async with store.engine.begin() as connection:
        await connection.run_sync(expire_row, store.setup.store.tables, key_hash)
    for flush in _flushes(store.setup):
        done = flush()
        if isawaitable(done):
            await done


def lapse_row(connection: Connection, tables: IdempotencyTables, key_hash: bytes) -> None:
    """As `lapse`, where the hash of the key is known; commit it. Raises LookupError."""
    records = tables.records
    running = update(records).where(records.c.key_hash == key_hash, records.c.state == int(State.PROCESSING))
    _changed(connection, tables, running, LEASE, "no run is in progress under that key")


def expire_row(connection: Connection, tables: IdempotencyTables, key_hash: bytes) -> None:
    """As `expire`, where the hash of the key is known, of the row alone; commit it. Raises LookupError."""
    records = tables.records
    ended = update(records).where(records.c.key_hash == key_hash, records.c.state.not_in(_ENDLESS))
    _changed(connection, tables, ended, EXPIRY, "nothing that can expire is stored under that key")


def _changed(connection: Connection, tables: IdempotencyTables, rows: Update, column: str, none: str) -> None:
    now_ms: ColumnElement[int] = literal_column(words_of(connection.dialect, tables).now_ms)
    if connection.execute(rows.values({column: now_ms - 1})).rowcount != 1:
        raise LookupError(none)


def _flushes(setup: Setup) -> list[Callable[[], Any]]:
    return [front.flush for front in setup.fronts if hasattr(front, "flush")]
