"""The guide's services that are called directly, over HTTP and gRPC: a real coordinator, and an open transaction."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from sqlalchemy import select

from examples.transfer.processes import Processes, free_address
from participant_sdk import XidServerInterceptor
from tests.coordinators import CALL_S, CoordinatorProcess, states
from tests.integration.business import Buyer
from tests.integration.guide_programs import Guide
from tests.integration.told_service import path, serving


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator."""
    with CoordinatorProcess(store=tmp_path / "coordinator.db") as process:
        yield process


@pytest.fixture
def stock(guide: Guide) -> Any:
    """The guide's stock of two teas."""
    module = guide.load("stock")
    with module.engine.begin() as db:
        module.metadata.create_all(db)
        db.execute(module.stock.insert(), {"sku": "tea", "available": 2})
    return module


def available_and_held(stock: Any) -> tuple[int, int]:
    """What the table holds."""
    with stock.engine.connect() as db:
        available, held = db.execute(select(stock.stock.c.available, stock.stock.c.held)).one()
    return available, held


class LosesAnswers(httpx2.HTTPTransport):
    """HTTP, on which the answers to as many requests as `lose` says are lost once they are served."""

    lose = 0

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """See `httpx2.BaseTransport`."""
        response = super().handle_request(request)
        if self.lose:
            self.lose -= 1
            response.close()
            raise httpx2.ReadError("the answer was lost")
        return response


@contextmanager
def web_service(guide: Guide, module: str, coordinator: CoordinatorProcess) -> Iterator[str]:
    """One of the guide's files, served by uvicorn as its readers would, only at free addresses; its URL."""
    file, web = guide.folder / f"{module}.py", free_address()
    text = file.read_text(encoding="utf-8")
    for printed, used in (("127.0.0.1:7800", coordinator.endpoint), ("127.0.0.1:7801", free_address())):
        assert printed in text
        text = text.replace(printed, used)
    file.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(guide.folder), "--port", web.rpartition(":")[2]]
    with Served(guide.folder, [*command, f"{module}:app"]) as process:
        process.start()
        yield f"http://{web}"
        assert process.stop_in_order()


class Served(Processes):
    """The web service's process, on the database in the folder."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        super().__init__(folder)
        environment = {"DATABASE_URL": f"sqlite:///{folder / 'shop.db'}"}
        self._web = self._add("web", command, r"INFO: +Uvicorn running on ", environment)

    def start(self) -> None:
        """Returns when it serves."""
        self._web.start()

    def stop_in_order(self) -> bool:
        """SIGTERM; whether all was closed as it should be."""
        self._web.stop()
        log = self._web.log.read_text()
        return "Application shutdown complete" in log and "Traceback" not in log


def test_a_request_is_a_branch_of_its_callers_transaction(
    guide: Guide, coordinator: CoordinatorProcess, stock: Any
) -> None:
    caller, transport = guide.load("caller"), LosesAnswers()
    with (
        web_service(guide, "direct", coordinator) as url,
        httpx2.Client(base_url=url, transport=transport, timeout=CALL_S) as client,
    ):
        first, second = Buyer(coordinator), Buyer(coordinator)
        with first.shopping():
            caller.order_tea(client)
        assert (first.seen, available_and_held(stock)) == ({1}, (1, 1))
        transport.lose = 1
        with second.shopping():
            caller.order_tea(client)
        assert (transport.lose, second.seen, len(second.get().branches)) == (0, {1}, 1)
        assert available_and_held(stock) == (0, 2)
        assert states(first.confirm()) == ["CONFIRMED", "CONFIRMED"]
        assert states(second.cancel()) == ["CANCELLED", "CANCELLED"]
        assert available_and_held(stock) == (1, 0)
        with first.shopping():
            assert answered(client, caller) == (409, "NOT_TRYING")
        assert answered(client, caller) == (409, "NO_XID")
        with Buyer(coordinator).shopping():
            caller.order_tea(client)
            assert answered(client, caller) == (409, "out_of_stock")


def answered(client: httpx2.Client, caller: Any) -> tuple[int, str]:
    """The status and detail of the error that an order ends with."""
    with pytest.raises(httpx2.HTTPStatusError) as raised:
        caller.order_tea(client)
    return raised.value.response.status_code, raised.value.response.json()["detail"]


def test_a_call_that_is_repeated_with_its_key_is_the_same_branch(
    guide: Guide, coordinator: CoordinatorProcess, stock: Any
) -> None:
    again, tracing, buyer = guide.load("again"), guide.load("tracing"), Buyer(coordinator)
    calls = 0

    def reserve_and_lose_the_first_answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        nonlocal calls
        calls += 1
        stock.reserve.enlist(stock.Reserve("tea", 1))
        if calls == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the answer was lost")
        return b"held"

    warehouse = stock.warehouse.start("127.0.0.1:0", coordinator=coordinator.endpoint)
    try:
        assert warehouse.wait_registered(CALL_S)
        with (
            serving({"unary_unary": reserve_and_lose_the_first_answer}, XidServerInterceptor()) as (address, _),
            tracing.channel_to(address) as channel,
            buyer.shopping(),
        ):
            reserve = channel.unary_unary(path("unary_unary"))
            assert again.until_answered(lambda: reserve(b"1", timeout=CALL_S), "tea") == b"held"
        assert (calls, buyer.seen, available_and_held(stock)) == (2, {1}, (1, 1))
        assert states(buyer.confirm()) == ["CONFIRMED", "CONFIRMED"]
        assert available_and_held(stock) == (1, 0)
    finally:
        assert warehouse.stop(CALL_S)
        tracing.executor.shutdown()
