"""What the middleware must not touch, it does not: the application is given the very same objects."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from participant_sdk.asgi import Message, Receive, Scope, Send
from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.asgi import IdempotencyMiddleware
from participant_sdk.idempotency.http_policy import ONE_TENANT, BodyKey, HttpOperation
from participant_sdk.idempotency.idempotency import AsyncIdempotency
from participant_sdk.idempotency.operation import Operation

SENT: list[Message] = [
    {"type": "http.response.start", "status": 200, "headers": [(b"x", b"1")], "trailers": True},
    {"type": "http.response.body", "body": b"a", "more_body": True},
    {"type": "http.response.pathsend", "path": "/file"},
]


def must_not_be_asked(scope: Scope) -> str:
    raise AssertionError


OPERATIONS = [
    HttpOperation(operation=Operation(name="optional"), path="/optional", tenant=must_not_be_asked, key_required=False),
    HttpOperation(
        operation=Operation(name="body"),
        path="/body",
        tenant=must_not_be_asked,
        key=BodyKey("/key"),
        key_required=False,
    ),
    HttpOperation(operation=Operation(name="required"), path="/required", tenant=must_not_be_asked),
]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncIdempotency]:
    """Never started: whoever asks it fails."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/never.db")
    yield AsyncIdempotency(engine)
    await engine.dispose()


KEY = (b"idempotency-key", b"k")


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "lifespan"},
        {"type": "websocket", "path": "/required", "headers": [KEY]},
        {"type": "http", "method": "POST", "path": "/elsewhere", "headers": [KEY]},
        {"type": "http", "method": "GET", "path": "/required", "headers": [KEY]},
        {"type": "http", "method": "POST", "path": "/required/more", "headers": [KEY]},
        {"type": "http", "method": "POST", "path": "/optional", "headers": [(b"content-length", b"999999999")]},
    ],
    ids=["lifespan", "websocket", "another path", "another method", "a longer path", "no key"],
)
async def test_what_is_no_keyed_request_passes_as_it_is(store: AsyncIdempotency, scope: dict[str, Any]) -> None:
    given: list[Any] = []

    async def app(*arguments: Any) -> None:
        given.extend(arguments)
        for message in SENT:
            await arguments[2](message)

    async def receive() -> Message:
        raise AssertionError("it has read what was not for it")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    before = dict(scope)
    await IdempotencyMiddleware(app, store, OPERATIONS)(scope, receive, send)
    assert given[0] is scope
    assert given[1] is receive
    assert given[2] is send
    assert all(one is other for one, other in zip(sent, SENT, strict=True))  # as they came, not as copies
    assert scope == before


@pytest.mark.parametrize("body", [[b""], [b"{}"], [b'{"item":', b'"tea"}'], [b"\xff" * 70_000, b"not JSON"]])
async def test_a_body_that_was_read_for_its_key_arrives_whole(store: AsyncIdempotency, body: list[bytes]) -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": part, "more_body": part is not body[-1]} for part in body
    ]
    messages.append({"type": "http.disconnect"})
    got: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while not got or got[-1]["type"] != "http.disconnect":
            got.append(await receive())
        for message in SENT:
            await send(message)

    async def receive() -> Message:
        return messages.pop(0)

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "method": "POST", "path": "/body", "headers": []}
    await IdempotencyMiddleware(app, store, OPERATIONS)(scope, receive, send)
    assert b"".join(message.get("body", b"") for message in got) == b"".join(body)
    assert [message["more_body"] for message in got[:-1]] == [True] * (len(got) - 2) + [False]
    assert sent == SENT


async def test_what_is_no_store_is_an_error_at_start() -> None:
    with pytest.raises(ConfigurationError, match="AsyncIdempotency"):
        IdempotencyMiddleware(OPERATIONS[0].tenant, object(), OPERATIONS)  # type: ignore[arg-type]


async def test_case_40_one_tenant_is_said_and_never_guessed() -> None:
    assert await HttpOperation(operation=Operation(name="one"), path="/", tenant=ONE_TENANT).tenant_of({}) == ""
    with pytest.raises(TypeError, match="tenant"):
        HttpOperation(operation=Operation(name="none"), path="/")  # type: ignore[call-arg]


@pytest.mark.parametrize("stranger", ["starlette", "fastapi", "grpc", "coordinator"])
def test_the_door_loads_no_framework(stranger: str) -> None:
    program = "import sys, participant_sdk.idempotency.asgi, participant_sdk.idempotency.http_status; "
    program += f"sys.exit({stranger!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
