"""Filters of lists, whatever the database: SQL finds what the filter matches by hand, and labels by their index."""

from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.codec import new_row
from coordinator.filters import parse
from coordinator.filters_tree import Node, looks_into_branches, matches
from coordinator.model import Attention, BranchSpec, Spec, State, Step, Transaction
from coordinator.store import filtering
from coordinator.store.rows import Batch, ListFilter
from coordinator.store.store import Store, backend_for
from tests.filter_trees import terms, trees

from .rows import LEASE_MS
from .stores import KINDS, empty_store, stores

NAMES = ["bank", "bank-b", "my_bank-b", "my.bank-b"]
ORDERS, TENANTS = ["", "1", "2"], ["", "a", "%"]
NOW_MS = 100_000


def transactions() -> Iterator[Transaction]:
    """Many that differ in all that filters ask for; of all states, ages, labels."""
    number = 0
    for state in State:
        for order in ORDERS:
            for tenant in TENANTS:
                number += 1
                branches = tuple(BranchSpec(name, "debit") for n, name in enumerate(NAMES) if number >> n & 1)
                labels = tuple((name, value) for name, value in (("order", order), ("tenant", tenant)) if value)
                xid = number.to_bytes(6, "big") + bytes(10)
                spec = Spec(xid, b"", number * 2_000, 30_000, branches, labels=labels)
                yield Transaction(
                    spec, state, (Step(),) * len(branches), wake_ms=None if state.finished else 2**40,
                    attention=Attention(number % 3),
                )  # fmt: skip


ALL = list(transactions())
TREES = trees(
    terms(
        names=st.sampled_from([*NAMES, "debit", "bank.debit", "%"]), values=st.sampled_from(["1", "2", "a", "%", "x"]),
        labels=st.sampled_from(["order", "tenant", "none"]), ages_s=NOW_MS // 1000,
    )
)  # fmt: skip


async def fill(store: Store) -> None:
    """Store them all."""
    await store.flush(Batch([new_row(tx) for tx in ALL], (), {tx.spec.xid: tx.spec.labels for tx in ALL}))


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An open store of each kind, with them all."""
    async with stores() as open_one:
        store = await open_one(empty_store(request))
        await fill(store)
        yield store


@pytest.fixture(params=KINDS)
def filled(request: pytest.FixtureRequest) -> Iterator[sa.Engine]:
    """The database of such a store, for tests that are not on asyncio."""
    import asyncio

    url = empty_store(request)

    async def make() -> None:
        async with stores() as open_one:
            await fill(await open_one(url))

    asyncio.run(make())
    engine = backend_for(url, LEASE_MS).engine()
    yield engine
    engine.dispose()


def found(connection: sa.Connection, which: ListFilter) -> list[bytes]:
    """The xids of a page."""
    return [row.xid for row in filtering.list_rows(connection, which)]


def expected(node: Node, *, oldest_first: bool = False) -> list[bytes]:
    """The xids that match, by hand."""
    xids = [tx.spec.xid for tx in ALL if matches(node, tx, NOW_MS)]
    return xids if oldest_first else xids[::-1]


def test_sql_finds_what_matches(filled: sa.Engine) -> None:
    """Exactly that; where actions are asked for, that and more."""
    with filled.connect() as connection:

        @settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(TREES, st.booleans())
        def compare(node: Node, oldest_first: bool) -> None:
            with connection.begin():
                rows = found(connection, ListFilter(node, NOW_MS, oldest_first, limit=1_000))
            wanted = expected(node, oldest_first=oldest_first)
            if looks_into_branches(node):
                assert [xid for xid in rows if xid in wanted] == wanted
            else:
                assert rows == wanted

        compare()


@pytest.mark.parametrize(
    "text",
    [
        "participant = bank-b",
        "participant != my.bank-b",
        "state = TRYING OR state = CONFIRMING",
        "NOT (state = CONFIRMED AND labels.order = 1)",
        "labels.order = 1 AND labels.tenant = a",
        "labels.order = 1 OR labels.tenant = '%'",
        "labels.none != 1 AND labels.order != 1",
        "labels.order = 1 OR state = TRYING OR attention = VIOLATION",
        "age > 50s AND create_time >= 1970-01-01T00:00:10Z",
    ],
)
async def test_pages_hold_each_once_in_order(store: Store, text: str) -> None:
    node = parse(text)
    assert node is not None
    for oldest_first in (False, True):
        seen: list[bytes] = []
        beyond: bytes | None = None
        while rows := await store.list(ListFilter(node, NOW_MS, oldest_first, beyond, limit=4)):
            seen += [row.xid for row in rows]
            beyond = rows[-1].xid
        assert seen == expected(node, oldest_first=oldest_first)
        assert 0 < len(seen) < len(ALL)


@pytest.mark.database
class TestPlan:
    """Labels are found by their key, whatever the planner knows of the tables."""

    @pytest.fixture(params=["no statistics", "statistics", "statistics of before"])
    async def connection(self, request: pytest.FixtureRequest, pg_database: str) -> AsyncIterator[sa.Connection]:
        """A store with 20,000 transactions; one of them has the order's label, and half of them have the tenant's."""
        async with stores() as open_one:
            await open_one(pg_database)
        with psycopg.connect(pg_database, autocommit=True) as raw:
            if request.param == "statistics of before":
                raw.execute("ANALYZE")
            rows = "SELECT decode(lpad(to_hex(n), 32, '0'), 'hex') AS xid, n FROM generate_series(1, 20000) AS n"
            raw.execute(
                "INSERT INTO tricord_transaction SELECT xid, n, NULL, '', ',bank,', 3, 1, 1, 3, 0, NULL, n, '' "
                f"FROM ({rows}) r".encode()
            )
            raw.execute(f"INSERT INTO tricord_label SELECT 'tenant', 'a', xid FROM ({rows}) r WHERE n % 2 = 0".encode())
            raw.execute("INSERT INTO tricord_label VALUES ('order', '42', decode(lpad(to_hex(7777), 32, '0'), 'hex'))")
            raw.execute("INSERT INTO tricord_label VALUES ('order', '43', decode(lpad(to_hex(7778), 32, '0'), 'hex'))")
            if request.param == "statistics":
                raw.execute("ANALYZE")
        engine = backend_for(pg_database, LEASE_MS).engine()
        with engine.connect() as connection:
            yield connection
        engine.dispose()

    @pytest.mark.parametrize(
        ("text", "count"),
        [
            ('labels.tenant = a AND labels.order = "43"', 1),
            ('labels.tenant = a OR labels.order = "43"', 1_000),
            ("labels.tenant = a AND state = CONFIRMED", 1_000),
            ('labels.order = "42"', 1),
            ('labels.order = "42" AND state = CONFIRMED', 1),
            ('labels.order = "42" AND labels.tenant = a', 0),
            ('labels.order = "42" OR labels.order = "43"', 2),
            ('labels.order = "none"', 0),
            ("labels.tenant = a", 1_000),
        ],
    )
    def test_by_the_index(self, connection: sa.Connection, text: str, count: int) -> None:
        """Of both tables no more is read than a page and some."""
        for beyond_xid in (None, bytes(14) + b"\xff\xff"):
            which = ListFilter(parse(text), NOW_MS, beyond_xid=beyond_xid, limit=1_000)
            with connection.begin():
                assert len(filtering.list_rows(connection, which)) == count
                query = filtering.page(connection, which).compile(
                    connection, compile_kwargs={"render_postcompile": True}
                )
                explain = f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {query}"
                plan = [line for (line,) in connection.exec_driver_sql(explain, query.params)]
            text_of = "\n".join(plan)
            assert "tricord_label_pkey" in text_of or count == 1_000, (
                text_of
            )  # what half of them have is met on any way
            assert "Seq Scan" not in text_of, text_of
            read = [
                int(line.split("rows=")[1].split()[0].split(".")[0]) * int(line.split("loops=")[1].rstrip(")"))
                for line in plan
                if "Scan" in line and "rows=" in line
            ]
            assert sum(read) < 50 + 7 * count, text_of
