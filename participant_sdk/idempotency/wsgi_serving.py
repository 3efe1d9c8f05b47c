"""One run behind the WSGI door: the handler is called, and its answer held back until what it says is durable."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import TracebackType
from typing import Any, Final, TypeAlias
from wsgiref.util import is_hop_by_hop

from participant_sdk.idempotency.current import bound_run
from participant_sdk.idempotency.errors import InProgress, LeaseLost, StoreUnavailable
from participant_sdk.idempotency.http_answers import AnswerWithheld, decide
from participant_sdk.idempotency.http_headers import SAID, Headers, length_header, values
from participant_sdk.idempotency.http_policy import HttpOperation, Streaming
from participant_sdk.idempotency.http_replies import Replies
from participant_sdk.idempotency.http_spool import Spool
from participant_sdk.idempotency.http_statuses import Ending
from participant_sdk.idempotency.problems import StreamRefused, is_answered
from participant_sdk.idempotency.runs import Run
from participant_sdk.idempotency.wsgi_replies import Body, StartResponse, as_text, start_reply
from participant_sdk.idempotency.wsgi_request import Environ, WsgiBody

Application: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]
Write: TypeAlias = Callable[[bytes], Any]
ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None]

RUN: Final = "tricord.idempotency_run"
"""The name of the run in the application's environ."""

_STATUS: Final = re.compile(r"[1-9][0-9]{2}(?: [^\r\n\0]*)?")
_BROKEN: Final = re.compile(r"[\r\n\0]")


class WsgiServing:
    """A run of `operation` from its beginning to its answer. `server`: its `start_response`."""

    def __init__(
        self, app: Application, operation: HttpOperation, run: Run, replies: Replies, method: str, server: StartResponse
    ) -> None:
        self._app = app
        self._operation = operation
        self._run = run
        self._replies = replies
        self._method = method
        self._server = server
        self._status = ""
        self._headers: list[tuple[str, str]] = []
        self._body = Spool()
        self._live = False
        self._live_write: Any = None
        self._ended = False
        self._failure: Exception | None = None
        self._result: Any = None
        self.sent = False
        """Whether anything of an answer has left."""

    def serve(self, environ: Environ, body: WsgiBody) -> Iterable[bytes]:
        """Call the application. Its errors are raised when its work is rolled back; the store's become answers."""
        inner = {**environ, RUN: self._run}
        inner.pop("wsgi.file_wrapper", None)  # a server that knows it would send the file itself
        if self._operation.identity:
            inner.pop("HTTP_ACCEPT_ENCODING", None)
        body.put_into(inner)
        try:
            with bound_run(self._run):
                self._result = self._app(inner, self._start)
                chunks = self._take()
        except BaseException as error:
            return self._raised(error)
        environ.update({name: inner[name] for name in inner.keys() - environ.keys() - {RUN}})  # such as the route
        return Body(chunks, self._close_result, self._body.close)

    def _is_live(self) -> bool:
        """Whether what the application answers goes out at once: its run is over."""
        return self._live

    def _take(self) -> Iterable[bytes]:
        """Read the application's answer; gives what is to be sent of it, when it may be."""
        said_size = hasattr(self._result, "__len__")
        iterator: Iterator[bytes] = iter(self._result)
        if self._is_live():
            return iterator
        for chunk in iterator:
            if self._is_live():  # by what it has written itself
                return chain([chunk], iterator)
            self._add(chunk, streams=not said_size)
            if self._is_live():
                return chain(self._body.chunks(), iterator)
        if not self._is_live():
            self._finish(whole=True)
            self._begin_answer(more=False)
        return self._body.chunks()

    def _start(self, status: str, headers: list[tuple[str, str]], exc_info: ExcInfo | None = None) -> Write:
        """The application's `start_response`."""
        if exc_info is not None and (self._live or self._body.size):
            raise exc_info[1].with_traceback(exc_info[2])
        if exc_info is None and self._status:
            raise AssertionError("start_response was called twice, without exc_info")
        if not isinstance(status, str) or not _STATUS.fullmatch(status):
            raise ValueError(f"{status!r} is no status, such as '200 OK'")
        for name, value in headers:
            if _BROKEN.search(name) or _BROKEN.search(value):
                raise ValueError(f"the header {name!r} has a line break or a NUL")
        # What is of one connection is not an application's to say; some servers would stop at it.
        self._status, self._headers = status, [line for line in headers if not is_hop_by_hop(line[0])]
        return self._write

    def _write(self, chunk: bytes) -> None:
        """What `start_response` gives."""
        if self._is_live():
            self._live_write(chunk)
            return
        self._add(chunk, streams=True)
        if self._is_live():
            for held in self._body.chunks():
                self._live_write(held)
            self._body.close()
            self._body = Spool()

    def _add(self, chunk: Any, *, streams: bool) -> None:
        if self._failure is not None:
            raise AnswerWithheld(str(self._failure))
        if not isinstance(chunk, bytes):
            raise TypeError(f"the application has answered with {type(chunk).__name__}, not with bytes")
        if not chunk:
            return
        if not self._status:
            raise AssertionError("the application has answered before it has called start_response")
        streams = streams and not any(name.lower() == "content-length" for name, _ in self._headers)
        policy = self._operation.streaming
        if streams and policy is Streaming.REJECT and self._body.size:
            self._reject()
        self._body.add(chunk)
        if (streams and policy is Streaming.TOMBSTONE) or self._body.size > self._operation.spool_bytes_max:
            self._finish(whole=False)
            self._begin_answer(more=True)

    def _reject(self) -> None:
        self._ended = True
        self._failure = StreamRefused(f"{self._operation.operation.name} has answered with a stream; it takes none")
        self._run.fail_retryable("the answer is a stream")
        raise AnswerWithheld(str(self._failure))

    def _finish(self, *, whole: bool) -> None:
        """Make durable what the answer says. Raises AnswerWithheld."""
        if self._failure is not None:
            raise AnswerWithheld(str(self._failure))
        if not self._status:
            raise AssertionError("the application has returned without calling start_response")
        try:
            decision = decide(
                self._operation, self._method, int(self._status[:3]), self._lines(), self._body, whole=whole
            )
            self._told = decision.told
            match decision.ending:
                case Ending.DONE:
                    self._run.succeed(decision.answer)
                case Ending.FINAL:
                    self._run.fail_final(decision.answer)
                case Ending.AGAIN:
                    self._run.fail_retryable(decision.reason)
            self._ended = True
        except Exception as error:
            self._failure = error
            raise AnswerWithheld(str(error)) from error

    def _lines(self) -> Headers:
        return tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in self._headers)

    def _begin_answer(self, *, more: bool) -> None:
        """Tell the server the head of what was held back."""
        lines = self._lines()
        extra: Headers = ()
        if not more and not values(lines, b"content-length"):
            extra = length_header(self._method, int(self._status[:3]), lines, self._body.size)
        said = SAID.decode()
        headers = [line for line in self._headers if line[0].lower() != said]
        self.sent = True
        self._live = more
        self._live_write = self._server(self._status, headers + as_text((*extra, *self._replies.first(self._told))))

    def _raised(self, error: BaseException) -> Iterable[bytes]:
        """The application has raised, or its answer was withheld: before that was whole, nothing of it stays."""
        try:
            if not self._ended:
                self._ended = True
                reason = error if self._failure is None else self._failure
                self._run.__exit__(type(reason), reason, reason.__traceback__)
            if self._failure is None and not self.sent and isinstance(error, LeaseLost | StoreUnavailable | InProgress):
                self._failure = error  # from a use of the run; other errors may be of other keys
        finally:
            Body((), self._close_result, self._body.close).close()
        if self._failure is None:
            raise error
        if not is_answered(self._failure):
            raise self._failure
        return start_reply(self._replies.refusal(self._failure), self._server)

    def _close_result(self) -> None:
        close = getattr(self._result, "close", None)
        if close is not None:
            close()
