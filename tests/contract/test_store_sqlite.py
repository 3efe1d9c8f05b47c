"""What only SQLite can show: durability settings, the instance lock, plans."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.store import sqlite, sqlite_flush
from coordinator.store.rows import Batch, StoreError
from coordinator.store.sqlite import SqliteBackend
from coordinator.store.store import Store, backend_for

from .rows import LEASE_MS, begin, new_row, open_store, saved, stored

_OPENER = """
import asyncio, sys
from coordinator.store.rows import StoreError
from coordinator.store.store import Store, backend_for

async def main():
    store = Store(backend_for(sys.argv[1], 10_000))
    try:
        await store.open()
        print("opened")
    except StoreError as error:
        print(error)
    finally:
        await store.close()

asyncio.run(main())
"""


def opens_elsewhere(path: Path) -> str:
    """What another process is told that opens the same store."""
    run = subprocess.run(
        [sys.executable, "-c", _OPENER, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    return run.stdout.strip()


def test_every_connection_is_as_durable_as_sqlite_can_be(tmp_path: Path) -> None:
    """FULL is 2: in WAL mode a COMMIT that has returned is on disk; NORMAL would lose the last ones."""
    backend = SqliteBackend(tmp_path / "tricord.db")
    backend.prepare()
    engine = backend.engine()
    try:
        hot = backend._open()
        with engine.connect() as cold, closing(hot):
            for connection in (hot, cold.connection.driver_connection):
                assert isinstance(connection, sqlite3.Connection)
                assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
                assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
                assert connection.execute("PRAGMA busy_timeout").fetchone() == (1_000,)
    finally:
        engine.dispose()
        backend.release()


async def test_one_file_serves_one_coordinator(tmp_path: Path) -> None:
    path = tmp_path / "tricord.db"
    store = await open_store(str(path))
    try:
        await begin(store, row := new_row())
        second = Store(backend_for(f"sqlite:///{path}", LEASE_MS))
        with pytest.raises(StoreError, match=r"another coordinator \(process \d+\)"):
            await second.open()
        await second.close()
        # Another reader of the file, in this very process, must not have dropped the lock.
        with closing(sqlite3.connect(path)) as reader:
            assert reader.execute("SELECT count(*) FROM tricord_transaction").fetchone() == (1,)
        assert "another coordinator" in opens_elsewhere(path)
        assert await store.get(xid=row.xid) == row
    finally:
        await store.close()
    assert opens_elsewhere(path) == "opened"


async def test_the_lock_is_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "tricord.db"
    store = await open_store(str(path))
    try:
        assert (tmp_path / "tricord.db.lock").exists()
        assert not path.read_bytes()[:1] or path.read_bytes().startswith(b"SQLite format 3\0")
    finally:
        await store.close()


async def test_a_file_that_is_no_database_is_refused_and_let_go(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear Sir or Madam, " * 100)
    store = Store(backend_for(str(path), LEASE_MS))
    with pytest.raises(StoreError, match="cannot be opened as a SQLite database"):
        await store.open()
    await store.close()
    assert path.read_text().startswith("Dear Sir")
    assert "cannot be opened" in opens_elsewhere(path)  # rather than "another coordinator"


async def test_the_look_for_due_work_reads_the_partial_index(tmp_path: Path) -> None:
    path = tmp_path / "tricord.db"
    store = await open_store(str(path))
    await store.close()
    with closing(sqlite3.connect(path)) as connection:
        for query, values in ((sqlite._DUE_SOME, (1, 10)), (sqlite._NEXT, ())):
            plan = " ".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}", values))
            assert "tricord_transaction_due" in plan, plan
            assert "SCAN tricord_transaction" not in plan.replace("SCAN tricord_transaction USING COVERING INDEX", "")
            assert "TEMP B-TREE" not in plan


@pytest.mark.parametrize("updates_from", [False, True])
async def test_many_rows_go_with_one_statement_and_each_is_told_what_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates_from: bool
) -> None:
    """64, 8 and single ones; of those that something stands in the way of, the others are written all the same."""
    monkeypatch.setattr(sqlite_flush, "_UPDATES_FROM", updates_from)  # an older SQLite saves one row after another
    store = await open_store(str(tmp_path / "tricord.db"))
    try:
        old = [new_row() for _ in range(74)]
        assert await begin(store, *old) == [None] * 74
        batch = Batch([new_row(b"\0%d" % n) for n in range(74)], [saved(row) for row in old])
        assert await store.flush(batch) == [None] * 148
        assert await stored(store, [*batch.begins, *batch.saves]) == [*batch.begins, *batch.saves]
        taken = new_row(b"\0" + b"7")
        again = [saved(row) for row in batch.saves]
        again[9], again[70] = again[9]._replace(version=9), again[70]._replace(version=2)
        begins = [*(new_row() for _ in range(66)), taken, new_row()]
        standing = await store.flush(Batch(begins, again))
        in_the_way = {66: batch.begins[7], 68 + 9: batch.saves[9], 68 + 70: batch.saves[70]}
        assert {n: row for n, row in enumerate(standing) if row is not None} == in_the_way
        written = [row for n, row in enumerate([*begins, *again]) if n not in in_the_way]
        assert await stored(store, written) == written
    finally:
        await store.close()


async def test_saves_of_many_rows_look_each_up(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "tricord.db"))
    await store.close()
    with closing(sqlite3.connect(tmp_path / "tricord.db")) as connection:
        statement = sqlite_flush._update(8)
        plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}", [None] * statement.count("?")).fetchall()
    steps = [step for *_, step in plan]
    assert any("SEARCH tricord_transaction USING INDEX" in step and "xid=?" in step for step in steps), steps
    assert not any("SCAN tricord_transaction" in step for step in steps), steps
