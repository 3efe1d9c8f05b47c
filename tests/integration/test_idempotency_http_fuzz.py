"""Fuzzed headers, keys and bodies over a real HTTP connection: no 5xx, and nothing is stored wrongly."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from participant_sdk.idempotency.errors import KeyMalformed
from participant_sdk.idempotency.keys import parse_key
from tests.contract.participant.world import postgres_url, sqlite_url
from tests.integration import wsgi_shop
from tests.integration.served_shop import Shop, opened

RUNS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LINE = st.binary(max_size=300).map(lambda raw: raw.translate(None, b"\r\n\0"))
KEYISH = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=40)
JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["item", "do", "key", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.database), "wsgi"])
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    if request.param == "postgres":
        server = request.getfixturevalue("postgres_server")
        with server.lent_database() as dsn, opened(postgres_url(dsn), postgres_url(dsn)) as found:
            yield found
        return
    folder = tmp_path_factory.mktemp("fuzz")
    if request.param == "wsgi":
        with wsgi_shop.opened(sqlite_url(folder), validated=False) as found:
            yield found
        return
    with opened(sqlite_url(folder, asynchronous=True), sqlite_url(folder)) as found:
        yield found


def asked(shop: Shop, path: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> tuple[int, bytes]:
    """Send bytes as they are; the status and all else of the answer, 0 if the connection was closed without one."""
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: shop", b"Connection: close", b"Content-Length: %d" % len(body)]
    lines += [name + b": " + value for name, value in headers]
    with socket.create_connection(("127.0.0.1", int(shop.address.rpartition(":")[2])), timeout=60) as connection:
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        got = b""
        while part := connection.recv(1 << 16):
            got += part
    return (int(got.split(b" ", 2)[1]), got) if got.startswith(b"HTTP/1.") else (0, got)


def body_of(item: str) -> bytes:
    return json.dumps({"item": item}).encode()


@RUNS
@given(value=LINE | KEYISH.map(lambda text: text.encode("latin-1")))
@example(value=b'"' + b"\\" * 300)
@example(value=b'"a";b=' + b'"' * 200)
@example(value=b"\xff\xfe")
def test_a_key_is_taken_or_refused_and_nothing_else(shop: Shop, value: bytes) -> None:
    if isinstance(shop, wsgi_shop.WsgiShop):
        value = value.translate(None, b"\x0b\x0c\x1c\x1d\x1e\x85")  # at which its server ends a line
    records, begun = shop.records(), shop.seen.begun["fuzzed"]
    status, answer = asked(
        shop, b"/optional", [(b"X-Account", b"acme"), (b"Idempotency-Key", value)], body_of("fuzzed")
    )
    try:
        key = parse_key(value)
    except KeyMalformed:
        assert status == 400, answer  # by the door, or by the server before it
        assert (shop.records(), shop.seen.begun["fuzzed"]) == (records, begun)
    else:
        assert status == 201, answer
        told = shop.client.get("/idempotency/", params={"operation": "orders.optional"}, headers={"X-Account": "acme"})
        assert told.status_code == 404
        again, _ = asked(shop, b"/optional", [(b"X-Account", b"acme"), (b"Idempotency-Key", value)], body_of("other"))
        assert again == 422, key
        assert shop.records() - records in (0, 1)


@RUNS
@given(
    headers=st.lists(
        st.tuples(
            st.sampled_from(
                [b"Idempotency-Key", b"X-Account", b"Accept-Encoding", b"Content-Type", b"X-Other", b"Connection"]
            ),
            LINE,
        ),
        max_size=6,
    )
)
def test_no_headers_are_a_server_error(shop: Shop, headers: list[tuple[bytes, bytes]]) -> None:
    status, answer = asked(shop, b"/orders", headers, body_of("headed"))
    assert status < 500, answer


@RUNS
@given(value=LINE | st.integers().map(lambda number: b"@%d" % number))
@example(value=b"@" + b"9" * 400)
@example(value="@\u0663".encode())
def test_a_first_time_is_taken_or_refused_and_nothing_else(shop: Shop, value: bytes) -> None:
    records, begun = shop.records(), shop.seen.begun["dated"]
    headers = [(b"X-Account", b"acme"), (b"Idempotency-Key", b"dated"), (b"First-Sent", value)]
    status, answer = asked(shop, b"/dated", headers, body_of("dated"))
    assert status in (201, 400, 412), answer
    if status != 201:
        assert (shop.records(), shop.seen.begun["dated"]) == (records, begun)


@RUNS
@given(content=st.binary(max_size=200) | JSONISH.map(lambda value: json.dumps(value).encode()))
@example(content=b'{"key": "' + b"k" * 300 + b'"}')
@example(content=b'{"key": "\\ud800"}')
@example(content=b"[" * 3_000)
@example(content=b'{"key": "k", "key": "l", "item": "tea"}')
@example(content=b'{"key": 1e999}')
def test_no_body_breaks_the_door(shop: Shop, content: bytes) -> None:
    records, placed = shop.records(), sum(shop.seen.begun.values())
    status, answer = asked(shop, b"/in-body", [(b"X-Account", b"acme")], content)
    assert status in (201, 400, 422), answer
    assert (sum(shop.seen.begun.values()) - placed, shop.records() - records) in ((0, 0), (0, 1), (1, 0), (1, 1))


@RUNS
@given(path=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="#"), max_size=60))
@example(path="%00?operation=orders.create")
@example(path="%ff?operation=%ff&operation=")
@example(path="a?" + "x&" * 500)
def test_no_look_up_is_a_server_error(shop: Shop, path: str) -> None:
    lines = f"GET /idempotency/{path} HTTP/1.1\r\nHost: shop\r\nConnection: close\r\nX-Account: acme\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(shop.address.rpartition(":")[2])), timeout=60) as connection:
        connection.sendall(lines.encode())
        got = b""
        while part := connection.recv(1 << 16):
            got += part
    assert int(got.split(b" ", 2)[1]) in (200, 400, 404), got
