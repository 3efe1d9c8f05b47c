"""Who takes the next step: of all calls in a race only one goes on at a time, chosen at random.

A call arrives at a point and waits there until it is chosen. One that was let go and does not arrive anywhere within
some milliseconds is taken to wait for a lock, and another is chosen. If it was only slow, two run at once for a
moment: no harm, every order is allowed. The choices are noted, so that an order can be had again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

TICK_SECONDS: Final = 0.002
"""Without an arrival for so long, whoever was let go is taken to wait."""
FORCED_TICKS_MAX: Final = 50
"""In a replay: how long to wait for the one that was chosen at this place."""


class State(Enum):
    """What a runner does."""

    COMING = auto()
    READY = auto()
    RUNNING = auto()
    WAITING = auto()
    ENDED = auto()


@dataclass(eq=False)
class Runner:
    """One that is scheduled; `wake` lets it go on from where it waits. `sleepy`: only if nobody else can go on."""

    name: str
    wake: Callable[[], None]
    state: State = State.COMING
    sleepy: bool = False


class Schedule:
    """The order of steps of one race. `switch` is the probability of choosing at random, and not by priority."""

    def __init__(
        self,
        runners: Sequence[Runner],
        priority: Sequence[Runner],
        rng: random.Random,
        switch: float,
        forced: Sequence[int] = (),
    ) -> None:
        self.runners = list(runners)
        self.trace: list[tuple[str, str]] = []
        self.choices: list[int] = []
        self._rng = rng
        self._switch = switch
        self._priority = list(priority)
        self._forced = list(forced)
        self._forced_ticks = 0
        self._lock = threading.Lock()
        self._current: Runner | None = None
        self._coming = len(self.runners)
        self._left = len(self.runners)
        self._moves = 0
        self._done = threading.Event()

    def arrive(self, runner: Runner, point: str) -> bool:
        """Whether `runner` may go on at once; if not, it has to wait until it is woken."""
        with self._lock:
            self._moves += 1
            if runner.state is State.COMING:
                self._coming -= 1
            runner.state = State.READY
            self.trace.append((runner.name, point))
            if self._coming:
                return False
            if self._current is None or self._current is runner:
                self._choose(runner)
            return self._current is runner

    def note(self, runner: Runner, text: str) -> None:
        """Put something into the trace."""
        self.trace.append((runner.name, text))

    def end(self, runner: Runner) -> None:
        """`runner` takes no more steps."""
        with self._lock:
            self._moves += 1
            if runner.state is State.COMING:
                self._coming -= 1
            runner.state = State.ENDED
            self._left -= 1
            if not self._left:
                self._done.set()
            elif not self._coming and self._current in (None, runner):
                self._choose(None)

    def watch(self, seconds: float) -> bool:
        """Until all have ended; False if they have not in `seconds`."""
        ends_at = time.monotonic() + seconds
        seen = -1
        while not self._done.wait(TICK_SECONDS):
            with self._lock:
                if self._moves == seen and not self._coming:
                    if self._current is not None:
                        self._current.state = State.WAITING
                        self.trace.append((self._current.name, "… waits"))
                        self._current = None
                    self._choose(None, patience=False)
                seen = self._moves
            if time.monotonic() > ends_at:
                return False
        return True

    def _choose(self, arriving: Runner | None, patience: bool = True) -> None:
        """Let one go on: `arriving` by telling it, any other by waking it. With `patience`, let the slow one sleep."""
        chosen = self._forced_choice() if self._forced else None
        self._current = None
        if chosen is None and self._forced:
            return
        if chosen is None:
            ready = [runner for runner in self._priority if runner.state is State.READY]
            awake = [runner for runner in ready if not runner.sleepy]
            if not awake and patience and any(runner.state is State.WAITING for runner in self.runners):
                return  # the next tick comes back
            if not ready:
                return
            among = awake or ready
            chosen = self._rng.choice(among) if self._rng.random() < self._switch else among[0]
        self.choices.append(self.runners.index(chosen))
        chosen.state, chosen.sleepy = State.RUNNING, False
        self._current = chosen
        if chosen is not arriving:
            chosen.wake()

    def _forced_choice(self) -> Runner | None:
        """The next choice of a replay; None if it cannot go on yet, or there is none."""
        while self._forced:
            wanted = self.runners[self._forced[0]]
            if wanted.state is State.WAITING and self._forced_ticks < FORCED_TICKS_MAX:
                self._forced_ticks += 1
                return None
            self._forced_ticks = 0
            del self._forced[0]
            if wanted.state is State.READY:
                return wanted
        return None
