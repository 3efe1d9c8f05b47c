"""The MariaDB launcher keeps its promises, and both drivers say through SQLAlchemy what the SDK listens for."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pymysql
import pytest
from sqlalchemy import Column, Connection, LargeBinary, MetaData, Table, create_engine, func, select
from sqlalchemy.dialects.mysql import DATETIME, VARBINARY
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine

from tests import mariadb
from tests.mariadb import MariaDbServer, MariaDbUnavailable, asyncmy_url, pymysql_url
from tests.servers import alive, eventually

pytestmark = pytest.mark.database

DUPLICATE_KEY = 1062


@pytest.fixture
def server() -> Iterator[MariaDbServer]:
    """A durable server of this test's own, whatever the environment says."""
    with MariaDbServer(durable=True) as own:
        yield own


def run(dsn: str, *statements: str) -> list[int]:
    """Run all of them in one transaction; gives the first column of the last one's rows."""
    with contextlib.closing(mariadb.connect(dsn)) as connection, connection.cursor() as cursor:
        connection.begin()
        for statement in statements:
            cursor.execute(statement)
        connection.commit()
        return [row[0] for row in cursor.fetchall()]


def fill(dsn: str, *numbers: int) -> None:
    run(dsn, "CREATE TABLE IF NOT EXISTS t (n int)", *(f"INSERT INTO t VALUES ({number})" for number in numbers))


def rows(dsn: str) -> list[int]:
    return run(dsn, "SELECT n FROM t ORDER BY n")


def test_committed_rows_survive_sigkill_on_the_same_address(server: MariaDbServer) -> None:
    dsn = server.create_database()
    fill(dsn, 1, 2)
    with contextlib.closing(mariadb.connect(dsn)) as open_session, open_session.cursor() as cursor:
        open_session.begin()
        cursor.execute("INSERT INTO t VALUES (3)")
        server.kill()
        assert not server.running
        with pytest.raises(pymysql.OperationalError):
            cursor.execute("SELECT 1")
    with pytest.raises(pymysql.OperationalError):
        rows(dsn)
    server.start()
    assert rows(dsn) == [1, 2]
    server.restart()
    assert rows(dsn) == [1, 2]


def test_the_server_writes_through_and_listens_on_loopback_only(server: MariaDbServer) -> None:
    wanted = "@@innodb_flush_log_at_trx_commit = 1 AND @@innodb_doublewrite = 1 AND @@bind_address = '127.0.0.1'"
    assert run(server.dsn(), f"SELECT {wanted}") == [1]


def test_a_dropped_database_is_gone_even_with_a_transaction_open_in_it(server: MariaDbServer) -> None:
    dsn = server.create_database()
    fill(dsn, 1)
    with contextlib.closing(mariadb.connect(dsn)) as open_session, open_session.cursor() as cursor:
        open_session.begin()
        cursor.execute("UPDATE t SET n = 2")
        server.drop_database(dsn)
    with pytest.raises(pymysql.OperationalError, match="Unknown database"):
        rows(dsn)


ABANDON = """
import os, signal
from tests.mariadb import MariaDbServer
server = MariaDbServer()
server.start()
print(server._process.pid, server._folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_server_outlives_the_process_that_started_it() -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", ABANDON], cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pid, folder = ended.stdout.split()
    assert eventually(lambda: not alive(int(pid)) and not Path(folder).exists())


def test_closing_leaves_no_file_and_no_process() -> None:
    with MariaDbServer() as server:
        folder, process = server._folder, server._process
        assert folder is not None
        assert process is not None
    assert not folder.exists()
    assert not alive(process.pid)
    server.close()


def test_an_external_server_is_used_and_never_stopped(server: MariaDbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    run(server.dsn(), "CREATE USER guest@'%' IDENTIFIED BY 'p@ss'", "GRANT ALL ON `tricord\\_%`.* TO guest@'%'")
    address = server.dsn().replace("mysql://root@", "mysql+pymysql://guest:p%40ss@")
    monkeypatch.setenv(mariadb.DSN_VARIABLE, address)
    with MariaDbServer.from_environment() as external:
        assert external.external
        dsn = external.create_database()
        fill(dsn, 1)
        assert rows(dsn) == [1]
        with pytest.raises(RuntimeError, match="not ours"):
            external.kill()
        external.drop_database(dsn)
    assert server.running


def test_where_there_is_no_mariadb_the_text_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv(mariadb.BIN_VARIABLE, str(tmp_path / "bin"))
    with pytest.raises(MariaDbUnavailable, match=rf"{tmp_path}.*make servers.*{mariadb.BIN_VARIABLE}"):
        MariaDbServer().start()


def test_mariadb_is_found_where_only_the_path_of_root_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(mariadb.BIN_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", os.pathsep.join(["/usr/local/bin", "/usr/bin", "/bin"]))
    assert os.access(mariadb.find_program("mariadbd"), os.X_OK)


def test_a_server_that_cannot_start_says_why_and_leaves_nothing() -> None:
    server = MariaDbServer({"no-such-option": "1"})
    with pytest.raises(MariaDbUnavailable, match="no-such-option"), server:
        pass
    assert server._folder is None


THINGS = Table(
    "things",
    MetaData(),
    Column("id", VARBINARY(16), primary_key=True),
    Column("payload", LargeBinary),
    Column("at", DATETIME(fsp=6)),
)


def keep_one_thing(connection: Connection) -> None:
    """What both drivers have to carry: bytes, microseconds, savepoints, and the number of an error."""
    THINGS.create(connection)
    thing = (bytes(range(16)), bytes(range(256)), datetime(2026, 1, 2, 3, 4, 5, 678_901))
    values = dict(zip(THINGS.columns.keys(), thing, strict=True))
    connection.execute(THINGS.insert(), values)
    with pytest.raises(IntegrityError) as refused, connection.begin_nested():
        connection.execute(THINGS.insert(), values)
    assert refused.value.orig is not None
    assert refused.value.orig.args[0] == DUPLICATE_KEY
    assert connection.execute(select(THINGS)).one() == thing


def test_pymysql_through_sqlalchemy(mariadb_database: str) -> None:
    engine = create_engine(pymysql_url(mariadb_database))
    try:
        with engine.begin() as connection:
            keep_one_thing(connection)
        with engine.connect() as connection:
            assert connection.scalar(select(func.count()).select_from(THINGS)) == 1
    finally:
        engine.dispose()


async def test_asyncmy_through_sqlalchemy(mariadb_database: str) -> None:
    engine = create_async_engine(asyncmy_url(mariadb_database))
    try:
        async with engine.begin() as connection:
            await connection.run_sync(keep_one_thing)
        async with engine.connect() as connection:
            assert await connection.scalar(select(func.count()).select_from(THINGS)) == 1
    finally:
        await engine.dispose()


def test_a_database_fixture_is_fresh(mariadb_database: str) -> None:
    fill(mariadb_database, 7)
    assert rows(mariadb_database) == [7]
