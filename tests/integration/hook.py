"""What alerts are sent to: a small HTTP server that a test scripts. It notes what arrives."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self

from tests.coordinators import CALL_S


class Arrival(NamedTuple):
    """One request."""

    path: str
    headers: dict[str, str]
    """By name in small letters."""
    document: dict[str, Any]


class Hook:
    """Answers its n-th request, from 1, with ``answer(n)``'s status; ``None``: not before the test ends."""

    def __init__(self, answer: Callable[[int], int | None] = lambda n: 204, *, location: str = "") -> None:
        self.answer = answer
        self.location = location
        self._arrivals: list[Arrival] = []
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hook = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def arrivals(self) -> list[Arrival]:
        """All requests so far."""
        with self._changed:
            return list(self._arrivals)

    def wait_for(self, count: int) -> list[Arrival]:
        """The requests, as soon as there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._arrivals) >= count, CALL_S), self._arrivals
            return list(self._arrivals)

    def take(self, arrival: Arrival) -> int | None:
        """Note a request; its answer's status."""
        with self._changed:
            self._arrivals.append(arrival)
            self._changed.notify_all()
            number = len(self._arrivals)
        status = self.answer(number)
        if status is None:
            self._ended.wait(CALL_S)
        return status


class _Server(ThreadingHTTPServer):
    hook: Hook


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.server.hook.take(
            Arrival(self.path, {k.lower(): v for k, v in self.headers.items()}, json.loads(body))
        )
        if status is None:
            return
        self.send_response(status)
        if self.server.hook.location:
            self.send_header("Location", self.server.hook.location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Tests look at what arrived."""
