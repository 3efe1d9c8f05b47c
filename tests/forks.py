"""Our programs as processes that start fast: forked off a process that has imported them already.

Most of what a short program costs is importing. One process for each worker of the tests pays for it once
(`tests.fork_server`); what it forks off is a process like any other: its own id, memory, connections and streams, and
it can be stopped and killed. Where that cannot be had, or the environment says something to Python itself, a program
is started in the usual way.

    with forks.start(["coordinator", "list"], env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        print(process.stdout.read(), process.wait())
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

ROOT: Final = Path(__file__).resolve().parents[1]
START_S: Final = 60.0
ORDER_BYTES_MAX: Final = 128 * 1024
_PYTHONS: Final = ("PYTHON", "LC_", "LANG", "LD_", "GRPC_")
"""Variables that a process reads before any of our code runs, or once: they must be those of the server."""
_HARMLESS: Final = {"PYTHONUNBUFFERED"}


class Fork:
    """One process, to be used like `subprocess.Popen`; its output is text."""

    def __init__(
        self, pid: int, report: socket.socket, stdin: int | None, stdout: int | None, stderr: int | None
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = None if stdin is None else open(stdin, "w", encoding="utf-8")  # noqa: SIM115
        self.stdout = _text(stdout)
        self.stderr = _text(stderr)
        self._report = report
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended. Raises subprocess.TimeoutExpired after so many seconds."""
        with self._waiting:
            if self.returncode is None:
                self._report.settimeout(timeout)
                try:
                    told = self._report.recv(16)
                except (BlockingIOError, TimeoutError):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from None
                self._report.close()
                if not told:
                    raise ChildProcessError(f"nobody knows how process {self.pid} has ended")
                self.returncode = int(told)
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Does nothing if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


Running = Fork | subprocess.Popen[str]


class _Server:
    """The connection to the process that forks; it ends when this one ends."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders = ours
        self.environment = dict(os.environ)
        with theirs:
            command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )

    def close(self) -> None:
        """End it; what it has forked off goes on."""
        self._orders.close()
        self._process.wait()

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether a program with this environment would have found Python and its libraries the same."""
        return _read_early(environment) == _read_early(self.environment)

    def fork(self, order: Mapping[str, object], standard: Sequence[int]) -> tuple[int, socket.socket]:
        """Fork off a program with these three streams: its id, and where its end is told."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [*standard, theirs.fileno()])
        ours.settimeout(START_S)
        told = b""
        while not told.endswith(b"\n"):
            more = ours.recv(1)
            if not more:
                raise OSError("the process that forks has ended")
            told += more
        return int(told), ours


_server: _Server | None = None
_starting = threading.Lock()


def _the_server() -> _Server:
    global _server
    with _starting:
        if _server is None:
            _server = _Server()
            atexit.register(_server.close)
        return _server


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_PYTHONS) and name not in _HARMLESS}


def _text(descriptor: int | None) -> IO[str] | None:
    return None if descriptor is None else open(descriptor, encoding="utf-8", errors="replace")


def _pipe(asked: int | None, standard: int) -> tuple[int, int | None]:
    """The process's end, which is to be closed when it has it, and ours if a pipe is asked for."""
    if asked == subprocess.PIPE:
        ours, theirs = os.pipe()
        return theirs, ours
    if asked == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_RDWR), None
    return os.dup(standard if asked is None else asked), None


def start(
    arguments: Sequence[str | bytes],
    *,
    env: Mapping[str, str],
    cwd: str | Path | None = None,
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
    start_new_session: bool = False,
) -> Running:
    """Start what `python -m MODULE …` would; streams as `subprocess.Popen` takes them."""
    order = {
        "arguments": [os.fsdecode(argument) for argument in arguments],
        "environment": dict(env),
        "folder": str(cwd or Path.cwd()),
        "new_session": start_new_session,
    }
    server = _the_server() if sys.platform == "linux" else None
    if server is None or not server.suits(env) or len(json.dumps(order)) > ORDER_BYTES_MAX:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments], env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, text=True,
            errors="replace", start_new_session=start_new_session,
        )  # fmt: skip
    theirs_in, ours_in = os.pipe() if stdin == subprocess.PIPE else _pipe(stdin, 0)
    theirs_out, ours_out = _pipe(stdout, 1)
    theirs_err, ours_err = (os.dup(theirs_out), None) if stderr == subprocess.STDOUT else _pipe(stderr, 2)
    standard = (theirs_in, theirs_out, theirs_err)
    try:
        return Fork(*server.fork(order, standard), ours_in, ours_out, ours_err)
    finally:
        for descriptor in standard:
            os.close(descriptor)


def run(
    arguments: Sequence[str | bytes],
    *,
    env: Mapping[str, str],
    cwd: str | Path | None = None,
    stdin: int | None = subprocess.DEVNULL,
    merged: bool = False,
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, and return what it wrote; ``merged``: all of it as standard output.

    Raises subprocess.TimeoutExpired, and has killed it then.
    """
    errors = subprocess.STDOUT if merged else subprocess.PIPE
    with start(arguments, env=env, cwd=cwd, stdin=stdin, stdout=subprocess.PIPE, stderr=errors) as process:
        overdue = threading.Timer(timeout_s, process.kill)
        overdue.start()
        try:
            with ThreadPoolExecutor(1) as pool:
                written = pool.submit(process.stderr.read) if process.stderr is not None else None
                output = process.stdout.read() if process.stdout is not None else ""
                error = written.result() if written is not None else None
            code = process.wait(timeout_s)
        finally:
            in_time = overdue.is_alive()
            overdue.cancel()
            overdue.join()
    command = [sys.executable, "-m", *arguments]
    if not in_time:
        raise subprocess.TimeoutExpired(command, timeout_s, output, error)
    return subprocess.CompletedProcess(command, code, output, error)
