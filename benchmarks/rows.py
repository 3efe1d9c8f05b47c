"""Transactions put into a coordinator's database as its own code would have left them, by COPY.

Only how they got there is short: the values are made by ``machine.begin``, the rows by ``codec``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import psycopg

from coordinator.codec import new_row
from coordinator.ids import new_xid
from coordinator.machine import begin
from coordinator.model import BranchSpec, BranchStatus, Payload, Policy, Spec, State, Step, Transaction
from coordinator.store.rows import Row

from .load import PAYLOAD
from .noop_participant import FENCE_ID

POLICY = Policy()
COLUMNS = ", ".join(Row._fields)
_TYPES = {
    "xid": "bytea", "key": "bytea", "body": "bytea", "progress": "bytea", "participants": "text",
    "format": "int2", "state": "int2", "attention": "int2", "version": "int4",
}  # fmt: skip
"""All others are int8."""


def made(number: int, now_ms: int, names: Sequence[str], timeout_ms: int = 30_000) -> Transaction:
    """A transaction that has just begun, with one no-op branch at each of ``names``."""
    branches = tuple(BranchSpec(name, "noop", Payload(PAYLOAD, "application/json")) for name in names)
    xid = new_xid(now_ms)
    spec = Spec(xid, b"\0" + xid.hex().encode(), now_ms, timeout_ms, branches)
    return begin(spec, now_ms, POLICY)._replace(save_id=number + 1)


def confirming(tx: Transaction, wake_ms: int, waits: Sequence[Step | None] = ()) -> Transaction:
    """Likewise when it is decided: its coordinator dies before any Confirm is answered.

    ``waits`` may hold another step for a branch, such as one that has failed before.
    """
    tried = Step(BranchStatus.TRIED, fence_id=FENCE_ID)
    steps = tuple(waits[n] or tried if n < len(waits) else tried for n in range(len(tx.steps)))
    now_ms = tx.spec.created_ms
    return tx._replace(
        state=State.CONFIRMING, steps=steps, version=2, wake_ms=wake_ms, updated_ms=now_ms, decided_ms=now_ms
    )


def confirmed(tx: Transaction) -> Transaction:
    """Likewise at its end."""
    now_ms = tx.spec.created_ms
    steps = (Step(BranchStatus.CONFIRMED, fence_id=FENCE_ID),) * len(tx.steps)
    return tx._replace(
        state=State.CONFIRMED, steps=steps, version=3, wake_ms=None, updated_ms=now_ms, decided_ms=now_ms
    )


def store(dsn: str, transactions: Iterable[Transaction]) -> None:
    """Put them into the database, and have the server write down what it has in memory."""
    with psycopg.connect(dsn, autocommit=True) as connection, connection.cursor() as cursor:
        with cursor.copy(f"COPY tricord_transaction ({COLUMNS}) FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types([_TYPES.get(name, "int8") for name in Row._fields])
            for tx in transactions:
                row = new_row(tx)
                copy.write_row(row)
        cursor.execute("VACUUM ANALYZE tricord_transaction")
        cursor.execute("CHECKPOINT")


@contextlib.contextmanager
def reading(dsn: str) -> Iterator[psycopg.Connection]:
    """A connection that reads what is committed."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


def counts(dsn: str) -> dict[State, int]:
    """How many rows there are by state."""
    with reading(dsn) as connection:
        found = connection.execute("SELECT state, count(*) FROM tricord_transaction GROUP BY state").fetchall()
    return {State(state): count for state, count in found}
