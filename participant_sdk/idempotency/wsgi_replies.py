"""What the WSGI door gives to its server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http import HTTPStatus
from typing import Any, TypeAlias

from participant_sdk.idempotency.http_headers import Headers
from participant_sdk.idempotency.http_replies import Reply

StartResponse: TypeAlias = Callable[..., Any]


class Body:
    """An answer's body for a server, which has to close it."""

    def __init__(self, chunks: Iterable[bytes], *closes: Callable[[], Any]) -> None:
        self._chunks = chunks
        self._closes = list(closes)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)

    def close(self) -> None:
        """Each of them, whatever another one raises."""
        while self._closes:
            close = self._closes.pop(0)
            try:
                close()
            except BaseException:
                with suppress(Exception):
                    self.close()
                raise


def as_text(headers: Headers) -> list[tuple[str, str]]:
    """Headers as WSGI has them."""
    return [(name.decode("latin-1").title(), value.decode("latin-1")) for name, value in headers]


def start_reply(reply: Reply, start_response: StartResponse) -> Iterable[bytes]:
    """Send it to a WSGI server."""
    try:
        phrase = HTTPStatus(reply.status).phrase
    except ValueError:
        phrase = "Unknown"
    start_response(f"{reply.status} {phrase}", as_text(reply.headers))
    return [reply.body]
