"""What an HTTP door itself sends: refusals, stored answers, and the markers of both."""

from __future__ import annotations

import logging
from typing import Final

from participant_sdk.asgi import Scope, Send
from participant_sdk.errors import TricordError
from participant_sdk.idempotency.errors import AnswerNotStored, StoreUnavailable
from participant_sdk.idempotency.http_headers import Headers, bodiless, kept, length_header, takes_encoding
from participant_sdk.idempotency.http_policy import HttpOperation
from participant_sdk.idempotency.problems import AnswerEncoded, Answering
from participant_sdk.idempotency.record import Answer, Codec
from participant_sdk.idempotency.replay import Replay

EXECUTED: Final = "executed"
"""It has run now, and its answer is kept."""
REPLAYED: Final = "replayed"
"""It has run before."""
RETRYABLE: Final = "retryable"
"""It has run now and left nothing: a repeat runs again."""
NOT_KEPT: Final = "answer-not-stored"
"""It has run now, and a repeat will be told so, but not given the answer."""

_STATUS: Final = b"idempotency-status"
_EXPIRES: Final = b"idempotency-key-expires"

_log = logging.getLogger(__name__)


class Replies:
    """To one request. `key` "" while it is not known."""

    def __init__(self, answering: Answering, operation: HttpOperation, method: str, key: str = "") -> None:
        self._answering = answering
        self._operation = operation
        self._method = method
        self._key = key

    async def refuse(self, error: TricordError, send: Send) -> None:
        """Answer with a problem."""
        url = self._answering.status_url(self._key, self._operation.operation.name) if self._key else None
        problem = self._answering.problem(error, url)
        await self._send(send, problem.status, problem.headers, problem.body)

    async def replay(self, replay: Replay, scope: Scope, send: Send) -> None:
        """Give a stored answer again. Raises AnswerEncoded, AnswerNotStored or StoreUnavailable before it sends."""
        answer = self._restored(replay.answer)
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
        await self._send(send, answer.status, (*headers, *markers), answer.body)

    def first(self, status: str) -> Headers:
        """The markers of an answer that is given for the first time."""
        markers: Headers = ((_STATUS, status.encode()),)
        if status in (EXECUTED, NOT_KEPT):
            markers += ((_EXPIRES, b"%d" % int(self._operation.operation.ttl_s)),)
        return markers

    def _restored(self, answer: Answer) -> Answer:
        if self._operation.restore is None:
            return answer
        try:
            restored = self._operation.restore(answer)
            if not isinstance(restored, Answer):
                raise TypeError(f"restore has given a {type(restored).__name__}, not an Answer")
        except Exception as error:
            _log.exception("%s: the stored answer could not be restored", self._operation.operation.name)
            raise StoreUnavailable("the stored answer could not be read") from error
        return restored

    async def _send(self, send: Send, status: int, headers: Headers, body: bytes) -> None:
        if bodiless(self._method, status):
            body_sent, length = b"", length_header(self._method, status, headers, 0)
        else:
            body_sent, length = body, length_header(self._method, status, headers, len(body))
        rest = [(name, value) for name, value in headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": status, "headers": [*rest, *length]})
        await send({"type": "http.response.body", "body": body_sent, "more_body": False})
