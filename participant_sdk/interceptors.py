"""gRPC interceptors that carry the current xid and branch id from a client's code to the server's handler.

    grpc.intercept_channel(channel, XidClientInterceptor())
    grpc.aio.insecure_channel(address, interceptors=async_xid_client_interceptors())
    grpc.server(workers, interceptors=[XidServerInterceptor()])
    grpc.aio.server(interceptors=[AsyncXidServerInterceptor()])

What travels is decided in `context_headers`; here it only goes in and out of metadata. On the server a handler that
returns is run inside `bound`. One that yields runs in steps, with steps of gRPC's and of other interceptors between
them: it gets a context of its own, which no one else sees and which keeps what it binds itself across a `yield`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from contextvars import Context
from types import coroutine
from typing import Any, Final, TypeAlias, TypeVar

import grpc

from participant_sdk.context import bound, bound_context
from participant_sdk.context_headers import MalformedHeader, headers_to_add, read_headers

Request = TypeVar("Request")
Response = TypeVar("Response")
T = TypeVar("T")

Behavior: TypeAlias = Callable[..., Any]
"""A handler's function, of whichever of the four kinds."""
Wrap: TypeAlias = Callable[[Behavior, bool, str | None, int | None], Behavior]
"""A behavior, whether it streams responses, and the xid and branch id that it is to see."""

_KINDS: Final = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""By whether requests and responses are streamed."""


class _Details(grpc.ClientCallDetails):
    """The details of a call that is about to leave, with our metadata added."""

    def __init__(self, given: grpc.ClientCallDetails) -> None:
        metadata = given.metadata or ()
        self.method = given.method
        self.timeout = given.timeout
        self.metadata = (*metadata, *headers_to_add(key for key, _ in metadata))
        self.credentials = given.credentials
        self.wait_for_ready = given.wait_for_ready
        self.compression = given.compression


class XidClientInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """For `grpc.intercept_channel`: every call takes the caller's xid and branch id along, if there are any.

    Metadata `tricord-xid` or `tricord-branch-id` that the caller gives itself stays as it is, and nothing is added.
    """

    def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.ClientCallDetails, Request], T],
        client_call_details: grpc.ClientCallDetails,
        request: Request,
    ) -> T:
        """See `grpc`; also for the other three kinds of calls: what is added does not depend on the kind."""
        return continuation(_Details(client_call_details), request)

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
        metadata = tuple(given.metadata or ())
        metadata = (*metadata, *headers_to_add(key for key, _ in metadata))
        details = grpc.aio.ClientCallDetails(
            given.method, given.timeout, grpc.aio.Metadata(*metadata), given.credentials, given.wait_for_ready
        )
        return await continuation(details, request)


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
    name, rebuilt = _KINDS[bool(handler.request_streaming), streams]
    try:
        xid, branch_id = read_headers(call.invocation_metadata or ())
    except MalformedHeader as error:
        behavior = refusal(f"metadata {error}")
    else:
        behavior = wrap(getattr(handler, name), streams, xid, branch_id)
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


def _in_thread(behavior: Behavior, streams: bool, xid: str | None, branch_id: int | None) -> Behavior:
    # `wraps` keeps the attributes by which grpc knows a behavior that is handed a callback instead of yielding.
    @functools.wraps(behavior)
    def run(request: object, context: object, *callback: object) -> Any:
        if not streams or callback:
            with bound(xid, branch_id):
                return behavior(request, context, *callback)
        own = bound_context(xid, branch_id)
        return _steps(own, own.run(behavior, request, context))

    return run


def _steps(own: Context, responses: Iterator[T]) -> Iterator[T]:
    try:
        while True:
            try:
                response = own.run(next, responses)
            except StopIteration:
                return
            yield response
    finally:
        if isinstance(responses, Generator):  # its `finally` blocks see the xid too
            own.run(responses.close)


def _in_task(behavior: Behavior, streams: bool, xid: str | None, branch_id: int | None) -> Behavior:
    if inspect.iscoroutinefunction(behavior):  # a streaming one writes its responses by itself

        @functools.wraps(behavior)
        async def run(request: object, context: object) -> Any:
            with bound(xid, branch_id):
                return await behavior(request, context)

        return run
    if inspect.isasyncgenfunction(behavior):

        @functools.wraps(behavior)
        async def run_steps(request: object, context: object) -> AsyncGenerator[Any, None]:
            own = bound_context(xid, branch_id)
            responses = own.run(behavior, request, context)
            try:
                while True:
                    try:
                        response = await _step(own, responses.__anext__())
                    except StopAsyncIteration:
                        return
                    yield response
            finally:
                await _step(own, responses.aclose())

        return run_steps
    return _in_thread(behavior, streams, xid, branch_id)  # grpc.aio runs it in a thread


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
