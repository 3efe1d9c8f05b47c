"""Case 44 over HTTP: the database is away, before a run and in the middle of one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Final

import httpx2
import pytest
from sqlalchemy import create_engine, text

from participant_sdk.idempotency import doubt
from participant_sdk.idempotency.errors import StoreUnavailable
from participant_sdk.idempotency.fingerprints import keyed_request
from participant_sdk.idempotency.idempotency import Idempotency
from participant_sdk.idempotency.operation import Mode, Operation
from participant_sdk.idempotency.request_parts import RequestParts
from participant_sdk.idempotency.runs import Run
from tests.contract.participant.world import postgres_url
from tests.integration import wsgi_shop
from tests.integration.idempotent_shop import until
from tests.integration.served_shop import Shop, opened
from tests.postgres import PostgresServer

pytestmark = pytest.mark.database

NOT_KEPT: Final = (409, 500, 503)


@pytest.fixture(scope="module", params=["tasks", "threads", "wsgi"])
def shop(request: pytest.FixtureRequest, own_server: PostgresServer) -> Iterator[Shop]:
    """On a server that is ours to stop."""
    url = postgres_url(own_server.create_database())
    if request.param == "wsgi":
        with wsgi_shop.opened(url) as found:
            yield found
        return
    with opened(url, url, threads=request.param == "threads") as found:
        yield found


@pytest.fixture(autouse=True)
def soon_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What became of a COMMIT is not asked for as long as otherwise: the database will not come back meanwhile."""
    monkeypatch.setattr(doubt, "DOUBT_S", 1.0)


def problem(answer: httpx2.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json"
    assert int(answer.headers["retry-after"]) >= 1
    return str(answer.json()["reason"])


def test_case_44_without_the_store_nothing_runs(shop: Shop, own_server: PostgresServer) -> None:
    assert shop.order("before").status_code == 201
    shop.engine.dispose()
    own_server.stop()
    try:
        for item in ("before", "during"):
            for path in ("/orders", "/leased"):
                answer = shop.order(item, path=path)
                assert (answer.status_code, problem(answer)) == (503, "IDEMPOTENCY_STORE_UNAVAILABLE")
        looked = shop.client.get("/idempotency/before", headers={"X-Account": "acme"})
        assert (looked.status_code, problem(looked)) == (503, "IDEMPOTENCY_STORE_UNAVAILABLE")
        assert (shop.seen.begun["before"], shop.seen.begun["during"]) == (1, 0)
        assert shop.client.post("/echo", content=b"as ever").content == b"as ever"
    finally:
        own_server.start()
    until(lambda: shop.order("during").status_code == 201)
    assert (shop.placed("during"), shop.seen.begun["during"]) == (1, 1)
    assert shop.order("before").headers["idempotency-replayed"] == "true"


def test_an_operation_that_fails_open_runs_unprotected_and_says_so(
    shop: Shop, own_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert shop.order("open", path="/open").status_code == 201
    shop.engine.dispose()
    own_server.stop()
    try:
        # A connection that was in the pool may have carried a claim away: that one is told, and no more.
        until(lambda: shop.order("any", path="/open-leased").status_code == 201)
        caplog.clear()
        for path in ("/open", "/open", "/open-leased"):
            answer = shop.order("unprotected", path=path, set={"X-Idempotency": "final"})
            assert (answer.status_code, answer.headers["idempotency-status"]) == (201, "bypassed")
            assert not {"idempotency-key-expires", "idempotency-replayed", "x-idempotency"} & set(answer.headers)
        assert [record.message.split(":")[0] for record in caplog.records] == ["ran_unprotected"] * 3
        if isinstance(shop, wsgi_shop.WsgiShop):
            assert shop.door.ran_unprotected > 3
        assert shop.order("other", path="/orders").status_code == 503
        assert shop.order("", path="/open").status_code == 400  # what is wrong with a request is told as ever
    finally:
        own_server.start()
    until(lambda: shop.order("open", path="/open").status_code == 201)
    assert shop.order("open", path="/open").headers["idempotency-replayed"] == "true"
    assert (shop.seen.begun["unprotected"], shop.placed("unprotected")) == (3, 0)


@pytest.mark.parametrize("path", ["/open", "/open-leased"])
def test_a_run_that_has_begun_is_never_done_again_unprotected(
    shop: Shop, own_server: PostgresServer, path: str
) -> None:
    item = f"half-{path[1:]}"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(shop.order, item, path=path, wait_first=item, wait=item)
        shop.seen.await_begun(item)
        shop.engine.dispose()
        own_server.kill()
        try:
            shop.seen.gate(item).set()
            answer = asked.result()
            assert answer.status_code in NOT_KEPT
            assert shop.seen.begun[item] == 1
        finally:
            own_server.start()


@pytest.mark.parametrize("path", ["/orders", "/leased"])
def test_case_44_an_answer_that_was_not_durable_is_never_given(
    shop: Shop, own_server: PostgresServer, path: str
) -> None:
    item = f"cut off at {path}"
    key = item.replace(" ", "-")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(shop.order, item, key, path=path, wait_first=item)
        shop.seen.await_begun(item)
        shop.engine.dispose()
        own_server.kill()
        try:
            shop.seen.gate(item).set()
            assert asked.result().status_code in NOT_KEPT  # its handler has said 201
        finally:
            own_server.start()
    until(lambda: shop.order(item, key, path=path, wait_first=item).status_code == 201)
    assert shop.placed(item) == 1
    assert shop.seen.begun[item] >= 2


def test_the_store_is_down_only_if_nothing_of_a_request_can_be_in_it(own_server: PostgresServer) -> None:
    engine = create_engine(postgres_url(own_server.create_database()), pool_size=1, max_overflow=0, pool_timeout=0.1)
    numbers = count()

    def is_down(mode: Mode, key: str = "") -> bool:
        request = keyed_request(key or f"k{next(numbers)}", "acme", RequestParts())
        with pytest.raises(StoreUnavailable) as refused:
            store.begin(Operation(name=f"orders.{mode.value}", mode=mode, wait_s=2), request)
        return refused.value.down

    with Idempotency(engine, sweep=None, listen=False) as store:
        with engine.connect():
            assert [is_down(mode) for mode in Mode] == [False] * 3  # its pool is used up: that is no outage
        own_server.stop()
        try:
            assert is_down(Mode.LEASED) is False  # a claim went out on a connection that was in the pool
            assert [is_down(mode) for mode in Mode] == [True] * 3
        finally:
            own_server.start()
        with engine.connect() as connection:
            connection.execute(text("SELECT 1"))
        own_server.stop()
        try:
            assert is_down(Mode.ATOMIC) is True  # nothing but a look went out
        finally:
            own_server.start()
        with ThreadPoolExecutor(1) as pool:
            run = store.begin(Operation(name="orders.atomic"), keyed_request("met", "acme", RequestParts()))
            assert isinstance(run, Run)
            waits = pool.submit(is_down, Mode.ATOMIC, "met")
            until(lambda: store.setup.waiting.number == 1)
            own_server.kill()
            try:
                run.fail_retryable()
                assert waits.result() is False  # another run of it was met, whose end is not known
            finally:
                own_server.start()
    engine.dispose()
