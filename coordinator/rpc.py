"""How every RPC of the coordinator ends: with an answer, or with an error that says what is wrong and what to do."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio
import structlog
from google.rpc import status_pb2
from grpc_status import rpc_status

from .engine import FormatNotReady, KeyReused, UnknownXid
from .errors import Conflict, NotFound, RpcError, TooMuch, Unavailable, Violation
from .journal import Overloaded
from .orders import Denied
from .store.rows import RowRejected, StoreError
from .wire import error_status

_log = structlog.get_logger(__name__)

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
Context = grpc.aio.ServicerContext[Any, Any]
Method = Callable[[Any, _Request, Context], Awaitable[_Response]]
StreamMethod = Callable[[Any, _Request, Context], AsyncIterator[_Response]]


def answering(method: Method[_Request, _Response]) -> Method[_Request, _Response]:
    """Answer errors as google.rpc.Status with a reason; what nobody foresaw is logged, and told as INTERNAL."""

    @functools.wraps(method)
    async def call(self: Any, request: _Request, context: Context) -> _Response:
        # What is kept of an error is its status: the error itself would keep its frames, and with them the request.
        try:
            return await method(self, request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            status = status_of(error, method.__qualname__)
        del request  # gRPC keeps the error that ends the call, and it this frame, until the collector comes
        await context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError("unreachable")

    return call


def answering_stream(method: StreamMethod[_Request, _Response]) -> StreamMethod[_Request, _Response]:
    """As ``answering``, for a method that streams its answers."""

    @functools.wraps(method)
    async def call(self: Any, request: _Request, context: Context) -> AsyncIterator[_Response]:
        try:
            async for response in method(self, request, context):
                yield response
            return
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            status = status_of(error, method.__qualname__)
        await context.abort_with_status(rpc_status.to_status(status))

    return call


def status_of(error: Exception, method: str) -> status_pb2.Status:
    """What a caller is told of an error."""
    if isinstance(error, RpcError):
        return error_status(error)
    if isinstance(error, Denied):
        return error_status(Conflict(str(error), reason=error.reason, metadata=dict(error.metadata)))
    if isinstance(error, KeyReused):
        return error_status(
            Conflict(
                f"idempotency_key: {error}",
                reason="IDEMPOTENCY_KEY_REUSED",
                violations=(Violation("idempotency_key", str(error)),),
                metadata={"xid": error.xid.hex()},
            )
        )
    if isinstance(error, UnknownXid):
        return error_status(NotFound(f"there is no transaction {error}", metadata={"xid": str(error)}))
    if isinstance(error, FormatNotReady):
        return error_status(Conflict(str(error), reason="STORE_FORMAT"))
    if isinstance(error, Overloaded):
        return error_status(TooMuch(f"the coordinator has too much to do: {error}; ask again", retry_s=1.0))
    if isinstance(error, RowRejected):
        return error_status(RpcError(str(error), reason="ROW_REJECTED"))
    if isinstance(error, StoreError):
        _log.warning("rpc.store_error", method=method, error=str(error))
        return error_status(Unavailable("the coordinator's store does not answer; ask again", retry_s=1.0))
    _log.error("rpc.failed", method=method, exc_info=error)
    return error_status(RpcError(f"the coordinator failed: {type(error).__name__}; its log has more"))
