"""A real MariaDB for tests and benchmarks: Debian's programs, our own data, as root or as a user.

    with MariaDbServer() as server:
        dsn = server.create_database()
        engine = create_engine(pymysql_url(dsn))
        server.kill()       # SIGKILL; what was committed is there again after start(), if durable=True
        server.start()

No wheel brings a MariaDB server: `make servers` installs Debian's. `MariaDbServer.from_environment()` uses the server
that $TRICORD_TEST_MARIADB_DSN names (mysql://user:password@host:port/), if it names one.
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pymysql
from pymysql.constants.ER import NO_SUCH_THREAD

from tests.servers import LocalServer, ServerUnavailable

DSN_VARIABLE = "TRICORD_TEST_MARIADB_DSN"
BIN_VARIABLE = "TRICORD_TEST_MARIADB_BIN"

# As a fresh Debian installation is set up where it matters to a participant, in little memory.
_SETTINGS: Mapping[str, str] = {
    "character-set-server": "utf8mb4",
    "collation-server": "utf8mb4_general_ci",
    "default-time-zone": "+00:00",
    "innodb-buffer-pool-size": "32M",
    "innodb-log-file-size": "32M",
    "max-connections": "200",
}
# Nothing is written through to the disk at a commit: a crash may lose the last second's commits.
_FAST: Mapping[str, str] = {"innodb-flush-log-at-trx-commit": "0", "innodb-doublewrite": "OFF"}
_DURABLE: Mapping[str, str] = {"innodb-flush-log-at-trx-commit": "1", "innodb-doublewrite": "ON"}
# Debian's mariadbd is where only root's PATH looks.
_SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin")


class MariaDbUnavailable(ServerUnavailable):
    """No MariaDB could be found or started; the text says why."""


def find_program(name: str) -> Path:
    """mariadbd or mariadb-install-db: in $TRICORD_TEST_MARIADB_BIN and the folders beside it, else in the system's."""
    if named := os.environ.get(BIN_VARIABLE):
        folder = Path(named)
        folders = [str(folder), *(str(folder.parent / beside) for beside in ("bin", "sbin", "scripts"))]
    else:
        folders = [*os.environ.get("PATH", "").split(os.pathsep), *_SYSTEM_FOLDERS]
    if found := shutil.which(name, path=os.pathsep.join(folders)):
        return Path(found)
    searched = ", ".join(folders)
    raise MariaDbUnavailable(f"{name} not found (searched: {searched}); run `make servers` or set {BIN_VARIABLE}")


class MariaDbServer(LocalServer):
    """One server of our own in a temporary folder, or (`external_dsn`) somebody else's, which is never stopped.

    `durable` writes every commit through, for tests that kill the server; `settings` are mariadbd's options, without
    the dashes in front.
    """

    name = "mariadb"
    home = "information_schema"
    dsn_variable = DSN_VARIABLE
    unavailable = MariaDbUnavailable
    stop_signal = signal.SIGTERM

    def __init__(
        self, settings: Mapping[str, str] | None = None, *, durable: bool = False, external_dsn: str | None = None
    ) -> None:
        super().__init__(external_dsn)
        self._settings = {**_SETTINGS, **(_DURABLE if durable else _FAST), **(settings or {})}

    def _own_dsn(self, port: int, database: str) -> str:
        return f"mysql://root@127.0.0.1:{port}/{database}"

    def _create_database(self, name: str) -> None:
        with contextlib.closing(connect(self.dsn())) as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE `{name}`")

    def _drop_database(self, name: str) -> None:
        with contextlib.closing(connect(self.dsn())) as connection, connection.cursor() as cursor:
            _drop(cursor, name)

    def _empty_database(self, name: str) -> bool:
        """Takes one connection instead of two, and its name stays."""
        with contextlib.closing(connect(self.dsn())) as connection, connection.cursor() as cursor:
            _drop(cursor, name)
            cursor.execute(f"CREATE DATABASE `{name}`")
        return True

    def _make_data(self, folder: Path) -> None:
        command = [str(find_program("mariadb-install-db")), "--no-defaults", f"--datadir={folder / 'data'}"]
        command += ["--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"]
        self._run([*command, *_as_root()], folder)

    def _command(self, folder: Path, port: int) -> Sequence[str]:
        command = [str(find_program("mariadbd")), "--no-defaults", f"--datadir={folder / 'data'}", *_as_root()]
        command += ["--bind-address=127.0.0.1", f"--port={port}", f"--socket={folder / 'socket'}"]
        command += [f"--pid-file={folder / 'pid'}", "--skip-name-resolve", "--skip-log-bin"]
        return [*command, *(f"--{name}={value}" for name, value in self._settings.items())]

    def _answers(self, folder: Path, port: int) -> bool:
        try:
            connection = connect(self._own_dsn(port, self.home))
        except pymysql.MySQLError:
            return False
        with contextlib.closing(connection), connection.cursor() as cursor:
            cursor.execute("SELECT @@pid_file")
            return cursor.fetchone() == (str(folder / "pid"),)


def _drop(cursor: pymysql.cursors.Cursor, name: str) -> None:
    # A session that a test left open in the middle of a transaction would hold up the DROP, for a day.
    cursor.execute("SET lock_wait_timeout = 20")
    cursor.execute("SELECT id FROM information_schema.processlist WHERE db = %s", [name])
    for (session,) in cursor.fetchall():
        try:
            cursor.execute("KILL %s", [session])
        except pymysql.MySQLError as error:
            if error.args[0] != NO_SUCH_THREAD:  # it left by itself
                raise
    cursor.execute(f"DROP DATABASE IF EXISTS `{name}`")


def _as_root() -> list[str]:
    # Unlike PostgreSQL, MariaDB runs as root when it is told to; its files are then root's.
    return ["--user=root"] if os.geteuid() == 0 else []


def connect(dsn: str) -> "pymysql.Connection[pymysql.cursors.Cursor]":
    """PyMySQL itself on an address, each statement committed; the caller closes it. Raises pymysql.MySQLError."""
    address = urlsplit(dsn)
    return pymysql.connect(
        host=address.hostname or "127.0.0.1",
        port=address.port or 3306,
        user=unquote(address.username or "root"),
        password=unquote(address.password or ""),
        database=address.path.lstrip("/"),
        autocommit=True,
        connect_timeout=10,
    )


def pymysql_url(dsn: str) -> str:
    """SQLAlchemy's address for create_engine()."""
    return dsn.replace("mysql:", "mysql+pymysql:", 1)


def asyncmy_url(dsn: str) -> str:
    """SQLAlchemy's address for create_async_engine()."""
    return dsn.replace("mysql:", "mysql+asyncmy:", 1)
