"""The no-op participant, but it answers nothing until SIGUSR1: so many transactions as begin are then in flight.

``python -m benchmarks.holding_participant NAME COORDINATOR``.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

from tricord.v1 import participant_pb2

from .noop_participant import Noop, done, run


class Holding(Noop):
    """Reads on while it holds its answers back."""

    def __init__(self) -> None:
        self._released = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._released.set)

    async def Exchange(
        self, request_iterator: AsyncIterator[participant_pb2.ExchangeRequest], context: Any
    ) -> AsyncIterator[participant_pb2.ExchangeResponse]:
        """One response for each batch, when it is time."""
        taken: asyncio.Queue[participant_pb2.ExchangeRequest | None] = asyncio.Queue()

        async def read() -> None:
            async for request in request_iterator:
                taken.put_nowait(request)
            taken.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            await self._released.wait()
            while (request := await taken.get()) is not None:
                yield participant_pb2.ExchangeResponse(replies=[done(call) for call in request.calls])
        finally:
            reading.cancel()


if __name__ == "__main__":
    run(Holding, *sys.argv[1:])
