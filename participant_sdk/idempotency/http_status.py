"""The status look-up over HTTP: what is known of a key, told to whoever may use it.

    app.mount("/idempotency", IdempotencyStatus(idempotency, operations))

`GET /idempotency/{key}?operation=orders.create` answers with JSON: `operation`, `state`, `attempt`, `age_s`,
`lease_left_s`, `expires_in_s` and, of a kept answer, its `status`. The tenant is told from the request as the operation
itself does. A key that nobody has used, one of another tenant and one that is no key get the same 404.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs

from participant_sdk.asgi import Receive, Scope, Send
from participant_sdk.errors import ConfigurationError, TricordError
from participant_sdk.idempotency.errors import KeyMalformed
from participant_sdk.idempotency.http_policy import HttpOperation
from participant_sdk.idempotency.http_routes import Routes, route_path
from participant_sdk.idempotency.http_store import DoorStore, Store
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
        routes = operations if isinstance(operations, Routes) else Routes.of(operations)
        if not routes.operations:
            raise ConfigurationError("the status look-up has no operations")
        self._store = DoorStore(store)
        self._operations = {operation.operation.name: operation for operation in routes.operations}
        self._answering = answering or Answering()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the status look-up does not speak {scope['type']}")
        if scope["method"] not in ("GET", "HEAD"):
            await _send(send, 405, b"application/problem+json", {"title": "Method Not Allowed", "status": 405}, _ALLOW)
            return
        try:
            record = await self._look_up(scope)
        except TricordError as error:
            problem = self._answering.problem(error)
            await _send_bytes(send, problem.status, [*problem.headers], problem.body)
            return
        await _send(send, 200, b"application/json", _told(record))

    def _asked(self, scope: Scope) -> Iterable[HttpOperation]:
        name = _named(scope.get("query_string", b""))
        if name is None:
            return self._operations.values()
        return [self._operations[name]] if name in self._operations else []

    async def _look_up(self, scope: Scope) -> Record:
        key = route_path(scope).lstrip("/")
        for operation in self._asked(scope):
            tenant = await operation.tenant_of(scope)
            try:
                checked = operation.checked(key)
            except KeyMalformed:
                continue
            record = await self._store.look_up(operation.operation, checked, tenant)
            if record is not None and record.operation == operation.operation.name:
                return record
        raise KeyUnknown


def _named(query: bytes) -> str | None:
    """The operation that a query names first."""
    try:
        found = parse_qs(query.decode("latin-1"), max_num_fields=20, errors="replace").get("operation")
    except ValueError:  # more fields than anybody needs
        return ""
    return found[0] if found else None


def _told(record: Record) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operation": record.operation,
        "state": record.state.name.lower(),
        "attempt": record.attempt,
        "age_s": record.age_ms / 1_000,
    }
    if record.state is State.PROCESSING:
        told["lease_left_s"] = max(0, record.lease_left_ms) / 1_000
    if record.expires_left_ms is not None:
        told["expires_in_s"] = max(0, record.expires_left_ms) / 1_000
    if record.answer is not None:
        told["status"] = record.answer.status
    return told


_ALLOW = ((b"allow", b"GET, HEAD"),)


async def _send(
    send: Send, status: int, kind: bytes, content: dict[str, Any], headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    fixed = [(b"content-type", kind), (b"cache-control", b"no-store")]
    await _send_bytes(send, status, [*fixed, *headers], json.dumps(content).encode())


async def _send_bytes(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
