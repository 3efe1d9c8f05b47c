"""What the doctor reads of a store, on every database."""

from collections.abc import AsyncIterator

import pytest

from coordinator.store import examine, schema
from coordinator.store.rows import Row
from coordinator.store.store import Store

from .rows import CONFIRMED, TRYING, begin, new_row
from .stores import KINDS, empty_store, stores

FAR_MS = 4_102_444_800_000


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An open store of each kind."""
    async with stores() as open_one:
        yield await open_one(empty_store(request))


async def pages(store: Store) -> list[list[Row]]:
    after, found = examine.After(), []
    while rows := await store.within(lambda connection, after=after: examine.open_rows(connection, after)):  # type: ignore[misc]
        found.append(list(rows))
        after = examine.After(rows[-1].wake_ms or 0, rows[-1].xid)
    return found


async def test_pages_hold_each_unfinished_row_once_in_the_order_of_their_time(store: Store) -> None:
    alike = [new_row() for _ in range(2 * examine.OPEN_ROWS + 1)]  # all of one wake_ms
    others = [new_row(wake_ms=FAR_MS + n) for n in (-1, 1)]
    finished = [new_row()._replace(wake_ms=None, state=CONFIRMED) for _ in range(3)]
    await begin(store, *alike, *others, *finished)
    found = await pages(store)
    assert [len(page) for page in found] == [examine.OPEN_ROWS, examine.OPEN_ROWS, 3]
    wanted = sorted([*alike, *others], key=lambda row: (row.wake_ms or 0, row.xid))
    assert [row for page in found for row in page] == wanted


async def test_a_row_is_made_due_if_it_is_not_and_nothing_else_of_it_changes(store: Store) -> None:
    later, due, finished = new_row(), new_row(wake_ms=FAR_MS - 10), new_row()._replace(wake_ms=None, state=CONFIRMED)
    await begin(store, later, due, finished)

    async def made_due(row: Row) -> bool:
        return await store.within(lambda connection: examine.make_due(connection, row.xid, FAR_MS - 5))

    assert [await made_due(row) for row in (later, due, finished)] == [True, False, False]
    assert await store.get(xid=later.xid) == later._replace(wake_ms=FAR_MS - 5)
    assert await store.get(xid=due.xid) == due
    assert await store.get(xid=finished.xid) == finished


async def test_what_finished_with_attention_is_found_newest_first(store: Store) -> None:
    rows = [new_row()._replace(wake_ms=None, state=CONFIRMED, attention=n % 2) for n in range(5)]
    await begin(store, *rows, new_row()._replace(attention=2, state=TRYING))
    found = await store.within(lambda connection: examine.finished_with_attention(connection, [CONFIRMED]))
    assert found == [(row.xid, ",bank,") for row in (rows[3], rows[1])]


async def test_how_far_it_has_been_migrated(store: Store) -> None:
    assert (await store.within(examine.stand)).revision == schema.REVISION
