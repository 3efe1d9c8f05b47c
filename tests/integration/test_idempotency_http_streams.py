"""Streams, requests without a key, and clients that leave: over real HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from tests.contract.participant.world import postgres_url, sqlite_url
from tests.integration.idempotent_shop import ANSWER_BYTES_MAX, make_app, until
from tests.integration.served_shop import Shop, opened, reason
from tests.postgres import PostgresServer

pytestmark = pytest.mark.database


@pytest.fixture(scope="module")
def shop(postgres_server: PostgresServer) -> Iterator[Shop]:
    with postgres_server.lent_database() as dsn, opened(postgres_url(dsn), postgres_url(dsn)) as found:
        yield found


def test_a_stream_is_stored_whole(shop: Shop, item: str) -> None:
    first, again = shop.order(item, stream=5), shop.order(item, stream=5)
    assert (first.status_code, first.text, first.headers["content-length"]) == (201, "0;1;2;3;4;", "10")
    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
    assert (shop.placed(item), shop.seen.begun[item]) == (1, 1)


@pytest.mark.parametrize("size", [ANSWER_BYTES_MAX, 5 * ANSWER_BYTES_MAX])
def test_case_41_a_stream_too_large_is_given_once(shop: Shop, item: str, size: int) -> None:
    name = f"{item}-{size}"
    first = shop.order(name, stream=3, size=size)
    assert (first.status_code, first.text) == (201, "0;" * size + "1;" * size + "2;" * size)
    assert first.headers["idempotency-status"] == "answer-not-stored"
    again = shop.order(name, stream=3, size=size)
    assert (again.status_code, reason(again)) == (409, "IDEMPOTENCY_ANSWER_NOT_STORED")
    assert (shop.placed(name), shop.seen.begun[name]) == (1, 1)


def test_case_41_a_stream_that_goes_on_is_told_once_it_is_durable_that_it_was_begun(shop: Shop, item: str) -> None:
    body = {"item": item, "do": {"stream": 3, "wait_between": item}}
    headers = {"X-Account": "acme", "Idempotency-Key": item}
    with shop.client.stream("POST", "/live", json=body, headers=headers) as live:
        parts = live.iter_text()
        assert next(parts) == "0;"
        assert shop.placed(item) == 1  # committed, while the stream goes on
        again = shop.order(item, path="/live", stream=3, wait_between=item)
        assert (again.status_code, reason(again)) == (409, "IDEMPOTENCY_ANSWER_NOT_STORED")
        shop.seen.gate(item).set()
        assert "".join(parts) == "1;2;"
    assert shop.seen.begun[item] == 1


def test_a_stream_is_refused_where_none_is_taken(shop: Shop, item: str) -> None:
    answer = shop.order(item, path="/no-streams", stream=3)
    assert (answer.status_code, reason(answer)) == (500, "IDEMPOTENCY_STREAM_REFUSED")
    assert shop.placed(item) == 0
    whole = shop.order(f"{item}-whole", path="/no-streams")
    assert whole.status_code == 201


def test_a_stream_without_a_key_is_not_held_back(shop: Shop, item: str) -> None:
    records = shop.records()
    body = {"item": item, "do": {"stream": 2, "wait_between": item}}
    with shop.client.stream("POST", "/optional", json=body) as live:
        parts = live.iter_text()
        assert next(parts) == "0;"  # the next one is not made yet
        assert not any(name.startswith("idempotency") for name in live.headers)
        shop.seen.gate(item).set()
        assert "".join(parts) == "1;"
    assert shop.records() == records


def test_requests_that_are_no_operations_are_left_alone(shop: Shop, item: str) -> None:
    content = bytes(range(256)) * 1_000
    answer = shop.client.post("/echo", content=content, headers={"Idempotency-Key": item})
    assert answer.content == content
    assert (answer.headers["x-bytes"], shop.client.post("/echo", content=b"").content) == ("256000", b"")
    assert "idempotency-status" not in answer.headers


def test_websockets_are_left_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    app = make_app(sqlite_url(tmp_path_factory.mktemp("web"), asynchronous=True))
    headers = {"Idempotency-Key": "k"}
    with TestClient(app) as client, client.websocket_connect("/optional", headers=headers) as websocket:
        websocket.send_text("as it is")
        assert websocket.receive_text() == "as it is"


def test_a_client_that_leaves_is_answered_when_it_comes_back(shop: Shop, item: str) -> None:
    content = json.dumps({"item": item, "do": {"wait": item}}).encode()
    head = f"POST /orders HTTP/1.1\r\nHost: shop\r\nX-Account: acme\r\nIdempotency-Key: {item}\r\n"
    port = int(shop.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as leaving:
        leaving.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        shop.seen.await_begun(item)
    shop.seen.gate(item).set()
    until(lambda: shop.placed(item) == 1)  # the run has gone on, and is committed
    again = shop.client.post(
        "/orders",
        content=content,
        headers={"X-Account": "acme", "Idempotency-Key": item},
    )
    assert (again.status_code, again.headers["idempotency-replayed"]) == (201, "true")
    assert (shop.placed(item), shop.seen.begun[item]) == (1, 1)


def test_a_client_that_leaves_before_its_request_is_whole_has_asked_nothing(shop: Shop, item: str) -> None:
    records = shop.records()
    head = f"POST /orders HTTP/1.1\r\nHost: shop\r\nX-Account: acme\r\nIdempotency-Key: {item}\r\n"
    port = int(shop.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as leaving:
        leaving.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    assert shop.order(f"{item}-next").status_code == 201
    assert (shop.seen.begun[item], shop.records()) == (0, records + 1)
