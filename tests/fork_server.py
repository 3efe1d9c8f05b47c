"""What `tests.forks` starts: a process that has imported our programs, and forks one of them off for each order.

python -m tests.fork_server DESCRIPTOR

An order comes through the socket of that number: JSON, and four descriptors with it: the program's standard input,
output and error, and a socket on which its id is told at once, and how it ended.
"""

from __future__ import annotations

# ruff: noqa: F401 - what is imported is for those that are forked off
import contextlib
import gc
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

# What the programs import at their start, and what they import when it is needed.
import alembic.command
import alembic.config
import psycopg
import rich.console
import rich.table
import sqlalchemy.dialects.mysql.asyncmy
import sqlalchemy.dialects.mysql.pymysql
import sqlalchemy.dialects.postgresql.psycopg
import sqlalchemy.dialects.sqlite.aiosqlite
import sqlalchemy.dialects.sqlite.pysqlite
import sqlalchemy.ext.asyncio
import sqlalchemy.orm

import coordinator.cli
import coordinator.coordinator
import coordinator.store.migrations
import coordinator.store.postgres
import coordinator.store.sqlite
import examples.transfer.databases
import participant_sdk.commands
import participant_sdk.participant
import participant_sdk.serve
import tests.chaos.counted
import tests.contract.participant.till
import tests.contract.participant.together
import tests.integration.keyed_shop
from tests.forks import ORDER_BYTES_MAX

with contextlib.suppress(ImportError):
    import uvloop  # an extra


class Server:
    """Forks, and tells who has ended. It has one thread, so that a fork takes all of it along."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._reports: dict[int, socket.socket] = {}
        self._ended, ended = socket.socketpair()
        ended.setblocking(False)
        self._ended.setblocking(False)
        self._ended_end = ended
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; then the orders end
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(ended.fileno())

    def run(self) -> dict[str, Any] | None:
        """Serve until the orders end; or, in a process that was forked off, return what it is to run."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._orders, selectors.EVENT_READ)
            selector.register(self._ended, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._ended in ready:
                    self._collect()
                if self._orders in ready:
                    data, descriptors, _, _ = socket.recv_fds(self._orders, ORDER_BYTES_MAX, 4)
                    if not data:
                        return None
                    order: dict[str, Any] = json.loads(data)
                    if self._fork(descriptors):
                        return order

    def _fork(self, descriptors: list[int]) -> bool:
        """Whether this is the new process."""
        *standard, report = descriptors
        pid = os.fork()
        if pid == 0:
            self._leave()
            os.close(report)
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
        for descriptor in standard:
            os.close(descriptor)
        if pid == 0:
            return True
        self._reports[pid] = socket.socket(fileno=report)
        self._tell(self._reports[pid], pid)
        return False

    def _leave(self) -> None:
        """What is the server's is none of the new process's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for mine in (self._orders, self._ended, self._ended_end, *self._reports.values()):
            mine.close()

    def _collect(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ended.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                report = self._reports.pop(ended[0])
                self._tell(report, os.waitstatus_to_exitcode(ended[1]))
                report.close()

    def _tell(self, report: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):  # whoever wanted to know it is gone
            report.sendall(f"{number}\n".encode())


def become(order: dict[str, Any]) -> None:
    """Run a module as `python -m` does, in a process that was forked off."""
    if order["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    os.chdir(order["folder"])
    sys.path[0] = order["folder"]
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        raw = open(number, "wb" if number else "rb", closefd=False)  # noqa: SIM115
        lines = name == "stderr" or os.isatty(number)
        new = io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=lines, write_through=unbuffered)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    module, *arguments = order["arguments"]
    sys.argv[1:] = arguments
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # what is run is a module of its own, beside one that was imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lose the other threads"
    gc.collect()
    gc.freeze()  # so that a collection in a fork does not touch, and so copy, what all of them share
    ordered = Server(socket.socket(fileno=int(sys.argv[1]))).run()
    if ordered is not None:
        become(ordered)
