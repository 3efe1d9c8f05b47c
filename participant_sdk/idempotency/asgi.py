"""The HTTP door: a middleware for every ASGI framework that runs on asyncio (FastAPI, Starlette, Litestar, …).

    app.add_middleware(IdempotencyMiddleware, store=idempotency, operations=[
        HttpOperation(operation=Operation(name="orders.create"), path="/orders", tenant=account_of),
    ])

It knows ASGI only, none of the frameworks. A request of an operation, with a key, is run once: the handler works in
the run's local transaction (`current_run()`, or `request.state.idempotency_run`), its answer is held back, the work and
the answer are committed, and only then the first byte leaves. A repeat is given the answer. Everything else, requests
without a key where it is optional included, passes through untouched.

Put it inside of what authenticates (a replay skips what is further in) and of what compresses. What a handler does
after its answer, such as background tasks, happens after the commit, and not again on a repeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from participant_sdk.asgi import Application, Message, Receive, Scope, Send
from participant_sdk.errors import IdempotencyKeyReused
from participant_sdk.idempotency.asgi_body import RequestBody, read_body
from participant_sdk.idempotency.errors import IdempotencyError
from participant_sdk.idempotency.faults import lost_a_race
from participant_sdk.idempotency.fingerprints import keyed_request
from participant_sdk.idempotency.http_answers import BYPASSED
from participant_sdk.idempotency.http_gate import Gate
from participant_sdk.idempotency.http_headers import values, without_said
from participant_sdk.idempotency.http_policy import BodyKey, HttpOperation
from participant_sdk.idempotency.http_replies import Replies, first_markers, send_reply
from participant_sdk.idempotency.http_routes import Routes, request_parts
from participant_sdk.idempotency.http_serving import Serving
from participant_sdk.idempotency.http_store import DoorStore, Store
from participant_sdk.idempotency.problems import Answering
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.request import KeyedRequest
from participant_sdk.idempotency.runs import AsyncRun, Run

__all__ = ["IdempotencyMiddleware"]

T = TypeVar("T")

_IN_THREAD_BYTES = 1 << 16
"""A larger body is read and compared in a thread: others go on meanwhile."""

_log = logging.getLogger(__name__)


class IdempotencyMiddleware:
    """Runs the requests of `operations` once. Raises ConfigurationError for what contradicts itself.

    `store`: an AsyncIdempotency, or an Idempotency (through threads, for handlers that are plain functions). It is
    started and closed by your program. `answering`: how refusals and repeats look.
    """

    def __init__(
        self,
        app: Application,
        store: Store,
        operations: Iterable[HttpOperation] | Routes = (),
        *,
        answering: Answering | None = None,
    ) -> None:
        self._app = app
        self._store = DoorStore(store)
        self._routes = operations if isinstance(operations, Routes) else Routes.of(operations)
        self._answering = answering or Answering()
        self._gate = Gate(self._routes.operations)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ran_unprotected(self) -> int:
        """How many requests have run while the store was down, of `fail_open` operations."""
        return self._gate.ran_unprotected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = self._routes.find(scope) if scope["type"] == "http" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        late = isinstance(operation.key, BodyKey)
        replies = Replies(self._answering, operation, scope["method"])
        try:
            key = None if late else operation.early_key(scope)
            tenant = None if key is None else await operation.tenant_of(scope)
            body = None
            if key is not None or late:
                length = values(scope["headers"], b"content-length")
                body = await read_body(receive, length[0] if length else None, operation.body_bytes_max)
                if body is None:
                    return  # the client has gone
                if late:
                    key = await _apart_if_large(body, lambda: operation.late_key(body.spool.whole()))
            if key is None and operation.key_required:
                raise operation.missing()
            if key is not None and tenant is None:
                tenant = await operation.tenant_of(scope)
        except IdempotencyError as error:
            await send_reply(replies.refusal(error), send)
            return
        if key is None or tenant is None or body is None:
            await self._app(scope, receive if body is None else body.receive(receive), send)
            return
        replies = Replies(self._answering, operation, scope["method"], key)
        await self._apart(self._keyed(operation, key, tenant, body, scope, receive, send, replies))

    async def _apart(self, work: Coroutine[Any, Any, None]) -> None:
        """In a task that goes on to its end when the server breaks off the request: its client repeats it anyway."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                task.add_done_callback(_note_failure)
            raise

    async def _keyed(
        self,
        operation: HttpOperation,
        key: str,
        tenant: str,
        body: RequestBody,
        scope: Scope,
        receive: Receive,
        send: Send,
        replies: Replies,
    ) -> None:
        try:
            request = await _request(operation, key, tenant, body, scope)
            for last in (False, True):
                try:
                    begun = await self._begin(operation, request, scope)
                    if isinstance(begun, Replay):
                        await send_reply(await replies.repeat(begun, scope), send)
                        return
                except (IdempotencyError, IdempotencyKeyReused) as error:
                    if operation.may_run_unprotected(error):
                        await self._unprotected(operation, scope, body.receive(receive), send)
                    else:
                        await send_reply(replies.refusal(error), send)
                    return
                serving = Serving(self._app, operation, begun, self._store.ends_of(begun))
                try:
                    await serving.serve(scope, receive, body, send, replies)
                    return
                except Exception as error:
                    if last or serving.sent or not lost_a_race(error):
                        raise
                    _log.info("%s: its work lost a race, and runs once more", operation.operation.name)
        finally:
            body.spool.close()

    async def _begin(self, operation: HttpOperation, request: KeyedRequest, scope: Scope) -> Replay | AsyncRun | Run:
        with self._gate.entry(operation, request.tenant, scope) as token:
            begun = await self._store.begin(operation.operation, request)
            token.spent = not isinstance(begun, Replay)
        return begun

    async def _unprotected(self, operation: HttpOperation, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate.note_unprotected(operation)

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*without_said(message.get("headers", ())), *first_markers(BYPASSED)]
                message = {**message, "headers": headers}
            await send(message)

        state = {**scope.get("state", {}), BYPASSED: True}
        await self._app({**scope, "state": state}, receive, marked)


async def _request(operation: HttpOperation, key: str, tenant: str, body: RequestBody, scope: Scope) -> KeyedRequest:
    parts = request_parts(scope, body.hashed)
    return await _apart_if_large(body, lambda: keyed_request(key, tenant, parts, operation.fingerprinter))


async def _apart_if_large(body: RequestBody, work: Callable[[], T]) -> T:
    return work() if body.spool.size <= _IN_THREAD_BYTES else await asyncio.to_thread(work)


def _note_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a request that was broken off has failed", exc_info=error)
