"""The WSGI door, on a real server over real HTTP: what it shares with the ASGI door holds here too."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from participant_sdk.idempotency.problems import Answering, Codes
from tests.contract.participant.world import postgres_url, sqlite_url
from tests.integration import wsgi_shop
from tests.integration.idempotent_shop import ANSWER_BYTES_MAX, BODY_BYTES_MAX
from tests.integration.served_shop import Shop, reason


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.database)])
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    if request.param == "postgres":
        server = request.getfixturevalue("postgres_server")
        with server.lent_database() as dsn, wsgi_shop.opened(postgres_url(dsn)) as found:
            yield found
        return
    with wsgi_shop.opened(sqlite_url(tmp_path_factory.mktemp("wsgi"))) as found:
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """On SQLite, where the database does not matter; with a server that says that its input ends by itself."""

    def change(environ: dict[str, Any]) -> None:
        if environ.get("HTTP_X_TERMINATED"):
            environ["wsgi.input_terminated"] = True

    url = sqlite_url(tmp_path_factory.mktemp("wsgi"))
    with wsgi_shop.opened(url, answering=Answering(codes=Codes.LOCKED), change=change, validated=False) as found:
        yield found


def test_cases_37_and_39_once_and_the_same_answer(shop: Shop, item: str) -> None:
    first, again = shop.order(item), shop.order(item)
    assert (first.status_code, first.headers["idempotency-status"]) == (201, "executed")
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers.get_list("link") == ["<a>", "<b>"]
    assert (again.headers["x-order"], again.headers["idempotency-replayed"]) == (item, "true")
    assert (first.headers["set-cookie"], "set-cookie" in again.headers) == ("session=secret", False)
    assert (first.headers["idempotency-key-expires"], first.headers["content-length"]) == (
        "86400",
        str(len(first.content)),
    )
    assert (shop.placed(item), shop.seen.begun[item]) == (1, 1)
    other = shop.order("other", item)
    assert (other.status_code, reason(other)) == (422, "IDEMPOTENCY_KEY_REUSED")
    assert shop.order(item, account="globex").headers["idempotency-status"] == "executed"
    told = shop.client.get(f"/idempotency/{item}?operation=orders.create", headers={"X-Account": "acme"})
    assert (told.json()["state"], told.json()["status"]) == ("succeeded", 201)
    assert shop.client.get(f"/idempotency/{item}", headers={"X-Account": "nobody"}).status_code == 404
    assert shop.client.post(f"/idempotency/{item}").status_code == 405


def test_what_fails_leaves_nothing_and_runs_again(shop: Shop, item: str) -> None:
    for do in ({"raise": "no"}, {"status": 503}, {"then": 503}, {"stream": 3, "break_at": 1}):
        name = f"{item}-{'-'.join(do)}"
        answer = shop.order(name, **do)
        assert answer.status_code in (500, 503)
        assert shop.placed(name) == 0
        assert shop.seen.background[name] == ("stream" in do)  # its answer was closed all the same
        assert shop.order(name, **do).headers.get("idempotency-replayed") is None
        assert shop.seen.begun[name] == 2
    final = [shop.order(f"{item}-final", status=404) for _ in "12"]
    assert [found.headers.get("idempotency-replayed") for found in final] == [None, "true"]
    said = [shop.order(f"{item}-said", set={"X-Idempotency": "retryable"}) for _ in "12"]
    assert [found.headers["idempotency-status"] for found in said] == ["retryable", "retryable"]
    assert "x-idempotency" not in said[0].headers
    assert (shop.placed(f"{item}-final"), shop.placed(f"{item}-said")) == (0, 0)


def test_50_at_once_run_once(shop: Shop, item: str) -> None:
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: shop.order(item), range(50)))
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, answers[0].content)}
    assert sum("idempotency-replayed" in answer.headers for answer in answers) == 49
    assert (shop.placed(item), shop.seen.begun[item]) == (1, 1)


@pytest.mark.database
def test_work_that_lost_a_race_runs_once_more(pg_database: str, item: str) -> None:
    with wsgi_shop.opened(postgres_url(pg_database)) as shop:
        assert shop.order(item, races=1).status_code == 201
        assert (shop.placed(item), shop.seen.begun[item]) == (1, 2)


def test_423_while_it_runs(plain: Shop, item: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(plain.order, item, path="/leased", wait=item)
        plain.seen.await_begun(item)
        busy = plain.order(item, path="/leased", wait=item)
        plain.seen.gate(item).set()
        assert first.result().status_code == 201
    assert (busy.status_code, reason(busy), busy.headers["retry-after"]) == (423, "IDEMPOTENCY_IN_PROGRESS", "1")


def test_streams(plain: Shop, item: str) -> None:
    whole = [plain.order(f"{item}-whole", stream=5) for _ in "12"]
    assert [answer.content for answer in whole] == [b"0;1;2;3;4;"] * 2
    written = [plain.order(f"{item}-written", write=2, stream=2) for _ in "12"]
    assert [answer.content for answer in written] == [b"w0;w1;0;1;"] * 2
    large = plain.order(f"{item}-large", stream=3, size=ANSWER_BYTES_MAX * 4, write=1)
    assert large.text == "w0;" + "".join(f"{n};" * ANSWER_BYTES_MAX * 4 for n in range(3))
    assert large.headers["idempotency-status"] == "answer-not-stored"
    again = plain.order(f"{item}-large", stream=3, size=ANSWER_BYTES_MAX * 4, write=1)
    assert (again.status_code, reason(again)) == (409, "IDEMPOTENCY_ANSWER_NOT_STORED")
    for how in ("stream", "write"):
        asked: dict[str, Any] = {how: 3}
        refused = plain.order(f"{item}-no-{how}", path="/no-streams", **asked)
        assert (refused.status_code, reason(refused)) == (500, "IDEMPOTENCY_STREAM_REFUSED")
    assert plain.order(f"{item}-one", path="/no-streams").status_code == 201


@pytest.mark.parametrize("do", [{"stream": 3, "wait_between": "x"}, {"write": 2, "stream": 2, "wait_between": "x"}])
def test_a_stream_that_goes_on_is_durable_before_its_first_byte(plain: Shop, item: str, do: dict[str, Any]) -> None:
    do = {**do, "wait_between": item}
    headers = {"X-Account": "acme", "Idempotency-Key": item}
    with plain.client.stream("POST", "/live", json={"item": item, "do": do}, headers=headers) as live:
        parts = live.iter_text()
        got = next(parts)
        assert plain.placed(item) == 1
        plain.seen.gate(item).set()
        assert got + "".join(parts) == ("w0;w1;0;1;" if "write" in do else "0;1;2;")
    assert reason(plain.order(item, path="/live", **do)) == "IDEMPOTENCY_ANSWER_NOT_STORED"


@pytest.mark.parametrize(
    ("lines", "body", "status"),
    [
        (["Content-Length: 3x"], b"{}", 400),
        (["Content-Length: -1"], b"{}", 400),
        ([f"Content-Length: {BODY_BYTES_MAX + 1}"], b"", 413),
        ([f"Content-Length: 1{'0' * 400}"], b"", 413),
        (["Transfer-Encoding: chunked"], b"", 411),
    ],
)
def test_bodies_that_are_not_what_they_say(plain: Shop, item: str, lines: list[str], body: bytes, status: int) -> None:
    records = plain.records()
    assert sent(plain, item, lines, body)[0] == status
    assert (plain.seen.begun[item], plain.records() - records) == (0, 0)


def test_a_client_that_leaves_before_its_request_is_whole_has_asked_nothing(plain: Shop, item: str) -> None:
    records = plain.records()
    status, answer = sent(plain, item, ["Content-Length: 100"], b'{"item": "half"', half_closed=True)
    assert (status, b"IDEMPOTENCY_REQUEST_TRUNCATED" in answer, plain.records()) == (400, True, records)


def test_a_body_of_unknown_length_is_read_to_its_end(plain: Shop, item: str) -> None:
    body = b'{"item": "%s"}' % item.encode()
    for _ in "12":
        status, answer = sent(plain, item, ["X-Terminated: 1"], body, half_closed=True)
        assert status == 201, answer
    assert (plain.placed(item), b"Idempotency-Replayed: true" in answer) == (1, True)
    large = sent(plain, f"{item}-large", ["X-Terminated: 1"], b" " * (BODY_BYTES_MAX + 1), half_closed=True)
    assert large[0] == 413


def sent(shop: Shop, key: str, lines: list[str], body: bytes, *, half_closed: bool = False) -> tuple[int, bytes]:
    """A request as it stands; its answer."""
    head = [
        "POST /orders HTTP/1.1", "Host: shop", "X-Account: acme", f"Idempotency-Key: {key}", *lines, "Connection: close"
    ]  # fmt: skip
    with socket.create_connection(("127.0.0.1", int(shop.address.rpartition(":")[2])), timeout=60) as connection:
        connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        if half_closed:
            connection.shutdown(socket.SHUT_WR)
        got = b""
        while part := connection.recv(1 << 16):
            got += part
    return int(got.split(b" ", 2)[1]), got


def test_requests_that_are_no_operations_are_left_alone(plain: Shop, item: str) -> None:
    answer = plain.client.post("/echo", content=b"abc", headers={"Idempotency-Key": item})
    assert (answer.content, "idempotency-status" in answer.headers) == (b"abc", False)
    optional = plain.client.post("/optional", json={"item": item})
    assert (optional.status_code, "idempotency-status" in optional.headers, plain.placed(item)) == (201, False, 0)
    late = plain.client.post("/in-body", json={"item": item})
    assert (late.status_code, "idempotency-status" in late.headers) == (201, False)
