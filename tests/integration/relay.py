"""Passes gRPC calls on to a coordinator, and can hold one: before it is passed on, or before its answer is given."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc

from tests.coordinators import CALL_S
from tests.postgres import free_port


class Relay(grpc.GenericRpcHandler):
    """A server in the test's process; what stands behind it is whatever answers at ``target``."""

    def __init__(self, target: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.reached = threading.Event()
        """A call is being held."""
        self._held = ("", "")
        self._released = threading.Event()
        self._channel = grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
        self._pool = ThreadPoolExecutor(16)
        self._server = grpc.server(self._pool, [self], options=[("grpc.so_reuseport", 0)])
        self._server.add_insecure_port(self.address)

    def hold(self, method: str, when: str) -> None:
        """Hold the calls of a method from now on: "before" they are passed on, or "after"."""
        self.reached.clear()
        self._released.clear()
        self._held = (method, when)

    def release(self) -> None:
        """What is held is answered UNAVAILABLE; hold no more."""
        self._held = ("", "")
        self._released.set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """See grpc.GenericRpcHandler."""
        path: str = handler_call_details.method
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._pass_on(path, request, context))

    def _pass_on(self, path: str, request: bytes, context: grpc.ServicerContext) -> Any:
        method = path.rpartition("/")[2]
        self._hold_here(method, "before", context)
        call: Any = self._channel.unary_unary(path)
        try:
            answer = call(request, timeout=context.time_remaining(), wait_for_ready=True)
        except grpc.RpcError as error:
            metadata: Any = error.trailing_metadata()
            context.set_trailing_metadata(metadata)
            context.abort(error.code(), error.details() or "")
        self._hold_here(method, "after", context)
        return answer

    def _hold_here(self, method: str, when: str, context: grpc.ServicerContext) -> None:
        if self._held == (method, when):
            self.reached.set()
            assert self._released.wait(CALL_S)
            context.abort(grpc.StatusCode.UNAVAILABLE, "held, and let go")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        self._server.stop(None).wait()
        self._channel.close()
        self._pool.shutdown()
