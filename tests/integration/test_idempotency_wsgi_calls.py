"""The WSGI door as a server calls it: start_response, write, iterables, close, environ; on a real store."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from participant_sdk.asgi import Scope
from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.current import current_run
from participant_sdk.idempotency.guard import RunMisused
from participant_sdk.idempotency.http_policy import ONE_TENANT, HttpOperation, Streaming
from participant_sdk.idempotency.idempotency import Idempotency
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.runs import Run
from participant_sdk.idempotency.wsgi import WsgiIdempotencyMiddleware
from participant_sdk.idempotency.wsgi_request import place_of, scope_of
from tests.contract.participant.world import sqlite_url
from tests.integration.idempotent_shop import INSERT, SQL

Call = Callable[..., tuple[str, list[tuple[str, str]], bytes]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Idempotency]:
    engine = create_engine(sqlite_url(tmp_path))
    with engine.begin() as connection:
        connection.execute(text(SQL))
    with Idempotency(engine) as store:
        yield store
    engine.dispose()


def placed(store: Idempotency) -> int:
    with store.engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM placed")).scalar_one())


def environ(**more: Any) -> dict[str, Any]:
    return {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/orders",
        "QUERY_STRING": "",
        "HTTP_IDEMPOTENCY_KEY": "k",
        "CONTENT_LENGTH": "0",
        "wsgi.input": io.BytesIO(),
        **more,
    }


def operation(**settings: Any) -> HttpOperation:
    made = {"operation": Operation(name="orders"), "path": "/orders", "tenant": ONE_TENANT, **settings}
    return HttpOperation(**made)


def call(app: Any, **more: Any) -> tuple[str, dict[str, str], bytes]:
    """As a server; an answer whose head comes after its body, or twice, is none."""
    heads: list[Any] = []
    written: list[bytes] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        assert not heads
        heads.append((status, {name.lower(): value for name, value in headers}))
        return written.append

    answer = app(environ(**more), start_response)
    try:
        for chunk in answer:
            assert heads
            written.append(chunk)
    finally:
        if hasattr(answer, "close"):
            answer.close()
    return (*heads[0], b"".join(written))


def work() -> Session:
    run = current_run()
    assert isinstance(run, Run)
    session = run.session()
    session.execute(INSERT, {"item": "tea"})
    return session


def test_what_is_no_keyed_request_is_handed_on_as_it_is(store: Idempotency) -> None:
    given: list[Any] = []

    def app(*arguments: Any) -> list[bytes]:
        given.append(arguments)
        return answer

    answer: list[bytes] = []
    door = WsgiIdempotencyMiddleware(app, store, [operation(key_required=False)])
    for untouched in (environ(PATH_INFO="/elsewhere"), environ(REQUEST_METHOD="GET"), environ()):
        if untouched["PATH_INFO"] == "/orders" and untouched["REQUEST_METHOD"] == "POST":
            del untouched["HTTP_IDEMPOTENCY_KEY"]
        before = dict(untouched)
        assert door(untouched, call) is answer
        assert given[-1][0] is untouched
        assert given[-1][1] is call
        assert untouched == before


def test_its_answer_is_closed_after_it_was_sent_and_its_environ_is_its_own(store: Idempotency) -> None:
    events: list[str] = []

    class Answer:
        def __iter__(self) -> Iterator[bytes]:
            work()
            events.append("work")
            yield b"done"

        def close(self) -> None:
            events.append(f"closed with {placed(store)}")

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        assert "HTTP_ACCEPT_ENCODING" not in environ
        assert "wsgi.file_wrapper" not in environ
        assert environ["wsgi.input"].readlines() == [b"a\n", b"b"]
        environ["app.route"] = "/orders"
        start_response("201 Created", [("Connection", "close")])
        return Answer()

    door = WsgiIdempotencyMiddleware(app, store, [operation()])
    asked = {"HTTP_ACCEPT_ENCODING": "gzip", "wsgi.file_wrapper": open, "CONTENT_LENGTH": "3"}
    heads: list[Any] = []
    sent = environ(**asked, **{"wsgi.input": io.BytesIO(b"a\nb and of the next request")})
    answer = door(sent, lambda *head: heads.append(head))
    assert (events, placed(store)) == (["work"], 1)  # durable, and nothing has been asked for yet
    assert b"".join(answer) == b"done"
    answer.close()  # type: ignore[attr-defined]
    assert events == ["work", "closed with 1"]
    assert sent["app.route"] == "/orders"
    assert "tricord.idempotency_run" not in sent
    assert not {"Connection", "connection"} & {name for name, _ in heads[0][1]}
    status, headers, body = call(door, CONTENT_LENGTH="3", **{"wsgi.input": io.BytesIO(b"a\nb")})
    assert (status, headers["idempotency-replayed"], body) == ("201 Created", "true", b"done")


@pytest.mark.parametrize(
    "head",
    [
        ("201", [("X-Split", "a\r\nSet-Cookie: b")]),
        ("201\r\n", []),
        ("created", []),
        ("201", [("X-Snow", "\u2603")]),
        None,
    ],
)
def test_an_answer_that_cannot_be_sent_is_not_stored(store: Idempotency, head: Any) -> None:
    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        work()
        if head is not None:
            start_response(*head)
        return [b"done"]

    door = WsgiIdempotencyMiddleware(app, store, [operation()])
    for _ in "12":
        with pytest.raises((ValueError, AssertionError)):
            call(door)
    assert placed(store) == 0


def test_chunks_that_are_no_bytes_are_refused_before_the_commit(store: Idempotency) -> None:
    def app(environ: dict[str, Any], start_response: Any) -> Any:
        work()
        start_response("201 Created", [])
        return ["text"]

    with pytest.raises(TypeError, match="str"):
        call(WsgiIdempotencyMiddleware(app, store, [operation()]))
    assert placed(store) == 0


def test_a_list_is_no_stream_and_an_error_after_the_first_bytes_ends_the_answer(store: Idempotency) -> None:
    late = False

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        work()
        write = start_response("201 Created", [])
        if not late:
            return [b"a", b"b"]
        write(b"a")
        try:
            raise LookupError("late")
        except LookupError as error:
            return start_response("500 Oh", [], (LookupError, error, error.__traceback__))

    door = WsgiIdempotencyMiddleware(app, store, [operation(streaming=Streaming.REJECT)])
    assert call(door)[2] == b"ab"
    late = True
    with pytest.raises(LookupError, match="late"):
        call(door, HTTP_IDEMPOTENCY_KEY="k2")
    assert placed(store) == 1


def test_the_length_of_head_is_what_its_handler_said(store: Idempotency) -> None:
    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Length", "7")])
        return []

    door = WsgiIdempotencyMiddleware(app, store, [operation(method="HEAD")])
    for _ in "12":
        status, headers, body = call(door, REQUEST_METHOD="HEAD")
        assert (status, headers["content-length"], body) == ("200 OK", "7", b"")


def test_a_session_that_ends_with_the_handler_cannot_carry_the_answer(store: Idempotency) -> None:
    """Frameworks give their own session up when the handler returns, which is before the COMMIT."""

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        with Session(store.engine) as session:
            run = current_run()
            assert isinstance(run, Run)
            run.join(session)
            session.execute(INSERT, {"item": "tea"})
        start_response("201 Created", [])
        return [b"done"]

    door = WsgiIdempotencyMiddleware(app, store, [operation()])
    for _ in "12":
        with pytest.raises(RunMisused):
            call(door)
    assert placed(store) == 0


def test_what_cannot_work_is_an_error_at_start(store: Idempotency) -> None:
    async def later(scope: Scope) -> str:
        return "a"

    app: Any = call
    with pytest.raises(ConfigurationError, match="orders: tenant is async"):
        WsgiIdempotencyMiddleware(app, store, [operation(tenant=later)])
    with pytest.raises(ConfigurationError, match="Idempotency"):
        WsgiIdempotencyMiddleware(app, object(), [operation()])  # type: ignore[arg-type]
    door = WsgiIdempotencyMiddleware(app, store, [operation(tenant=lambda scope: later(scope))])
    assert call(door)[0] == "403 Forbidden"


@pytest.mark.parametrize(
    ("root", "path", "seen"),
    [
        ("", "/a", "/a"),
        ("", "", "/"),
        ("/shop", "/a", "/shop/a"),
        ("", "/caf\xc3\xa9", "/caf\xe9"),
        ("", "/\xff", "/\udcff"),
    ],
)
def test_paths_are_those_of_the_other_door(root: str, path: str, seen: str) -> None:
    found = place_of(environ(SCRIPT_NAME=root, PATH_INFO=path))
    assert (found["path"], found["root_path"]) == (seen, root)


class Wire(io.BytesIO):
    """A connection: what is read past the end of a request would be waited for."""

    asked = 0

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None
        assert size >= 0
        self.asked += size
        return super().read(size)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.none() | st.text(max_size=25) | st.integers(-5, 300).map(str),
    encoding=st.none() | st.sampled_from(["chunked", "identity", "", "gzip, chunked"]),
    terminated=st.booleans(),
    body=st.binary(max_size=300),
    key=st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF), max_size=20),
    path=st.sampled_from(["/orders", "/orders/", "", "/\xff"]),
    query=st.text(st.characters(max_codepoint=0xFF), max_size=10),
)
def test_no_environ_breaks_the_door(
    store: Idempotency, length: str | None, encoding: str | None, terminated: bool, body: bytes, key: str, path: str,
    query: str,
) -> None:  # fmt: skip
    got: list[bytes] = []

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        if environ.get("tricord.idempotency_run") is not None:
            got.append(environ["wsgi.input"].read())
            assert environ["CONTENT_LENGTH"] == str(len(got[-1]))
        start_response("200 OK", [])
        return [b"done"]

    wire = Wire(body)
    more: dict[str, Any] = {"CONTENT_LENGTH": length or ""}
    if encoding is not None:
        more["HTTP_TRANSFER_ENCODING"] = encoding
    door = WsgiIdempotencyMiddleware(app, store, [operation(body_bytes_max=200)])
    with store.engine.begin() as connection:
        connection.execute(text("DELETE FROM tricord_idempotency"))
    status, _, said = call(
        door,
        PATH_INFO=path,
        QUERY_STRING=query,
        HTTP_IDEMPOTENCY_KEY=key,
        **{"wsgi.input": wire, "wsgi.input_terminated": terminated, **more},
    )
    assert status[:3] in ("200", "400", "411", "413"), said
    assert len(got) <= 1
    if encoding and not terminated and path == "/orders":
        assert status[:3] in ("400", "411")
    if not terminated and length is not None and re.fullmatch("[0-9]+", length):
        assert wire.asked <= int(length)
    for whole in got:
        assert status == "200 OK"
        expected = body if terminated and (encoding or not length) else body[: int(length or 0)]
        assert whole == expected
    with store.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM tricord_idempotency")).scalar_one() == len(got)


def test_headers_are_those_of_the_other_door() -> None:
    given = environ(HTTP_X_ACCOUNT="\xff", CONTENT_TYPE="text/plain", REMOTE_ADDR="::1", HTTP_ODD=1)
    scope = scope_of(given)
    assert scope["headers"] == [
        (b"idempotency-key", b"k"),
        (b"x-account", b"\xff"),
        (b"content-type", b"text/plain"),
        (b"content-length", b"0"),
    ]
    assert scope["wsgi.environ"] is given
