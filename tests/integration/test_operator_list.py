"""Pages of operators' lists where rows must be read to know whether they match: bounded, and none is left out."""

from collections.abc import AsyncIterator

import pytest

from coordinator.codec import new_row
from coordinator.errors import InvalidRequest
from coordinator.model import BranchSpec, Spec, State, Step, Transaction
from coordinator.operator_list import ROWS_READ_MAX, Found, find_page, read_list
from coordinator.store.rows import Batch
from coordinator.store.store import Store
from tests.contract.stores import KINDS, empty_store, stores
from tricord.v1 import operator_pb2 as pb

COUNT = 2 * ROWS_READ_MAX + 500
RARE = (2_250, 2_255, 2_256, 4_499)
"""The numbers of those with the action "rare", the newest being the highest."""


def tx_of(number: int) -> Transaction:
    """One of them; the first ones have another participant."""
    branch = BranchSpec("shop" if number < 3 else "bank", "rare" if number in RARE else "debit")
    spec = Spec(number.to_bytes(6, "big") + bytes(10), b"", number, 30_000, (branch,))
    return Transaction(spec, State.CONFIRMED, (Step(),))


@pytest.fixture(params=KINDS[:2])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """A store with all of them."""
    async with stores() as open_one:
        store = await open_one(empty_store(request))
        for start in range(0, COUNT, 1_000):
            rows = [new_row(tx_of(number)) for number in range(start, min(start + 1_000, COUNT))]
            await store.flush(Batch(rows, ()))
        yield store


async def pages(store: Store, filter_: str, size: int, order_by: str = "") -> list[list[int]]:
    """The numbers on each page, to the last."""
    found: list[list[int]] = []
    token = ""
    while not found or token:
        request = pb.ListRequest(filter=filter_, page_size=size, page_token=token, order_by=order_by)
        page: Found = await find_page(store, read_list(request))
        found.append([int.from_bytes(row.xid[:6], "big") for row in page.rows])
        token = page.next_page_token
    return found


async def test_a_page_looks_at_a_bounded_number_and_its_token_goes_on(store: Store) -> None:
    assert await pages(store, "action = rare", 50) == [[4_499], [2_256, 2_255, 2_250], []]
    assert await pages(store, "action = bank.rare", 2, "create_time") == [[], [2_250, 2_255], [2_256], [4_499]]
    assert await pages(store, "action = shop.rare", 50) == [[], [], []]


async def test_a_full_page_ends_at_its_last(store: Store) -> None:
    assert (await pages(store, "action = rare", 1))[1:4] == [[2_256], [2_255], [2_250]]
    found = await pages(store, "action != rare AND create_time < 1970-01-01T00:00:01Z", 300)
    assert [len(page) for page in found] == [300, 300, 300, 100]
    assert [number for page in found for number in page] == list(range(999, -1, -1))


async def test_what_sql_tells_bounds_what_is_read(store: Store) -> None:
    assert await pages(store, "participant = shop AND action = debit", 50) == [[2, 1, 0]]
    assert await pages(store, "participant = shop AND NOT action = debit", 50) == [[]]


async def test_one_that_cannot_be_read_is_shown(store: Store) -> None:
    await store.flush(Batch([new_row(tx_of(COUNT))._replace(body=b"\x90")], ()))
    assert (await pages(store, "action = rare", 50))[0] == [COUNT, 4_499]
    assert (await pages(store, "action = rare AND state = CANCELLED", 50)) == [[]]


def test_every_wrong_field_is_told() -> None:
    request = pb.ListRequest(page_size=1_001, filter="state = ", order_by="xid desc", page_token="x")
    with pytest.raises(InvalidRequest) as caught:
        read_list(request)
    assert {wrong.field: wrong.description for wrong in caught.value.violations} == {
        "page_size": "is 1001; the limit is 1000",
        "filter": "column 9: expected a value, found the end",
        "order_by": "is 'xid desc'; use create_time desc, create_time asc or create_time",
    }
