"""The database goes away under a flush: every flush still ends, and its outcome is known (protocol A1)."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest

from coordinator.store.rows import Batch, StoreError
from coordinator.store.store import Store, StoreClosed, backend_for
from tests.postgres import PostgresServer

from .proxy import Proxy
from .rows import CONFIRMING, DUE_MS, LEASE_MS, begin, new_row, open_store, save, saved, stored
from .stores import OpenStore, stores
from .test_store_postgres import waits_for_lock

pytestmark = pytest.mark.database


@pytest.fixture
def database(own_server: PostgresServer) -> Iterator[str]:
    """A fresh database on it."""
    own_server.start()
    dsn = own_server.create_database()
    yield dsn
    own_server.start()
    own_server.drop_database(dsn)


@pytest.fixture
async def opened() -> AsyncIterator[OpenStore]:
    """Opens stores, and closes them after the test."""
    async with stores() as open_one:
        yield open_one


async def warm_up(store: Store) -> None:
    """Have the statements prepared, so that the next answer is that of the flush itself."""
    await begin(store, row := new_row())
    assert await store.flush(Batch([new_row()], [saved(row)])) == [None, None]


async def test_a_commit_whose_answer_was_lost_is_mine(database: str) -> None:
    with Proxy(database) as proxy:
        store = await open_store(proxy.dsn)
        try:
            old = [new_row() for _ in range(3)]
            await warm_up(store)
            await begin(store, *old)
            batch = Batch([new_row(b"\0k"), new_row()], [saved(row) for row in old])
            proxy.lose_next_answer()
            assert await store.flush(batch) == [None] * 5
            assert proxy.lost == 1
            assert await stored(store, [*batch.begins, *batch.saves]) == [*batch.begins, *batch.saves]
        finally:
            await store.close()


async def test_a_commit_whose_answer_was_lost_and_that_was_overtaken_is_anothers(
    database: str, opened: OpenStore
) -> None:
    """What was mine for a moment has been written over: the standing row replaces what is held in memory."""
    other = await opened(database)
    loop = asyncio.get_running_loop()
    with Proxy(database) as proxy:
        store = await open_store(proxy.dsn)
        try:
            old, fresh = new_row(), new_row(b"\0k")
            await warm_up(store)
            await begin(store, old)
            batch = Batch([fresh], [saved(old)])
            theirs = [saved(fresh, state=CONFIRMING), saved(batch.saves[0], state=CONFIRMING)]

            def overtake() -> None:
                assert asyncio.run_coroutine_threadsafe(_save(other, theirs), loop).result(30) == [None, None]

            proxy.lose_next_answer(overtake)
            assert await store.flush(batch) == theirs
            assert proxy.lost == 1
        finally:
            await store.close()


async def _save(store: Store, rows: list) -> object:  # type: ignore[type-arg]
    return await save(store, *rows)


async def test_the_backend_is_terminated_in_the_middle(database: str, opened: OpenStore) -> None:
    """Its transaction is rolled back by the server; the same batch goes out again on a new connection."""
    store = await opened(database)
    row, fresh = new_row(), new_row(b"\0k")
    await begin(store, row)
    mine = saved(row)
    async with await psycopg.AsyncConnection.connect(database) as other:
        await other.execute("SELECT 1 FROM tricord_transaction WHERE xid = %s FOR UPDATE", (row.xid,))
        flushed = asyncio.ensure_future(store.flush(Batch([fresh], [mine])))
        ended: set[int] = set()
        while len(ended) < 3:
            for pid in await waits_for_lock(database):
                if pid not in ended:
                    await other.execute("SELECT pg_terminate_backend(%s)", (pid,))
                    ended.add(pid)
        assert not flushed.done()
    assert await flushed == [None, None]
    assert await stored(store, [fresh, mine]) == [fresh, mine]


async def test_the_server_is_killed_under_flushes(own_server: PostgresServer, database: str, opened: OpenStore) -> None:
    """Nothing is lost and nothing doubled, whether a COMMIT's answer was heard or not."""
    store = await opened(database)
    rows = [new_row(b"\0order-%d" % n) for n in range(400)]
    tasks = [asyncio.ensure_future(begin(store, row)) for row in rows]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.to_thread(own_server.kill)
    acknowledged = sum(task.done() for task in tasks)
    assert 0 < acknowledged < len(tasks)
    with pytest.raises(StoreError):
        await store.claim(1, LEASE_MS)
    with pytest.raises(StoreError):
        await store.get(xid=rows[0].xid)
    await asyncio.to_thread(own_server.start)
    assert await asyncio.gather(*tasks) == [[None]] * 400
    with psycopg.connect(database) as connection:
        count = connection.execute("SELECT count(*), count(DISTINCT xid) FROM tricord_transaction").fetchone()
    assert count == (400, 400)
    assert await stored(store, rows[::50]) == rows[::50]
    # Claims and lists find the server again too.
    await save(store, saved(rows[0], wake_ms=DUE_MS))
    assert [row.xid for row in (await store.claim(1, LEASE_MS)).rows] == [rows[0].xid]


async def test_a_flush_that_is_still_open_when_the_store_closes_is_unknown(
    own_server: PostgresServer, database: str
) -> None:
    """Neither stored nor not stored is told: it is not known."""
    store = await open_store(database)
    try:
        await asyncio.to_thread(own_server.kill)
        flushed = asyncio.ensure_future(begin(store, new_row()))
        await asyncio.sleep(0)
    finally:
        await store.close()
    with pytest.raises(StoreClosed):
        await flushed


async def test_a_server_that_is_not_there_is_named() -> None:
    store = Store(backend_for("postgresql://nobody:secret@127.0.0.1:9/tricord", LEASE_MS))
    try:
        with pytest.raises(StoreError, match="cannot be reached") as caught:
            await store.open()
        assert "secret" not in str(caught.value)
    finally:
        await store.close()
