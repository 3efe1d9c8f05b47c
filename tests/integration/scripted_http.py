"""An HTTP server that does its work by key, once, and answers, or fails to, as its script says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DROP = "drop"
"""The connection is reset before anything is done."""
LOSE = "lose"
"""The work is done, and the connection reset before the answer."""
HALF = "half"
"""The work is done, and half of the answer sent."""
ANSWER = "answer"


class ScriptedServer(ThreadingHTTPServer):
    """`script` has a step for each request to come: one of the words above, or a status and headers. Then: ANSWER."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: list[str | tuple[int, dict[str, str]]] = []
        self.keys: list[str | None] = []
        self.bodies: list[bytes] = []
        self.done: list[str | None] = []
        self.status, self.answer = 200, b'{"done": true}'
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone, or a connection that was reset here."""


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))) if not self._chunked() else self._chunks()
        key = self.headers.get("Idempotency-Key")
        with self.server.lock:
            step = self.server.script.pop(0) if self.server.script else ANSWER
            self.server.keys.append(key)
            self.server.bodies.append(body)
            if step in (LOSE, HALF, ANSWER) and (key is None or key not in self.server.done):
                self.server.done.append(key)
        if step in (DROP, LOSE):
            self._reset()
        elif isinstance(step, tuple):
            self._answer(step[0], step[1], b"{}")
        else:
            self._answer(self.server.status, {}, self.server.answer, half=step == HALF)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _chunked(self) -> bool:
        return self.headers.get("Transfer-Encoding", "") == "chunked"

    def _chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _answer(self, status: int, headers: dict[str, str], body: bytes, half: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if half else body)
        if half:
            self.wfile.flush()
            self.close_connection = True

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.connection.close()


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """One that runs."""
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
