"""Coordinators and the two example banks as real processes, on fresh databases, for tests that kill some of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from examples.transfer.databases import BANKS, Account, Databases, eventually, sqlite_databases
from examples.transfer.processes import ROOT, Process, Processes, free_address
from tests import forks
from tests.postgres import PostgresServer

# A killed coordinator's work is free again after this lease, a call that got lost is repeated after this time-out.
SHORT: Mapping[str, int] = {"call_timeout_ms": 1_000, "lease_ms": 2_000, "backoff_cap_ms": 500}
OPENING: Mapping[str, Mapping[str, int]] = {
    "bank-a": {"alice": 100_000, "carol": 100_000},
    "bank-b": {"bob": 100_000, "dave": 100_000},
}


@contextmanager
def fresh_databases(folder: Path, server: PostgresServer | None = None) -> Iterator[Databases]:
    """SQLite files in a folder, or databases of a server, dropped at the end."""
    if server is None:
        yield sqlite_databases(folder)
        return
    with ExitStack() as stack:
        store, *others = [stack.enter_context(server.lent_database()) for _ in ("coordinator", *BANKS)]
        addresses = [dsn.replace("postgresql:", "postgresql+psycopg:", 1) for dsn in others]
        yield Databases(store, dict(zip(BANKS, addresses, strict=True)))


class ForkedProcesses(Processes):
    """They start fast: those that Python runs as modules are forked off."""

    def popen(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command."""
        python, option, *arguments = command
        if (python, option) != (sys.executable, "-m"):
            return super().popen(command, environment)
        started = forks.start(
            arguments, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        return cast("subprocess.Popen[str]", started)  # all that is used of one


class Cast:
    """Who plays: coordinators on one store and the banks. Leaving the ``with`` block ends all of them."""

    def __init__(
        self,
        folder: Path,
        databases: Databases,
        *,
        coordinators: int = 1,
        gate: str = "",
        settings: Mapping[str, int] = SHORT,
        program: Callable[[Path, str], Sequence[str]] = lambda folder, name: ("coordinator",),
    ) -> None:
        """``program``: a coordinator's module and first arguments, by folder and name."""
        self.databases = databases
        self.processes = ForkedProcesses(folder)
        self.endpoints = [free_address() for _ in range(coordinators)]
        names = [f"coordinator-{number}" for number in range(1, coordinators + 1)]
        self.coordinators = [
            self.processes.coordinator(databases.store, endpoint, settings, name, program(folder, name))
            for endpoint, name in zip(self.endpoints, names, strict=True)
        ]
        self.banks: dict[str, Process] = {
            bank: self.processes.bank(bank, free_address(), url, self.endpoints[0], OPENING[bank], gate)
            for bank, url in databases.banks.items()
        }

    @property
    def everybody(self) -> Sequence[Process]:
        """All processes."""
        return [*self.coordinators, *self.banks.values()]

    def __enter__(self) -> Self:
        try:
            for group in (self.coordinators, list(self.banks.values())):
                for process in group:
                    process.launch()
                for process in group:
                    process.wait_ready()
        except BaseException:
            self.processes.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.processes.tails())
        self.processes.close()

    def settle(self, seconds: float = 60.0) -> None:
        """Wait until every transaction is finished in the coordinators' database. Raises TimeoutError."""
        eventually("all are finished", lambda: not self.databases.transactions(unfinished=True), seconds)


def opening_accounts() -> dict[str, Account]:
    """What the accounts hold before the first transfer."""
    return {f"{name}@{bank}": Account(cents) for bank, names in OPENING.items() for name, cents in names.items()}
