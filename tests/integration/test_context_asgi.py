"""The xid through web programs: the middleware by itself, and FastAPI behind a real uvicorn."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest
import uvicorn
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException, WebSocket
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from participant_sdk.asgi import Message, Receive, Scope, Send, XidMiddleware
from participant_sdk.context import bound, current_branch_id, current_xid, note_tried
from participant_sdk.context_headers import outgoing_headers
from tests.postgres import free_port

A, B = "a" * 32, "b" * 32
WAIT_S = 30.0
OF_A = {"tricord-xid": A, "tricord-branch-id": "7"}
TOLD_A, NONE = f"{A}/7", "None/None"

MALFORMED = [
    ([("tricord-xid", "A" * 32)], "tricord-xid is not 32 lowercase hexadecimal characters"),
    ([("tricord-xid", A), ("tricord-xid", A)], "tricord-xid is there more than once"),
    (
        [("tricord-xid", A), ("tricord-branch-id", "0")],
        "tricord-branch-id is not a whole number from 1 to 4294967295",
    ),
    ([("tricord-branch-id", "1")], "tricord-branch-id is there without tricord-xid"),
]


def told() -> str:
    """What the running code sees."""
    return f"{current_xid()}/{current_branch_id()}"


@pytest.mark.parametrize(
    ("status", "told"),
    [(200, [(b"tricord-tried", b"3,12")]), (302, [(b"tricord-tried", b"3,12")]), (404, []), (500, [])],
)
async def test_b3_a_response_names_what_was_tried_if_all_went_well(
    status: int, told: list[tuple[bytes, bytes]]
) -> None:
    own = [(b"x-own", b"1")]

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        note_tried(A, [12, 3])
        note_tried(B, [99])
        await send({"type": "http.response.start", "status": status, "headers": own})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        raise AssertionError

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    for headers, expected in (([(b"tricord-xid", A.encode())], told), ([], [])):
        sent.clear()
        await XidMiddleware(application)({"type": "http", "headers": headers}, receive, send)
        assert sent[0] == {"type": "http.response.start", "status": status, "headers": [*own, *expected]}
        assert sent[1] == {"type": "http.response.body", "body": b""}


class TestMiddleware:
    """XidMiddleware around an application of a few lines."""

    def setup_method(self) -> None:
        self.seen: list[str] = []
        self.messages: list[Message] = []
        self.error: Exception | None = None

    async def application(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append(told())
        if self.error is not None:
            raise self.error
        await asyncio.sleep(0)
        self.seen.append(told())

    async def ask(self, kind: str, *headers: tuple[str, str]) -> None:
        async def receive() -> Message:
            self.messages.append({"type": f"{kind}.connect"})
            return self.messages[-1]

        async def send(message: Message) -> None:
            self.messages.append(message)

        scope: Scope = {"type": kind, "headers": [(key.encode(), value.encode()) for key, value in headers]}
        await XidMiddleware(self.application)(scope, receive, send)

    @pytest.mark.parametrize("kind", ["http", "websocket"])
    async def test_it_holds_and_is_gone(self, kind: str) -> None:
        await self.ask(kind, ("accept", "*/*"), *OF_A.items())
        assert told() == NONE
        await self.ask(kind, ("accept", "*/*"))
        assert self.seen == [TOLD_A, TOLD_A, NONE, NONE]

    @pytest.mark.parametrize("kind", ["http", "websocket"])
    async def test_case_15_an_error_leaves_nothing_to_the_next_request(self, kind: str) -> None:
        self.error = LookupError()
        with pytest.raises(LookupError):
            await self.ask(kind, *OF_A.items())
        assert told() == NONE
        with pytest.raises(LookupError):
            await self.ask(kind)
        assert self.seen == [TOLD_A, NONE]

    @pytest.mark.parametrize("kind", ["http", "websocket"])
    async def test_case_15_a_cancelled_request_leaves_nothing_to_the_next(self, kind: str) -> None:
        async def connection() -> None:  # one task serves one connection, request after request
            try:
                async with asyncio.timeout(0):
                    await self.ask(kind, *OF_A.items())
            except TimeoutError:
                await self.ask(kind)

        await asyncio.create_task(connection())
        assert self.seen == [TOLD_A, NONE, NONE]

    @pytest.mark.parametrize("kind", ["http", "websocket"])
    async def test_the_callers_own_is_not_seen(self, kind: str) -> None:
        with bound(B, 1):
            await self.ask(kind)
            assert told() == f"{B}/1"
        assert self.seen == [NONE, NONE]

    async def test_the_life_of_the_program_is_left_alone(self) -> None:
        with bound(B, 1):
            await self.ask("lifespan", ("tricord-xid", "malformed"))
        assert self.seen == [f"{B}/1", f"{B}/1"]
        assert self.messages == []

    @pytest.mark.parametrize(("headers", "detail"), MALFORMED)
    async def test_a_malformed_request_is_refused(self, headers: list[tuple[str, str]], detail: str) -> None:
        await self.ask("http", *headers)
        start, body = self.messages
        assert (start["type"], start["status"]) == ("http.response.start", 400)
        assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
        assert json.loads(body["body"])["detail"] == detail
        assert self.seen == []

    @pytest.mark.parametrize(("headers", "detail"), MALFORMED)
    async def test_a_malformed_websocket_is_closed(self, headers: list[tuple[str, str]], detail: str) -> None:
        await self.ask("websocket", *headers)
        refusal = {"type": "websocket.close", "code": 1008, "reason": detail}
        assert self.messages == [{"type": "websocket.connect"}, refusal]  # never an answer before the question
        assert len(detail) <= 123  # what fits into the frame
        assert self.seen == []

    async def test_requests_at_once_see_their_own(self) -> None:
        count = 40
        together = asyncio.Barrier(count)

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            for _ in range(3):
                await together.wait()
                assert told() == f"{scope['number']:032x}/{scope['number']}"

        async def request(number: int) -> None:
            headers = [(b"tricord-xid", b"%032x" % number), (b"tricord-branch-id", b"%d" % number)]
            scope = {"type": "http", "number": number, "headers": headers}
            await XidMiddleware(application)(scope, unused, unused)

        await asyncio.gather(*map(request, range(1, count + 1)))


async def unused(*_: object) -> Any:
    raise AssertionError


def make_app() -> FastAPI:
    """A web service that tells what its parts see."""
    app = FastAPI()
    app.add_middleware(XidMiddleware)
    app.state.background = []
    app.state.done = threading.Event()

    async def dependency() -> AsyncIterator[str]:
        yield told()

    @app.get("/task")
    async def task(background: BackgroundTasks, depended: str = Depends(dependency)) -> list[str]:
        background.add_task(lambda: (app.state.background.append(told()), app.state.done.set()))
        return [depended, told(), await asyncio.create_task(asyncio.to_thread(told))]

    @app.get("/thread")
    def thread() -> list[str]:
        return [told()]

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def lines() -> AsyncIterator[str]:
            for _ in range(3):
                yield told() + "\n"
                await asyncio.sleep(0)

        return StreamingResponse(lines())

    @app.get("/stream-in-threads")
    def stream_in_threads() -> StreamingResponse:
        return StreamingResponse(told() + "\n" for _ in range(3))

    @app.get("/refused")
    async def refused() -> None:
        raise HTTPException(409, told())

    @app.get("/error")
    async def error() -> None:
        raise LookupError(told())

    @app.get("/error-in-thread")
    def error_in_thread() -> None:
        raise LookupError(told())

    @app.get("/onward/{port}")
    async def onward(port: int) -> list[str]:
        async with httpx2.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"http://127.0.0.1:{port}/thread", headers=outgoing_headers(), timeout=WAIT_S)
        return list(answer.json())

    @app.websocket("/ws")
    async def ws(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(told())
        await websocket.close()

    return app


class Server(uvicorn.Server):
    """A uvicorn in a thread, on a free port."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(uvicorn.Config(app, log_config=None, lifespan="on", timeout_keep_alive=600))
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say when it listens."""
        await super().startup(sockets)
        self.ready.set()


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return make_app()


@pytest.fixture(scope="module")
def web(app: FastAPI) -> Iterator[httpx2.Client]:
    """A client with one connection to the service: all requests pass through one task after another."""
    with socket.create_server(("127.0.0.1", free_port())) as listening:
        server = Server(app)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            assert server.ready.wait(WAIT_S)
            limits = httpx2.Limits(max_connections=1)
            address = f"http://127.0.0.1:{listening.getsockname()[1]}"
            with httpx2.Client(base_url=address, timeout=WAIT_S, limits=limits, trust_env=False) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(WAIT_S)


class TestServer:
    """Over HTTP."""

    @pytest.mark.parametrize(("path", "parts"), [("/task", 3), ("/thread", 1)])
    def test_every_part_of_a_request_sees_it(self, web: httpx2.Client, app: FastAPI, path: str, parts: int) -> None:
        app.state.done.clear()
        assert web.get(path, headers=OF_A).json() == [TOLD_A] * parts
        if path == "/task":
            assert app.state.done.wait(WAIT_S)
            assert app.state.background.pop() == TOLD_A
        assert web.get(path).json() == [NONE] * parts

    @pytest.mark.parametrize("path", ["/stream", "/stream-in-threads"])
    def test_it_holds_to_the_end_of_a_stream(self, web: httpx2.Client, path: str) -> None:
        assert web.get(path, headers=OF_A).text.split() == [TOLD_A] * 3
        assert web.get(path).text.split() == [NONE] * 3

    @pytest.mark.parametrize(("path", "status"), [("/refused", 409), ("/error", 500), ("/error-in-thread", 500)])
    def test_case_15_an_error_leaves_nothing_to_the_next_request(
        self, web: httpx2.Client, path: str, status: int
    ) -> None:
        # After an error that nothing caught uvicorn closes the connection: the next request must not race with that.
        closing = {"connection": "close"} if status == 500 else {}
        assert web.get(path, headers={**OF_A, **closing}).status_code == status
        assert web.get("/task").json() == [NONE] * 3
        assert web.get("/thread").json() == [NONE]

    def test_it_goes_on_to_the_next_service(self, web: httpx2.Client) -> None:
        assert web.get(f"/onward/{web.base_url.port}", headers=OF_A).json() == [TOLD_A]
        assert web.get(f"/onward/{web.base_url.port}").json() == [NONE]

    @pytest.mark.parametrize(("headers", "detail"), MALFORMED)
    def test_a_malformed_request_is_refused(
        self, web: httpx2.Client, headers: list[tuple[str, str]], detail: str
    ) -> None:
        answer = web.get("/task", headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
        assert answer.json() == {"type": "about:blank", "title": "Bad Request", "status": 400, "detail": detail}

    def test_websockets(self, app: FastAPI) -> None:
        with TestClient(app) as client:
            with client.websocket_connect("/ws", headers=OF_A) as websocket:
                assert websocket.receive_text() == TOLD_A
            malformed = {"tricord-xid": "x"}
            with pytest.raises(WebSocketDisconnect) as caught, client.websocket_connect("/ws", headers=malformed):
                pytest.fail("it was accepted")
        assert (caught.value.code, caught.value.reason) == (1008, MALFORMED[0][1])
