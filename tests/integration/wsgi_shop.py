"""The idempotent shop as a WSGI application, served by the standard library's server, for tests over real HTTP.

It has the operations of the ASGI shop and takes the same requests; what only WSGI has is said by more of `do`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.validate import validator

from sqlalchemy import create_engine, text

from participant_sdk.idempotency.current import current_run
from participant_sdk.idempotency.http_policy import HttpOperation
from participant_sdk.idempotency.http_sources import is_async
from participant_sdk.idempotency.idempotency import Idempotency
from participant_sdk.idempotency.problems import Answering
from participant_sdk.idempotency.runs import Run
from participant_sdk.idempotency.wsgi import WsgiIdempotencyMiddleware
from participant_sdk.idempotency.wsgi_status import WsgiIdempotencyStatus
from tests.integration.idempotent_shop import INSERT, RACE, SQL, WAIT_S, Seen, operations, wait
from tests.integration.served_shop import Shop

Environ = dict[str, Any]
STATUSES: Final = {201: "201 Created", 204: "204 No Content", 404: "404 Not Found", 503: "503 Service Unavailable"}


class Server(ThreadingMixIn, WSGIServer):
    """A thread for each request."""

    daemon_threads = True
    request_queue_size = 64


class Quiet(WSGIRequestHandler):
    """Logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """See BaseHTTPRequestHandler."""

    def get_stderr(self) -> Any:
        """See WSGIRequestHandler."""
        return _Nowhere()


class _Nowhere:
    def write(self, text: str) -> None:
        """Errors that tests bring about."""

    writelines = write

    def flush(self) -> None:
        """Nothing is held."""


class Answer:
    """An iterable of no known size, that wants to be closed."""

    def __init__(self, chunks: Iterable[bytes], closed: Callable[[], None]) -> None:
        self._chunks = iter(chunks)
        self.close = closed

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks


class Handlers:
    """The shop's application inside of the door."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.environs: list[Environ] = []

    def __call__(self, environ: Environ, start_response: Any) -> Iterable[bytes]:
        self.environs.append(environ)
        if environ["PATH_INFO"] == "/echo":
            content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("200 OK", [("Content-Type", "text/plain"), ("X-Bytes", str(len(content)))])
            return [content]
        try:
            wanted = json.loads(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
            item, do = wanted["item"], wanted.get("do", {})
            if not (item.isprintable() and len(item.encode()) <= 200 and isinstance(do, dict)):
                raise ValueError(item)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            start_response("400 Bad Request", [("Content-Type", "text/plain")])
            return [b"what item?"]
        return self._order(item, do, environ, start_response)

    def _order(self, item: str, do: dict[str, Any], environ: Environ, start_response: Any) -> Iterable[bytes]:
        self.seen.note_begun(item)
        run = current_run()
        assert run is environ.get("tricord.idempotency_run")
        if isinstance(run, Run):
            run.session().execute(INSERT, {"item": item})
            if self.seen.begun[item] <= do.get("races", 0):
                run.session().execute(RACE)
        wait(self.seen, item, do)
        if "raise" in do:
            raise LookupError(do["raise"])
        status = STATUSES[do.get("status", 201)]
        headers = [] if do.get("status") == 204 else [("Content-Type", "text/plain")]
        headers += [("X-Order", item), ("Link", "<a>"), ("Link", "<b>")]
        headers += [("Set-Cookie", "session=secret"), *do.get("set", {}).items()]
        write = start_response(status, headers)
        if "then" in do:  # an error that is noticed when the answer has been begun
            try:
                raise LookupError("too late")
            except LookupError as error:
                start_response(STATUSES[do["then"]], headers, (LookupError, error, error.__traceback__))
        for number in range(do.get("write", 0)):
            write(b"w%d;" % number)
        if "stream" in do:
            return Answer(self._chunks(item, do), lambda: self.seen.background.update([item]))
        content = json.dumps({"item": item, "run": self.seen.begun[item], "fill": "x" * do.get("size", 0)})
        return [] if do.get("status") == 204 or environ["REQUEST_METHOD"] == "HEAD" else [content.encode()]

    def _chunks(self, item: str, do: dict[str, Any]) -> Iterator[bytes]:
        for number in range(do["stream"]):
            if number == do.get("break_at"):
                raise LookupError("the stream breaks")
            yield b"%d;" % number * do.get("size", 1)
            if "wait_between" in do:
                assert self.seen.gate(do["wait_between"]).wait(WAIT_S)


class WsgiShop(Shop):
    """With its door, and the environs that its handlers were given."""

    door: WsgiIdempotencyMiddleware
    environs: list[Environ]


@contextmanager
def opened(
    url: str,
    found: list[HttpOperation] | None = None,
    *,
    answering: Answering | None = None,
    change: Callable[[Environ], None] | None = None,
    validated: bool = True,
) -> Iterator[WsgiShop]:
    """A shop on an empty database. `change`: what its server does with each request's environ. `validated`: whether
    the door's own answers are checked by the standard library's validator, which takes no wrong requests.
    """
    engine = create_engine(url)
    seen = Seen()
    found = [one for one in operations() if not is_async(one.current)] if found is None else found
    handlers = Handlers(seen)
    with engine.begin() as connection:
        connection.execute(text(SQL))
    with Idempotency(engine) as store:
        door = WsgiIdempotencyMiddleware(validator(handlers), store, found, answering=answering)
        status = WsgiIdempotencyStatus(store, found)

        def app(environ: Environ, start_response: Any) -> Iterable[bytes]:
            if change is not None:
                change(environ)
            if environ["PATH_INFO"].startswith("/idempotency/"):
                inner = {**environ, "SCRIPT_NAME": "/idempotency", "PATH_INFO": environ["PATH_INFO"][12:]}
                return status(inner, start_response)
            return door(environ, start_response)

        with make_server("127.0.0.1", 0, validator(app) if validated else app, Server, Quiet) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                shop = WsgiShop(f"http://127.0.0.1:{server.server_port}", engine, seen)
                shop.door, shop.environs = door, handlers.environs
                with shop.client:
                    yield shop
            finally:
                server.shutdown()
                thread.join(WAIT_S)
    engine.dispose()
