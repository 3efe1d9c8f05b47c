"""Time, and event loops that live in it.

A ``World`` is one heap of what happens when, in microseconds, and one random generator. Each process of the simulated
town has a ``SimLoop`` of its own: a small asyncio event loop whose callbacks run only when the world steps it. A
process may be paused (nothing of it runs, its messages and timers gather) and crashed (nothing of it ever runs again,
not even a ``finally``). Nothing here reads a clock or a random number that is not the world's.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

_T = TypeVar("_T")

EPOCH_US = 1_700_000_000_000_000
"""The wall clock when a run begins."""
TURN_US = 20
"""How long one turn of a process's event loop takes: others' turns come in between."""


class Stuck(Exception):
    """A run that does not come to its end within the steps that it may take."""


class Handle:
    """A callback that waits for its turn."""

    __slots__ = ("args", "callback", "context", "dead", "when_s")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None, when_s: float
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.dead = False
        self.when_s = when_s

    def cancel(self) -> None:
        """Have it not run."""
        self.dead = True
        self.args = ()

    def cancelled(self) -> bool:
        """Whether it will not run."""
        return self.dead

    def when(self) -> float:
        """When it is to run, by its loop's clock."""
        return self.when_s


class World:
    """What happens when."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now_us = 0
        self.steps = 0
        self.counts: Counter[str] = Counter()
        """What has happened how often: faults, states, late Trys, take-overs, …"""
        self.lines: list[str] | None = [] if tracing else None
        self.hash = hashlib.blake2b(digest_size=8)
        self._heap: list[tuple[int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._seq = 0
        self.unexpected: list[str] = []
        """What the product itself has told as a failure that it did not expect."""
        self.graveyard: list[object] = []
        """What crashed is kept until the run is over, so that no destructor runs."""
        self.tasks: list[asyncio.Task[Any]] = []
        self.contexts: list[contextvars.Context] = []
        self.closed = False
        self.stop = False
        """Whether the run is to end after this step: an invariant is broken."""
        self._checks: list[Callable[[], None]] = []

    @property
    def now_ms(self) -> int:
        """The true time, in milliseconds."""
        return (EPOCH_US + self.now_us) // 1000

    def at(self, delay_us: int, callback: Callable[..., object], *args: Any) -> None:
        """Have something happen in so many microseconds, whatever has crashed until then."""
        if self.closed:
            return
        self._seq += 1
        heapq.heappush(self._heap, (self.now_us + max(0, delay_us), self._seq, callback, args))

    def soon(self, check: Callable[[], None]) -> None:
        """Have something looked at when this step is over."""
        self._checks.append(check)

    def chance(self, rate: float) -> bool:
        """Whether something with this rate happens now."""
        return rate > 0 and self.random.random() < rate

    def note(self, who: str, what: str) -> None:
        """A line of the trace: part of the run's hash, kept to be read if it is traced."""
        if self.closed:
            return
        line = f"{self.now_us / 1000:11.3f}  {who:<10}  {what}"
        self.hash.update(line.encode())
        if self.lines is not None:
            self.lines.append(line)

    def run(self, done: Callable[[], bool], until_us: int, steps_max: int) -> bool:
        """Let things happen until ``done`` or the time is over; whether it is done. Raises Stuck beyond so many."""
        heap = self._heap
        pop = heapq.heappop
        last = self.steps + steps_max
        while heap and heap[0][0] <= until_us:
            when_us, _, callback, args = pop(heap)
            self.now_us = when_us
            self.steps += 1
            callback(*args)
            if self._checks:
                for check in self._checks:
                    check()
                self._checks.clear()
            if self.stop or done():
                return True
            if self.steps > last:
                raise Stuck(f"{steps_max} steps were not enough")
        self.now_us = max(self.now_us, until_us)
        return done()

    def untold(self) -> list[str]:
        """How tasks have failed of which nobody has asked how they ended."""
        return [
            f"{task.get_name()}: {task.exception()!r}"
            for task in self.tasks
            if getattr(task.get_loop(), "alive", True) and task.done() and not task.cancelled() and task._log_traceback
        ]

    def close(self) -> None:
        """End the run: nothing happens any more. What is still open is closed, unseen by anything that counts."""
        self.closed = True
        self._heap.clear()
        for task, context in zip(self.tasks, self.contexts, strict=True):
            coroutine = task.get_coro()
            if coroutine is not None:
                with contextlib.suppress(BaseException):
                    context.run(coroutine.close)  # what it has set in its context is set back there


if TYPE_CHECKING:
    _Loop = asyncio.SelectorEventLoop  # which has all that nobody asks of it here
else:
    _Loop = asyncio.AbstractEventLoop


class SimLoop(_Loop):
    """The event loop of one process, from its start to its crash."""

    def __init__(self, world: World, name: str, *, skew_us: int = 0) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.skew_us = skew_us
        """How far this process's own wall clock is ahead; ``time`` is monotonic and does not have it."""
        self.crash_in: int | None = None
        """After so many callbacks the process crashes: at any await."""
        self.on_crash: Callable[[], None] = lambda: None
        self._ready: deque[Handle] = deque()
        self._turn_planned = False
        self._paused_until_us = 0

    # --- the process's life --------------------------------------------------------------------------------

    def wall_ms(self) -> int:
        """This process's own wall clock."""
        return (EPOCH_US + self.world.now_us + self.skew_us) // 1000

    def pause(self, for_us: int) -> None:
        """Nothing of it runs for so long; what is sent to it waits."""
        self._paused_until_us = max(self._paused_until_us, self.world.now_us + for_us)

    @property
    def paused(self) -> bool:
        """Whether it is standing still now."""
        return self._paused_until_us > self.world.now_us

    def crash(self) -> None:
        """Nothing of it ever runs again."""
        if self.alive:
            self.alive = False
            self.world.graveyard.append((self, list(self._ready)))
            self._ready.clear()
            self.on_crash()

    def arrive(self, callback: Callable[..., object], *args: Any) -> None:
        """Something comes from outside; lost if the process has crashed."""
        if self.alive:
            self._ready.append(Handle(callback, args, None, 0.0))
            self._plan_turn()

    def _plan_turn(self) -> None:
        if not self._turn_planned:
            self._turn_planned = True
            self.world.at(max(TURN_US, self._paused_until_us - self.world.now_us), self._turn)

    def _turn(self) -> None:
        self._turn_planned = False
        if not self.alive:
            return
        if self.paused:
            self._plan_turn()
            return
        ready = self._ready
        asyncio._set_running_loop(self)
        try:
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle.dead:
                    continue
                if self.crash_in is not None:
                    self.crash_in -= 1
                    if self.crash_in < 0:
                        self.crash()
                        return
                try:
                    if handle.context is None:
                        handle.callback(*handle.args)
                    else:
                        handle.context.run(handle.callback, *handle.args)
                except Exception as error:
                    self.call_exception_handler({"exception": error})
                if self._halted():
                    break
        finally:
            asyncio._set_running_loop(None)
        if ready:
            self._plan_turn()

    def _halted(self) -> bool:
        return not self.alive or self.paused

    def _due(self, handle: Handle) -> None:
        if self.alive and not handle.dead:
            self._ready.append(handle)
            self._plan_turn()

    # --- what asyncio asks of a loop -----------------------------------------------------------------------

    def time(self) -> float:
        """The monotonic clock, in seconds."""
        return self.world.now_us / 1_000_000

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Have it called in the next turn."""
        handle = Handle(callback, args, context, 0.0)
        if self.alive and not self.world.closed:
            self._ready.append(handle)
            self._plan_turn()
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Have it called in so many seconds."""
        handle = Handle(callback, args, context, self.time() + delay)
        self.world.at(int(delay * 1_000_000 + 0.999), self._due, handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Have it called at a time of ``time``."""
        return self.call_later(when - self.time(), callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, _T], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[_T]:
        """Begin to run a coroutine in the next turn."""
        context = context or contextvars.copy_context()
        self.world.contexts.append(context)
        task: asyncio.Task[_T] = asyncio.Task(coro, loop=self, name=name or self.name, context=context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # a crash leaves tasks behind
        self.world.tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what nobody has caught: the runner makes a failure of it."""
        error = context.get("exception")
        if error is not None and self.alive and not self.world.closed:
            self.world.unexpected.append(f"{self.name}: {type(error).__name__}: {error}")
            self.world.note(self.name, f"uncaught {type(error).__name__}: {error}")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """As ``call_exception_handler``."""
        self.call_exception_handler(context)

    def get_debug(self) -> bool:
        """Never."""
        return False

    def is_running(self) -> bool:
        """Always: a crashed one runs nothing that could ask."""
        return True

    def is_closed(self) -> bool:
        """Never."""
        return False
