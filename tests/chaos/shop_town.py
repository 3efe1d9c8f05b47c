"""The shop API as its users start it, on PostgreSQL or SQLite, with a provider that loses answers; and all it holds."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from sqlalchemy import create_engine, text

from examples.shop_api.tables import ASSORTMENT
from examples.transfer.databases import eventually
from examples.transfer.processes import Processes, free_address
from tests.servers import children

READY_S: Final = 120.0


@dataclass(frozen=True)
class Books:
    """What the databases of shop and provider hold."""

    orders: list[tuple[str, str]]
    """Reference and id, as all that follows sorted."""
    payments: list[tuple[str, str]]
    labels: list[tuple[str, str]]
    charges: list[str]
    tea_left: int
    records: dict[int, int]
    """How many idempotency records are in each state."""


class ShopTown(Processes):
    """A provider, and a shop of several processes behind one address. `database`: an address for an AsyncEngine."""

    def __init__(self, folder: Path, database: str, workers: int = 1, loses: float = 0.2) -> None:
        super().__init__(folder)
        self.database = database
        self._charges = folder / "provider.db"
        provider, shop = free_address(), free_address()
        self.url = f"http://{shop}"
        python = [sys.executable, "-m", "examples.shop_api"]
        selling = ["--listen", shop, "--database", database, "--provider", f"http://{provider}"]
        charging = ["--listen", provider, "--database", str(self._charges), "--loses", str(loses)]
        ready = "INFO: +Uvicorn running on "
        self.provider = self._add("provider", [*python, "provider", *charging], ready)
        self.shop = self._add("shop", [*python, "serve", *selling, "--workers", str(workers)], ready)

    def start(self) -> None:
        """Both, and wait until the shop takes requests."""
        self.provider.start()
        self.shop.start()
        eventually("the shop takes requests", self._is_ready, READY_S)

    def workers(self) -> list[int]:
        """The ids of the shop's processes that serve."""
        found = [] if self.shop.pid is None else children(self.shop.pid)
        return [pid for pid in found if b"spawn_main" in _command(pid)]

    def kill_worker(self, pid: int) -> bool:
        """SIGKILL one of them; its parent starts another. Whether it was still there."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    def books(self) -> Books:
        """What was done in all."""
        engine = create_engine(self.database.replace("+aiosqlite", ""))
        try:
            with engine.connect() as db:

                def rows(statement: str) -> list[Any]:
                    return sorted(tuple(row) for row in db.execute(text(statement)))

                return Books(
                    orders=rows("SELECT reference, id FROM orders"),
                    payments=rows("SELECT order_id, charge FROM payment"),
                    labels=rows("SELECT order_id, id FROM label"),
                    charges=self._made_charges(),
                    tea_left=rows("SELECT available FROM item WHERE sku = 'tea'")[0][0],
                    records=dict(
                        rows("SELECT state, count(*) FROM tricord_idempotency WHERE operation <> '' GROUP BY state")
                    ),
                )
        finally:
            engine.dispose()

    def _made_charges(self) -> list[str]:
        with closing(sqlite3.connect(self._charges, timeout=30.0)) as db:
            return sorted(charge for (charge,) in db.execute("SELECT id FROM charge WHERE NOT declined"))

    def _is_ready(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/ready", timeout=5.0).status_code == 200
        return False


def tea_at_first() -> int:
    """How much there is in a new shop."""
    return ASSORTMENT["tea"][1]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has gone
        return b""
