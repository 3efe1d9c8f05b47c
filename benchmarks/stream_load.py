"""Load on a coordinator, by the published contract: N transactions in flight on ``ExecuteStream``.

``python -m benchmarks.stream_load COORDINATOR IN_FLIGHT SECONDS [--streams N] [--keys]`` prints one line of JSON, as
``benchmarks.load`` does. Whatever was answered in one message is followed by as many new calls in one. ``--streams``
shares them out among so many streams, each on a connection of its own. ``--keys`` gives each transaction a random
idempotency key of 32 characters, as users do who make their own; without it the coordinator finds one.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time

import grpc.aio

from tricord.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2

from .load import TIMEOUT_S, request, seen
from .processes import run_fast

CALLS_MAX = 256
"""In one message."""
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


class StreamLoad:
    """What the streams have in common."""

    def __init__(self, coordinator: str, seconds: float, *, keys: bool) -> None:
        self.latencies: list[float] = []
        self._coordinator = coordinator
        self._seconds = seconds
        self._keys = keys
        self._template = coordinator_pb2.ExecuteStreamCall(request=request(), patience_ms=int(TIMEOUT_S * 1000))
        self._opened = asyncio.Event()
        self._left = 0
        """Streams that are not open yet."""
        self._start_s = 0.0

    async def run(self, in_flight: int, streams: int) -> float:
        """Load until the time is over and all is answered; the seconds that it took."""
        self._left = streams
        shares = [in_flight // streams + (number < in_flight % streams) for number in range(streams)]
        await asyncio.gather(*(self._stream(share) for share in shares))
        return time.perf_counter() - self._start_s

    async def _stream(self, in_flight: int) -> None:
        begun_s: list[float] = []
        answered = 0
        async with grpc.aio.insecure_channel(self._coordinator, options=OWN_CONNECTION) as channel:
            stream = coordinator_pb2_grpc.CoordinatorServiceStub(channel).ExecuteStream()
            await stream.read()  # it is empty: the coordinator is there
            await self._all_open()
            for first in range(0, in_flight, CALLS_MAX):
                await stream.write(self._calls(min(CALLS_MAX, in_flight - first), begun_s))
            while isinstance(response := await stream.read(), coordinator_pb2.ExecuteStreamResponse):
                now = time.perf_counter()
                for result in response.results:
                    if result.response.transaction.state != types_pb2.TRANSACTION_STATE_CONFIRMED:
                        raise RuntimeError(f"not confirmed: {result}")
                    self.latencies.append(now - begun_s[result.call_id])
                answered += len(response.results)
                if now - self._start_s < self._seconds:
                    await stream.write(self._calls(len(response.results), begun_s))
                elif answered == len(begun_s):
                    await stream.done_writing()

    async def _all_open(self) -> None:
        self._left -= 1
        if not self._left:
            print("ready", flush=True)
            self._start_s = time.perf_counter()
            self._opened.set()
        await self._opened.wait()

    def _calls(self, count: int, begun_s: list[float]) -> coordinator_pb2.ExecuteStreamRequest:
        message = coordinator_pb2.ExecuteStreamRequest()
        now = time.perf_counter()
        for _ in range(count):
            message.calls.append(self._template)
            call = message.calls[-1]
            call.call_id = len(begun_s)
            if self._keys:
                call.request.idempotency_key = secrets.token_hex(16)
            begun_s.append(now)
        return message


async def main() -> None:
    """Run the load and print what it saw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stream_load", description=__doc__)
    parser.add_argument("coordinator")
    parser.add_argument("in_flight", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--keys", action="store_true")
    options = parser.parse_args()
    load = StreamLoad(options.coordinator, options.seconds, keys=options.keys)
    took_s = await load.run(options.in_flight, options.streams)
    print(seen(load.latencies, took_s))


if __name__ == "__main__":
    run_fast(main())
