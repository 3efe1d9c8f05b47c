"""A thread that carries out one piece of work after another for an event loop.

What ``ThreadPoolExecutor(1)`` is for, with half of its hand-overs: a lone transaction waits for two flushes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

_T = TypeVar("_T")


class HandOver:
    """The thread, which starts with the first piece of work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """Have it done on the thread; what it returns or raises. It is done whether somebody waits for it or not."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_T] = loop.create_future()

        def carry_out() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to be told
                try:
                    result = work()
                except BaseException as error:
                    loop.call_soon_threadsafe(_fail, done, error)
                else:
                    loop.call_soon_threadsafe(_succeed, done, result)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(carry_out)
        return done

    def stop(self) -> None:
        """Return when all that was handed over is done. Nothing may be handed over after this."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while True:
            carry_out = self._queue.get()
            if carry_out is None:
                return
            carry_out()
            del carry_out  # and with it what it has been given, while this waits for more


def _succeed(done: asyncio.Future[_T], result: _T) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: asyncio.Future[_T], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)
