"""Load at a fixed rate on one ``ExecuteStream``, whether answers come or not.

``python -m benchmarks.steady_load COORDINATOR PER_SECOND SECONDS`` prints the same line as ``benchmarks.load``. Each
transaction has its time by the rate alone, and its latency counts from that time: what waits behind a slow answer, in
this process too, is not left out of the figures (coordinated omission).
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TypeAlias

import grpc.aio

from tricord.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2

from .load import request, seen
from .processes import run_fast

Stream: TypeAlias = grpc.aio.StreamStreamCall[
    coordinator_pb2.ExecuteStreamRequest, coordinator_pb2.ExecuteStreamResponse
]
TICK_S = 0.001
"""Whatever is due by then goes out in one message."""


class Steady:
    """The calls by their time, and what has become of them."""

    def __init__(self, per_s: float, seconds: float) -> None:
        self.latencies: list[float] = []
        self._per_s = per_s
        self._count = int(per_s * seconds)
        self._request = request()
        self._start_s = 0.0

    async def run(self, stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub) -> float:
        """Send all, and read until all is answered; the seconds that it took."""
        stream = stub.ExecuteStream()
        await stream.read()  # it is empty: the coordinator is there
        print("ready", flush=True)
        self._start_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send(stream))
            while isinstance(response := await stream.read(), coordinator_pb2.ExecuteStreamResponse):
                self._take(response)
        return time.perf_counter() - self._start_s

    async def _send(self, stream: Stream) -> None:
        sent = 0
        while sent < self._count:
            due = min(self._count, int((time.perf_counter() - self._start_s) * self._per_s) + 1)
            if due > sent:
                calls = [
                    coordinator_pb2.ExecuteStreamCall(call_id=number, request=self._request)
                    for number in range(sent, due)
                ]
                await stream.write(coordinator_pb2.ExecuteStreamRequest(calls=calls))
                sent = due
            await asyncio.sleep(TICK_S)
        await stream.done_writing()

    def _take(self, response: coordinator_pb2.ExecuteStreamResponse) -> None:
        now_s = time.perf_counter() - self._start_s
        for result in response.results:
            if result.response.transaction.state != types_pb2.TRANSACTION_STATE_CONFIRMED:
                raise RuntimeError(f"not confirmed: {result}")
            self.latencies.append(now_s - result.call_id / self._per_s)


async def main(coordinator: str, per_s: float, seconds: float) -> None:
    """Run the load and print what it saw."""
    async with grpc.aio.insecure_channel(coordinator) as channel:
        steady = Steady(per_s, seconds)
        took_s = await steady.run(coordinator_pb2_grpc.CoordinatorServiceStub(channel))
    print(seen(steady.latencies, took_s))


if __name__ == "__main__":
    run_fast(main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3])))
