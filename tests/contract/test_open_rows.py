"""Counts of open transactions: right, bounded, and by the index that has no finished rows in it."""

import json
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from coordinator.store import open_rows
from coordinator.store.open_rows import LATE_MS, OpenGroup
from coordinator.store.rows import Row
from coordinator.store.store import Store, backend_for

from .rows import CONFIRMED, CONFIRMING, DUE_MS, LEASE_MS, TRYING, begin, new_row, open_store, save, saved
from .stores import KINDS, empty_store, stores


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store of each kind."""
    url = empty_store(request)
    async with stores() as open_one:
        yield await open_one(url)


async def test_open_transactions_by_kind(store: Store) -> None:
    due = [new_row(wake_ms=store.now_ms() - LATE_MS * 2), new_row(wake_ms=store.now_ms() - LATE_MS // 5)]
    others = [new_row(participants=",bank,shop,"), new_row(), new_row(), new_row()]
    await begin(store, *due, *others)
    await save(store, saved(others[1], state=CONFIRMING, attention=1), saved(others[2], state=CONFIRMED, wake_ms=None))
    opened = await store.count_open()
    assert sorted(opened.groups) == [
        OpenGroup(TRYING, 0, ",bank,", 3, 1, due[0].created_ms),
        OpenGroup(TRYING, 0, ",bank,shop,", 1, 0, others[0].created_ms),
        OpenGroup(CONFIRMING, 1, ",bank,", 1, 0, others[1].created_ms),
    ]
    assert not opened.cut


async def test_an_empty_store(store: Store) -> None:
    assert await store.count_open() == open_rows.OpenRows([], False)


async def test_not_more_are_counted_than_so_many(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_rows, "OPEN_ROWS_MAX", 3)
    await begin(store, *(new_row() for _ in range(3)))
    opened = await store.count_open()
    assert (sum(group.transactions for group in opened.groups), opened.cut) == (3, False)
    await begin(store, late := new_row(wake_ms=DUE_MS), new_row())
    opened = await store.count_open()
    assert (sum(group.transactions for group in opened.groups), opened.cut) == (4, True)
    assert sum(group.late for group in opened.groups) == 1, late  # what is due first is counted first


FILL = "(SELECT n, CASE WHEN mod(n, 100) > 0 THEN null ELSE 4102444800000 END AS w FROM {numbers}) AS g"


def fill(numbers: str, random: str, xid: str) -> str:
    """A statement that copies one row 20,000 times; of 100 copies 99 are finished."""
    columns = ", ".join(Row._fields)
    values = ", ".join({"xid": random, "wake_ms": "w", "key": "null"}.get(f, f) for f in Row._fields)
    source = FILL.format(numbers=numbers)
    return f"INSERT INTO tricord_transaction ({columns}) SELECT {values} FROM tricord_transaction, {source} WHERE {xid}"


def explained(engine: sa.Engine, explain: str) -> list[Any]:
    """The plan of the statement that counts, with whatever is run before it in its local transaction."""
    ran: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        ran.append((statement, parameters))

    with engine.connect() as connection:
        sa.event.listen(engine, "before_cursor_execute", note)
        open_rows.read(connection, DUE_MS)
        sa.event.remove(engine, "before_cursor_execute", note)
        connection.rollback()
        *before, (statement, parameters) = ran
        for first, values in before:
            connection.exec_driver_sql(first, values)
        return list(connection.exec_driver_sql(f"{explain} {statement}", parameters))


@pytest.mark.database
@pytest.mark.parametrize("analyzed", [True, False])
async def test_the_plan_on_postgresql(pg_database: str, analyzed: bool) -> None:
    async with stores() as open_one:
        store = await open_one(pg_database)
        await begin(store, row := new_row())
        with psycopg.connect(pg_database, autocommit=True) as connection:
            connection.execute("ALTER TABLE tricord_transaction SET (autovacuum_enabled = off)")
            numbers = "generate_series(1, 20000) n"
            connection.execute(fill(numbers, "sha256(n::text::bytea)", "xid = %s").encode(), (row.xid,))
            if analyzed:
                connection.execute("ANALYZE tricord_transaction")
        engine = backend_for(pg_database, LEASE_MS).engine()
        ((found,),) = explained(engine, "EXPLAIN (FORMAT JSON)")
        engine.dispose()
        scans = [node for node in nodes(found[0]["Plan"]) if "Relation Name" in node or "Index Name" in node]
        assert scans, json.dumps(found, indent=1)
        assert {node["Node Type"] for node in scans} <= {"Index Scan", "Bitmap Index Scan", "Bitmap Heap Scan"}, scans
        assert {node["Index Name"] for node in scans if "Index Name" in node} == {"tricord_transaction_due"}, scans
        assert sum(group.transactions for group in (await store.count_open()).groups) == 201


async def test_the_plan_on_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "tricord.db"
    store = await open_store(str(path))
    await begin(store, row := new_row())
    await store.close()
    numbers = "(WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 2000) SELECT n FROM c)"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(fill(numbers, "randomblob(16)", "xid = ?"), (row.xid,))
        connection.commit()
    engine = backend_for(str(path), LEASE_MS).engine()
    plan = [step[3] for step in explained(engine, "EXPLAIN QUERY PLAN")]
    engine.dispose()
    reads = [step for step in plan if "tricord_transaction" in step]
    assert reads, plan
    assert all("USING INDEX tricord_transaction_due" in step for step in reads), plan


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A plan's nodes, itself first."""
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes(below)
