"""What goes wrong between the program and its database driver: told apart, and never at the cost of others.

Each error here comes out of the driver itself.
"""

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from coordinator.store import schema
from coordinator.store.postgres import PostgresBackend
from coordinator.store.rows import Batch, Fault, RowRejected, StoreError
from coordinator.store.sqlite import SqliteBackend
from coordinator.store.store import Store, backend_for

from .rows import DUE_MS, LEASE_MS, begin, new_row, save, saved, stored
from .stores import KINDS, OpenStore, empty_store, stores

NOT_TO_BE_SENT: dict[str, object] = {"a lone surrogate": "\ud800", "no type that a database knows": object()}


@pytest.fixture
async def opened() -> AsyncIterator[OpenStore]:
    """Opens stores, and closes them after the test."""
    async with stores() as open_one:
        yield open_one


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest, opened: OpenStore) -> Store:
    """An open store of each kind."""
    return await opened(empty_store(request))


def caught(work: Callable[[], object]) -> Exception:
    """The error that it raises."""
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("no error was raised")


class TestFault:
    """Errors that the driver raises by itself carry no code of the database, as lost connections do not."""

    @pytest.mark.parametrize("value", [*NOT_TO_BE_SENT.values(), 2**200], ids=[*NOT_TO_BE_SENT, "beyond all"])
    def test_sqlite_tells_what_can_never_be_sent(self, tmp_path: Path, value: object) -> None:
        with closing(sqlite3.connect(tmp_path / "tricord.db")) as connection:
            error = caught(lambda: connection.execute("SELECT ?", (value,)))
        assert SqliteBackend(tmp_path / "tricord.db").fault(error) is Fault.REJECTED, repr(error)

    @pytest.mark.database
    @pytest.mark.parametrize("value", [*NOT_TO_BE_SENT.values(), "a\0b"], ids=[*NOT_TO_BE_SENT, "NUL in a text"])
    def test_postgresql_tells_what_can_never_be_sent(self, pg_database: str, value: object) -> None:
        with psycopg.connect(pg_database, autocommit=True) as connection:
            error = caught(lambda: connection.execute("SELECT %s::text[]", ([value],)))
            assert getattr(error, "sqlstate", None) is None
            assert PostgresBackend(pg_database, LEASE_MS).fault(error) is Fault.REJECTED, repr(error)
            assert connection.execute("SELECT 1").fetchone() == (1,)  # nothing is wrong with the connection

    @pytest.mark.database
    def test_postgresql_still_tells_a_lost_connection(self, pg_database: str) -> None:
        backend = PostgresBackend(pg_database, LEASE_MS)
        with psycopg.connect(pg_database, autocommit=True) as connection:
            ended = caught(lambda: connection.execute("SELECT pg_terminate_backend(pg_backend_pid())"))
            closed = caught(lambda: connection.execute("SELECT 1"))
        nobody = caught(lambda: psycopg.connect("postgresql://postgres@127.0.0.1:9/x", connect_timeout=5))
        assert [backend.fault(error) for error in (ended, closed, nobody)] == [Fault.LOST] * 3

    def test_memory_that_is_short_may_be_there_again(self, tmp_path: Path) -> None:
        for backend in (SqliteBackend(tmp_path / "x"), PostgresBackend("postgresql://x@127.0.0.1/x", LEASE_MS)):
            assert backend.fault(MemoryError()) is Fault.AGAIN


class TestOneBadRecord:
    """A record that never reaches the database fails alone, too."""

    @pytest.mark.parametrize("value", NOT_TO_BE_SENT.values(), ids=NOT_TO_BE_SENT)
    async def test_among_begins_and_saves(self, store: Store, value: object) -> None:
        old = [new_row() for _ in range(3)]
        await begin(store, *old)
        begins = [new_row(b"\0%d" % n) for n in range(3)]
        begins[1] = begins[1]._replace(participants=value)  # type: ignore[arg-type]
        saves = [saved(row) for row in old]
        saves[2] = saves[2]._replace(progress=value)  # type: ignore[arg-type]
        standing = await store.flush(Batch(begins, saves))
        assert [isinstance(row, RowRejected) for row in standing] == [False, True, False, False, False, True]
        assert [row is None for row in standing] == [True, False, True, True, True, False]
        rows = [begins[0], None, begins[2], saves[0], saves[1], old[2]]
        assert await stored(store, [*begins, *old]) == rows

    @pytest.mark.database
    async def test_a_nul_in_a_text(self, pg_database: str, opened: OpenStore) -> None:
        store = await opened(pg_database)
        rows = [new_row(), new_row(participants=",a\0b,"), new_row()]
        standing = await begin(store, *rows)
        assert [isinstance(row, RowRejected) for row in standing] == [False, True, False]
        assert await stored(store, rows) == [rows[0], None, rows[2]]


@pytest.mark.database
class TestOptionsOfTheAddress:
    """What the owner's address sets is kept; what the coordinator must have comes after it and wins."""

    @pytest.mark.parametrize("spelling", ["-c%20search_path%3Dapp", "-csearch_path%3Dapp%20-c%20lock_timeout%3D0"])
    async def test_a_search_path(self, pg_database: str, opened: OpenStore, spelling: str) -> None:
        with psycopg.connect(pg_database, autocommit=True) as connection:
            connection.execute("CREATE SCHEMA app")
        store = await opened(f"{pg_database}?options={spelling}")
        row = new_row(wake_ms=DUE_MS)
        assert await begin(store, row) == [None]  # the writer's connection
        claimed = (await store.claim(10, LEASE_MS)).rows  # the reader's
        assert [one.xid for one in claimed] == [row.xid]
        assert await save(store, mine := saved(row)) == [None]
        assert await store.get(xid=row.xid) == mine  # SQLAlchemy's
        with psycopg.connect(pg_database) as connection:
            found = connection.execute(
                "SELECT DISTINCT schemaname FROM pg_tables WHERE tablename LIKE 'tricord%'"
            ).fetchall()
            assert found == [("app",)]
            assert connection.execute("SELECT count(*) FROM app.tricord_transaction").fetchone() == (1,)

    def test_ours_come_after_it(self, pg_database: str) -> None:
        """Of a setting that is named twice, PostgreSQL takes the last."""
        backend = PostgresBackend(f"{pg_database}?options=-c%20lock_timeout%3D0%20-c%20work_mem%3D5MB", LEASE_MS)
        engine = backend.engine()
        try:
            with backend._connect() as hot, engine.connect() as cold:
                for name, value in (("lock_timeout", f"{LEASE_MS // 2000}s"), ("work_mem", "5MB")):
                    assert hot.execute(f"SHOW {name}".encode()).fetchone() == (value,)
                    assert cold.execute(sa.text(f"SHOW {name}")).one() == (value,)
        finally:
            engine.dispose()

    def test_an_address_that_is_none(self) -> None:
        with pytest.raises(StoreError, match="not a PostgreSQL address"):
            backend_for("postgresql://x@127.0.0.1/x?nonsense=1", LEASE_MS)


_REVISIONS = sa.text(f"SELECT version_num FROM {schema.VERSION_TABLE}")


def test_the_tables_are_made_in_one_local_transaction(tmp_path: Path) -> None:
    """SQLite's driver would commit each CREATE TABLE by itself: an error in the middle left half a schema for ever."""
    backend = SqliteBackend(tmp_path / "tricord.db")
    engine = backend.engine()

    def fail(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if "CREATE TABLE tricord_participant" in statement:
            raise KeyboardInterrupt

    sa.event.listen(engine, "before_cursor_execute", fail)
    try:
        with pytest.raises(KeyboardInterrupt):
            schema.ensure_schema(engine)
        sa.event.remove(engine, "before_cursor_execute", fail)
        assert sa.inspect(engine).get_table_names() == []
        schema.ensure_schema(engine)
        with engine.connect() as connection:
            assert connection.execute(_REVISIONS).scalars().all() == [schema.REVISION]
    finally:
        engine.dispose()
