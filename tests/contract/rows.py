"""Rows for the store's conformance suite: made by the thousand, each with its own xid, all of one shape."""

import itertools
import os
from collections.abc import Sequence

from coordinator.store.rows import Batch, Row, RowRejected
from coordinator.store.store import Store, backend_for

LEASE_MS = 10_000
DUE_MS = 1_000
"""Long ago on every clock: a row with this ``wake_ms`` is due."""
TRYING, CONFIRMING, CONFIRMED = 1, 2, 3

Standing = list[Row | RowRejected | None]

_numbers = itertools.count(1)


def new_row(key: bytes = b"", *, wake_ms: int | None = None, participants: str = ",bank,") -> Row:
    """A row that is not stored yet. Without ``wake_ms`` it is not due before the year 2100."""
    number = next(_numbers)
    return Row(
        xid=number.to_bytes(8, "big") + os.urandom(8),
        created_ms=1_700_000_000_000 + number,
        key=key,
        body=b"body %d" % number,
        participants=participants,
        version=1,
        save_id=save_id(),
        state=TRYING,
        wake_ms=4_102_444_800_000 if wake_ms is None else wake_ms,
        updated_ms=1_700_000_000_000,
        progress=b"progress",
    )


def save_id() -> int:
    """Random, positive, 62 bits, as the engine makes them."""
    return int.from_bytes(os.urandom(8), "big") >> 2 | 1


def saved(row: Row, **changes: object) -> Row:
    """The next version of a row, as a save writes it."""
    after = row._replace(version=row.version + 1, save_id=save_id(), progress=row.progress + b"+")
    return after._replace(**changes)  # type: ignore[arg-type]


async def begin(store: Store, *rows: Row) -> Standing:
    """Flush new rows, in one batch."""
    return await store.flush(Batch(rows, ()))


async def save(store: Store, *rows: Row) -> Standing:
    """Flush saves, in one batch."""
    return await store.flush(Batch((), rows))


async def stored(store: Store, rows: Sequence[Row]) -> list[Row | None]:
    """The rows as they now stand in the database."""
    return [await store.get(xid=row.xid) for row in rows]


async def open_store(url: str, *, lease_ms: int = LEASE_MS) -> Store:
    """An open store; a store that does not open is closed again."""
    store = Store(backend_for(url, lease_ms))
    try:
        await store.open()
    except BaseException:
        await store.close()
        raise
    return store
