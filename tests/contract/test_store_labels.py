"""Labels in the store, whatever the database: written with the row that is really inserted, and deleted with it."""

from collections.abc import AsyncIterator, Sequence

import psycopg
import pytest
import sqlalchemy as sa

from coordinator.store import schema
from coordinator.store.history import first_xid_at
from coordinator.store.rows import Batch, Row, RowRejected
from coordinator.store.store import Store
from tests.postgres import PostgresServer

from .proxy import Proxy
from .rows import CONFIRMED, begin, new_row, open_store, save, saved
from .stores import KINDS, empty_store, stores

AT_MOST = tuple((f"{n:0>2}".replace("0", "a") + "x" * 60, "😀" * 255) for n in range(16))
"""16 labels with the longest values there are."""


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An open store of each kind."""
    async with stores() as open_one:
        yield await open_one(empty_store(request))


async def labels_of(store: Store, row: Row) -> list[tuple[str, str]]:
    """What the table holds for a transaction, by name."""
    t = schema.labels
    found = sa.select(t.c.name, t.c.value).where(t.c.xid == row.xid).order_by(t.c.name)
    return await store._run(lambda connection: [(each.name, each.value) for each in connection.execute(found)])


async def begin_with(store: Store, *rows: Row, labels: Sequence[tuple[str, str]]) -> Sequence[object]:
    """Flush new rows that all have these labels."""
    return await store.flush(Batch(rows, (), {row.xid: labels for row in rows}))


async def test_labels_are_written_with_their_row_and_with_no_other(store: Store) -> None:
    one, other, bare, old = new_row(b"\0z"), new_row(b"\0a"), new_row(), new_row()
    await begin(store, old)
    labels = {one.xid: [("order", "42"), ("tenant", 'é "quoted" \\ 漢')], other.xid: AT_MOST}
    assert await store.flush(Batch([one, other, bare], [saved(old)], labels)) == [None] * 4
    assert await labels_of(store, one) == labels[one.xid]
    assert await labels_of(store, other) == sorted(AT_MOST)
    assert await labels_of(store, bare) == await labels_of(store, old) == []


async def test_a_begin_that_met_a_taken_key_leaves_none(store: Store) -> None:
    holder, late, free = new_row(b"\0taken"), new_row(b"\0taken"), new_row(b"\0free")
    await begin_with(store, holder, labels=[("order", "1")])
    assert await begin_with(store, late, free, labels=[("order", "2")]) == [holder, None]
    assert await labels_of(store, holder) == [("order", "1")]
    assert await labels_of(store, late) == []
    assert await labels_of(store, free) == [("order", "2")]


async def test_one_key_twice_in_one_flush_is_labelled_once(store: Store) -> None:
    first, second = new_row(b"\0twice"), new_row(b"\0twice")
    standing = await begin_with(store, first, second, labels=[("order", "1")])
    kept, lost = (first, second) if standing[0] is None else (second, first)
    assert await labels_of(store, kept) == [("order", "1")]
    assert await labels_of(store, lost) == []


async def test_the_same_flush_again_changes_nothing(store: Store) -> None:
    batch = Batch([row := new_row(b"\0k")], (), {})._replace(labels={row.xid: [("order", "1")]})
    for _ in range(3):
        assert await store.flush(batch) == [None]
    assert await labels_of(store, row) == [("order", "1")]


async def test_a_label_that_the_database_rejects_fails_its_row_alone(store: Store) -> None:
    rows = [new_row() for _ in range(5)]
    labels: dict[bytes, list[tuple[str, str]]] = {row.xid: [("order", str(n))] for n, row in enumerate(rows)}
    labels[rows[3].xid] = [("order", "\ud800")]  # cannot be sent
    standing = await store.flush(Batch(rows, (), labels))
    assert [isinstance(row, RowRejected) for row in standing] == [n == 3 for n in range(5)]
    assert await store.get(xid=rows[3].xid) is None
    assert [await labels_of(store, row) for row in rows] == [[] if n == 3 else [("order", str(n))] for n in range(5)]


async def test_the_purge_deletes_them_with_their_transaction(store: Store) -> None:
    old_ms = 1_500_000_000_000
    xids = [(old_ms + n).to_bytes(6, "big") + bytes(9) + b"\1" for n in range(3)]
    rows = [new_row()._replace(xid=xid, updated_ms=old_ms) for xid in xids]
    await begin_with(store, *rows, labels=[("order", "1"), ("tenant", "a")])
    await save(store, saved(rows[0], state=CONFIRMED, wake_ms=None), saved(rows[2], state=CONFIRMED, wake_ms=None))
    page = await store.purge_page(b"", first_xid_at(old_ms + 1_000), old_ms + 1_000)
    assert page.deleted == 2
    assert [await labels_of(store, row) for row in rows] == [[], [("order", "1"), ("tenant", "a")], []]
    assert await store.get(xid=xids[1]) is not None


@pytest.mark.database
async def test_a_flush_without_labels_does_not_touch_their_table(pg_database: str) -> None:
    """Statement triggers fire even where a statement has no rows."""
    async with stores() as open_one:
        store = await open_one(pg_database)
        with psycopg.connect(pg_database, autocommit=True) as connection:
            connection.execute(
                "CREATE TABLE touched (n int); "
                "CREATE FUNCTION touch() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN INSERT INTO touched VALUES (1); RETURN NULL; END $$; "
                "CREATE TRIGGER touch AFTER INSERT ON tricord_label FOR EACH STATEMENT EXECUTE FUNCTION touch()"
            )
            await begin(store, row := new_row())
            await store.flush(Batch([new_row()], [saved(row)]))
            assert connection.execute("SELECT count(*) FROM touched").fetchone() == (0,)
            await begin_with(store, new_row(), labels=[("order", "1")])
            assert connection.execute("SELECT count(*) FROM touched").fetchone() == (1,)


@pytest.mark.database
async def test_a_commit_whose_answer_was_lost_has_its_labels(own_server: PostgresServer) -> None:
    """And a begin of that flush whose key was taken has none, though the flush runs again."""
    own_server.start()
    dsn = own_server.create_database()
    with Proxy(dsn) as proxy:
        store = await open_store(proxy.dsn)
        try:
            holder, old = new_row(b"\0taken"), new_row()
            await begin_with(store, holder, new_row(), labels=[("warm", "up")])  # the statement is prepared
            await begin(store, old)
            await store.flush(Batch([row := new_row()], [saved(old)], {row.xid: [("warm", "up")]}))
            late, fresh = new_row(b"\0taken"), new_row(b"\0k")
            batch = Batch([late, fresh], [saved(row)], {x.xid: [("order", "7")] for x in (late, fresh)})
            proxy.lose_next_answer()
            assert await store.flush(batch) == [holder, None, None]
            assert proxy.lost == 1
            assert await labels_of(store, fresh) == [("order", "7")]
            assert await labels_of(store, late) == []
        finally:
            await store.close()
    own_server.drop_database(dsn)
