"""The gRPC interceptors that make listed methods safe to repeat.

    grpc.server(workers, interceptors=[IdempotencyInterceptor(idempotency, [GrpcOperation(...)])])
    grpc.aio.server(interceptors=[AsyncIdempotencyInterceptor(idempotency, [GrpcOperation(...)])])

A keyed call's request is taken as bytes, and its response is encoded here, so that what is compared is what came and
what is stored is what is sent. The handler runs with `current_run()`; nothing that it says of its call's end reaches
gRPC before the COMMIT. A method that is not listed, and a call without a key that needs none, is left as it is.

Place them behind what authenticates: a replay does not run the handler, so whoever may not call it must not get here.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

import grpc

from participant_sdk.errors import ConfigurationError, TricordError
from participant_sdk.idempotency.grpc_calls import Call
from participant_sdk.idempotency.grpc_policy import GrpcOperation, by_method, quotas_of
from participant_sdk.idempotency.grpc_status import GrpcCodes
from participant_sdk.idempotency.grpc_tasks import TaskDoor
from participant_sdk.idempotency.grpc_threads import ThreadDoor, in_own_context
from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class IdempotencyInterceptor(grpc.ServerInterceptor):
    """For `grpc.server`: each of `operations` runs once for each key, and answers each repeat alike.

    `codes`: which status some refusals have. Raises ConfigurationError if a method is listed twice.
    """

    def __init__(
        self, idempotency: Idempotency, operations: Iterable[GrpcOperation], *, codes: GrpcCodes | None = None
    ) -> None:
        self._operations = by_method(operations)
        for method, policy in self._operations.items():
            if inspect.iscoroutinefunction(policy.current):
                raise ConfigurationError(
                    f"{method}: `current` is a coroutine function, for AsyncIdempotencyInterceptor"
                )
        self._threads = ThreadDoor(idempotency, codes or GrpcCodes(), quotas_of(self._operations.values()))

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Request, Response] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Request, Response] | None:
        """See `grpc.ServerInterceptor`."""
        handler = continuation(handler_call_details)
        policy = self._operations.get(_text(handler_call_details.method))
        if handler is None or policy is None:
            return handler
        return _in_thread(Call(policy, handler_call_details.invocation_metadata or (), handler), self._threads)


class AsyncIdempotencyInterceptor(grpc.aio.ServerInterceptor):
    """As IdempotencyInterceptor, for `grpc.aio.server`.

    `threads`: the store for handlers that are plain functions, which `grpc.aio` runs in threads. One that takes a
    client's stream has to be a coroutine: as a plain function it is not told a stream's end from its cancellation.
    """

    def __init__(
        self,
        idempotency: AsyncIdempotency,
        operations: Iterable[GrpcOperation],
        *,
        codes: GrpcCodes | None = None,
        threads: Idempotency | None = None,
    ) -> None:
        codes = codes or GrpcCodes()
        self._operations = by_method(operations)
        quotas = quotas_of(self._operations.values())
        self._tasks = TaskDoor(idempotency, codes, quotas)
        self._threads = None if threads is None else ThreadDoor(threads, codes, quotas)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Request, Response] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Request, Response] | None:
        """See `grpc.aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        policy = self._operations.get(_text(handler_call_details.method))
        if handler is None or policy is None:
            return handler
        call = Call(policy, handler_call_details.invocation_metadata or (), handler)
        if inspect.iscoroutinefunction(call.behavior) or inspect.isasyncgenfunction(call.behavior):
            return _in_task(call, self._tasks)
        if self._threads is not None and not call.requests_streamed:
            return _in_thread(call, self._threads)
        what = "cannot tell whether all of a client's stream has arrived" if self._threads else "needs `threads`"
        error = ConfigurationError(f"{policy.method} has a plain function as its handler, which {what}")
        logger.error("%s", error)
        return _refused(call, self._tasks, error)


def _in_thread(call: Call, door: ThreadDoor) -> Handler:
    try:
        key = call.early_key()
    except TricordError as error:
        refused = error

        def refuse(source: Any, context: Any) -> None:
            with door.refusing(context):
                raise refused

        def refuse_stream(source: Any, context: Any) -> Iterator[bytes]:  # its body is to run in the call's thread
            refuse(source, context)
            yield b""

        return call.rebuilt(refuse_stream if call.responses_streamed else refuse)
    if key is None and not call.policy.key_field:
        return call.handler
    if not call.responses_streamed:
        return call.rebuilt(lambda source, context: door.unary(call, key, source, context))

    def stream(source: Any, context: Any) -> Iterator[bytes]:
        return in_own_context(lambda: door.stream(call, key, source, context))

    return call.rebuilt(stream)


def _in_task(call: Call, door: TaskDoor) -> Handler:
    try:
        key = call.early_key()
    except TricordError as error:
        return _refused(call, door, error)
    if key is None and not call.policy.key_field:
        return call.handler

    async def run(source: Any, context: Any) -> bytes | None:
        return await door.answer(call, key, source, context)

    return call.rebuilt(run)


def _refused(call: Call, door: TaskDoor, error: TricordError) -> Handler:
    async def refuse(source: Any, context: Any) -> None:
        await door.refuse(context, error)

    return call.rebuilt(refuse)


def _text(method: str | bytes) -> str:
    return method.decode() if isinstance(method, bytes) else method
