"""A TCP proxy before PostgreSQL that can lose an answer: what was sent arrives, what came of it is never heard."""

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from urllib.parse import urlsplit, urlunsplit


class Proxy:
    """Stands before the server that ``dsn`` names; ``self.dsn`` is the same database through the proxy."""

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        user = parts.netloc.rpartition("@")[0]
        self.dsn = urlunsplit(parts._replace(netloc=f"{user}@{host}" if user else host))
        self.lost = 0
        """How many answers were lost."""
        self._error: Exception | None = None
        self._lose: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def lose_next_answer(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Throw the server's next answer away, call ``meanwhile``, then cut that connection."""
        with self._lock:
            self._lose = meanwhile

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _end(self._listener)
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            _end(one)
        for thread in list(self._threads):
            thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            with self._lock:
                self._sockets += [client, server]
            for work in (self._questions, self._answers):
                thread = threading.Thread(target=work, args=(client, server))
                self._threads.append(thread)
                thread.start()

    def _questions(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
        _end(server)

    def _answers(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                with self._lock:
                    lose, self._lose = self._lose, None
                if lose is not None:
                    self.lost += 1
                    try:
                        lose()
                    except Exception as error:  # for the test's thread to raise
                        self._error = error
                    break
                client.sendall(data)
        _end(client)
        _end(server)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
