"""The launcher keeps its promises: durable rows, no process and no file left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests import postgres
from tests.postgres import PostgresServer, PostgresUnavailable
from tests.servers import alive, children, eventually

pytestmark = pytest.mark.database


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of this test's own, whatever the environment says."""
    with PostgresServer() as own:
        yield own


def rows(dsn: str) -> list[int]:
    with psycopg.connect(dsn, connect_timeout=5) as connection:
        return [row[0] for row in connection.execute("SELECT n FROM t ORDER BY n")]


def fill(dsn: str, *numbers: int) -> None:
    with psycopg.connect(dsn, connect_timeout=5) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS t (n int)")
        for number in numbers:
            connection.execute("INSERT INTO t VALUES (%s)", [number])


def test_committed_rows_survive_sigkill_on_the_same_address(server: PostgresServer) -> None:
    dsn = server.create_database()
    fill(dsn, 1, 2)
    with psycopg.connect(dsn) as open_session:
        open_session.execute("INSERT INTO t VALUES (3)")
        server.kill()
        assert not server.running
        with pytest.raises(psycopg.OperationalError):
            open_session.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError):
        rows(dsn)
    server.start()
    assert rows(dsn) == [1, 2]


def test_a_database_that_is_lent_again_is_like_a_new_one(server: PostgresServer) -> None:
    with server.lent_database() as dsn, psycopg.connect(dsn) as left_open:
        fill(dsn, 1)
        left_open.execute("CREATE SCHEMA another")
        left_open.execute(f"ALTER DATABASE {dsn.rpartition('/')[2]} SET work_mem = '5MB'")
        left_open.commit()
        left_open.execute("SELECT n FROM t")
    with server.lent_database() as again, psycopg.connect(again) as connection:
        assert again == dsn
        assert connection.execute("SELECT count(*) FROM pg_class WHERE relname = 't'").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'another'").fetchone() == (0,)
        assert connection.execute("SHOW work_mem").fetchone() != ("5MB",)
        with server.lent_database() as other:
            assert other != dsn


def test_restart_keeps_rows_and_address(server: PostgresServer) -> None:
    dsn = server.create_database("again")
    fill(dsn, 1)
    server.restart()
    assert dsn == server.dsn("again")
    assert rows(dsn) == [1]


def test_a_server_that_died_by_itself_is_started_again(server: PostgresServer) -> None:
    dsn = server.create_database()
    fill(dsn, 1)
    assert server._process is not None
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait()
    assert not server.running
    server.start()
    assert rows(dsn) == [1]


def test_the_server_is_durable_and_listens_on_loopback_only(server: PostgresServer) -> None:
    wanted = {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
    }
    with psycopg.connect(server.dsn()) as connection:
        query = "SELECT name, setting FROM pg_settings WHERE name = ANY(%s)"
        found: dict[str, str] = dict(connection.execute(query, [list(wanted)]).fetchall())
    assert found == wanted
    assert (server.bin_dir / "pgbench").exists()


def test_a_dropped_database_is_gone_even_with_sessions_in_it(server: PostgresServer) -> None:
    dsn = server.create_database()
    with psycopg.connect(dsn):
        server.drop_database(dsn)
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(dsn)


def test_closing_leaves_no_file_and_no_process() -> None:
    with PostgresServer() as server:
        folder, process = server._folder, server._process
        assert folder is not None
        assert process is not None
        backends = children(process.pid)
    assert not folder.exists()
    assert not any(map(alive, [process.pid, *backends]))
    server.close()


ABANDON = """
import os, signal, sys
from tests.postgres import PostgresServer
server = PostgresServer()
server.start()
print(server._process.pid, server._folder, flush=True)
if sys.argv[1] == "exception":
    raise SystemExit("lost")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["exception", "sigkill"])
def test_no_server_outlives_the_process_that_started_it(end: str) -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", ABANDON, end], cwd=root, capture_output=True, text=True, check=False)
    pid, folder = ended.stdout.split()
    assert ended.returncode == (1 if end == "exception" else -signal.SIGKILL)
    assert eventually(lambda: not alive(int(pid)) and not Path(folder).exists())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root has to become somebody else")
def test_root_without_user_namespaces_runs_the_server_as_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = postgres._runs
    monkeypatch.setattr(postgres, "_runs", lambda command, *rest: command[0] != "unshare" and runs(command, *rest))
    with PostgresServer() as server:
        assert server._identity["user"] != 0
        dsn = server.create_database()
        fill(dsn, 1)
        server.kill()
        server.start()
        assert rows(dsn) == [1]


def test_an_external_server_is_used_and_never_stopped(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(postgres.DSN_VARIABLE, server.dsn().replace("postgresql:", "postgresql+psycopg:"))
    with PostgresServer.from_environment() as external:
        assert external.external
        dsn = external.create_database()
        fill(dsn, 1)
        assert rows(dsn) == [1]
        for forbidden in (external.stop, external.kill, external.restart):
            with pytest.raises(RuntimeError, match="not ours"):
                forbidden()
        external.drop_database(dsn)
    assert server.running


def test_a_wrong_folder_of_binaries_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(postgres.BIN_VARIABLE, str(tmp_path))
    with pytest.raises(PostgresUnavailable, match=str(tmp_path)):
        PostgresServer().start()


def test_a_server_that_cannot_start_says_why_and_leaves_nothing() -> None:
    server = PostgresServer({**postgres.DURABLE, "shared_buffers": "nonsense"})
    with pytest.raises(PostgresUnavailable, match="shared_buffers"), server:
        pass
    assert server._folder is None


def test_a_database_fixture_is_fresh(pg_database: str) -> None:
    fill(pg_database, 7)
    assert rows(pg_database) == [7]
