"""The replies of one Exchange stream on their way out.

Each reply leaves as soon as its call has finished; those that gather while one message is being written leave
together in the next. Messages are cut by bytes and number. What is pure about that is `Outbox`; its two waiting
forms serve a thread and a task.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Final

from tricord.v1 import participant_pb2

MESSAGE_BYTES_MAX: Final = 1024 * 1024
MESSAGE_REPLIES_MAX: Final = 256


class Outbox:
    """Finished replies, and whether more will come."""

    def __init__(self) -> None:
        self._ready: deque[participant_pb2.Reply] = deque()
        self._awaited = 0
        self._ending = False
        self._broken = False

    def expect(self, calls: int) -> None:
        """So many replies will be put."""
        self._awaited += calls

    def put(self, reply: participant_pb2.Reply) -> None:
        """A call has finished."""
        self._awaited -= 1
        if not self._broken:
            self._ready.append(reply)

    def end(self) -> None:
        """No more calls will come; replies still awaited will be sent."""
        self._ending = True

    def abandon(self) -> None:
        """The stream is broken: nobody reads replies any more."""
        self._broken = True
        self._ready.clear()

    def cut(self) -> list[participant_pb2.Reply] | None:
        """The replies of the next message; [] when the stream is over; None when there is nothing to send yet."""
        if self._broken or (not self._ready and self._ending and self._awaited <= 0):
            return []
        if not self._ready:
            return None
        batch = [self._ready.popleft()]
        size = batch[0].ByteSize()
        while self._ready and len(batch) < MESSAGE_REPLIES_MAX:
            size += self._ready[0].ByteSize()
            if size > MESSAGE_BYTES_MAX:
                break
            batch.append(self._ready.popleft())
        return batch


class ThreadOutbox:
    """An Outbox that a thread takes from and any thread puts into."""

    def __init__(self) -> None:
        self._outbox = Outbox()
        self._changed = threading.Condition()

    def expect(self, calls: int) -> None:
        """So many replies will be put."""
        with self._changed:
            self._outbox.expect(calls)

    def put(self, reply: participant_pb2.Reply) -> None:
        """A call has finished."""
        with self._changed:
            self._outbox.put(reply)
            self._changed.notify()

    def end(self) -> None:
        """No more calls will come."""
        with self._changed:
            self._outbox.end()
            self._changed.notify()

    def abandon(self) -> None:
        """The stream is broken."""
        with self._changed:
            self._outbox.abandon()
            self._changed.notify()

    def take(self) -> list[participant_pb2.Reply]:
        """Wait for the replies of the next message; [] when the stream is over."""
        with self._changed:
            while (batch := self._outbox.cut()) is None:
                self._changed.wait()
            return batch


class TaskOutbox(Outbox):
    """An Outbox that a task takes from, all in one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    def put(self, reply: participant_pb2.Reply) -> None:
        """A call has finished."""
        super().put(reply)
        self._changed.set()

    def end(self) -> None:
        """No more calls will come."""
        super().end()
        self._changed.set()

    def abandon(self) -> None:
        """The stream is broken."""
        super().abandon()
        self._changed.set()

    async def take(self) -> list[participant_pb2.Reply]:
        """Wait for the replies of the next message; [] when the stream is over."""
        while (batch := self.cut()) is None:
            self._changed.clear()
            await self._changed.wait()
        return batch
