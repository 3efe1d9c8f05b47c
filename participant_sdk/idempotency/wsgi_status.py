"""The status look-up over HTTP (see http_status) as a WSGI application, to be mounted at a path.

DispatcherMiddleware(app, {"/idempotency": WsgiIdempotencyStatus(idempotency, operations)})     # Werkzeug's
"""

from __future__ import annotations

from collections.abc import Iterable

from participant_sdk.asgi import Scope
from participant_sdk.errors import ConfigurationError, TricordError
from participant_sdk.idempotency.http_policy import HttpOperation
from participant_sdk.idempotency.http_routes import Routes
from participant_sdk.idempotency.http_status import asked_for, by_name, is_told, refused_method, told, untold
from participant_sdk.idempotency.idempotency import Idempotency
from participant_sdk.idempotency.problems import Answering, KeyUnknown
from participant_sdk.idempotency.record import Record
from participant_sdk.idempotency.wsgi import wsgi_routes
from participant_sdk.idempotency.wsgi_replies import StartResponse, start_reply
from participant_sdk.idempotency.wsgi_request import Environ, scope_of

__all__ = ["WsgiIdempotencyStatus"]


class WsgiIdempotencyStatus:
    """As IdempotencyStatus, for WSGI: its key is the rest of the path, after SCRIPT_NAME. Raises ConfigurationError."""

    def __init__(
        self, store: Idempotency, operations: Iterable[HttpOperation] | Routes, *, answering: Answering | None = None
    ) -> None:
        if not isinstance(store, Idempotency):
            raise ConfigurationError(f"{store!r} is no Idempotency, which a WSGI application needs")
        self._store = store
        self._operations = by_name(wsgi_routes(operations))
        self._answering = answering or Answering()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        scope = scope_of(environ)
        try:
            reply = refused_method(scope) or told(self._look_up(scope))
        except TricordError as error:
            reply = untold(error, self._answering)
        return start_reply(reply, start_response)

    def _look_up(self, scope: Scope) -> Record:
        for operation, key in asked_for(self._operations, scope):
            tenant = operation.tenant_at_once(scope)
            record = self._store.look_up(operation.operation, key, tenant) if key is not None else None
            if is_told(record, operation):
                return record
        raise KeyUnknown
