"""Three coordinators on one PostgreSQL, and four participants: three banks and a shop, on four databases of two kinds.

bank-a, bank-b and the shop live on the coordinators' own server, so its end is everybody's; bank-c has a SQLite file
and answers on. Every call that reaches a participant is written down (``counted``), and so is what the coordinators
save and send (``recorded``).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from sqlalchemy import NullPool, create_engine, select

from examples.transfer.databases import Account, Databases, FenceRow, Stored, eventually
from examples.transfer.processes import Process, Processes, free_address
from tests.chaos.counted import Called, read
from tests.chaos.recorded import program
from tests.chaos.shop import stock
from tests.postgres import PostgresServer

BANKS = ("bank-a", "bank-b", "bank-c")
SHOP = "shop"
PARTICIPANTS = (*BANKS, SHOP)
COORDINATORS = 3
ACCOUNTS, CENTS = 40, 1_000_000
ITEMS, UNITS = 40, 1_000_000
SETTINGS: Mapping[str, int] = {
    "call_timeout_ms": 1_500,
    "lease_ms": 2_000,
    "backoff_cap_ms": 1_000,
    "drain_ms": 5_000,
}


class Tables:
    """What the coordinators and the participants have stored."""

    def __init__(self, store: str, banks: dict[str, str], shop: str) -> None:
        self.store = store
        self.urls = {**banks, SHOP: shop}
        self._banks = Databases(store, banks)
        self._shop = Databases(store, {SHOP: shop})
        self._shop_engine = create_engine(shop, poolclass=NullPool)

    def accounts(self) -> Mapping[str, Account]:
        """All accounts of all banks, as ``alice@bank-a``."""
        return self._banks.accounts()

    def stock(self) -> Mapping[str, tuple[int, int, int]]:
        """Units of each item: free, held, sold."""
        columns = select(stock.c.item, stock.c.free, stock.c.held, stock.c.sold)
        with self._shop_engine.connect() as connection:
            return {item: (free, held, sold) for item, free, held, sold in connection.execute(columns)}

    def fence_rows(self, participant: str) -> Sequence[FenceRow]:
        """A participant's fence rows."""
        return (self._shop if participant == SHOP else self._banks).fence_rows(participant)

    def transactions(self, *, unfinished: bool = False) -> Sequence[Stored]:
        """The transactions in the coordinators' database: all, or those that still owe somebody something."""
        return self._banks.transactions(unfinished=unfinished)


@contextmanager
def fresh_tables(folder: Path, server: PostgresServer) -> Iterator[Tables]:
    """Databases of a server, dropped at the end, and a SQLite file in a folder."""
    names = ("coordinator", "bank-a", "bank-b", SHOP)
    dsns = {name: server.create_database() for name in names}
    urls = {name: dsn.replace("postgresql:", "postgresql+psycopg:", 1) for name, dsn in dsns.items()}
    banks = {"bank-a": urls["bank-a"], "bank-b": urls["bank-b"], "bank-c": f"sqlite:///{folder / 'bank-c.db'}"}
    try:
        yield Tables(dsns["coordinator"], banks, urls[SHOP])
    finally:
        if not server.running:
            server.start()
        for dsn in dsns.values():
            server.drop_database(dsn)


class Town(Processes):
    """The processes. Leaving the ``with`` block ends all of them."""

    def __init__(self, folder: Path, tables: Tables, coordinators: int = COORDINATORS) -> None:
        super().__init__(folder)
        self.tables = tables
        self.endpoints = [free_address() for _ in range(coordinators)]
        self.coordinators = [
            self._coordinator(endpoint, f"coordinator-{number}") for number, endpoint in enumerate(self.endpoints, 1)
        ]
        self.participants = [self._participant(n, name) for n, name in enumerate(PARTICIPANTS)]

    def _coordinator(self, endpoint: str, name: str) -> Process:
        return self.coordinator(self.tables.store, endpoint, SETTINGS, name, program(self.folder, name))

    def _participant(self, number: int, name: str) -> Process:
        kind, opening = ("shop", f"--stock={_opening(ITEMS, UNITS)}")
        if name != SHOP:
            kind, opening = ("bank", f"--accounts={_opening(ACCOUNTS, CENTS)}")
        coordinator = self.endpoints[number % len(self.endpoints)]  # whoever hears of it, all know it
        command = [sys.executable, "-m", "tests.chaos.counted", kind, "--calls", str(self._calls_file(name))]
        command += ["--name", name, "--listen", free_address(), "--database", self.tables.urls[name]]
        command += ["--coordinator", coordinator, opening]
        return self._add(name, command, f"participant {re.escape(name)} serves on ")

    def _calls_file(self, participant: str) -> Path:
        return self.folder / f"{participant}.calls"

    @property
    def everybody(self) -> Sequence[Process]:
        """All processes."""
        return [*self.coordinators, *self.participants]

    def calls(self) -> Counter[Called]:
        """How often each thing was asked of a participant."""
        counts: Counter[Called] = Counter()
        for participant in PARTICIPANTS:
            counts.update(read(self._calls_file(participant)))
        return counts

    def settle(self, seconds: float) -> None:
        """Wait until every transaction is finished in the coordinators' database. Raises TimeoutError."""
        eventually("all are finished", lambda: not self.tables.transactions(unfinished=True), seconds)

    def __enter__(self) -> Self:
        try:
            for group in (self.coordinators, self.participants):
                for process in group:
                    process.launch()
                for process in group:
                    process.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.tails())
        self.close()


def accounts_of(bank: str) -> Sequence[str]:
    """The names of a bank's accounts, as ``n1@bank-a``."""
    return [f"n{number}@{bank}" for number in range(1, ACCOUNTS + 1)]


def items() -> Sequence[str]:
    """The names of the shop's items."""
    return [f"n{number}" for number in range(1, ITEMS + 1)]


def opening_accounts() -> dict[str, Account]:
    """What the accounts hold before the first transfer."""
    return {account: Account(CENTS) for bank in BANKS for account in accounts_of(bank)}


def opening_stock() -> dict[str, tuple[int, int, int]]:
    """What the shop has of each item before the first purchase: free, held, sold."""
    return dict.fromkeys(items(), (UNITS, 0, 0))


def _opening(count: int, each: int) -> str:
    return ",".join(f"n{number}={each}" for number in range(1, count + 1))
