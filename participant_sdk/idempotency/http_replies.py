"""What an HTTP door itself sends: refusals, stored answers, and the markers of both."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isawaitable
from typing import Final

from participant_sdk.asgi import Scope, Send
from participant_sdk.errors import TricordError
from participant_sdk.idempotency.errors import AnswerNotStored, StoreUnavailable
from participant_sdk.idempotency.http_answers import EXECUTED, NOT_KEPT, REPLAYED
from participant_sdk.idempotency.http_headers import Headers, bodiless, kept, length_header, takes_encoding
from participant_sdk.idempotency.http_policy import HttpOperation
from participant_sdk.idempotency.problems import AnswerEncoded, Answering
from participant_sdk.idempotency.record import Answer, Codec, answer_given
from participant_sdk.idempotency.replay import Replay

_STATUS: Final = b"idempotency-status"
_EXPIRES: Final = b"idempotency-key-expires"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it is sent: with the right Content-Length, and without a body where there is none."""

    status: int
    headers: Headers
    body: bytes


class Replies:
    """To one request. `key` "" while it is not known."""

    def __init__(self, answering: Answering, operation: HttpOperation, method: str, key: str = "") -> None:
        self._answering = answering
        self._operation = operation
        self._method = method
        self._key = key

    def refusal(self, error: TricordError) -> Reply:
        """A problem."""
        url = self._answering.status_url(self._key, self._operation.operation.name) if self._key else None
        problem = self._answering.problem(error, url)
        return self._reply(problem.status, problem.headers, problem.body)

    async def repeat(self, replay: Replay, scope: Scope) -> Reply:
        """A stored answer, or what `current` says in its place.

        Raises AnswerEncoded, AnswerNotStored or StoreUnavailable.
        """
        answer = self._restored(replay.answer)
        if self._operation.current is not None:
            with self._telling():
                found = self._operation.current(scope, answer)
                answer = answer_given("current", await found if isawaitable(found) else found)
        return self._repeat(replay, scope, answer)

    def repeat_at_once(self, replay: Replay, scope: Scope) -> Reply:
        """As `repeat`, where nothing can be awaited."""
        answer = self._restored(replay.answer)
        if self._operation.current is not None:
            with self._telling():
                answer = answer_given("current", self._operation.current(scope, answer))
        return self._repeat(replay, scope, answer)

    def _repeat(self, replay: Replay, scope: Scope, answer: Answer) -> Reply:
        if answer.codec is not Codec.HTTP:
            raise AnswerNotStored("it was done through another door, whose answer cannot be given here")
        if not takes_encoding(scope["headers"], answer.headers):
            raise AnswerEncoded("the stored answer is in an encoding that Accept-Encoding does not name")
        markers = [(self._answering.marker.lower().encode(), b"true"), (_STATUS, REPLAYED.encode())]
        if replay.record.expires_left_ms is not None:
            markers.append((_EXPIRES, b"%d" % max(0, replay.record.expires_left_ms // 1_000)))
        if self._answering.age:
            markers.append((b"age", b"%d" % max(0, replay.age_ms // 1_000)))
        # What an older version of the program has stored is held against today's list.
        headers = kept(answer.headers, self._operation.kept_headers)
        if self._method == "HEAD":
            headers += length_header("HEAD", answer.status, answer.headers, 0)
        return self._reply(answer.status, (*headers, *markers), answer.body)

    def first(self, status: str) -> Headers:
        """The markers of an answer that is given for the first time."""
        markers = first_markers(status)
        if status in (EXECUTED, NOT_KEPT):
            markers += ((_EXPIRES, b"%d" % int(self._operation.operation.ttl_s)),)
        return markers

    def _restored(self, answer: Answer) -> Answer:
        if self._operation.restore is None:
            return answer
        try:
            return answer_given("restore", self._operation.restore(answer))
        except Exception as error:
            _log.exception("%s: the stored answer could not be restored", self._operation.operation.name)
            raise StoreUnavailable("the stored answer could not be read") from error

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            _log.exception("%s: what is said to a repeat could not be told", self._operation.operation.name)
            raise StoreUnavailable("what became of it could not be read") from error

    def _reply(self, status: int, headers: Headers, body: bytes) -> Reply:
        sent = b"" if bodiless(self._method, status) else body
        rest = tuple((name, value) for name, value in headers if name != b"content-length")
        return Reply(status, (*rest, *length_header(self._method, status, headers, len(sent))), sent)


def first_markers(status: str) -> Headers:
    """What says how an answer came about that is given for the first time."""
    return ((_STATUS, status.encode()),)


async def send_reply(reply: Reply, send: Send) -> None:
    """Send it to an ASGI server."""
    await send({"type": "http.response.start", "status": reply.status, "headers": list(reply.headers)})
    await send({"type": "http.response.body", "body": reply.body, "more_body": False})
