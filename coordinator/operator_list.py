"""Lists of transactions: what is asked for, checked; pages, and the tokens that lead from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tricord.v1 import operator_pb2 as pb

from . import filters
from .codec import UnreadableRow, transaction
from .errors import InvalidRequest, Violation
from .filters_tree import Node, looks_into_branches, matches, printed
from .operator_pages import key_of, make_token
from .store.rows import ListFilter, Row
from .store.store import Store

PAGE_SIZE_DEFAULT = 50
PAGE_SIZE_MAX = 1_000
ROWS_READ_MAX = 2_000
"""Of one page, where each must be read to know whether it matches."""
ROWS_READ_AT_ONCE = 100
"""Of those: whole rows may be large."""
ORDERS = {"": False, "create_time": True, "create_time asc": True, "create_time desc": False}
"""Whether the oldest come first."""


class Listing(NamedTuple):
    """A checked request for a page."""

    matching: Node | None
    oldest_first: bool
    beyond_xid: bytes | None
    page_size: int
    text: str
    """The filter and the order, whatever they were written like: names the list that the page is of."""


class Found(NamedTuple):
    """A page."""

    rows: Sequence[Row]
    next_page_token: str
    """Empty on the last one."""


def read_list(request: pb.ListRequest) -> Listing:
    """What is asked for. Raises InvalidRequest, with every wrong field."""
    wrong: list[Violation] = []
    if request.page_size > PAGE_SIZE_MAX:
        wrong.append(Violation("page_size", f"is {request.page_size}; the limit is {PAGE_SIZE_MAX}"))
    matching: Node | None = None
    try:
        matching = filters.parse(request.filter)
    except filters.FilterError as error:
        wrong.append(Violation("filter", str(error)))
    order = " ".join(request.order_by.split())
    if order not in ORDERS:
        shown = f"{request.order_by[:64]!a}"
        wrong.append(Violation("order_by", f"is {shown}; use create_time desc, create_time asc or create_time"))
    if wrong:
        raise InvalidRequest(*wrong)
    oldest_first = ORDERS[order]
    text = f"list|{oldest_first}|{printed(matching) if matching is not None else ''}"
    beyond_xid = key_of(request.page_token, text) if request.page_token else None
    return Listing(matching, oldest_first, beyond_xid, request.page_size or PAGE_SIZE_DEFAULT, text)


async def find_page(store: Store, listing: Listing) -> Found:
    """The page. Raises StoreError.

    Where rows must be read to know whether they match, no more than ROWS_READ_MAX are: the page may then hold fewer
    than were asked for, and its token goes on where reading stopped.
    """
    matching, size = listing.matching, listing.page_size
    reads = matching is not None and looks_into_branches(matching)
    limit = ROWS_READ_AT_ONCE if reads else size + 1
    which = ListFilter(matching, store.now_ms(), listing.oldest_first, listing.beyond_xid, limit)
    page: list[Row] = []
    looked_at = 0
    while True:
        rows = await store.list(which)
        for row in rows:
            if reads and not _matches(matching, row, which.now_ms):
                continue
            if len(page) == size:
                return Found(page, make_token(listing.text, page[-1].xid))
            page.append(row)
        looked_at += len(rows)
        if len(rows) < limit:
            return Found(page, "")
        which = which._replace(beyond_xid=rows[-1].xid)
        if looked_at >= ROWS_READ_MAX:
            return Found(page, make_token(listing.text, rows[-1].xid))


def _matches(matching: Node | None, row: Row, now_ms: int) -> bool:
    """Whether a row is one of those; one that cannot be read may be, and is shown."""
    try:
        return matching is None or matches(matching, transaction(row), now_ms)
    except UnreadableRow:
        return True
