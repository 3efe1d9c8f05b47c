"""Cases 37 and 39-43 over HTTP: a real uvicorn, on every database, with coroutine handlers and with threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.idempotent_shop import ANSWER_BYTES_MAX, until
from tests.integration.served_shop import Shop, reason


def test_case_37_fifty_at_once_run_once(web_shop: Shop, item: str) -> None:
    with ThreadPoolExecutor(50) as pool:
        asked = [pool.submit(web_shop.order, item, wait=item) for _ in range(50)]
        web_shop.seen.await_begun(item)
        web_shop.seen.gate(item).set()
        answers = [one.result() for one in asked]
    assert {answer.status_code for answer in answers} <= {201, 409}
    bodies = {answer.content for answer in answers if answer.status_code == 201}
    assert len(bodies) == 1
    assert all(reason(answer) == "IDEMPOTENCY_IN_PROGRESS" for answer in answers if answer.status_code == 409)
    assert (web_shop.placed(item), web_shop.seen.begun[item]) == (1, 1)
    assert web_shop.order(item, wait=item).content in bodies


def test_case_37_where_nobody_waits_it_is_in_progress(web_shop: Shop, item: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(web_shop.order, item, path="/impatient", wait=item)
        web_shop.seen.await_begun(item)
        busy = web_shop.order(item, path="/impatient", wait=item)
        assert (busy.status_code, reason(busy)) == (409, "IDEMPOTENCY_IN_PROGRESS")
        assert int(busy.headers["retry-after"]) >= 1
        web_shop.seen.gate(item).set()
        assert first.result().status_code == 201
    assert web_shop.order(item, path="/impatient", wait=item).headers["idempotency-replayed"] == "true"
    assert web_shop.placed(item) == 1


def test_case_39_the_late_ones_work_rolls_back(web_shop: Shop, item: str) -> None:
    if web_shop.engine.dialect.name == "sqlite":
        pytest.skip("there the first one's local transaction bars every other one's")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(web_shop.order, item, path="/leased", wait_first=item)
        web_shop.seen.await_begun(item)
        until(lambda: web_shop.order(item, path="/leased", wait_first=item).status_code == 201)
        web_shop.seen.gate(item).set()
        lost = late.result()
    assert (lost.status_code, reason(lost)) == (409, "IDEMPOTENCY_LEASE_LOST")
    assert int(lost.headers["retry-after"]) >= 1
    assert (web_shop.placed(item), web_shop.seen.begun[item]) == (1, 2)
    assert web_shop.order(item, path="/leased", wait_first=item).headers["idempotency-replayed"] == "true"


def test_case_40_another_payload_or_path_is_422(web_shop: Shop, item: str) -> None:
    assert web_shop.order(item).status_code == 201
    for answer in (
        web_shop.order(f"{item}-other", item),
        web_shop.order(item, status=202),
        web_shop.client.post(
            "/orders?x=1", json={"item": item, "do": {}}, headers={"X-Account": "acme", "Idempotency-Key": item}
        ),
        web_shop.order(item, path="/orders/7", method="PUT"),
    ):
        assert (answer.status_code, reason(answer)) == (422, "IDEMPOTENCY_KEY_REUSED")
    assert (web_shop.placed(item), web_shop.placed(f"{item}-other")) == (1, 0)


def test_case_40_another_tenant_or_operation_is_another_request(web_shop: Shop, item: str) -> None:
    answers = [
        web_shop.order(item, account="acme", size=1),
        web_shop.order(item, account="acme2", size=2),
        web_shop.order(item, path="/impatient", size=3),
    ]
    assert [answer.status_code for answer in answers] == [201] * 3
    assert len({answer.content for answer in answers}) == 3
    assert web_shop.placed(item) == 3
    assert web_shop.order(item, account="acme2", size=2).content == answers[1].content


def test_case_40_a_key_may_be_one_request_in_the_whole_program(web_shop: Shop, item: str) -> None:
    assert web_shop.order(item, path="/global/a").status_code == 201
    for path in ("/global/b", "/global-too"):
        answer = web_shop.order(item, path=path)
        assert (answer.status_code, reason(answer)) == (422, "IDEMPOTENCY_KEY_REUSED")
    headers = {"X-Account": "acme"}
    assert web_shop.client.get(f"/idempotency/{item}?operation=orders.global", headers=headers).status_code == 200
    assert web_shop.client.get(f"/idempotency/{item}?operation=orders.global-too", headers=headers).status_code == 404
    assert web_shop.placed(item) == 1


def test_case_40_without_a_tenant_nothing_runs(web_shop: Shop, item: str) -> None:
    records = web_shop.records()
    headers = {"Idempotency-Key": item}
    for found in (headers, {**headers, "X-Account": ""}, {**headers, "X-Account": "x" * 201}):
        answer = web_shop.client.post("/orders", json={"item": item}, headers=found)
        assert (answer.status_code, reason(answer)) == (403, "IDEMPOTENCY_SCOPE_MISSING")
    assert (web_shop.seen.begun[item], web_shop.records()) == (0, records)


def test_case_41_an_answer_too_large_is_given_once(web_shop: Shop, item: str) -> None:
    for size in (ANSWER_BYTES_MAX, 40 * ANSWER_BYTES_MAX):
        name = f"{item}-{size}"
        first = web_shop.order(name, size=size)
        assert (first.status_code, len(first.json()["fill"])) == (201, size)
        assert first.headers["idempotency-status"] == "answer-not-stored"
        again = web_shop.order(name, size=size)
        assert (again.status_code, reason(again)) == (409, "IDEMPOTENCY_ANSWER_NOT_STORED")
        assert (web_shop.placed(name), web_shop.seen.begun[name]) == (1, 1)


def test_case_42_what_belongs_to_one_answer_is_not_said_again(web_shop: Shop, item: str) -> None:
    first, again = web_shop.order(item), web_shop.order(item)
    assert "session=secret" in first.headers["set-cookie"]
    assert first.headers["x-request-id"] == "request-1"
    for name in ("set-cookie", "x-request-id", "x-ratelimit-remaining"):
        assert name in first.headers
        assert name not in again.headers
    assert "1970" in first.headers["date"]
    assert "1970" not in again.headers["date"]
    assert again.headers["x-order"] == item


def test_case_42_only_what_is_listed(web_shop: Shop, item: str) -> None:
    web_shop.order(item, path="/listed")
    again = web_shop.order(item, path="/listed")
    assert again.headers["x-order"] == item
    assert "link" not in again.headers


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503, 400, 409, 422])
def test_case_43_what_is_not_final_is_not_kept(web_shop: Shop, item: str, status: int) -> None:
    name = f"{item}-{status}"
    first = web_shop.order(name, status=status)
    assert (first.status_code, first.headers["idempotency-status"]) == (status, "retryable")
    assert web_shop.placed(name) == 0
    again = web_shop.order(name, status=status)
    assert (again.status_code, web_shop.seen.begun[name], web_shop.placed(name)) == (status, 2, 0)
    other = web_shop.order(name, status=201)
    assert (other.status_code, reason(other)) == (422, "IDEMPOTENCY_KEY_REUSED")  # it is compared all the same


def test_case_43_an_error_leaves_nothing(web_shop: Shop, item: str) -> None:
    closing = {"connection": "close"}
    do: dict[str, Any] = {"raise": "no tea"}
    assert web_shop.order(item, headers=closing, **do).status_code == 500
    assert web_shop.placed(item) == 0
    assert web_shop.order(item, headers=closing, **do).status_code == 500
    assert web_shop.seen.begun[item] == 2
