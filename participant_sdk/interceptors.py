"""gRPC interceptors that carry the current xid and branch id from a client's code to the server's handler.

    grpc.intercept_channel(channel, XidClientInterceptor())
    grpc.aio.insecure_channel(address, interceptors=async_xid_client_interceptors())
    grpc.server(workers, interceptors=[XidServerInterceptor()])
    grpc.aio.server(interceptors=[AsyncXidServerInterceptor()])

What travels is decided in `context_headers`; here it only goes in and out of metadata. On the server a handler that
returns is run inside its own scope. One that yields runs in steps, with steps of gRPC's and of other interceptors
between them: it gets a context of its own, which no one else sees and which keeps what it binds across a `yield`.

What branches were tried for a call travels back in its trailing metadata, when all went well. A client must have taken
note of them before whoever called goes on: a branch that was not seen tried bars the confirm.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import suppress
from contextvars import Context
from types import coroutine
from typing import Any, Final, TypeAlias, TypeVar, cast

import grpc

from participant_sdk.context import Collector, Scope, arrived, arrived_context, current_calling
from participant_sdk.context_headers import (
    XID_HEADER,
    MalformedHeader,
    headers_to_add,
    read_headers,
    read_tried,
    tried_header,
)

Request = TypeVar("Request")
Response = TypeVar("Response")
T = TypeVar("T")

Behavior: TypeAlias = Callable[..., Any]
"""A handler's function, of whichever of the four kinds."""
ReadScope: TypeAlias = Callable[[Any], Scope]
"""Where a call belongs, by its context."""
Wrap: TypeAlias = Callable[[Behavior, bool, ReadScope], Behavior]
"""A behavior, whether it streams responses, and where its calls belong."""
Pairs: TypeAlias = tuple[tuple[str, str | bytes], ...]

KINDS: Final = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""By whether requests and responses are streamed."""

_WAIT_SECONDS_MAX: Final = 7 * 86_400.0
"""A call that waits for longer has no deadline: gRPC then says that there are some ten thousand years left."""


class _Note:
    """Takes note, once, of the branches that a call tells were tried; it is made when the call leaves."""

    def __init__(self, collector: Collector, xid: str) -> None:
        self._collector = collector
        self._xid = xid

    def take(self, code: grpc.StatusCode | None, trailing_metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """The call has ended so."""
        if code is grpc.StatusCode.OK and trailing_metadata:
            self._collector.note(self._xid, read_tried(trailing_metadata))


def _leaving(given: Any) -> tuple[Pairs, _Note | None]:
    """The metadata of a call that is about to leave, and who takes note of what comes back, if somebody wants to."""
    metadata: Pairs = tuple(given.metadata or ())
    method = given.method.decode() if isinstance(given.method, bytes) else given.method
    metadata = (*metadata, *headers_to_add(dict(metadata), method).items())
    collector = current_calling().collector
    xid = dict(metadata).get(XID_HEADER)
    return metadata, _Note(collector, xid) if collector is not None and isinstance(xid, str) else None


class _Details(grpc.ClientCallDetails):
    """The details of a call that is about to leave, with our metadata added."""

    def __init__(self, given: grpc.ClientCallDetails, metadata: Pairs) -> None:
        self.method = given.method
        self.timeout = given.timeout
        self.metadata = metadata
        self.credentials = given.credentials
        self.wait_for_ready = given.wait_for_ready
        self.compression = given.compression


class _Noted:
    """A call under way, as gRPC gave it, but whoever has its result or its last response has been taken note for."""

    def __init__(self, call: Any, note: _Note) -> None:
        self._call = call
        self._note = note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._call)
        except StopIteration:
            self._take()
            raise

    def result(self, timeout: float | None = None) -> Any:
        """See `grpc.Future`."""
        result = self._call.result(timeout)
        self._take()
        return result

    def exception(self, timeout: float | None = None) -> Any:
        """See `grpc.Future`."""
        error = self._call.exception(timeout)
        self._take()
        return error

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """See `grpc.Future`."""

        def taken_first(call: object) -> None:
            self._take()
            callback(self)

        self._call.add_done_callback(taken_first)

    def _take(self) -> None:
        self._note.take(self._call.code(), self._call.trailing_metadata())


class XidClientInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """For `grpc.intercept_channel`: every call takes the caller's xid and branch id along, if there are any.

    And a branch key, by which services that are called know a repeat of the call. Metadata `tricord-xid` or
    `tricord-branch-id` that the caller gives itself stays as it is, and nothing is added.
    """

    def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.ClientCallDetails, Request], T],
        client_call_details: grpc.ClientCallDetails,
        request: Request,
    ) -> T:
        """See `grpc`; also for the other three kinds of calls: what is added does not depend on the kind."""
        metadata, note = _leaving(client_call_details)
        call: Any = continuation(_Details(client_call_details, metadata), request)
        if note is None:
            return cast(T, call)
        if call.done():
            note.take(call.code(), call.trailing_metadata())
            return cast(T, call)
        return cast(T, _Noted(call, note))

    intercept_unary_stream = intercept_unary_unary
    intercept_stream_unary = intercept_unary_unary  # type: ignore[assignment]  # its last parameter has another name,
    intercept_stream_stream = intercept_unary_unary  # type: ignore[assignment]  # but gRPC gives all by position


class _AsyncCarrier:
    async def carry(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Request], Awaitable[T]],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Request,
    ) -> T:
        given = client_call_details
        metadata, note = _leaving(given)
        details = grpc.aio.ClientCallDetails(
            given.method, given.timeout, grpc.aio.Metadata(*metadata), given.credentials, given.wait_for_ready
        )
        call: Any = await continuation(details, request)
        if note is not None:  # grpc.aio calls it before it hands out the result or the end of the responses
            with suppress(NotImplementedError):  # an answer that another interceptor has made up
                call.add_done_callback(functools.partial(_take_ended, note))
        return cast(T, call)


def _take_ended(note: _Note, call: Any) -> None:
    note.take(_at_once(call.code()), _at_once(call.trailing_metadata()))


def _at_once(asked: Coroutine[Any, Any, T]) -> T | None:
    """What a call that has ended says; it need not be waited for."""
    try:
        asked.send(None)
    except StopIteration as stop:
        return cast(T, stop.value)
    asked.close()
    return None


class _AsyncUnaryUnary(_AsyncCarrier, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary = _AsyncCarrier.carry


class _AsyncUnaryStream(_AsyncCarrier, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream = _AsyncCarrier.carry


class _AsyncStreamUnary(_AsyncCarrier, grpc.aio.StreamUnaryClientInterceptor):
    intercept_stream_unary = _AsyncCarrier.carry  # type: ignore[assignment]  # as in XidClientInterceptor


class _AsyncStreamStream(_AsyncCarrier, grpc.aio.StreamStreamClientInterceptor):
    intercept_stream_stream = _AsyncCarrier.carry  # type: ignore[assignment]  # as in XidClientInterceptor


def async_xid_client_interceptors() -> list[grpc.aio.ClientInterceptor]:
    """As XidClientInterceptor, for the `interceptors` of a `grpc.aio` channel.

    Four of them: a grpc.aio channel uses one interceptor for one kind of calls only, whatever else it could do.
    """
    return [_AsyncUnaryUnary(), _AsyncUnaryStream(), _AsyncStreamUnary(), _AsyncStreamStream()]


class XidServerInterceptor(grpc.ServerInterceptor):
    """For `grpc.server`: a handler runs with the xid and branch id that its call brought, or with none.

    A call whose `tricord-xid` or `tricord-branch-id` is malformed ends with INVALID_ARGUMENT, its handler is not run.
    """

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Request, Response] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Request, Response] | None:
        """See `grpc.ServerInterceptor`."""
        return _intercepted(continuation(handler_call_details), handler_call_details, _in_thread, _refusal)


class AsyncXidServerInterceptor(grpc.aio.ServerInterceptor):
    """As XidServerInterceptor, for `grpc.aio.server` and every kind of handler that it takes, plain `def` included."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Request, Response] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Request, Response] | None:
        """See `grpc.aio.ServerInterceptor`."""
        return _intercepted(await continuation(handler_call_details), handler_call_details, _in_task, _async_refusal)


def _intercepted(
    handler: grpc.RpcMethodHandler[Request, Response] | None,
    call: grpc.HandlerCallDetails,
    wrap: Wrap,
    refusal: Callable[[str], Behavior],
) -> grpc.RpcMethodHandler[Request, Response] | None:
    if handler is None:  # nobody serves this method
        return None
    streams = bool(handler.response_streaming)
    name, rebuilt = KINDS[bool(handler.request_streaming), streams]
    metadata = call.invocation_metadata or ()
    try:
        read_headers(metadata)
    except MalformedHeader as error:
        behavior = refusal(f"metadata {error}")
    else:
        behavior = wrap(getattr(handler, name), streams, lambda context: read_headers(metadata, _expires_at(context)))
    return rebuilt(behavior, handler.request_deserializer, handler.response_serializer)


def _refusal(why: str) -> Behavior:
    def refuse(request: object, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)

    return refuse


def _async_refusal(why: str) -> Behavior:
    # Also for a streaming method: grpc.aio takes a coroutine function that yields nothing.
    async def refuse(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)

    return refuse


def _expires_at(context: Any) -> float | None:
    """When the caller stops waiting, as `time.monotonic()` tells it; None: never."""
    seconds = context.time_remaining()
    return None if seconds is None or seconds > _WAIT_SECONDS_MAX else time.monotonic() + seconds


class _Context:
    """The context of a handler that grpc.aio runs in a thread, which does not tell what metadata it was given."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._trailing_metadata: Pairs = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """See `grpc.ServicerContext`."""
        self._trailing_metadata = tuple(trailing_metadata)
        self._context.set_trailing_metadata(self._trailing_metadata)

    def trailing_metadata(self) -> Pairs:
        """See `grpc.ServicerContext`."""
        return self._trailing_metadata


def _answer(context: Any, seen: set[int]) -> None:
    """Tell the caller which branches were tried for its call; it takes that only if the call's status is OK."""
    if seen:
        context.set_trailing_metadata((*(context.trailing_metadata() or ()), tried_header(seen)))


def _in_thread(behavior: Behavior, streams: bool, read_scope: ReadScope) -> Behavior:
    # `wraps` keeps the attributes by which grpc knows a behavior that is handed a callback instead of yielding.
    @functools.wraps(behavior)
    def run(request: object, context: Any, *callback: object) -> Any:
        if not hasattr(context, "trailing_metadata"):
            context = _Context(context)
        if not streams or callback:
            with arrived(read_scope(context)) as seen:
                response = behavior(request, context, *callback)
                _answer(context, seen)
                return response
        own, seen = arrived_context(read_scope(context))
        return _steps(own, own.run(behavior, request, context), context, seen)

    return run


def _steps(own: Context, responses: Iterator[T], context: Any, seen: set[int]) -> Iterator[T]:
    try:
        while True:
            try:
                response = own.run(next, responses)
            except StopIteration:
                _answer(context, seen)
                return
            yield response
    finally:
        if isinstance(responses, Generator):  # its `finally` blocks see the xid too
            own.run(responses.close)


def _in_task(behavior: Behavior, streams: bool, read_scope: ReadScope) -> Behavior:
    if inspect.iscoroutinefunction(behavior):  # a streaming one writes its responses by itself

        @functools.wraps(behavior)
        async def run(request: object, context: Any) -> Any:
            with arrived(read_scope(context)) as seen:
                response = await behavior(request, context)
                _answer(context, seen)
                return response

        return run
    if inspect.isasyncgenfunction(behavior):

        @functools.wraps(behavior)
        async def run_steps(request: object, context: Any) -> AsyncGenerator[Any, None]:
            own, seen = arrived_context(read_scope(context))
            responses = own.run(behavior, request, context)
            try:
                while True:
                    try:
                        response = await _step(own, responses.__anext__())
                    except StopAsyncIteration:
                        _answer(context, seen)
                        return
                    yield response
            finally:
                await _step(own, responses.aclose())

        return run_steps
    return _in_thread(behavior, streams, read_scope)  # grpc.aio runs it in a thread


@coroutine
def _step(own: Context, awaitable: Awaitable[T]) -> Generator[Any, Any, T]:
    """`await awaitable`, in the same task, but with the context `own`."""
    steps = awaitable.__await__()
    resume: Callable[[], Any] = functools.partial(next, steps)
    while True:
        try:
            waits_for = own.run(resume)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        try:
            sent = yield waits_for
        except BaseException as error:
            resume = functools.partial(steps.throw, error)
        else:
            resume = functools.partial(steps.send, sent)
