"""A bare gRPC echo, grpc.aio at both ends: what one unary call costs when nothing stands behind it.

``python -m benchmarks.echo serve`` answers with the request; ``python -m benchmarks.echo call ADDRESS CLIENTS SECONDS``
prints one line of JSON as ``benchmarks.load`` does. The message is the ``Execute`` request of that load.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from typing import Any

import grpc.aio

from tricord.v1 import coordinator_pb2

from .load import TIMEOUT_S, request, seen
from .processes import run_fast

METHOD = "/benchmarks.Echo/Echo"


async def serve() -> None:
    """Answer until SIGTERM."""

    async def echo(message: coordinator_pb2.ExecuteRequest, context: Any) -> coordinator_pb2.ExecuteRequest:
        return message

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    handler = grpc.unary_unary_rpc_method_handler(
        echo,
        request_deserializer=coordinator_pb2.ExecuteRequest.FromString,
        response_serializer=coordinator_pb2.ExecuteRequest.SerializeToString,
    )
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    _, service, method = METHOD.split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await stop.wait()
    await server.stop(1)


async def call(address: str, clients: int, seconds: float) -> None:
    """Run the load and print what it saw."""
    message = request()
    async with grpc.aio.insecure_channel(address) as channel:
        echo = channel.unary_unary(
            METHOD,
            request_serializer=coordinator_pb2.ExecuteRequest.SerializeToString,
            response_deserializer=coordinator_pb2.ExecuteRequest.FromString,
        )
        latencies: list[float] = []
        print("ready", flush=True)
        start = time.perf_counter()

        async def client() -> None:
            while (before := time.perf_counter()) - start < seconds:
                await echo(message, timeout=TIMEOUT_S)
                latencies.append(time.perf_counter() - before)

        await asyncio.gather(*(client() for _ in range(clients)))
        took = time.perf_counter() - start
    print(seen(latencies, took))


def main(what: str, *arguments: str) -> None:
    """Either end."""
    if what == "serve":
        run_fast(serve())
    else:
        address, clients, seconds = arguments
        run_fast(call(address, int(clients), float(seconds)))


if __name__ == "__main__":
    main(*sys.argv[1:])
