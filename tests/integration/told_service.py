"""A gRPC service without protobuf that answers each request with what its handler sees: "xid/branch_id".

`/test.Told/<kind>` for the four kinds of calls. Streamed responses are one for each step of the handler.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import grpc

from participant_sdk.context import current_branch_id, current_xid
from tests.postgres import free_port

KINDS: Final = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
STREAMED: Final = ("unary_stream", "stream_stream")
CALL_S: Final = 30.0
NONE: Final = b"None/None"

Handlers = dict[str, Callable[..., Any]]
Metadata = tuple[tuple[str, str | bytes], ...]


def told() -> bytes:
    """What the running code sees."""
    return f"{current_xid()}/{current_branch_id()}".encode()


def path(kind: str) -> str:
    """The method of that kind."""
    return f"/test.Told/{kind}"


def generic_handler(handlers: Handlers) -> grpc.GenericRpcHandler:
    """Serves `handlers`, which are named by their kinds; the bytes of messages are left as they are."""
    made = {kind: getattr(grpc, f"{kind}_rpc_method_handler")(behavior) for kind, behavior in handlers.items()}
    return grpc.method_handlers_generic_handler("test.Told", made)


@contextmanager
def serving(
    handlers: Handlers, *interceptors: grpc.ServerInterceptor, workers: int = 2
) -> Iterator[tuple[str, grpc.Server]]:
    """A grpc.server that runs: its address, and itself."""
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(workers) as pool:
        server = grpc.server(pool, [generic_handler(handlers)], list(interceptors), [("grpc.so_reuseport", 0)])
        server.add_insecure_port(address)
        server.start()
        try:
            yield address, server
        finally:
            server.stop(None).wait(CALL_S)


def ask(
    channel: grpc.Channel, kind: str, metadata: Metadata = (), requests: Iterable[bytes] = (b"1", b"2")
) -> list[bytes]:
    """The responses to one call of that kind."""
    call: Callable[..., Any] = getattr(channel, kind)(path(kind))
    request = iter(requests) if kind.startswith("stream") else b"1"
    answer = call(request, timeout=CALL_S, metadata=metadata)
    return list(answer) if kind in STREAMED else [answer]
