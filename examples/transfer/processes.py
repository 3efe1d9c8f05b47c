"""Real processes: a coordinator, banks; started, waited for, killed, and never left behind.

What a process prints goes to a log file of its own. It is ready when it says so, in one line on standard output.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

ROOT = Path(__file__).resolve().parents[2]
READY_S = 30.0
STOP_S = 20.0
# Below the range that Linux hands out to client sockets: one of those could hold the port while its process is down.
_PORTS = range(15_000, 32_000)
# Kills what its last line names when our end of the pipe closes, which even SIGKILL of this process does.
_WATCHDOG = 'pids=; while read -r line; do pids=$line; done; if [ -n "$pids" ]; then kill -KILL $pids; fi'


class ProcessFailed(Exception):
    """A process did not start, or ended by itself; the text holds the end of its log."""


def free_address() -> str:
    """A loopback address that nothing listens on now, and that no client socket will take."""
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return f"127.0.0.1:{port}"
    raise ProcessFailed("no free port")


class Process:
    """One program that can be started again and again."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        ready: str,
        environment: Mapping[str, str],
        log: Path,
        group: Processes,
    ) -> None:
        self.name = name
        self._environment = environment
        self.log = log
        self._command = command
        self._ready = re.compile(ready)
        self._group = group
        self._popen: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._is_ready = threading.Event()

    @property
    def pid(self) -> int | None:
        """The process's id while it runs."""
        return self._popen.pid if self._popen is not None and self._popen.poll() is None else None

    def start(self) -> None:
        """Start it, and return when it is ready. Raises ProcessFailed."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start it; ``wait_ready`` must follow."""
        assert self.pid is None
        self._collect()
        self._popen = self._group.popen(self._command, {**_environment(), **self._environment})
        self._group.watch()
        assert self._popen.stdout is not None
        self._is_ready = threading.Event()
        self._reader = threading.Thread(
            target=self._read, args=(self._popen.stdout, self._is_ready), name=f"log-{self.name}"
        )
        self._reader.start()

    def wait_ready(self) -> None:
        """Return when it has said that it is ready. Raises ProcessFailed."""
        assert self._popen is not None
        deadline_s = time.monotonic() + READY_S
        while not self._is_ready.wait(0.1):
            if self._popen.poll() is not None:
                self._collect()
                raise ProcessFailed(f"{self.name} ended with code {self._popen.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline_s:
                self.kill()
                raise ProcessFailed(f"{self.name} was not ready after {READY_S:.0f} s:\n{self.tail()}")

    def kill(self) -> None:
        """SIGKILL: no chance to tidy up. Returns when it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> int | None:
        """SIGTERM, and SIGKILL if that does not help; the exit code."""
        return self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP: it keeps its connections and does nothing."""
        assert self._popen is not None
        self._popen.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._popen is not None
        self._popen.send_signal(signal.SIGCONT)

    def tail(self, lines: int = 15) -> str:
        """The end of its log."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])

    def _end(self, number: signal.Signals) -> int | None:
        if self._popen is None:
            return None
        if self._popen.poll() is None:
            self._popen.send_signal(number)
            try:
                self._popen.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
        self._collect()
        return self._popen.returncode

    def _collect(self) -> None:
        self._group.watch()
        if self._reader is not None:
            self._reader.join()
            self._reader = None

    def _read(self, output: IO[str], ready: threading.Event) -> None:
        with output, self.log.open("a") as log:
            command = re.sub(r"(://[^:/@ ]*):[^@ ]*@", r"\1:***@", " ".join(self._command[1:]))  # no passwords
            log.write(f"--- {self.name} starts: {command}\n")
            for line in output:
                log.write(line)
                log.flush()
                if self._ready.match(line):
                    ready.set()


class Processes:
    """All processes of one show. Leaving the ``with`` block ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[Process] = []
        self._watched = ""
        self._lock = threading.Lock()
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def coordinator(
        self,
        store: str,
        listen: str,
        settings: Mapping[str, int],
        name: str = "coordinator",
        program: Sequence[str] = ("coordinator",),
    ) -> Process:
        """A coordinator; ``settings`` are its flags, such as ``{"lease_ms": 3000}``, ``program`` is its module."""
        command = [sys.executable, "-m", *program, "serve", "--listen", listen]
        for flag, value in settings.items():
            command += [f"--{flag.replace('_', '-')}", str(value)]
        return self._add(name, command, "tricord: listening on ", {"TRICORD_STORE": store})

    def bank(
        self, name: str, listen: str, database: str, coordinator: str, accounts: Mapping[str, int], gate: str = ""
    ) -> Process:
        """A bank, with a gate before its handlers if an address is given."""
        command = [sys.executable, "-m"]
        command += ["examples.transfer.gate", "--gate", gate] if gate else ["examples.transfer.bank"]
        command += ["--name", name, "--listen", listen, "--database", database, "--coordinator", coordinator]
        command += ["--accounts", ",".join(f"{account}={cents}" for account, cents in accounts.items())]
        return self._add(name, command, f"participant {re.escape(name)} serves on ")

    def _add(
        self, name: str, command: Sequence[str], ready: str, environment: Mapping[str, str] | None = None
    ) -> Process:
        process = Process(name, command, ready, environment or {}, self.folder / f"{name}.log", self)
        self._all.append(process)
        return process

    def popen(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command; all that it prints comes through its standard output."""
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for us alone: we end them, in order
        )

    def watch(self) -> None:
        """Tell the watchdog which processes run now."""
        with self._lock:
            pids = " ".join(str(process.pid) for process in self._all if process.pid is not None)
            if pids != self._watched and self._watchdog.stdin is not None and not self._watchdog.stdin.closed:
                self._watched = pids
                self._watchdog.stdin.write(f"{pids}\n")
                self._watchdog.stdin.flush()

    def tails(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- end of {process.log}\n{process.tail()}" for process in self._all)

    def close(self) -> None:
        """End all that run: banks first, so that the coordinator has nobody to wait for."""
        for process in reversed(self._all):
            with contextlib.suppress(ProcessLookupError):
                if process.pid is not None:
                    process.thaw()
            process.stop()
        self.watch()
        self._watchdog.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _environment() -> dict[str, str]:
    """Ours, without settings that are meant for another coordinator."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRICORD_")}
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
