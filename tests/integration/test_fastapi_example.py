"""The shop on FastAPI as its users start it: ordered from over HTTP, killed in the middle of an order, told to end."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from sqlalchemy import create_engine, select

from examples.fastapi_shop.stock import Item
from examples.transfer.bank import accounts
from examples.transfer.databases import eventually
from examples.transfer.gate import Gate
from examples.transfer.processes import Process, Processes, free_address
from tests.contract.participant.world import postgres_url
from tests.integration.guide_programs import blocks
from tests.processes import SHORT

WAIT_S: Final = 60.0
PATIENT: Final = 30.0


def printed(program: str) -> list[str]:
    """The arguments of the one command of the guide that starts with `program`."""
    lines = [line for block in blocks("participants.md") if block.language == "sh" for line in block.commands]
    (found,) = [shlex.split(line) for line in lines if line.startswith(program)]
    return found


class Cast(Processes):
    """A coordinator, a bank that stops before a gate, and the shop, started as the guide says."""

    def __init__(self, folder: Path, gate: Gate, database: str, patience: float) -> None:
        super().__init__(folder)
        self.gate = gate
        coordinator, bank, shop, web = (free_address() for _ in range(4))
        options = dict(zip(*[iter(printed("python -m examples.transfer.bank")[3:])] * 2, strict=True))
        opening = {name: int(cents) for name, _, cents in (a.partition("=") for a in options["--accounts"].split(","))}
        self.bank_url = f"sqlite:///{folder / 'bank.db'}"
        self.shop_url = database.replace("+aiosqlite", "")
        store = ["--store", str(folder / printed("tricord serve")[-1]), "--listen", coordinator]
        settings = (f"--{name.replace('_', '-')}={value}" for name, value in SHORT.items())
        serve = [str(Path(sys.executable).with_name("tricord")), *printed("tricord serve")[1:-2], *store, *settings]
        self.coordinator_process = self._add("coordinator", serve, "tricord: listening on ")
        name = options["--name"]
        self.bank_process = self.bank(name, bank, self.bank_url, coordinator, opening, gate.address)
        command = [sys.executable, "-m", *printed("uvicorn")]
        command[command.index("--port") + 1] = web.rpartition(":")[2]
        environment = {
            "SHOP_DATABASE": database,
            "SHOP_LISTEN": shop,
            "SHOP_COORDINATOR": coordinator,
            "SHOP_PATIENCE": str(patience),
        }
        self.shop: Process = self._add("shop", command, r"INFO: +Uvicorn running on ", environment)
        self.web = httpx2.Client(base_url=f"http://{web}", timeout=WAIT_S)

    def start(self) -> None:
        """All of them, and wait until the coordinator knows the shop."""
        for process in (self.coordinator_process, self.bank_process, self.shop):
            process.start()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """The coordinator knows the stock."""
        eventually("the shop is registered", lambda: self.web.get("/ready").status_code == 200, WAIT_S)

    def order(self, key: str, **changes: object) -> httpx2.Response:
        """The order that the guide shows, or one like it."""
        arguments = printed("curl")
        assert arguments[2:5] == ["-X", "POST", "http://127.0.0.1:8000/orders"]
        headers = dict(value.split(": ") for option, value in itertools.pairwise(arguments) if option == "-H")
        body = {**json.loads(arguments[-1]), **changes}
        return self.web.post("/orders", json=body, headers={**headers, "Idempotency-Key": key})

    def stock(self) -> dict[str, Sequence[int]]:
        """Free, held and sold pieces of each item, from the database."""
        engine = create_engine(self.shop_url)
        with engine.connect() as db:
            rows = db.execute(select(Item.sku, Item.available, Item.held, Item.sold)).all()
        engine.dispose()
        return {sku: numbers for sku, *numbers in rows}

    def accounts(self) -> dict[str, Sequence[int]]:
        """Balance, held and incoming cents of each account, from the database."""
        engine = create_engine(self.bank_url)
        with engine.connect() as db:
            c = accounts.c
            rows = db.execute(select(c.name, c.balance, c.held, c.incoming)).all()
        engine.dispose()
        return {name: numbers for name, *numbers in rows}

    def settle(self, teas: int) -> None:
        """Wait until as many teas are sold and paid, and see that nothing else has happened."""
        paid = teas * 450
        eventually("the teas are sold", lambda: self.stock()["tea"] == [10 - teas, 0, teas], WAIT_S)
        whole = {"alice": [10_000 - paid, 0, 0], "shop": [paid, 0, 0]}
        eventually("the teas are paid", lambda: self.accounts() == whole, WAIT_S)
        assert self.stock()["mug"] == [1, 0, 0]


@contextmanager
def open_shop(folder: Path, *, database: str = "", patience: float = PATIENT) -> Iterator[Cast]:
    """All processes, started; ended afterwards."""
    database = database or f"sqlite+aiosqlite:///{folder / 'shop.db'}"
    with Gate() as gate, Cast(folder, gate, database, patience) as cast, cast.web:
        try:
            cast.start()
            yield cast
        except BaseException as error:
            error.add_note(cast.tails())
            raise
        finally:
            gate.release()


def refusal(response: httpx2.Response) -> tuple[int, str, str]:
    """Status, participant and reason."""
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == response.status_code
    return response.status_code, body["participant"], body["reason"]


def test_orders_are_carried_out_once_or_refused_with_the_reason(tmp_path: Path) -> None:
    with open_shop(tmp_path) as cast:
        assert cast.web.get("/stock/tea").json() == {"sku": "tea", "price": 450, "available": 10, "held": 0, "sold": 0}
        first = cast.order("order-1")
        assert (first.status_code, first.headers["location"]) == (201, "/orders/order-1")
        again = cast.order("order-1")
        assert (again.status_code, again.json()["xid"]) == (201, first.json()["xid"])
        assert cast.order("order-1", quantity=3, total=1350).status_code == 422
        assert refusal(cast.order("order-2", quantity=9, total=4050)) == (409, "stock", "out_of_stock")
        assert refusal(cast.order("order-3", total=899)) == (409, "stock", "price_changed")
        assert refusal(cast.order("order-4", account="mallory")) == (409, "bank-a", "unknown_account")
        assert cast.order("not a key").status_code == 422
        cast.settle(teas=2)
        confirmed = {**first.json(), "state": "CONFIRMED"}
        eventually("order-1 has ended", lambda: cast.web.get("/orders/order-1").json() == confirmed, WAIT_S)
        eventually("order-4, too", lambda: cast.web.get("/orders/order-4").json()["state"] == "CANCELLED", WAIT_S)
        assert cast.web.get("/orders/order-5").status_code == cast.web.get("/stock/gold").status_code == 404
        assert cast.web.get("/stock/tea", headers={"tricord-xid": "x"}).status_code == 400
        assert f"INFO shop.stock {first.json()['xid']} holds 2 of tea" in cast.shop.log.read_text()
        end_in_order(cast)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_killed_in_the_middle_of_an_order(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    database = postgres_url(request.getfixturevalue("pg_database")) if kind == "postgres" else ""
    with open_shop(tmp_path, database=database, patience=1.0) as cast:
        hold = cast.gate.hold("bank-a", "TRY")
        told = cast.order("order-1")
        assert (told.status_code, told.headers["location"]) == (202, "/orders/order-1")
        hold.wait()
        eventually("the teas are held", lambda: cast.stock()["tea"] == [8, 2, 0], WAIT_S)
        cast.shop.kill()
        with pytest.raises(httpx2.TransportError):
            cast.order("order-1")
        hold.release()
        cast.shop.start()
        cast.wait_until_ready()
        eventually("the order is known", lambda: cast.order("order-1").status_code == 201, WAIT_S)
        cast.settle(teas=2)
        assert cast.order("order-2").status_code == 201
        cast.settle(teas=4)
        end_in_order(cast)


def test_an_order_that_is_under_way_is_answered_before_it_ends(tmp_path: Path) -> None:
    with open_shop(tmp_path) as cast, ThreadPoolExecutor(2) as pool:
        hold = cast.gate.hold("bank-a", "TRY")
        ordering = pool.submit(cast.order, "order-1")
        hold.wait()
        eventually("the teas are held", lambda: cast.stock()["tea"] == [8, 2, 0], WAIT_S)
        ending = pool.submit(cast.shop.stop)
        eventually("it ends", lambda: "Shutting down" in cast.shop.log.read_text(), WAIT_S)
        assert not ordering.done()
        hold.release()
        assert ordering.result().status_code == 201
        assert ending.result() in ENDED
        assert "shop.app - the participant has ended\n" in cast.shop.log.read_text()
        cast.shop.start()
        cast.settle(teas=2)


ENDED: Final = (0, -15)
"""uvicorn ends gracefully and then by the signal that told it to."""


def end_in_order(cast: Cast) -> None:
    """SIGTERM to the shop: everything is closed, in its order."""
    assert cast.shop.stop() in ENDED
    log = cast.shop.log.read_text()
    assert "shop.app - the participant has ended\n" in log
    assert "Application shutdown complete" in log
    assert "Traceback" not in log
