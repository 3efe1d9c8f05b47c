"""The status look-up over HTTP: what is known of a key, told to whoever may use it.

    app.mount("/idempotency", IdempotencyStatus(idempotency, operations))

(for WSGI applications: wsgi_status)

`GET /idempotency/{key}?operation=orders.create` answers with JSON: `operation`, `state`, `attempt`, `age_s`,
`lease_left_s`, `expires_in_s` and, of a kept answer, its `status`. The tenant is told from the request as the operation
itself does. A key that nobody has used, one that has expired, one of another tenant and one that is no key get the same
404.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard
from urllib.parse import parse_qs

from participant_sdk.asgi import Receive, Scope, Send
from participant_sdk.errors import ConfigurationError, TricordError
from participant_sdk.idempotency.errors import KeyMalformed
from participant_sdk.idempotency.http_headers import Headers
from participant_sdk.idempotency.http_policy import HttpOperation
from participant_sdk.idempotency.http_replies import Reply, send_reply
from participant_sdk.idempotency.http_routes import Routes, route_path
from participant_sdk.idempotency.http_store import DoorStore, Store
from participant_sdk.idempotency.machine import has_expired
from participant_sdk.idempotency.problems import Answering, KeyUnknown
from participant_sdk.idempotency.record import Record, State

__all__ = ["IdempotencyStatus"]


class IdempotencyStatus:
    """An ASGI application to be mounted at a path. Without `?operation=`, the first one that has a record is told.

    `operations`: those whose keys may be asked for. Raises ConfigurationError for none.
    """

    def __init__(
        self, store: Store, operations: Iterable[HttpOperation] | Routes, *, answering: Answering | None = None
    ) -> None:
        self._store = DoorStore(store)
        self._operations = by_name(operations if isinstance(operations, Routes) else Routes.of(operations))
        self._answering = answering or Answering()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the status look-up does not speak {scope['type']}")
        try:
            reply = refused_method(scope) or told(await self._look_up(scope))
        except TricordError as error:
            reply = untold(error, self._answering)
        await send_reply(reply, send)

    async def _look_up(self, scope: Scope) -> Record:
        for operation, key in asked_for(self._operations, scope):
            tenant = await operation.tenant_of(scope)
            record = await self._store.look_up(operation.operation, key, tenant) if key is not None else None
            if is_told(record, operation):
                return record
        raise KeyUnknown


def is_told(record: Record | None, operation: HttpOperation) -> TypeGuard[Record]:
    """Whether it is there for those who ask for keys of the operation."""
    return record is not None and record.operation == operation.operation.name and not has_expired(record)


def by_name(routes: Routes) -> Mapping[str, HttpOperation]:
    """Their operations. Raises ConfigurationError if there are none."""
    if not routes.operations:
        raise ConfigurationError("the status look-up has no operations")
    return {operation.operation.name: operation for operation in routes.operations}


def asked_for(operations: Mapping[str, HttpOperation], scope: Scope) -> Iterator[tuple[HttpOperation, str | None]]:
    """The operations whose records may be told, with the key; None where it cannot be one of theirs."""
    key, name = route_path(scope).lstrip("/"), _named(scope.get("query_string", b""))
    for operation in operations.values():
        if name is None or name == operation.operation.name:
            try:
                yield operation, operation.checked(key)
            except KeyMalformed:
                yield operation, None


def _named(query: bytes) -> str | None:
    """The operation that a query names first."""
    try:
        found = parse_qs(query.decode("latin-1"), max_num_fields=20, errors="replace").get("operation")
    except ValueError:  # more fields than anybody needs
        return ""
    return found[0] if found else None


def told(record: Record) -> Reply:
    """What is known of a key."""
    known: dict[str, Any] = {
        "operation": record.operation,
        "state": record.state.name.lower(),
        "attempt": record.attempt,
        "age_s": record.age_ms / 1_000,
    }
    if record.state is State.PROCESSING:
        known["lease_left_s"] = max(0, record.lease_left_ms) / 1_000
    if record.expires_left_ms is not None:
        known["expires_in_s"] = max(0, record.expires_left_ms) / 1_000
    if record.answer is not None:
        known["status"] = record.answer.status
    return _reply(200, b"application/json", known)


def untold(error: TricordError, answering: Answering) -> Reply:
    """Why it is not told."""
    problem = answering.problem(error)
    return _with_length(problem.status, problem.headers, problem.body)


def refused_method(scope: Scope) -> Reply | None:
    """The answer to a request that asks for nothing; None: it asks."""
    if scope["method"] in ("GET", "HEAD"):
        return None
    content = {"title": "Method Not Allowed", "status": 405}
    return _reply(405, b"application/problem+json", content, ((b"allow", b"GET, HEAD"),))


def _reply(status: int, kind: bytes, content: dict[str, Any], headers: Headers = ()) -> Reply:
    fixed = ((b"content-type", kind), (b"cache-control", b"no-store"))
    return _with_length(status, (*fixed, *headers), json.dumps(content).encode())


def _with_length(status: int, headers: Headers, body: bytes) -> Reply:
    return Reply(status, (*headers, (b"content-length", b"%d" % len(body))), body)
