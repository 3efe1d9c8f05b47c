"""Both halves together over gRPC: a client that retries, a server that runs once; answers get lost, calls double."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import Engine, create_engine, text

from participant_sdk.idempotency import Idempotency, Operation, RetryClientInterceptor, RetryPolicy, current_run, intent
from participant_sdk.idempotency.grpc_interceptors import IdempotencyInterceptor
from participant_sdk.idempotency.grpc_policy import GrpcOperation
from tests.contract.participant.world import sqlite_url
from tests.contract.proxy import Proxy
from tests.integration.told_service import CALL_S, path, serving

METHOD = path("unary_unary")
POLICY = RetryPolicy(attempts_max=200, base_s=0.01, cap_s=0.1, budget_burst=1_000)
PLACE = GrpcOperation(operation=Operation(name="orders.place"), method=METHOD, tenant=None)


class Shop:
    """Serves `METHOD`, which makes an order with the given name, and counts how often it was run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.runs = 0
        self.go = threading.Event()
        self.go.set()
        with engine.begin() as db:
            db.execute(text("CREATE TABLE orders (id INTEGER PRIMARY KEY, name TEXT)"))

    def place(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """An order; the answer is its number."""
        self.runs += 1
        run: Any = current_run()
        made = run.connection.execute(text("INSERT INTO orders (name) VALUES (:name)"), {"name": request.decode()})
        assert self.go.wait(CALL_S)
        return str(made.lastrowid).encode()

    def orders(self) -> int:
        """How many there are."""
        with self.engine.connect() as db:
            return int(db.execute(text("SELECT count(*) FROM orders")).scalar_one())


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    engine = create_engine(sqlite_url(tmp_path))
    try:
        yield Shop(engine)
    finally:
        engine.dispose()


class Counter(grpc.ServerInterceptor):
    """Counts the calls that come; `enough` is set when so many have."""

    def __init__(self, wanted: int) -> None:
        self.enough = threading.Event()
        self._left = wanted
        self._lock = threading.Lock()

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """See `grpc`."""
        with self._lock:
            self._left -= 1
            if self._left <= 0:
                self.enough.set()
        return continuation(handler_call_details)


@contextmanager
def served(shop: Shop, workers: int, *outside: grpc.ServerInterceptor) -> Iterator[str]:
    """The shop's address."""
    with Idempotency(shop.engine) as store:
        guard = IdempotencyInterceptor(store, [PLACE])
        with serving({"unary_unary": shop.place}, *outside, guard, workers=workers) as (address, _):
            yield address


@contextmanager
def retrying(address: str) -> Iterator[Any]:
    """`METHOD`, called by a client that retries."""
    with grpc.insecure_channel(address) as plain:
        yield grpc.intercept_channel(plain, RetryClientInterceptor(POLICY)).unary_unary(METHOD)


def test_answers_that_are_lost_on_the_way(shop: Shop) -> None:
    with served(shop, 4) as address, Proxy(f"tcp://{address}") as proxy:
        with retrying(proxy.dsn.removeprefix("tcp://")) as place:
            answers = [place(b"warm", timeout=CALL_S)]
            for number in range(5):
                proxy.lose_next_answer()
                answers.append(place(str(number).encode(), timeout=CALL_S))
        assert proxy.lost == 5
    assert answers == [str(number).encode() for number in range(1, 7)]
    assert (shop.runs, shop.orders()) == (6, 6)


def test_one_intent_from_ten_threads_at_once(shop: Shop) -> None:
    shop.go.clear()
    counter = Counter(20)  # each of ten has been refused once, or some of them more often
    with served(shop, 12, counter) as address, retrying(address) as place, ThreadPoolExecutor(10) as pool:

        def click(_: int) -> bytes:
            with intent("order-42"):
                answer: bytes = place(b"tea", timeout=CALL_S)
                return answer

        clicks = [pool.submit(click, number) for number in range(10)]
        assert counter.enough.wait(CALL_S)
        shop.go.set()
        assert {click.result(CALL_S) for click in clicks} == {b"1"}
    assert (shop.runs, shop.orders()) == (1, 1)
