"""A web shop behind the idempotency middleware, served by a uvicorn in a thread, for tests over real HTTP.

A request says what its handler shall do: `POST /orders {"item": "tea", "do": {"status": 404}}`. Each run inserts a row
of the item and notes that it has begun.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket

from participant_sdk.asgi import Scope
from participant_sdk.idempotency.asgi import IdempotencyMiddleware
from participant_sdk.idempotency.current import current_run
from participant_sdk.idempotency.first_sent import FirstSent
from participant_sdk.idempotency.http_headers import values
from participant_sdk.idempotency.http_policy import BodyKey, HttpOperation, Streaming
from participant_sdk.idempotency.http_status import IdempotencyStatus
from participant_sdk.idempotency.http_statuses import Statuses
from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency
from participant_sdk.idempotency.machine import TakeOver
from participant_sdk.idempotency.operation import KeyScope, Mode, Operation
from participant_sdk.idempotency.problems import Answering
from participant_sdk.idempotency.quotas import KeyQuota
from participant_sdk.idempotency.runs import AsyncRun, Run

WAIT_S: Final = 60.0
ANSWER_BYTES_MAX: Final = 20_000
BODY_BYTES_MAX: Final = 100_000
INSERT: Final = text("INSERT INTO placed (item) VALUES (:item)")
RACE: Final = text("DO $$ BEGIN RAISE EXCEPTION 'as if' USING ERRCODE = 'serialization_failure'; END $$")
SQL: Final = "CREATE TABLE IF NOT EXISTS placed (item VARCHAR(200) NOT NULL)"


def account(scope: Scope) -> str | None:
    """The tenant: what the header says, as if it had been authenticated."""
    found = values(scope["headers"], b"x-account")
    return found[0].decode("latin-1") if found else None


def operations() -> list[HttpOperation]:
    """What is safe to repeat in the shop."""
    create = Operation(name="orders.create", wait_s=20, answer_bytes_max=ANSWER_BYTES_MAX)
    impatient = Operation(name="orders.impatient", answer_bytes_max=ANSWER_BYTES_MAX)
    leased = Operation(name="orders.leased", mode=Mode.LEASED, lease_s=0.3, heartbeat=False)
    never = Operation(name="orders.never", mode=Mode.LEASED, lease_s=0.3, take_over=TakeOver.NEVER)
    optional = Operation(name="orders.optional")

    def at(path: str, operation: Operation, **settings: Any) -> HttpOperation:
        settings = {"tenant": account, "statuses": Statuses(final=frozenset({404, 410})), **settings}
        return HttpOperation(operation=operation, path=path, body_bytes_max=BODY_BYTES_MAX, **settings)

    return [
        at("/orders", create, spool_bytes_max=200_000),
        at("/orders/{id}", create, method="PUT"),
        at("/impatient", impatient),
        at("/leased", leased),
        at("/never", never),
        at("/global/{name}", Operation(name="orders.global", scope=KeyScope.GLOBAL)),
        at("/global-too", Operation(name="orders.global-too", scope=KeyScope.GLOBAL)),
        at("/beating", Operation(name="orders.beating", mode=Mode.LEASED, lease_s=1)),
        at("/optional", optional, key_required=False),
        at("/in-body", Operation(name="orders.body"), key=BodyKey("/key"), key_required=False),
        at("/live", Operation(name="orders.live"), streaming=Streaming.TOMBSTONE),
        at("/no-streams", Operation(name="orders.whole"), streaming=Streaming.REJECT),
        at("/listed", Operation(name="orders.listed"), headers=("X-Order", "Content-Type")),
        at("/sealed", Operation(name="orders.sealed"), redact=_seal, restore=_unseal),
        at("/dated", Operation(name="orders.dated", ttl_s=3_600), first_sent=FirstSent(skew_s=60)),
        at("/metered", Operation(name="orders.metered"), quota=KeyQuota(keys=3, window_s=86_400)),
        at("/open", Operation(name="orders.open"), fail_open=True),
        at("/open-leased", Operation(name="orders.open-leased", mode=Mode.LEASED), fail_open=True),
        at("/broken-seal", Operation(name="orders.broken"), redact=_cannot),
        at("/current", Operation(name="orders.current"), current=_current),
    ]


def _seal(answer: Any) -> Any:
    return type(answer)(answer.codec, answer.status, answer.headers, answer.body[::-1])


_unseal = _seal


async def _current(scope: Any, answer: Any) -> Any:
    if (b"x-account", b"nobody") in scope["headers"]:
        raise OSError("what it is by now cannot be told")
    return type(answer)(answer.codec, 200, (*answer.headers, (b"set-cookie", b"a=b")), b"it was sent")


def _cannot(answer: Any) -> Any:
    raise OSError("no key to seal with")


class Seen:
    """What the handlers have done, and what they wait for."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.background: Counter[str] = Counter()
        self.errors: list[str] = []
        self._gates: dict[str, threading.Event] = {}
        self._lock = threading.Condition()

    def gate(self, name: str) -> threading.Event:
        """What a handler waits for that is told to `{"wait": name}`."""
        with self._lock:
            return self._gates.setdefault(name, threading.Event())

    def await_begun(self, item: str, count: int = 1) -> None:
        """Until so many runs of an item have begun."""
        with self._lock:
            assert self._lock.wait_for(lambda: self.begun[item] >= count, WAIT_S), "it has not begun"

    def note_begun(self, item: str) -> None:
        """A handler is at work."""
        with self._lock:
            self.begun[item] += 1
            self._lock.notify_all()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what has no event."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.01)


def respond(item: str, do: dict[str, Any], seen: Seen, run: AsyncRun | Run | None) -> Response:
    """What a handler answers."""
    headers = {
        "X-Order": item,
        "X-Request-Id": f"request-{seen.begun[item]}",
        "Date": "Thu, 01 Jan 1970 00:00:00 GMT",
        "X-RateLimit-Remaining": "7",
        **do.get("set", {}),
    }
    if do.get("stream"):

        async def chunks() -> AsyncIterator[bytes]:
            for number in range(do["stream"]):
                yield b"%d;" % number * do.get("size", 1)
                if "wait_between" in do:
                    await asyncio.to_thread(seen.gate(do["wait_between"]).wait, WAIT_S)

        return StreamingResponse(chunks(), do.get("status", 201), headers=headers, media_type="text/plain")
    if "raw" in do:
        answer = Response(do["raw"], do.get("status", 201), headers=headers)
    elif do.get("status") in (204, 304):
        answer = Response(status_code=do["status"], headers=headers)
    else:
        content = {"item": item, "run": seen.begun[item], "fill": "x" * do.get("size", 0)}
        answer = JSONResponse(content, do.get("status", 201), headers=headers)
    answer.set_cookie("session", "secret")
    answer.headers.append("Link", "<a>; rel=next")
    answer.headers.append("Link", "<b>; rel=prev")
    if "background" in do:
        answer.background = BackgroundTask(seen.background.update, [item])
    return answer


def make_app(
    url: str, *, threads: bool = False, seen: Seen | None = None, answering: Answering | None = None
) -> Starlette:
    """The shop on a database; `threads`: with an Idempotency and handlers that are plain functions."""
    seen = seen or Seen()
    found = operations()
    engine: Any = create_engine(url) if threads else create_async_engine(url)
    store: Any = Idempotency(engine) if threads else AsyncIdempotency(engine)

    async def order(request: Request) -> Response:
        item, do = _wanted(await request.body())
        if not item:
            return Response("what item?", 400)
        seen.note_begun(item)
        run = current_run()
        assert run is request.scope.get("state", {}).get("idempotency_run")
        if isinstance(run, AsyncRun):
            session = await run.session()
            await session.execute(INSERT, {"item": item})
            if seen.begun[item] <= do.get("races", 0):
                await session.execute(RACE)
        await asyncio.to_thread(wait, seen, item, do)
        if "raise" in do:
            raise LookupError(do["raise"])
        return respond(item, do, seen, run)

    def order_in_thread(request: Request) -> Response:
        item, do = _wanted(asyncio.run(request.body()))
        if not item:
            return Response("what item?", 400)
        seen.note_begun(item)
        run = current_run()
        if isinstance(run, Run):
            run.session().execute(INSERT, {"item": item})
        wait(seen, item, do)
        if "raise" in do:
            raise LookupError(do["raise"])
        return respond(item, do, seen, run)

    async def echo(request: Request) -> Response:
        return Response(await request.body(), headers={"X-Bytes": str(len(await request.body()))})

    async def socket_echo(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(await websocket.receive_text())
        await websocket.close()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if threads:
            with store:
                yield
            engine.dispose()
        else:
            async with store:
                yield
            await engine.dispose()

    handler: Any = order_in_thread if threads else order
    paths = dict.fromkeys((operation.path, operation.method) for operation in found)
    routes: list[Any] = [Route(path, handler, methods=[method]) for path, method in paths]
    routes += [Route("/echo", echo, methods=["POST"]), WebSocketRoute("/optional", socket_echo)]
    routes.append(Mount("/idempotency", IdempotencyStatus(store, found)))
    app = Starlette(routes=routes, lifespan=lifespan)
    app.add_middleware(IdempotencyMiddleware, store=store, operations=found, answering=answering)
    app.state.seen = seen
    return app


def _wanted(body: bytes) -> tuple[str, dict[str, Any]]:
    """The item and what its handler shall do; no item if the body asks for none."""
    try:
        content = json.loads(body)
        item, do = content["item"], content.get("do", {})
        fits = item.isprintable() and len(item.encode()) <= 200 and isinstance(do, dict)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "", {}
    return (item, do) if fits else ("", {})


def wait(seen: Seen, item: str, do: dict[str, Any]) -> None:
    if "stuck_unless" in do and not Path(do["stuck_unless"]).exists():
        Path(do["stuck_unless"]).touch()
        do = {"wait": "for ever"}
    gate = do.get("wait") or (do.get("wait_first") if seen.begun[item] == 1 else None)
    if gate is not None:
        assert seen.gate(gate).wait(WAIT_S)


def from_environment() -> Starlette:
    """The shop in a process of its own, for `uvicorn --factory`."""
    return make_app(os.environ["SHOP_DATABASE"])
