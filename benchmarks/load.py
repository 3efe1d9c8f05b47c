"""Load on a coordinator, by the published contract: N clients, each with one unary ``Execute`` at a time.

``python -m benchmarks.load COORDINATOR CLIENTS SECONDS`` prints one line of JSON: answers counted, seconds, latencies.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import grpc.aio

from tricord.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2

PAYLOAD = b'{"account": "a-000001", "amount": 100, "note": "%s"}' % (b"x" * 56)
TIMEOUT_S = 60.0


async def main(coordinator: str, clients: int, seconds: float) -> None:
    """Run the load and print what it saw."""
    branches = [
        coordinator_pb2.BranchRequest(
            participant=name,
            action="noop",
            payload=types_pb2.Payload(data=PAYLOAD, content_type="application/json"),
        )
        for name in ("noop-1", "noop-2")
    ]
    async with grpc.aio.insecure_channel(coordinator) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        latencies: list[float] = []
        print("ready", flush=True)
        start = time.perf_counter()

        async def client() -> None:
            while (before := time.perf_counter()) - start < seconds:
                response = await stub.Execute(coordinator_pb2.ExecuteRequest(branches=branches), timeout=TIMEOUT_S)
                if response.transaction.state != types_pb2.TRANSACTION_STATE_CONFIRMED:
                    raise RuntimeError(f"not confirmed: {response.transaction}")
                latencies.append(time.perf_counter() - before)

        await asyncio.gather(*(client() for _ in range(clients)))
        took = time.perf_counter() - start
    latencies.sort()
    p50, p99 = (latencies[int(len(latencies) * share)] * 1000 for share in (0.50, 0.99))
    print(json.dumps({"answers": len(latencies), "seconds": took, "p50_ms": p50, "p99_ms": p99}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
