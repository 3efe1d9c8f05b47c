"""The keyed shop in a process of its own, that SIGKILL may end: `python -m … server urls address mode where`.

`where` "work": it is killed in the middle of the work; "answer": when all is committed, before gRPC has the answer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import grpc

from participant_sdk.idempotency.operation import Mode

from .keyed_shop import Shop, policy


def operation(mode: Mode) -> dict[str, Any]:
    """How the process runs its method."""
    lease = {} if mode is Mode.ATOMIC else {"lease_s": 1.0}
    return {"mode": mode, "wait_s": 30.0, **lease}


class Killer(grpc.ServerInterceptor):
    """In front of the interceptor under test: dies when that has an answer."""

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        behavior = continuation(handler_call_details).unary_unary

        def run(request: bytes, context: Any) -> Any:
            behavior(request, context)
            os.kill(os.getpid(), signal.SIGKILL)

        return grpc.unary_unary_rpc_method_handler(run)


class AsyncKiller(grpc.aio.ServerInterceptor):
    """The same under asyncio."""

    async def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        behavior = (await continuation(handler_call_details)).unary_unary

        async def run(request: bytes, context: Any) -> Any:
            await behavior(request, context)
            os.kill(os.getpid(), signal.SIGKILL)

        return grpc.unary_unary_rpc_method_handler(run)


def main(server: str, url: str, address: str, mode: str, where: str) -> None:
    """Serve until killed."""
    killer = Killer() if server == "threads" else AsyncKiller()
    outside = [killer] if where == "answer" else []
    with Shop(server, (url, url), [policy(operation=operation(Mode(mode)))], outside=outside, address=address) as shop:
        shop.mortal = where == "work"
        print("serves", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
