"""Case 44 over HTTP: the database is away, before a run and in the middle of one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import httpx2
import pytest

from tests.contract.participant.world import postgres_url
from tests.integration.idempotent_shop import until
from tests.integration.served_shop import Shop, opened
from tests.postgres import PostgresServer

pytestmark = pytest.mark.database

NOT_KEPT: Final = (409, 500, 503)


@pytest.fixture(scope="module", params=["tasks", "threads"])
def shop(request: pytest.FixtureRequest, own_server: PostgresServer) -> Iterator[Shop]:
    """On a server that is ours to stop."""
    url = postgres_url(own_server.create_database())
    with opened(url, url, threads=request.param == "threads") as found:
        yield found


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
