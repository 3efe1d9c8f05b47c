"""Which operation an HTTP request belongs to, if to any."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from participant_sdk.asgi import Scope
from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.http_policy import HttpOperation
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.request_parts import HashedBody, RequestParts


@dataclass(frozen=True, slots=True)
class Route:
    """Requests of a method ("*": any) and path. `operation` None: those that a router serves before any later one."""

    method: str
    path_regex: re.Pattern[str]
    operation: HttpOperation | None


class Routes:
    """The first route that a request fits. Raises ConfigurationError for operations that contradict each other."""

    def __init__(self, routes: Sequence[Route]) -> None:
        operations = [route.operation for route in routes if route.operation is not None]
        _check(operations)
        self.operations: tuple[HttpOperation, ...] = tuple(operations)
        # Of a router's other routes only those are looked at that come before an operation which a request fits.
        self._candidates = [
            (route, [other for other in routes[:at] if other.operation is None and other.method in ("*", route.method)])
            for at, route in enumerate(routes)
            if route.operation is not None
        ]

    @classmethod
    def of(cls, operations: Iterable[HttpOperation]) -> Routes:
        """Nothing but these."""
        return cls([Route(operation.method, operation.path_regex, operation) for operation in operations])

    def find(self, scope: Scope) -> HttpOperation | None:
        """The operation of a request."""
        method, path = scope["method"], route_path(scope)
        for route, others in self._candidates:
            if route.method == method and route.path_regex.fullmatch(path):
                return None if any(other.path_regex.fullmatch(path) for other in others) else route.operation
        return None


def route_path(scope: Scope) -> str:
    """The path as the application's own router sees it: without the path at which it is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and (path == root or path.startswith(root.rstrip("/") + "/")) else path


def request_parts(scope: Scope, body: HashedBody) -> RequestParts:
    """What a request's fingerprint is made of."""
    route = ("http", scope["method"], route_path(scope), scope.get("query_string", b""))
    return RequestParts(route=route, headers=list(scope["headers"]), body=body)


def _check(operations: Sequence[HttpOperation]) -> None:
    places: set[tuple[str, str]] = set()
    names: dict[str, Operation] = {}
    for found in operations:
        place = (found.method, found.path_regex.pattern)
        if place in places:
            raise ConfigurationError(f"{found.method} {found.path} is an operation twice")
        places.add(place)
        if names.setdefault(found.operation.name, found.operation) != found.operation:
            raise ConfigurationError(f"two operations of different settings are named {found.operation.name}")
