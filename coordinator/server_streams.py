"""All ``ExecuteStream`` streams of a coordinator: how they open and stop, and what they learn from the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeVar

import structlog

from tricord.v1 import coordinator_pb2 as pb

from .codec import UnreadableRow
from .engine import Engine, UnknownXid
from .errors import Unavailable
from .journal import Started
from .server_stream import Call, CallStream
from .store.rows import StoreError
from .wire import LOOK_UP_XIDS_MAX, Starting

_log = structlog.get_logger(__name__)

_Done = TypeVar("_Done")

CALLS_MAX: Final = 4_096
"""Calls of one stream that are not answered yet, where the settings say nothing else: beyond it nothing is read."""
LOOK_S: Final = 0.5
"""How often the store is asked how far those transactions have come that nobody drives here."""


class Streams:
    """All streams that are open, and what they have in common."""

    def __init__(
        self,
        engine: Engine,
        read: Callable[[pb.ExecuteRequest], Starting],
        start: Callable[[Starting], asyncio.Future[Started]],
        calls_max: int,
    ) -> None:
        self.engine = engine
        self.read = read
        """Checks a request. Raises InvalidRequest."""
        self.start = start
        """Begins a transaction. Raises what hinders it, the future too."""
        self.calls_max = calls_max
        """Calls of one stream that are not answered yet."""
        self._open: set[CallStream] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._stopping = False

    async def serve(self, requests: AsyncIterator[pb.ExecuteStreamRequest]) -> AsyncIterator[pb.ExecuteStreamResponse]:
        """Serve one stream. Raises InvalidRequest for what is no request, Unavailable when the coordinator stops."""
        stream = CallStream(self)
        self._open.add(stream)
        if self._stopping:
            stream.end(_stops())
        reader = self.spawn(stream.read(requests))
        if self._looking is None or self._looking.done():
            self._looking = self.spawn(self._look())
        try:
            async for response in stream.responses():
                yield response
        finally:
            reader.cancel()
            stream.close()
            self._open.discard(stream)

    def stop(self) -> None:
        """Read no more calls; each stream ends when those that it has are answered."""
        self._stopping = True
        for stream in self._open:
            stream.end(_stops())

    def spawn(self, work: Coroutine[None, None, _Done]) -> asyncio.Task[_Done]:
        """Run something to its end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _look(self) -> None:
        """Learn what becomes of transactions that rest here, or that another coordinator drives."""
        failures = 0
        while self._open:
            away: dict[bytes, list[Call]] = {}
            for call in [call for stream in self._open for call in stream.calls.values()]:
                if call.tx is not None and not self.engine.drives(call.tx):
                    away.setdefault(call.tx.spec.xid, []).append(call)
            known = list(away)
            for first in range(0, len(known), LOOK_UP_XIDS_MAX):
                xids = known[first : first + LOOK_UP_XIDS_MAX]
                try:
                    states = (await self.engine.store.look_up(xids)).states
                    for xid in xids:
                        await self._tell(states.get(xid), away[xid])
                    failures = 0
                except StoreError as error:
                    failures += 1
                    if failures in (1, 10, 100):
                        _log.warning("streams.look_failed", error=str(error), failures=failures)
                    break
                except Exception:
                    _log.exception("streams.look_failed")  # whatever it is, looking must go on
                    break
            await asyncio.sleep(LOOK_S)

    async def _tell(self, state: int | None, calls: list[Call]) -> None:
        """Raises StoreError."""
        seen = calls[0].tx
        if seen is None or state is None or state == seen.state:
            return
        try:
            tx = await self.engine.get_by_xid(seen.spec.xid)
        except (UnknownXid, UnreadableRow) as error:
            for call in calls:
                call.fail(error)
            return
        for call in calls:
            if call.moved(tx):
                self.engine.forget(tx, call.moved)


def _stops() -> Unavailable:
    return Unavailable("the coordinator stops; ask another one, or again", reason="COORDINATOR_STOPS")
