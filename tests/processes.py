"""Coordinators and the two example banks as real processes, on fresh databases, for tests that kill some of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from examples.transfer.databases import BANKS, Account, Databases, eventually, sqlite_databases
from examples.transfer.processes import Process, Processes, free_address
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
    ) -> None:
        self.databases = databases
        self.processes = Processes(folder)
        self.endpoints = [free_address() for _ in range(coordinators)]
        self.coordinators = [
            self.processes.coordinator(databases.store, endpoint, settings, f"coordinator-{number}")
            for number, endpoint in enumerate(self.endpoints, 1)
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
