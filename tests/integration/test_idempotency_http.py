"""Answers over HTTP, and what is asked of requests: a real uvicorn, on every database, with coroutines and threads."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from sqlalchemy import select, update

from participant_sdk.idempotency.keys import key_hash
from participant_sdk.idempotency.tables import DEFAULT
from tests.integration.idempotent_shop import BODY_BYTES_MAX, until
from tests.integration.served_shop import Shop, reason


def test_the_answer_is_said_again_byte_for_byte(web_shop: Shop, item: str) -> None:
    first = web_shop.order(item)
    assert (first.status_code, first.headers["idempotency-status"]) == (201, "executed")
    assert "idempotency-replayed" not in first.headers
    again = web_shop.order(item)
    assert (again.status_code, again.content) == (201, first.content)
    assert (again.headers["idempotency-replayed"], again.headers["idempotency-status"]) == ("true", "replayed")
    assert 86_000 < int(again.headers["idempotency-key-expires"]) <= int(first.headers["idempotency-key-expires"])
    assert again.headers["content-type"] == first.headers["content-type"]
    assert again.headers["content-length"] == str(len(first.content))
    assert again.headers.get_list("link") == first.headers.get_list("link") == ["<a>; rel=next", "<b>; rel=prev"]
    assert (web_shop.placed(item), web_shop.seen.begun[item]) == (1, 1)
    assert web_shop.order(item, f'"{item}"').headers["idempotency-replayed"] == "true"  # the same key in its other form


def test_a_final_no_is_said_again_and_nothing_of_the_work_stays(web_shop: Shop, item: str) -> None:
    said = {"status": 409, "set": {"X-Idempotency": "final"}}
    wanted: list[tuple[str, dict[str, Any]]] = [(item, {"status": 404}), (f"{item}-said", said)]
    for name, do in wanted:
        first, again = web_shop.order(name, **do), web_shop.order(name, **do)
        assert first.status_code == again.status_code == do["status"]
        assert "x-idempotency" not in first.headers
        assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
        assert (web_shop.placed(name), web_shop.seen.begun[name]) == (0, 1)


def test_a_handler_may_ask_for_another_try(web_shop: Shop, item: str) -> None:
    do: dict[str, Any] = {"status": 202, "set": {"X-Idempotency": "retryable"}}
    assert web_shop.order(item, **do).status_code == 202
    assert web_shop.order(item, **do).headers["idempotency-status"] == "retryable"
    assert (web_shop.placed(item), web_shop.seen.begun[item]) == (0, 2)


@pytest.mark.parametrize("status", [204, 303])
def test_answers_without_a_body(web_shop: Shop, item: str, status: int) -> None:
    name = f"{item}-{status}"
    do: dict[str, Any] = {"status": status, "raw": "", "set": {"Location": "/orders/7"}}
    first, again = web_shop.order(name, **do), web_shop.order(name, **do)
    assert first.status_code == again.status_code == status
    assert again.content == b""
    assert again.headers["location"] == "/orders/7"
    assert ("content-length" in again.headers) is (status == 303)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (None, "IDEMPOTENCY_KEY_MISSING"),
        ("", "IDEMPOTENCY_KEY_MALFORMED"),
        ("x" * 256, "IDEMPOTENCY_KEY_MALFORMED"),
        ('"open', "IDEMPOTENCY_KEY_MALFORMED"),
        ("a, b", "IDEMPOTENCY_KEY_MALFORMED"),
    ],
)
def test_a_bad_key_runs_nothing(web_shop: Shop, item: str, key: str | None, why: str) -> None:
    records = web_shop.records()
    headers = {"X-Account": "acme", **({} if key is None else {"Idempotency-Key": key})}
    answer = web_shop.client.post("/orders", json={"item": item}, headers=headers)
    assert (answer.status_code, reason(answer)) == (400, why)
    assert (web_shop.seen.begun[item], web_shop.records()) == (0, records)


def test_two_keys_are_refused(web_shop: Shop, item: str) -> None:
    headers = [("X-Account", "acme"), ("Idempotency-Key", item), ("Idempotency-Key", item)]
    answer = web_shop.client.post("/orders", json={"item": item}, headers=headers)
    assert (answer.status_code, reason(answer)) == (400, "IDEMPOTENCY_KEY_MALFORMED")
    assert web_shop.seen.begun[item] == 0


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_too_large_is_413_and_runs_nothing(web_shop: Shop, item: str, declared: bool) -> None:
    records = web_shop.records()
    content = json.dumps({"item": item, "fill": "x" * BODY_BYTES_MAX}).encode()
    sent = content if declared else iter([content[:50], content[50:]])
    headers = {"X-Account": "acme", "Idempotency-Key": item, "connection": "close"}
    answer = web_shop.client.post("/orders", content=sent, headers=headers)
    assert (answer.status_code, reason(answer)) == (413, "IDEMPOTENCY_REQUEST_TOO_LARGE")
    assert str(BODY_BYTES_MAX) in answer.json()["detail"]
    assert (web_shop.seen.begun[item], web_shop.records()) == (0, records)


def test_a_key_in_the_body(web_shop: Shop, item: str) -> None:
    def send(key: object, **more: object) -> httpx2.Response:
        body = {"key": key, "item": item, **more}
        return web_shop.client.post("/in-body", json=body, headers={"X-Account": "acme"})

    first = send(item)
    assert (first.status_code, first.headers["idempotency-status"]) == (201, "executed")
    assert send(item).headers["idempotency-replayed"] == "true"
    assert send(item, more=1).status_code == 422
    assert (send(7).status_code, reason(send(7))) == (400, "IDEMPOTENCY_KEY_MALFORMED")
    assert web_shop.placed(item) == 1


def test_an_answer_is_sealed_in_the_store_and_open_to_its_caller(web_shop: Shop, item: str) -> None:
    first, again = web_shop.order(item, path="/sealed"), web_shop.order(item, path="/sealed")
    assert first.json()["item"] == item
    assert again.content == first.content
    assert again.headers["idempotency-replayed"] == "true"
    records, under = DEFAULT.records, key_hash("default", "acme", "orders.sealed", item)
    with web_shop.engine.connect() as connection:
        stored = connection.scalar(select(records.c.body).where(records.c.key_hash == under))
    assert bytes(stored or b"") == first.content[::-1]


def test_a_repeat_is_told_what_it_is_by_now(web_shop: Shop, item: str) -> None:
    first, again = web_shop.order(item, path="/current"), web_shop.order(item, path="/current")
    assert (first.status_code, first.json()["item"]) == (201, item)
    assert (again.status_code, again.text, again.headers["idempotency-replayed"]) == (200, "it was sent", "true")
    assert again.headers["content-length"] == "11"
    assert "set-cookie" not in again.headers
    headers = {"X-Account": "nobody"}
    assert web_shop.order(item, path="/current", headers=headers).status_code == 201
    assert web_shop.order(item, path="/current", headers=headers).status_code == 503
    assert (web_shop.placed(item), web_shop.seen.begun[item]) == (2, 2)


def test_an_answer_that_cannot_be_sealed_fails_closed(web_shop: Shop, item: str) -> None:
    closing = {"connection": "close"}
    assert web_shop.order(item, path="/broken-seal", headers=closing).status_code == 500
    assert (web_shop.placed(item), web_shop.seen.begun[item]) == (0, 1)


def test_background_tasks_run_after_the_first_answer_only(web_shop: Shop, item: str) -> None:
    web_shop.order(item, background=True)
    until(lambda: web_shop.seen.background[item] == 1)
    assert web_shop.order(item, background=True).headers["idempotency-replayed"] == "true"
    assert web_shop.seen.background[item] == 1


def test_the_status_of_a_key_is_told_to_its_own_tenant(web_shop: Shop, item: str) -> None:
    def look(key: str, account: str = "acme", operation: str = "orders.create") -> httpx2.Response:
        return web_shop.client.get(f"/idempotency/{key}?operation={operation}", headers={"X-Account": account})

    web_shop.order(item)
    told = look(item).json()
    assert (told["operation"], told["state"], told["attempt"], told["status"]) == ("orders.create", "succeeded", 1, 201)
    assert 86_000 < told["expires_in_s"] <= 86_400
    unknown = [look(item, "acme2"), look(f"{item}-never"), look(item, operation="orders.leased"), look("%00"), look("")]
    assert {answer.status_code for answer in unknown} == {404}
    assert len({answer.content for answer in unknown}) == 1
    assert web_shop.client.get(f"/idempotency/{item}").status_code == 403
    assert web_shop.client.post(f"/idempotency/{item}").status_code == 405
    with web_shop.engine.begin() as connection:
        under = key_hash("default", "acme", "orders.create", item)
        connection.execute(update(DEFAULT.records).where(DEFAULT.records.c.key_hash == under).values(expires_ms=0))
    expired = look(item)
    assert (expired.status_code, expired.content) == (404, unknown[0].content)


def test_the_status_of_a_run_in_progress(web_shop: Shop, item: str) -> None:
    if web_shop.engine.dialect.name == "sqlite":
        pytest.skip("the run's local transaction may bar readers there")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(web_shop.order, item, path="/never", wait=item)
        web_shop.seen.await_begun(item)
        headers = {"X-Account": "acme"}
        told = web_shop.client.get(f"/idempotency/{item}?operation=orders.never", headers=headers).json()
        assert (told["state"], told["attempt"]) == ("processing", 1)
        assert 0 <= told["lease_left_s"] <= 0.3
        web_shop.seen.gate(item).set()
        first.result()
