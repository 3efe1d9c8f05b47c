"""Load on a coordinator, by the published contract: N clients, each with one unary ``Execute`` at a time.

``python -m benchmarks.load COORDINATOR CLIENTS SECONDS`` prints one line of JSON: answers counted, seconds, latencies.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence

import grpc.aio

from tricord.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2

from .processes import run_fast

PAYLOAD = b'{"account": "a-000001", "amount": 100, "note": "%s"}' % (b"x" * 56)
TIMEOUT_S = 60.0


def request() -> coordinator_pb2.ExecuteRequest:
    """Two no-op branches with a payload of 100 bytes each."""
    return coordinator_pb2.ExecuteRequest(
        branches=[
            coordinator_pb2.BranchRequest(
                participant=name,
                action="noop",
                payload=types_pb2.Payload(data=PAYLOAD, content_type="application/json"),
            )
            for name in ("noop-1", "noop-2")
        ]
    )


def percentiles_ms(latencies: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile of seconds, in ms."""
    ordered = sorted(latencies)
    p50, p99 = (ordered[int(len(ordered) * share)] * 1000 for share in (0.50, 0.99))
    return p50, p99


def seen(latencies: list[float], took: float) -> str:
    """What a load saw, as a line of JSON; ``latencies`` are seconds, one for each answer."""
    p50, p99 = percentiles_ms(latencies)
    return json.dumps({"answers": len(latencies), "seconds": took, "p50_ms": p50, "p99_ms": p99})


async def main(coordinator: str, clients: int, seconds: float) -> None:
    """Run the load and print what it saw."""
    execute = request()
    async with grpc.aio.insecure_channel(coordinator) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        latencies: list[float] = []
        print("ready", flush=True)
        start = time.perf_counter()

        async def client() -> None:
            while (before := time.perf_counter()) - start < seconds:
                response = await stub.Execute(execute, timeout=TIMEOUT_S)
                if response.transaction.state != types_pb2.TRANSACTION_STATE_CONFIRMED:
                    raise RuntimeError(f"not confirmed: {response.transaction}")
                latencies.append(time.perf_counter() - before)

        await asyncio.gather(*(client() for _ in range(clients)))
        took = time.perf_counter() - start
    print(seen(latencies, took))


if __name__ == "__main__":
    run_fast(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
