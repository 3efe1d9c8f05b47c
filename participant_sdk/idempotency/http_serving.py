"""One run behind an HTTP door: the handler is called, and its answer held back until what it says is durable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from participant_sdk.asgi import Application, Message, Receive, Scope, Send
from participant_sdk.idempotency.asgi_body import RequestBody
from participant_sdk.idempotency.current import bound_run
from participant_sdk.idempotency.errors import InProgress, LeaseLost, StoreUnavailable
from participant_sdk.idempotency.http_answers import AnswerWithheld, decide
from participant_sdk.idempotency.http_headers import length_header, values, without_said
from participant_sdk.idempotency.http_policy import HttpOperation, Streaming
from participant_sdk.idempotency.http_replies import Replies, send_reply
from participant_sdk.idempotency.http_spool import Spool
from participant_sdk.idempotency.http_statuses import Ending
from participant_sdk.idempotency.http_store import DoorRun
from participant_sdk.idempotency.problems import StreamRefused, is_answered
from participant_sdk.idempotency.runs import AsyncRun, Run

STATE: Final = "idempotency_run"
"""The name of the run in `scope["state"]`, which Starlette has as `request.state`."""

_log = logging.getLogger(__name__)


class Serving:
    """A run of `operation` from its beginning to its answer."""

    def __init__(self, app: Application, operation: HttpOperation, run: AsyncRun | Run, ends: DoorRun) -> None:
        self._app = app
        self._operation = operation
        self._run = run
        self._ends = ends
        self._start: Message | None = None
        self._body = Spool()
        self._free = asyncio.Event()
        self._live = False
        self.sent = False
        """Whether anything of an answer has left."""
        self._failure: BaseException | None = None
        self._ending: asyncio.Task[None] | None = None

    async def serve(self, scope: Scope, receive: Receive, body: RequestBody, send: Send, replies: Replies) -> None:
        """Call the application. Its errors are raised when its work is rolled back; the store's become answers."""
        self._receive, self._send, self._replies = receive, send, replies
        self._method = scope["method"]
        self._run.on_lost = self._stopper()
        inner = self._inner_scope(scope)
        try:
            with bound_run(self._run):
                await self._app(inner, body.receive(self._gone), self._take)
            if self._ending is None:
                raise RuntimeError("the application has returned without a whole answer")
        except BaseException as error:
            await self._raised(error)
        finally:
            self._free.set()
            if self.sent:
                scope.update({name: inner[name] for name in inner.keys() - scope.keys()})  # such as the route
            self._body.close()

    def _inner_scope(self, scope: Scope) -> Scope:
        """As the application sees it: with the run, and without ways around `send`."""
        extensions = {name: value for name, value in (scope.get("extensions") or {}).items() if name == "tls"}
        headers = scope["headers"]
        if self._operation.identity:
            headers = [(name, value) for name, value in headers if name.lower() != b"accept-encoding"]
        scope.setdefault("state", {})[STATE] = self._run
        return {**scope, "headers": headers, "extensions": extensions}

    def _stopper(self) -> Any:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def stop() -> None:
            if self._ending is None:
                task.cancel("another run has taken over")

        return lambda: loop.call_soon_threadsafe(stop)

    async def _gone(self) -> Message:
        """What comes after the body: the client's leaving. Not before the answer: the work goes on without him."""
        await self._free.wait()
        return await self._receive() if self._live else {"type": "http.disconnect"}

    async def _raised(self, error: BaseException) -> None:
        """The application has raised: before its answer was whole, nothing of it stays."""
        if self._ending is not None:
            await _shielded(self._ending)  # it may have been cancelled while we were at it
        elif not self._live:
            self._ending = asyncio.ensure_future(self._ends.leave(error))
            await _shielded(self._ending)
            if isinstance(error, LeaseLost | StoreUnavailable | InProgress):
                self._failure = error  # from a use of the run; other errors may be of other keys
            elif self._run.lost and isinstance(error, asyncio.CancelledError):
                task = asyncio.current_task()
                if task is not None:
                    task.uncancel()
                self._failure = LeaseLost("another run of the same request has taken over")
        if self._failure is None:
            raise error
        if not is_answered(self._failure):
            raise self._failure
        if not isinstance(error, AnswerWithheld):
            _log.debug("after its answer was withheld the handler raised", exc_info=error)
        await send_reply(self._replies.refusal(self._failure), self._send)

    async def _take(self, message: Message) -> None:
        """The application's `send`."""
        if self._failure is not None:
            raise AnswerWithheld(str(self._failure))
        if self._live or self._ending is not None:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            await self._take_body(message.get("body", b""), message.get("more_body", False))

    async def _take_body(self, chunk: bytes, more: bool) -> None:
        if self._start is None:
            raise RuntimeError("the application has sent a body before the start of its answer")
        policy = self._operation.streaming
        streams = more and not values(self._start.get("headers", ()), b"content-length")
        await self._body.add_apart(chunk)
        if streams and policy is Streaming.REJECT:
            await self._end(self._reject())
        elif more and (
            (streams and policy is Streaming.TOMBSTONE) or self._body.size > self._operation.spool_bytes_max
        ):
            await self._end(self._finish(whole=False))
            self._live = True
            self._free.set()
            await self._give(more=True)
        elif not more:
            await self._end(self._finish(whole=True))
            await self._give(more=False)
            self._free.set()

    async def _end(self, ending: Coroutine[Any, Any, None]) -> None:
        """Bring the run to its end, whatever happens to the application meanwhile."""
        self._ending = asyncio.ensure_future(ending)
        await asyncio.shield(self._ending)
        if self._failure is not None:
            raise AnswerWithheld(str(self._failure))

    async def _reject(self) -> None:
        self._failure = StreamRefused(f"{self._operation.operation.name} has answered with a stream; it takes none")
        await self._ends.fail_retryable("the answer is a stream")

    async def _finish(self, *, whole: bool) -> None:
        """Make durable what the answer says. Never raises."""
        assert self._start is not None
        status, headers = self._start["status"], self._start.get("headers", ())
        try:
            decision = decide(self._operation, self._method, status, headers, self._body, whole=whole)
            self._told = decision.told
            match decision.ending:
                case Ending.DONE:
                    await self._ends.succeed(decision.answer)
                case Ending.FINAL:
                    await self._ends.fail_final(decision.answer)
                case Ending.AGAIN:
                    await self._ends.fail_retryable(decision.reason)
        except Exception as error:
            self._failure = error
            await self._ends.leave(error)

    async def _give(self, *, more: bool) -> None:
        """Send what was held back."""
        assert self._start is not None
        headers = without_said(self._start.get("headers", ()))
        if not more and not values(headers, b"content-length"):
            headers += length_header(self._method, self._start["status"], headers, self._body.size)
        headers += self._replies.first(self._told)
        self.sent = True
        await self._send({**self._start, "headers": headers})
        sent = 0
        async for chunk in self._body.chunks_apart():
            sent += len(chunk)
            more_body = more or sent < self._body.size
            await self._send({"type": "http.response.body", "body": chunk, "more_body": more_body})
        if not sent:
            await self._send({"type": "http.response.body", "body": b"", "more_body": more})


async def _shielded(task: asyncio.Task[None]) -> None:
    """Wait for the end of a task that nothing may break off, also while cancelled."""
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                return
