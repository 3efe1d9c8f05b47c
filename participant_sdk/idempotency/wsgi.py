"""The HTTP door for WSGI: a middleware for every WSGI application (Flask, Django, Bottle, …), on an `Idempotency`.

    app.wsgi_app = WsgiIdempotencyMiddleware(app.wsgi_app, idempotency, operations=[
        HttpOperation(operation=Operation(name="orders.create"), path="/orders", tenant=account_of),
    ])

It takes the operations of the ASGI door and does with them the same, to the byte: see `asgi`. A `tenant` and a key's
function are given a scope as there, which has the request's environ under "wsgi.environ"; none of them can be awaited.
The run is `current_run()`, and `environ["tricord.idempotency_run"]`. What a repeat waits, it waits in its server's
thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from participant_sdk.asgi import Scope
from participant_sdk.errors import ConfigurationError, IdempotencyKeyReused
from participant_sdk.idempotency.errors import IdempotencyError
from participant_sdk.idempotency.faults import lost_a_race
from participant_sdk.idempotency.fingerprints import keyed_request
from participant_sdk.idempotency.http_answers import BYPASSED
from participant_sdk.idempotency.http_gate import Gate
from participant_sdk.idempotency.http_headers import SAID
from participant_sdk.idempotency.http_policy import BodyKey, HttpOperation
from participant_sdk.idempotency.http_replies import Replies, first_markers
from participant_sdk.idempotency.http_routes import Routes, request_parts
from participant_sdk.idempotency.http_sources import is_async
from participant_sdk.idempotency.idempotency import Idempotency
from participant_sdk.idempotency.problems import Answering
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.request import KeyedRequest
from participant_sdk.idempotency.runs import Run
from participant_sdk.idempotency.wsgi_replies import Body, StartResponse, as_text, start_reply
from participant_sdk.idempotency.wsgi_request import Environ, WsgiBody, place_of, read_body, scope_of
from participant_sdk.idempotency.wsgi_serving import Application, WsgiServing

__all__ = ["WsgiIdempotencyMiddleware"]

_log = logging.getLogger(__name__)


class WsgiIdempotencyMiddleware:
    """Runs the requests of `operations` once. Raises ConfigurationError for what contradicts itself.

    `store`: an Idempotency, started and closed by your program. `answering`: how refusals and repeats look.
    """

    def __init__(
        self,
        app: Application,
        store: Idempotency,
        operations: Iterable[HttpOperation] | Routes = (),
        *,
        answering: Answering | None = None,
    ) -> None:
        if not isinstance(store, Idempotency):
            raise ConfigurationError(f"{store!r} is no Idempotency, which a WSGI application needs")
        self._app = app
        self._store = store
        self._routes = wsgi_routes(operations)
        self._answering = answering or Answering()
        self._gate = Gate(self._routes.operations)

    @property
    def ran_unprotected(self) -> int:
        """How many requests have run while the store was down, of `fail_open` operations."""
        return self._gate.ran_unprotected

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        operation = self._routes.find(place_of(environ))
        if operation is None:
            return self._app(environ, start_response)
        late, scope = isinstance(operation.key, BodyKey), scope_of(environ)
        method: str = scope["method"]
        body = None
        try:
            key = None if late else operation.early_key(scope)
            tenant = None if key is None else operation.tenant_at_once(scope)
            if key is not None or late:
                body = read_body(environ, operation.body_bytes_max)
                key = operation.late_key(body.spool.whole()) if late else key
            if key is None and operation.key_required:
                raise operation.missing()
            if key is not None and tenant is None:
                tenant = operation.tenant_at_once(scope)
        except IdempotencyError as error:
            if body is not None:
                body.spool.close()
            return start_reply(Replies(self._answering, operation, method).refusal(error), start_response)
        if key is None or tenant is None or body is None:
            return self._passed_on(environ, body, start_response)
        keyed = _Keyed(operation, scope, environ, body, Replies(self._answering, operation, method, key))
        try:
            request = keyed_request(key, tenant, request_parts(scope, body.hashed), operation.fingerprinter)
            return self._answered(keyed, request, start_response)
        finally:
            if not keyed.kept:
                body.spool.close()

    def _answered(self, keyed: _Keyed, request: KeyedRequest, start_response: StartResponse) -> Iterable[bytes]:
        operation, replies = keyed.operation, keyed.replies
        for last in (False, True):
            try:
                begun = self._begin(operation, request, keyed.scope)
                if isinstance(begun, Replay):
                    return start_reply(replies.repeat_at_once(begun, keyed.scope), start_response)
            except (IdempotencyError, IdempotencyKeyReused) as error:
                if operation.may_run_unprotected(error):
                    keyed.kept = True
                    return self._unprotected(keyed, start_response)
                return start_reply(replies.refusal(error), start_response)
            serving = WsgiServing(self._app, operation, begun, replies, keyed.scope["method"], start_response)
            try:
                answer = serving.serve(keyed.environ, keyed.body)
            except Exception as error:
                if last or serving.sent or not lost_a_race(error):
                    raise
                _log.info("%s: its work lost a race, and runs once more", operation.operation.name)
            else:
                # A stream that has begun may still read its request.
                keyed.kept = True
                return Body(answer, *_closers(answer), keyed.body.spool.close)
        raise AssertionError  # the second try has ended above

    def _begin(self, operation: HttpOperation, request: KeyedRequest, scope: Scope) -> Replay | Run:
        with self._gate.entry(operation, request.tenant, scope) as token:
            begun = self._store.begin(operation.operation, request)
            token.spent = not isinstance(begun, Replay)
        return begun

    def _unprotected(self, keyed: _Keyed, start_response: StartResponse) -> Iterable[bytes]:
        self._gate.note_unprotected(keyed.operation)
        said = SAID.decode()

        def marked(status: str, headers: list[tuple[str, str]], *exc_info: Any) -> Any:
            kept = [line for line in headers if line[0].lower() != said]
            return start_response(status, kept + as_text(first_markers(BYPASSED)), *exc_info)

        return self._passed_on(keyed.environ, keyed.body, marked)

    def _passed_on(self, environ: Environ, body: WsgiBody | None, start_response: StartResponse) -> Iterable[bytes]:
        """To the application, as it came, but for a body that was read."""
        if body is None:
            return self._app(environ, start_response)
        inner = dict(environ)
        body.put_into(inner)
        answer = self._app(inner, start_response)
        return Body(answer, *_closers(answer), body.spool.close)


class _Keyed:
    """A request with a key. `kept`: its body is closed with its answer."""

    def __init__(
        self, operation: HttpOperation, scope: Scope, environ: Environ, body: WsgiBody, replies: Replies
    ) -> None:
        self.operation, self.scope, self.environ, self.body, self.replies = operation, scope, environ, body, replies
        self.kept = False


def _closers(answer: Any) -> list[Any]:
    return [answer.close] if hasattr(answer, "close") else []


def wsgi_routes(operations: Iterable[HttpOperation] | Routes) -> Routes:
    """Them as routes. Raises ConfigurationError for a tenant or `current` that has to be awaited."""
    routes = operations if isinstance(operations, Routes) else Routes.of(operations)
    for operation in routes.operations:
        for name, function in (("tenant", operation.tenant), ("current", operation.current)):
            if is_async(function):
                raise ConfigurationError(f"{operation.operation.name}: {name} is async, which WSGI cannot await")
    return routes
