"""What every launcher of a test server needs: a free port, a folder that goes away, a process that never outlives us.

A launcher (tests/postgres.py, tests/mariadb.py) says how its data is made, which command serves it and how to ask
whether it answers; starting, stopping, killing and cleaning up are here, once, because each took care to get right.
"""

import atexit
import contextlib
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit, urlunsplit

_START_SECONDS = 60.0
_START_ATTEMPTS = 5
_STOP_SECONDS = 20.0
# Below the range that Linux hands out to client sockets: one of those could hold the port while the server is down.
_PORTS = range(15_000, 32_000)
_WORKERS_MAX = 8
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_given: set[int] = set()
# Ends the server and removes its files when our end of the pipe closes, which even SIGKILL of this process does.
_WATCHDOG = 'read -r _; kill -QUIT "$1"; sleep 1; kill -KILL "$1"; rm -rf "$2"'


class ServerUnavailable(Exception):
    """No server could be found or started; the text says why."""


class LocalServer(ABC):
    """One server of our own in a temporary folder, or (`external_dsn`) somebody else's, which is never stopped."""

    name: ClassVar[str]
    home: ClassVar[str]  # the database that every such server has
    dsn_variable: ClassVar[str]
    unavailable: ClassVar[type[ServerUnavailable]]
    stop_signal: ClassVar[signal.Signals]

    def __init__(self, external_dsn: str | None) -> None:
        # SQLAlchemy's addresses name a driver; the drivers' own do not.
        self._external_dsn = re.sub(r"^(\w+)\+\w+:", r"\1:", external_dsn) if external_dsn else None
        self._folder: Path | None = None
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._identity: dict[str, Any] = {}
        self._given_back: list[str] = []

    @classmethod
    def from_environment(cls) -> Self:
        """The server that the environment names, else one of our own."""
        return cls(external_dsn=os.environ.get(cls.dsn_variable) or None)

    @property
    def external(self) -> bool:
        """Somebody else's server: kill(), stop() and restart() are refused, so tests that need them skip."""
        return self._external_dsn is not None

    @property
    def running(self) -> bool:
        return self.external or (self._process is not None and self._process.poll() is None)

    # --- what a launcher says ---

    @abstractmethod
    def _own_dsn(self, port: int, database: str) -> str:
        """The address of a database of our own server."""

    @abstractmethod
    def _make_data(self, folder: Path) -> None:
        """Make `folder/data`, once. Raises `unavailable`; may set _identity, the user to serve as."""

    @abstractmethod
    def _command(self, folder: Path, port: int) -> Sequence[str]:
        """What serves the data, in the foreground."""

    @abstractmethod
    def _answers(self, folder: Path, port: int) -> bool:
        """Is it our server that answers at the port? (Another may have taken it, ours is then about to leave.)"""

    @abstractmethod
    def _create_database(self, name: str) -> None: ...

    @abstractmethod
    def _drop_database(self, name: str) -> None:
        """Ends the sessions in it."""

    def _empty_database(self, name: str) -> bool:
        """Make it like a new one, where that is cheaper, and end the sessions in it; whether it is."""
        return False

    # --- databases ---

    def dsn(self, database: str | None = None) -> str:
        """The address of a database, without a driver's name."""
        database = database or self.home
        if self._external_dsn is not None:
            return urlunsplit(urlsplit(self._external_dsn)._replace(path=f"/{database}"))
        return self._own_dsn(self._port, database)

    def create_database(self, name: str | None = None) -> str:
        """Create an empty database and return its address."""
        name = name or f"tricord_{uuid.uuid4().hex[:16]}"
        self._create_database(name)
        return self.dsn(name)

    def drop_database(self, name_or_dsn: str) -> None:
        """Drop a database, by name or by the address that create_database() gave; ends its sessions."""
        self._drop_database(_name_in(name_or_dsn))

    @contextlib.contextmanager
    def lent_database(self) -> Iterator[str]:
        """The address of an empty database: one that was given back, else a new one."""
        name = self._given_back.pop() if self._given_back else _name_in(self.create_database())
        try:
            yield self.dsn(name)
        finally:
            if not self.running:  # the test stopped or killed it
                self.start()
            if self._empty_database(name):
                self._given_back.append(name)
            else:
                self._drop_database(name)

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
            except self.unavailable:
                if not attempts_left:
                    raise
                time.sleep(0.2)
            else:
                self._port = port
                return

    def stop(self) -> None:
        """Stop in order, without waiting for clients; the data stays for the next start()."""
        process = self._own("stop")
        if process is None:
            return
        process.send_signal(self.stop_signal)
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
        found = children(process.pid)
        for pid in [*found, process.pid]:
            _signal(pid, signal.SIGKILL)
        process.wait()
        eventually(lambda: not any(map(alive, found)))
        self._forget()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the server and all its processes where they stand: it fails nothing, and answers nothing."""
        process = self._own("freeze")
        assert process is not None
        process.send_signal(signal.SIGSTOP)  # first, so that the list of its processes is complete
        pids = [process.pid, *children(process.pid)]
        try:
            for pid in pids:
                _signal(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                _signal(pid, signal.SIGCONT)

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop and remove all files. Closing twice is fine."""
        if self.external:
            return
        self.stop()
        self._given_back.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder, self._port = None, 0
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
            raise RuntimeError(f"cannot {verb} the server that {self.dsn_variable} names: it is not ours")
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
        self._folder = Path(tempfile.mkdtemp(prefix=f"tricord-{self.name}-"))
        atexit.register(self.close)
        try:
            self._make_data(self._folder)
        except BaseException:
            self.close()
            raise

    def _run(self, command: Sequence[str], folder: Path) -> None:
        """Run a command that makes data. Raises `unavailable` with what it wrote."""
        made = subprocess.run(command, **quiet(self._identity, folder))
        if made.returncode != 0:
            output = made.stdout.decode(errors="replace").strip()
            raise self.unavailable(f"{self.name}'s data could not be made: {output}")

    def _launch(self, port: int) -> None:
        assert self._folder is not None
        log = self._folder / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command(self._folder, port), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                cwd=self._folder, start_new_session=True, **self._identity,
            )  # fmt: skip
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "watchdog", str(self._process.pid), str(self._folder)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            if self._answers(self._folder, port):
                return
            time.sleep(0.01)
        self.kill()
        raise self.unavailable(f"{self.name} did not start: {log.read_text(errors='replace')[-2000:].strip()}")


def _name_in(name_or_dsn: str) -> str:
    return urlsplit(name_or_dsn).path.lstrip("/") if "://" in name_or_dsn else name_or_dsn


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def quiet(identity: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """How to run a short command as that user: its output is kept for the error's text."""
    output = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return {**identity, **output, "cwd": folder, "check": False}


def free_port() -> int:
    """A port of loopback that nobody listens on, and that no client socket will take.

    Nor does any other test, as long as it can be helped: who listened there may only be down for a moment.
    """
    mine = _PORTS[_WORKER % _WORKERS_MAX :: _WORKERS_MAX]
    for port in random.SystemRandom().sample(mine, 200):
        if port in _given:
            continue
        with socket.socket() as probe:
            # A port in TIME_WAIT is free for a server.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                _given.add(port)
                if len(_given) > len(mine) // 2:
                    _given.clear()
                return port
    raise ServerUnavailable("no free port")


def children(pid: int) -> list[int]:
    """The ids of a process's own processes."""
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # no such file on this system: orphans see that their parent is gone and leave by themselves
        return []
    return [int(child) for child in listed.split()]


def alive(pid: int) -> bool:
    """Gone, or a zombie that only waits to be collected, is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition: Callable[[], bool], seconds: float = _STOP_SECONDS) -> bool:
    """Whether it comes true in time. For what other processes do, which gives no sign."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
