"""What a request has to pass before the store is asked, at both doors: its age, its tenant's quota of keys."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx2
import pytest

from participant_sdk.idempotency.intents import intent
from participant_sdk.idempotency.retry_http import RetryTransport
from participant_sdk.idempotency.retry_rules import RetryPolicy
from tests.contract.participant.world import sqlite_url
from tests.integration import wsgi_shop
from tests.integration.served_shop import Shop, opened, reason


@pytest.fixture(scope="module", params=["asgi", "wsgi"])
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("gate")
    url = sqlite_url(folder)
    if request.param == "wsgi":
        with wsgi_shop.opened(url) as found:
            yield found
    else:
        with opened(sqlite_url(folder, asynchronous=True), url) as found:
            yield found


def test_what_was_first_sent_too_long_ago_does_not_run(shop: Shop, item: str) -> None:
    def order(first_sent: str) -> httpx2.Response:
        return shop.order(item, path="/dated", headers={"First-Sent": first_sent})

    records, now = shop.records(), int(time.time())
    for late in (now - 3_600, now - 3_545, 0):
        old = order(f"@{late}")
        assert (old.status_code, reason(old), old.json()["retryable"]) == (412, "IDEMPOTENCY_INTENT_TOO_OLD", False)
        assert "new key" in old.json()["detail"]
        assert "retry-after" not in old.headers
    for bad in ("yesterday", f"{now}.5", f"@{now};a=1", f"@{now}, @{now}", "", f"@{now + 200}"):
        wrong = order(bad)
        assert (wrong.status_code, reason(wrong)) == (400, "IDEMPOTENCY_FIRST_SENT_MALFORMED")
    assert (shop.records(), shop.seen.begun[item]) == (records, 0)
    answers = [order(f"@{now - 3_400}"), order(str(now)), shop.order(item, path="/dated")]
    assert [found.headers.get("idempotency-replayed") for found in answers] == [None, "true", "true"]


def test_a_retrying_client_says_when_it_began(shop: Shop, item: str) -> None:
    transport = RetryTransport(httpx2.HTTPTransport(), RetryPolicy(attempts_max=1), first_sent="First-Sent")
    with httpx2.Client(transport=transport, base_url=shop.address, trust_env=False) as client:

        def order() -> httpx2.Response:
            return client.post("/dated", json={"item": item}, headers={"X-Account": "acme"})

        sent = order()
        assert (sent.status_code, sent.request.headers["first-sent"][:1]) == (201, "@")
        with intent(f"{item}-old", began_s=time.time() - 7_200):
            assert order().status_code == 412
        with intent(f"{item}-new"):
            assert [order().status_code, order().headers["idempotency-replayed"]] == [201, "true"]


def test_a_tenant_brings_no_more_keys_than_it_may(shop: Shop, item: str) -> None:
    def order(number: int, account: str = item) -> httpx2.Response:
        return shop.order(f"{item}-{number}", path="/metered", account=account)

    for number in (0, 0, 1, 1, 1, 2):  # repeats bring no new keys
        assert order(number).status_code == 201
    records = shop.records()
    over = order(3)
    assert (over.status_code, reason(over)) == (429, "IDEMPOTENCY_TOO_MANY_KEYS")
    assert 28_000 < int(over.headers["retry-after"]) <= 28_800
    assert (shop.records(), shop.seen.begun[f"{item}-3"]) == (records, 0)
    assert order(3, f"{item}-else").status_code == 201
    assert shop.order(f"{item}-3").status_code == 201  # at another operation
