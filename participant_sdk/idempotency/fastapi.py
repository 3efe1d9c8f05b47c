"""The HTTP door for FastAPI: routes are marked by a dependency, and `protect` does the rest.

    create = Idempotent(Operation(name="orders.create"), tenant=account_of)

    @app.post("/orders", status_code=201)
    async def create_order(order: Order, run: Annotated[AsyncRun, Depends(create)]) -> Order:
        session = await run.session()
        ...

    protect(app, idempotency)          # after the last route

The middleware owns the local transaction: it commits before the answer leaves, and rolls back where the handler fails.
A session of your own takes part if it is joined: `Depends(create.joining(get_session))`. Its dependency must not be
what commits it: that comes after the answer has been sent, or, with `scope="function"`, before the record. So `protect`
refuses a session that is not joined.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from typing import Any, Final, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from fastapi import Depends, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import StreamingResponse
from starlette.routing import BaseRoute, Mount, compile_path

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.asgi import IdempotencyMiddleware
from participant_sdk.idempotency.current import current_run
from participant_sdk.idempotency.http_answers import BYPASSED
from participant_sdk.idempotency.http_policy import BodyKey, HeaderKey, HttpOperation, Streaming, Tenant
from participant_sdk.idempotency.http_routes import Route, Routes
from participant_sdk.idempotency.http_store import Store
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.problems import Answering, Codes
from participant_sdk.idempotency.runs import AsyncRun, Run

__all__ = ["Idempotent", "protect"]

_ENDS_AFTER_ANSWER: Final = "scope" in inspect.signature(Depends).parameters
"""Whether a `yield` dependency ends after the answer, unless its scope says otherwise."""
_SETTINGS: Final = frozenset(name for name, setting in HttpOperation.__dataclass_fields__.items() if setting.init) - {
    "operation",
    "path",
    "method",
    "tenant",
}


class Idempotent:
    """A dependency that marks a route as an operation and gives its run; None where there is none.

    There is none without a key, where that is optional, and for a `fail_open` operation whose store is down.

    `settings`: those of HttpOperation, but for its method and path, which are the route's. `sessions_apart`: the route
    may also have sessions that are not joined, such as of what authenticates; what they write is not rolled back with
    the work, nor done once. Raises ConfigurationError.
    """

    def __init__(self, operation: Operation, *, tenant: Tenant, sessions_apart: bool = False, **settings: Any) -> None:
        unknown = sorted(settings.keys() - _SETTINGS)
        if unknown:
            raise ConfigurationError(f"{operation.name}: {', '.join(unknown)}: no such setting of a route")
        self._made_of = {"operation": operation, "tenant": tenant, **settings}
        self.required: bool = self.at("POST", "/").key_required
        self.name = operation.name
        self.sessions_apart = sessions_apart

    def at(self, method: str, path: str) -> HttpOperation:
        """The operation of a route."""
        return HttpOperation(method=method, path=path, **self._made_of)

    async def __call__(self, request: Request) -> Any:
        run: AsyncRun | Run | None = current_run()
        if run is None and request.scope.get("state", {}).get(BYPASSED):
            return None
        if run is None and self.required:
            raise ConfigurationError(f"{self.name}: the request is not protected: call protect(app, store) after it")
        if run is not None and run.operation.name != self.name:
            raise ConfigurationError(f"{self.name}: the request runs as {run.operation.name}")
        return run

    def joining(self, session: Callable[..., Any]) -> Callable[..., Any]:
        """A dependency that gives what the dependency `session` gives, joined to the run (see `Run.join`).

        Raises ConfigurationError with a FastAPI before 0.121, which ends `session` before the answer is committed.
        """
        if not _ENDS_AFTER_ANSWER:
            raise ConfigurationError(f"{self.name}: joining needs FastAPI 0.121 or newer")

        run_of, session_of = Depends(self), Depends(session)

        async def joined(run: Any = run_of, given: Any = session_of) -> Any:
            if isinstance(run, AsyncRun):
                await run.join(given)
            elif run is not None:
                await asyncio.to_thread(run.join, given)
            return given

        _JOINS[joined] = session
        return joined


_JOINS: Final[WeakKeyDictionary[Callable[..., Any], Callable[..., Any]]] = WeakKeyDictionary()
"""Which session a dependency joins."""


def protect(app: FastAPI, store: Store, *, answering: Answering | None = None) -> Routes:
    """Protect the routes of `app` that depend on an Idempotent; call it after the last of them was added.

    Gives the operations, for an IdempotencyStatus. Raises ConfigurationError: for a route that is marked twice, answers
    with a stream where its operation takes none, or has a session that is not joined to the run; for
    operations that contradict each other; where no route is marked.
    """
    answering = answering or Answering()
    found: list[Route] = []
    for route in _routes(app):
        path, dependant = getattr(route, "path", None), getattr(route, "dependant", None)
        if path is None:
            continue
        mounted = isinstance(getattr(route, "original_route", route), Mount)
        marks = [] if dependant is None else _marks(dependant)
        regex = compile_path(path + "/{path:path}" if mounted else path)[0]
        methods = ["*"] if mounted else sorted(getattr(route, "methods", None) or ())
        if not marks:
            found += [Route(method, regex, None) for method in methods]
            continue
        if len(marks) > 1:
            raise ConfigurationError(f"{path}: the route is marked twice, as {marks[0].name} and {marks[1].name}")
        for method in methods:
            operation = marks[0].at(method, path)
            _check(route, marks[0], operation, dependant)
            found.append(Route(method, regex, operation))
            _document(route, operation, answering)
    routes = Routes(found)
    if not routes.operations:
        raise ConfigurationError("no route depends on an Idempotent; call protect after the routes were added")
    app.add_middleware(IdempotencyMiddleware, store=store, operations=routes, answering=answering)
    app.openapi_schema = None
    return routes


def _routes(app: FastAPI) -> Iterator[Any]:
    """Routes in the order in which requests are held against them, those of included routers with their prefix."""
    try:
        from fastapi.routing import iter_route_contexts
    except ImportError:  # before routers were included as a whole
        yield from app.routes
    else:
        yield from iter_route_contexts(app.routes)


def _marks(dependant: Any) -> list[Idempotent]:
    own = [dependant.call] if isinstance(dependant.call, Idempotent) else []
    return list(dict.fromkeys([*own, *(mark for inner in dependant.dependencies for mark in _marks(inner))]))


def _check(route: Any, mark: Idempotent, operation: HttpOperation, dependant: Any) -> None:
    kind = getattr(route.response_class, "value", route.response_class)
    streams = inspect.isclass(kind) and issubclass(kind, StreamingResponse)
    streams = streams or getattr(route, "is_sse_stream", False) or getattr(route, "is_json_stream", False)
    if operation.streaming is Streaming.REJECT and streams:
        raise ConfigurationError(f"{operation.path}: it answers with a stream, and its operation takes none")
    if mark.sessions_apart:
        return
    every = list(_every(dependant))
    joined = {_JOINS[found.call] for found in every if found.call in _JOINS}
    for found in every:
        call = found.call
        if (
            _generates(call)
            and _is_session(call)
            and (call not in joined or getattr(found, "scope", None) == "function")
        ):
            raise ConfigurationError(
                f"{operation.path}: the session of {getattr(call, '__name__', call)} is not committed with the answer; "
                "take run.session(), or Depends(….joining(…)), in which no scope is set"
            )


def _every(dependant: Any) -> Iterator[Any]:
    for inner in dependant.dependencies:
        yield inner
        yield from _every(inner)


def _generates(call: Any) -> bool:
    return inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call)


def _is_session(call: Any) -> bool:
    """Whether a generator says that it gives a session or connection of SQLAlchemy."""
    try:
        returned = get_type_hints(call).get("return")
    except Exception:  # names that cannot be resolved: it does not say
        return False
    if get_origin(returned) not in (AsyncGenerator, AsyncIterator, Generator, Iterator) or not get_args(returned):
        return False
    given = get_args(returned)[0]
    return inspect.isclass(given) and given.__module__.startswith("sqlalchemy.")


def _document(route: Any, operation: HttpOperation, answering: Answering) -> None:
    """Tell OpenAPI of the key and of the refusals."""
    original: BaseRoute = getattr(route, "original_route", route)
    if not isinstance(original, APIRoute):
        return
    content = "application/json" if answering.codes is Codes.STRIPE else "application/problem+json"
    reused = "400" if answering.codes is Codes.STRIPE else "422"
    refusals = {
        **({"423": "The same request is being processed"} if answering.codes is Codes.LOCKED else {}),
        "409": "The same request is being processed, or it was done and its answer is not stored",
        reused: "The idempotency key belongs to another request",
    }
    extra: dict[str, Any] = dict(original.openapi_extra or {})
    responses = dict(extra.get("responses", {}))
    for status, description in refusals.items():
        if status not in responses and int(status) not in original.responses and status not in original.responses:
            responses[status] = {"description": description, "content": {content: {"schema": {"type": "object"}}}}
    extra["responses"] = responses
    if isinstance(operation.key, HeaderKey):
        header = {
            "name": operation.key.name,
            "in": "header",
            "required": operation.key_required,
            "description": "One key per intent, the same in every repeat of the request",
            "schema": {"type": "string", "maxLength": operation.rules.bytes_max},
        }
        known = [found for found in extra.get("parameters", []) if found.get("name") != operation.key.name]
        extra["parameters"] = [*known, header]
    elif isinstance(operation.key, BodyKey):
        extra.setdefault("x-idempotency-key", operation.key.pointer)
    original.openapi_extra = extra
