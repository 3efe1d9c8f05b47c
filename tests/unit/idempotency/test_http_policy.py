"""An HTTP operation's settings: what is wrong is an error at start, and what the rest of them say of a request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.asgi_body import RequestBody, read_body
from participant_sdk.idempotency.errors import InProgress, KeyMalformed, LeaseLost, ScopeMissing, StoreUnavailable
from participant_sdk.idempotency.fingerprints import RAW, JsonBody
from participant_sdk.idempotency.http_policy import ONE_TENANT, BodyKey, CallableKey, HeaderKey, HttpOperation
from participant_sdk.idempotency.http_routes import Routes, route_path
from participant_sdk.idempotency.http_spool import CHUNK_BYTES, MEMORY_BYTES_MAX, Spool
from participant_sdk.idempotency.keys import KeyRules
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.request_parts import BodyHasher

CREATE = Operation(name="orders.create")


def operation(**settings: Any) -> HttpOperation:
    return HttpOperation(**{"operation": CREATE, "path": "/orders", "tenant": ONE_TENANT, **settings})


def scope(method: str = "POST", path: str = "/orders", root: str = "", **headers: str) -> dict[str, Any]:
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": path, "root_path": root, "headers": lines}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"method": "post"}, "method"),
        ({"method": ""}, "method"),
        ({"path": "orders"}, "path"),
        ({"path": "/orders?x=1"}, "path"),
        ({"path": "/orders/{id"}, "path"),
        ({"path": "/orders/{a-b}"}, "path"),
        ({"tenant": "me"}, "tenant"),
        ({"tenant": None}, "tenant"),
        ({"headers": ("set-cookie",)}, "set-cookie"),
        ({"headers": "etag"}, "headers"),
        ({"headers": ("two words",)}, "headers"),
        ({"body_bytes_max": -1}, "body_bytes_max"),
        ({"spool_bytes_max": 1 << 40}, "spool_bytes_max"),
        ({"key": HeaderKey("not a header")}, "key"),
        ({"key": BodyKey("")}, "pointer"),
        ({"key": BodyKey("no/slash")}, "JSON pointer"),
        ({"key": CallableKey("no function")}, "key"),  # type: ignore[arg-type]
        ({"key": "Idempotency-Key"}, "key"),
        ({"operation": "orders.create"}, "operation"),
        ({"statuses": frozenset({404})}, "statuses"),
        ({"streaming": "spool"}, "streaming"),
        ({"key_rules": "uuid"}, "key_rules"),
        ({"fingerprint": "raw"}, "fingerprint"),
        ({"redact": "no"}, "redact"),
        ({"restore": lambda answer: answer}, "restore"),
    ],
)
def test_wrong_settings_are_errors_at_start(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        operation(**settings)


def test_operations_that_contradict_each_other_are_errors_at_start() -> None:
    with pytest.raises(ConfigurationError, match="twice"):
        Routes.of([operation(path="/o/{id}"), operation(path="/o/{other}")])
    with pytest.raises(ConfigurationError, match=r"orders\.create"):
        Routes.of([operation(), operation(path="/o", operation=Operation(name="orders.create", ttl_s=60))])
    assert len(Routes.of([operation(), operation(method="PUT")]).operations) == 2


@pytest.mark.parametrize(
    ("method", "path", "root", "found"),
    [
        ("POST", "/orders", "", "/orders"),
        ("POST", "/api/orders", "/api", "/orders"),
        ("POST", "/api/orders", "", None),
        ("POST", "/apiorders", "/api", None),
        ("PUT", "/orders", "", None),
        ("GET", "/orders", "", None),
        ("POST", "/orders/", "", None),
        ("POST", "/orders/7", "", "/orders/{id}"),
        ("POST", "/orders/7\n", "", "/orders/{id}"),
        ("POST", "/orders/7/8", "", None),
        ("POST", "/files/a/b", "", "/files/{rest:path}"),
        ("POST", "/a.b", "", "/a.b"),
        ("POST", "/aXb", "", None),
    ],
)
def test_a_request_finds_its_operation(method: str, path: str, root: str, found: str | None) -> None:
    paths = ("/orders", "/orders/{id}", "/files/{rest:path}", "/a.b")
    routes = Routes.of([operation(path=path) for path in paths])
    match = routes.find(scope(method, path, root))
    assert (None if match is None else match.path) == found


def test_the_path_is_the_routers() -> None:
    assert route_path(scope(path="/api", root="/api")) == ""
    assert route_path(scope(path="/orders", root="/api")) == "/orders"


def test_a_key_from_a_header() -> None:
    plain = operation()
    assert plain.early_key(scope()) is None
    assert plain.early_key(scope(idempotency_key='"k-1"')) == "k-1"
    other = operation(key=HeaderKey("X-Request-Key"), key_rules=KeyRules(field="X-Request-Key", chars_min=3))
    assert other.early_key(scope(idempotency_key="k")) is None
    with pytest.raises(KeyMalformed, match="X-Request-Key"):
        other.early_key(scope(x_request_key="k"))
    twice = scope(idempotency_key="k")
    twice["headers"] *= 2
    with pytest.raises(KeyMalformed, match="2 times"):
        plain.early_key(twice)


def test_a_key_from_the_body_is_left_out_of_the_fingerprint() -> None:
    found = operation(key=BodyKey("/meta/key"))
    assert found.early_key(scope(idempotency_key="k")) is None
    assert found.late_key(b'{"meta": {"key": "k-1"}}') == "k-1"
    assert isinstance(found.fingerprinter, JsonBody)
    assert found.fingerprinter.exclude == ("/meta/key",)
    for body in (b"", b"{}", b"[]", b"not JSON", b"\xff", b'{"meta": {"key": null}}', b"[" * 100_000):
        assert found.late_key(body) is None
    for body in (
        b'{"meta": {"key": 7}}',
        b'{"meta": {"key": []}}',
        b'{"meta": {"key": ""}}',
        '{"meta": {"key": "é"}}'.encode(),
    ):
        with pytest.raises(KeyMalformed, match="body/meta/key"):
            found.late_key(body)
    assert operation(key=BodyKey("/key"), fingerprint=RAW).fingerprinter is RAW


def test_a_key_from_a_function() -> None:
    found = operation(key=CallableKey(lambda scope: scope.get("key")))
    assert found.early_key(scope()) is None
    assert found.early_key({**scope(), "key": "k"}) == "k"
    with pytest.raises(KeyMalformed, match="key is of type int"):
        found.early_key({**scope(), "key": 7})


async def test_the_tenant() -> None:
    async def slow(scope: Any) -> str:
        await asyncio.sleep(0)
        return "slow"

    assert await operation().tenant_of(scope()) == ""
    assert await operation(tenant=lambda scope: "acme").tenant_of(scope()) == "acme"
    assert await operation(tenant=slow).tenant_of(scope()) == "slow"


@pytest.mark.parametrize("given", ["", None, 7, b"acme", "a\0b", "x" * 201, "é" * 101, "\ud800", KeyError("user")])
async def test_case_40_a_tenant_that_cannot_be_told_fails_closed(given: object) -> None:
    def tenant(scope: Any) -> Any:
        if isinstance(given, Exception):
            raise given
        return given

    with pytest.raises(ScopeMissing):
        await operation(tenant=tenant).tenant_of(scope())


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, MEMORY_BYTES_MAX, MEMORY_BYTES_MAX + 1, 3 * MEMORY_BYTES_MAX + 7])
async def test_a_spool_gives_back_what_it_was_given(size: int) -> None:
    content = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    spool = Spool()
    hasher = BodyHasher()
    for at in range(0, size, 50_000):
        await spool.add_apart(content[at : at + 50_000])
        hasher.add(content[at : at + 50_000])
    for _ in range(2):
        assert b"".join([chunk async for chunk in spool.chunks_apart()]) == content
        assert b"".join(spool.chunks()) == content == spool.reader().read()
        assert spool.whole() == content
    receive = RequestBody(spool, hasher.done(spool.whole)).receive(gone)
    message: Any = {"more_body": True, "body": b""}
    got = b""
    while message["more_body"]:
        message = await receive()
        got += message["body"]
    assert got == content
    assert await receive() == {"type": "http.disconnect"}
    spool.close()


async def gone() -> dict[str, Any]:
    return {"type": "http.disconnect"}


async def test_a_client_that_leaves_while_it_sends_is_no_request() -> None:
    messages = [{"type": "http.request", "body": b"half", "more_body": True}, await gone()]

    async def receive() -> Any:
        return messages.pop(0)

    assert await read_body(receive, None, 100) is None


def test_only_what_fails_open_runs_unprotected_and_only_if_nothing_of_it_can_be_stored() -> None:
    away = StoreUnavailable("away", down=True)
    assert operation(fail_open=True).may_run_unprotected(away)
    assert not operation().may_run_unprotected(away)
    for error in (StoreUnavailable("in doubt"), InProgress(1), LeaseLost("lost")):
        assert not operation(fail_open=True).may_run_unprotected(error)
