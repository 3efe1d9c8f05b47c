"""What only PostgreSQL can show: two coordinators on one database, locks, settings, plans."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from coordinator.store import postgres
from coordinator.store.postgres import PostgresBackend
from coordinator.store.postgres_flush import FLUSHES, Writer
from coordinator.store.rows import Batch, ParticipantRow, Row, RowRejected, StoreError
from tests.postgres import DURABLE, PostgresServer

from .rows import CONFIRMING, DUE_MS, LEASE_MS, begin, new_row, open_store, save, saved, stored
from .stores import OpenStore, set_hostile_defaults, stores

pytestmark = pytest.mark.database

SETTINGS = {
    "transaction_isolation": "read committed",
    "synchronous_commit": "on",
    "lock_timeout": "1s",
    "statement_timeout": "2s",
    "idle_in_transaction_session_timeout": "2s",
}
"""For a lease of 2 s: no wait of the coordinator, and no pause of it, may outlast its lease (protocol A3)."""

_SPY = """
    CREATE TABLE spied (what text, name text, value text);
    CREATE FUNCTION spy() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO spied SELECT TG_TABLE_NAME || ' ' || TG_OP, n, current_setting(n)
                FROM unnest(ARRAY[{names}]) AS n;
            RETURN NULL;
        END $$;
    CREATE TRIGGER spy AFTER INSERT OR UPDATE ON tricord_transaction FOR EACH STATEMENT EXECUTE FUNCTION spy();
    CREATE TRIGGER spy AFTER INSERT OR UPDATE ON tricord_participant FOR EACH STATEMENT EXECUTE FUNCTION spy();
"""


@pytest.fixture
async def opened() -> AsyncIterator[OpenStore]:
    """Opens stores, and closes them after the test."""
    async with stores() as open_one:
        yield open_one


async def waits_for_lock(dsn: str, count: int = 1) -> list[int]:
    """The server processes of the coordinators that wait for a lock, as soon as there are so many."""
    query = (
        "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'tricord%' AND wait_event_type = 'Lock' "
        "AND datname = current_database()"
    )
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        while True:
            pids = [pid for (pid,) in await (await connection.execute(query)).fetchall()]
            if len(pids) >= count:
                return pids
            await asyncio.sleep(0.01)


def deadlocks(dsn: str) -> int:
    """How many deadlocks this database has seen, by the sessions that have ended."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        (count,) = connection.execute(query).fetchone() or (0,)
        return int(count)


@pytest.mark.parametrize("hostile", [False, True])
async def test_every_connection_has_the_coordinators_settings(
    pg_database: str, opened: OpenStore, hostile: bool
) -> None:
    """Read inside the coordinator's own statements, by a trigger: flush, claim and registration."""
    if hostile:
        set_hostile_defaults(pg_database)
    store = await opened(pg_database, lease_ms=2_000)
    names = ", ".join(f"'{name}'" for name in SETTINGS)
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute(_SPY.format(names=names).encode())
    await begin(store, row := new_row())
    flushed = await save(store, saved(row, wake_ms=DUE_MS))
    claimed = await store.claim(10, LEASE_MS)
    await store.register(ParticipantRow("bank", "127.0.0.1:20001", {"a": "f"}), replace_fence=False)
    assert (flushed, len(claimed.rows)) == ([None], 1)
    with psycopg.connect(pg_database, autocommit=True) as connection:
        spied = connection.execute("SELECT what, name, value FROM spied").fetchall()
    by_statement: dict[str, dict[str, set[str]]] = {}
    for what, name, value in spied:
        by_statement.setdefault(what, {}).setdefault(name, set()).add(value)
    expected = {name: {value} for name, value in SETTINGS.items()}
    whats = (
        "tricord_transaction INSERT",
        "tricord_transaction UPDATE",
        *(f"tricord_participant {how}" for how in ("INSERT", "UPDATE")),
    )
    assert by_statement == dict.fromkeys(whats, expected)
    assert sum(what == "tricord_transaction UPDATE" for what, _, _ in spied) == 2 * len(SETTINGS)


async def test_a_stronger_synchronous_commit_is_left_alone(pg_database: str, opened: OpenStore) -> None:
    with psycopg.connect(pg_database, autocommit=True) as connection:
        name = connection.info.dbname
        connection.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = remote_apply'.encode())
    store = await opened(pg_database)
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute(_SPY.format(names="'synchronous_commit'").encode())
    await begin(store, new_row())
    with psycopg.connect(pg_database, autocommit=True) as connection:
        assert connection.execute("SELECT DISTINCT value FROM spied").fetchall() == [("remote_apply",)]


async def test_a_nul_byte_in_a_text_fails_alone(pg_database: str, opened: OpenStore) -> None:
    store = await opened(pg_database)
    rows = [new_row(b"\0%d" % n) for n in range(6)]
    rows[1] = rows[1]._replace(participants=",a\0b,")
    old = new_row()
    await begin(store, old)
    standing = await store.flush(Batch(rows, [saved(old)]))
    assert [n for n, row in enumerate(standing) if isinstance(row, RowRejected)] == [1]
    assert [n for n, row in enumerate(standing) if row is None] == [0, 2, 3, 4, 5, 6]
    assert await stored(store, rows) == [rows[0], None, *rows[2:]]


async def test_two_claimers_at_once_take_each_row_once(pg_database: str, opened: OpenStore) -> None:
    one, two = await opened(pg_database), await opened(pg_database)
    rows = [new_row(wake_ms=DUE_MS + n) for n in range(300)]
    await begin(one, *rows)
    claims = await asyncio.gather(*(store.claim(7, LEASE_MS) for _ in range(30) for store in (one, two)))
    xids = [row.xid for claim in claims for row in claim.rows]
    assert len(xids) == len(set(xids))
    while left := (await one.claim(500, LEASE_MS)).rows:  # what both passed over while it was in the other's hands
        xids += [row.xid for row in left]
    assert sorted(xids) == sorted(row.xid for row in rows)


async def test_a_claim_passes_over_rows_in_other_hands(pg_database: str, opened: OpenStore) -> None:
    store = await opened(pg_database)
    rows = [new_row(wake_ms=DUE_MS + n) for n in range(5)]
    await begin(store, *rows)
    async with await psycopg.AsyncConnection.connect(pg_database) as other:
        await other.execute("SELECT 1 FROM tricord_transaction WHERE xid = %s FOR UPDATE", (rows[0].xid,))
        claim = await store.claim(10, LEASE_MS)
        assert {row.xid for row in claim.rows} == {row.xid for row in rows[1:]}
        assert claim.next_wake_ms == rows[0].wake_ms
    assert [row.xid for row in (await store.claim(10, LEASE_MS)).rows] == [rows[0].xid]


async def test_flushes_of_two_coordinators_never_deadlock(pg_database: str) -> None:
    """Both hold the same xids and the same keys, and write them in opposite orders (A4)."""
    one, two = await open_store(pg_database), await open_store(pg_database)
    try:
        rows = [new_row() for _ in range(1_000)]
        await begin(one, *rows)
        for n in range(12):
            keys = [b"\0%d-%d" % (n, k) for k in range(20)]
            batches = []
            for turned in (1, -1):
                saves = [saved(row) for row in rows[::turned]]
                begins = [new_row(key) for key in keys[::turned]] if n % 2 else []  # whose keys alone keep them apart
                batches.append(Batch(begins, saves))
            await asyncio.gather(one.flush(batches[0]), two.flush(batches[1]))
            rows = [row._replace(version=n + 2) for row in rows]
        with psycopg.connect(pg_database) as connection:
            query = "SELECT version, count(*) FROM tricord_transaction WHERE key IS NULL GROUP BY version"
            assert connection.execute(query).fetchall() == [(rows[0].version, len(rows))]
    finally:
        await one.close()
        await two.close()
    assert deadlocks(pg_database) == 0


@pytest.mark.parametrize("analyzed", [False, True])
async def test_saves_look_up_one_row_after_another(pg_database: str, opened: OpenStore, analyzed: bool) -> None:
    """So their locks are taken in the order of the arrays (A4), whatever the planner knows of the table."""
    backend = PostgresBackend(pg_database, LEASE_MS)
    store = await opened(pg_database)
    rows = [new_row() for _ in range(500 if analyzed else 1)]
    await begin(store, *rows)
    with backend._connect(plan_for_arrays=True) as connection:
        if analyzed:
            connection.execute("ANALYZE tricord_transaction")
        Writer(connection)  # one plan for all flushes, so that it matters not what the arrays hold
        (statement,) = [sql for kind, sql in FLUSHES.items() if kind == (False, False, True, False)]
        connection.execute(b"PREPARE saves AS " + statement)
        empty = ", ".join(["'{}'"] * statement.count(b"::"))
        found = connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE saves ({empty})".encode()).fetchone()
    assert found is not None
    joins = [node for node in _nodes(found[0][0]["Plan"]) if "Join Type" in node]
    assert [node["Node Type"] for node in joins] == ["Nested Loop"]
    outer, inner = joins[0]["Plans"]
    assert outer["Node Type"] == "Function Scan"
    assert "xid" in (inner.get("Index Cond") or _nodes(inner)[-1]["Index Cond"])


async def test_every_kind_of_flush_tells_how_many_rows_it_has_written(pg_database: str, opened: OpenStore) -> None:
    """One that told less would have all rows read again, and locked: in the log that is more than the save itself."""
    await opened(pg_database)
    with PostgresBackend(pg_database, LEASE_MS)._connect(plan_for_arrays=True) as connection:
        writer = Writer(connection)
        rows = [new_row(b"\0%d" % n) for n in range(6)]
        assert writer.write(Batch(rows[:2], [])) == 2
        assert writer.write(Batch(rows[2:4], [saved(rows[0])])) == 3
        assert writer.write(Batch(rows[4:5], [saved(rows[2])], {rows[4].xid: [("a", "b")]})) == 2
        assert writer.write(Batch(rows[5:], [], {rows[5].xid: [("a", "b")]})) == 1
        assert writer.write(Batch([], [saved(rows[1]), saved(rows[3])])) == 2
        assert writer.write(Batch([rows[0]], [saved(rows[1]), saved(rows[4])])) == 1  # two are there by now


async def test_a_deadlock_with_others_is_run_again(pg_database: str) -> None:
    store = await open_store(pg_database)
    try:
        low, high = sorted((new_row(), new_row()))
        await begin(store, low, high)
        lock = "SELECT 1 FROM tricord_transaction WHERE xid = %s FOR UPDATE"
        async with await psycopg.AsyncConnection.connect(pg_database) as other:
            await other.execute("SET deadlock_timeout = '60s'")  # so that it is ours that is ended
            await other.execute(lock, (high.xid,))
            mine = [saved(high), saved(low)]
            flushed = asyncio.ensure_future(save(store, *mine))
            await waits_for_lock(pg_database)
            await other.execute(lock, (low.xid,))
            await other.rollback()
        assert await flushed == [None, None]
        assert await stored(store, mine) == mine
    finally:
        await store.close()
    assert deadlocks(pg_database) == 1


async def test_a_row_locked_by_a_stopped_session_is_waited_for_again_and_again(
    pg_database: str, opened: OpenStore
) -> None:
    """lock_timeout ends each wait, so nothing of ours outlasts a lease; the flush is run until it is done."""
    store = await opened(pg_database, lease_ms=200)
    row, fresh = new_row(), new_row(b"\0k")
    await begin(store, row)
    mine = saved(row)
    async with await psycopg.AsyncConnection.connect(pg_database) as other:
        await other.execute("SELECT 1 FROM tricord_transaction WHERE xid = %s FOR UPDATE", (row.xid,))
        flushed = asyncio.ensure_future(store.flush(Batch([fresh], [mine])))
        for _ in range(3):
            await waits_for_lock(pg_database)
            await asyncio.sleep(0.15)  # longer than lock_timeout: the next wait is another one
        assert not flushed.done()
    assert await flushed == [None, None]
    assert await stored(store, [fresh, mine]) == [fresh, mine]


async def test_no_connection_stays_in_a_transaction(pg_database: str, opened: OpenStore) -> None:
    store = await opened(pg_database)
    await begin(store, new_row(wake_ms=DUE_MS))
    await store.claim(10, LEASE_MS)
    await store.get(xid=bytes(16))
    query = "SELECT state FROM pg_stat_activity WHERE application_name LIKE 'tricord%' AND datname = current_database()"
    with psycopg.connect(pg_database, autocommit=True) as connection:
        assert {state for (state,) in connection.execute(query)} == {"idle"}


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan] + [node for child in plan.get("Plans", []) for node in _nodes(child)]


@pytest.mark.parametrize("planned_for_arrays", [False, True])
async def test_the_look_for_due_work_reads_the_partial_index(
    pg_database: str, opened: OpenStore, planned_for_arrays: bool
) -> None:
    """An index condition, not a filter over all open rows (A8), and finished rows are not in the index at all."""
    store = await opened(pg_database)
    await begin(store, row := new_row())
    columns = ", ".join(Row._fields)
    values = ", ".join({"xid": "sha256(n::text::bytea)", "wake_ms": "w", "key": "null"}.get(f, f) for f in Row._fields)
    fill = (
        f"INSERT INTO tricord_transaction ({columns}) SELECT {values} FROM tricord_transaction, "
        "(SELECT n, CASE WHEN mod(n, 4) > 0 THEN null WHEN mod(n, 400) = 0 THEN 1 ELSE 4102444800000 END AS w "
        "FROM generate_series(1, 20000) n) AS g WHERE xid = %s"
    )
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute(fill.encode(), (row.xid,))
        connection.execute("ANALYZE tricord_transaction")
        if planned_for_arrays:
            connection.execute("SET enable_seqscan = off")
        explain = f"EXPLAIN (FORMAT JSON) {postgres._CLAIM}"
        (found,) = connection.execute(explain.encode(), (100, LEASE_MS)).fetchone() or (None,)
        peek = connection.execute(f"EXPLAIN (FORMAT JSON) {postgres._PEEK}".encode()).fetchone()
    plan = found if isinstance(found, list) else json.loads(str(found))
    scans = [node for node in _nodes(plan[0]["Plan"]) if node.get("Index Name") == "tricord_transaction_due"]
    assert scans, json.dumps(plan, indent=1)
    assert all("wake_ms <=" in node["Index Cond"] for node in scans), scans
    assert peek is not None
    assert any(node.get("Index Name") == "tricord_transaction_due" for node in _nodes(peek[0][0]["Plan"]))
    assert len((await store.claim(500, LEASE_MS)).rows) == 50


async def test_a_history_that_has_changed_calls_for_attention(pg_database: str, opened: OpenStore) -> None:
    """After a restore or a failover decisions may be lost of which calls have left (A9)."""
    store = await open_store(pg_database)
    open_row, finished = new_row(), new_row()
    await begin(store, open_row, finished)
    await save(store, finished := saved(finished, state=3, wake_ms=None))
    store_id = store.store_id
    await store.close()
    with psycopg.connect(pg_database, autocommit=True) as connection:
        connection.execute("UPDATE tricord_store SET incarnation = '1-00000001'")
    again = await opened(pg_database)
    assert again.store_id == store_id
    found = await again.get(xid=open_row.xid)
    assert found is not None
    assert (found.attention, found.version) == (2, 2)
    assert found.save_id != open_row.save_id
    assert await again.get(xid=finished.xid) == finished
    # A coordinator that had been driving it adopts the flagged row rather than write over it.
    assert await save(again, saved(open_row, state=CONFIRMING)) == [found]
    third = await opened(pg_database)
    assert await third.get(xid=open_row.xid) == found


async def test_of_two_that_find_another_history_one_flags(pg_database: str, opened: OpenStore) -> None:
    """Both have read the old one: the second to write it finds that it has been done."""
    store = await open_store(pg_database)
    await begin(store, row := new_row())
    await store.close()
    async with await psycopg.AsyncConnection.connect(pg_database) as other:
        await other.execute("UPDATE tricord_store SET incarnation = '1-00000001'")
        await other.commit()
        await other.execute("SELECT 1 FROM tricord_store FOR UPDATE")
        opening = [asyncio.ensure_future(opened(pg_database)) for _ in range(2)]
        await waits_for_lock(pg_database, 2)
    assert sorted([list((await task).flagged) for task in opening]) == [[], [row.xid]]
    found = await (await opening[0]).get(xid=row.xid)
    assert found is not None
    assert (found.attention, found.version) == (2, 2)


async def test_a_server_that_may_forget_what_it_committed_is_refused() -> None:
    with PostgresServer({**DURABLE, "fsync": "off"}) as server:
        with pytest.raises(StoreError, match="fsync=off"):
            await open_store(server.dsn())
        with psycopg.connect(server.dsn()) as connection:
            assert connection.execute("SELECT count(*) FROM pg_tables WHERE tablename LIKE 'tricord%'").fetchone() == (
                0,
            )


_OPENER = """
import asyncio, sys
import alembic.command  # before the start, not after it
from coordinator.store.store import Store, backend_for

async def main():
    store = Store(backend_for(sys.argv[1], 10_000))
    try:
        await store.open()
        print(store.store_id, flush=True)
    finally:
        await store.close()

print("ready", flush=True)
sys.stdin.readline()
asyncio.run(main())
"""


@pytest.mark.parametrize("round_", range(3))
async def test_several_coordinators_create_the_schema_at_once(pg_database: str, opened: OpenStore, round_: int) -> None:
    """Alembic is not made for threads, so each is a process, held at the start line until all are there."""
    openers = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", _OPENER, pg_database,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
        for _ in range(3)
    ]  # fmt: skip
    for opener in openers:
        assert opener.stdout is not None
        assert await opener.stdout.readline() == b"ready\n"
    said = await asyncio.gather(*(opener.communicate(b"go\n") for opener in openers))
    assert [opener.returncode for opener in openers] == [0, 0, 0], said[0][1].decode() + said[1][1].decode()
    store = await opened(pg_database)
    assert {out.decode().strip() for out, _ in said} == {store.store_id}
    assert await begin(store, row := new_row()) == [None]
    assert await store.get(xid=row.xid) == row


async def test_the_loser_of_the_race_for_the_first_start_finds_the_winners_identity(
    pg_database: str, opened: OpenStore
) -> None:
    """Both have found no identity; the other's is stored while ours waits for its COMMIT."""
    await (await open_store(pg_database)).close()
    async with await psycopg.AsyncConnection.connect(pg_database) as other:
        row = await (await other.execute("DELETE FROM tricord_store RETURNING incarnation")).fetchone()
        await other.commit()
        assert row is not None
        await other.execute("INSERT INTO tricord_store VALUES (1, 'winner', %s)", row)
        opening = asyncio.ensure_future(opened(pg_database))
        await waits_for_lock(pg_database)
        await other.commit()
    assert (await opening).store_id == "winner"
