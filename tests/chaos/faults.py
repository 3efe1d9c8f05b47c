"""What is done to the town: somebody is killed, stopped, or restarted, one after another, until it is enough.

The kinds are dealt like cards, all of them before any comes again, so that even a short run has each. A fault has a
thread of its own, and may still be going on when the next one begins.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from examples.transfer.processes import Process, ProcessFailed
from tests.chaos.town import SETTINGS, Town
from tests.postgres import PostgresServer, PostgresUnavailable

EVERY_S: Final = 3.0
DOWN_S_MAX: Final = 1.0
LEASE_S: Final = SETTINGS["lease_ms"] / 1000
SHORT_STOP_S: Final = (0.2, 0.7 * LEASE_S)
LONG_STOP_S: Final = (1.3 * LEASE_S, 2.2 * LEASE_S)
"""Longer than the lease: the others have taken over what the sleeper wakes up with."""
REVIVE_S: Final = 60.0
PAUSE_S: Final = 0.2


class Faults:
    """Deals faults until it is told to stop."""

    def __init__(self, town: Town, server: PostgresServer, rng: random.Random, say: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        """Faults that came to their end, by kind."""
        self.found: list[str] = []
        """What went wrong meanwhile, for people."""
        self._town = town
        self._server = server
        self._rng = rng
        self._say = say
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._busy: set[str] = set()
        self._deck: list[str] = []
        self._workers = ThreadPoolExecutor(4, thread_name_prefix="fault")
        self._thread = threading.Thread(target=self._deal, name="faults")
        self._kinds: dict[str, Callable[[], None]] = {
            "PostgreSQL killed": self._kill_server,
            "PostgreSQL restarted": self._restart_server,
            "PostgreSQL stopped for longer than the lease": self._freeze_server,
        }
        for group, processes in (("coordinator", town.coordinators), ("participant", town.participants)):
            for verb, act in (
                ("killed", self._kill),
                ("restarted", self._restart),
                ("stopped for a moment", partial(self._freeze, SHORT_STOP_S)),
                ("stopped for longer than the lease", partial(self._freeze, LONG_STOP_S)),
            ):
                self._kinds[f"{group} {verb}"] = partial(self._on_one_of, processes, act)

    @property
    def kinds(self) -> Sequence[str]:
        """All kinds of faults."""
        return list(self._kinds)

    def start(self) -> None:
        """Begin, with the first fault at once."""
        self._thread.start()

    def stop(self) -> None:
        """Deal no more, and return when everybody is up again."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._workers.shutdown()

    def check_alive(self) -> None:
        """Note who has ended without being asked to."""
        for process in self._town.everybody:
            if process.pid is None:
                self.found.append(f"{process.name} ended by itself:\n{process.tail()}")

    def _deal(self) -> None:
        next_s = time.monotonic()
        while not self._stopping.wait(max(0.0, next_s - time.monotonic())):
            next_s += EVERY_S
            if not self._deck:
                self._deck = self._rng.sample(self.kinds, len(self._kinds))
            self._workers.submit(self._play, self._deck.pop())

    def _play(self, kind: str) -> None:
        try:
            self._kinds[kind]()
            with self._changed:
                self.counts[kind] += 1
        except Exception as error:
            self.found.append(f"{kind}: {type(error).__name__}: {error}")

    def _on_one_of(self, processes: Sequence[Process], act: Callable[[Process], None]) -> None:
        """Do it to one whom nothing else is being done to; if there is none just now, to the first that gets free."""
        victim = self._take([process.name for process in processes])
        try:
            [process] = [process for process in processes if process.name == victim]
            if process.pid is None:
                self.found.append(f"{process.name} ended by itself:\n{process.tail()}")
                self._revive(process)
            act(process)
        finally:
            self._give_back(victim)

    def _take(self, names: Sequence[str]) -> str:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy.issuperset(names))
            name = self._rng.choice([name for name in names if name not in self._busy])
            self._busy.add(name)
            return name

    def _give_back(self, name: str) -> None:
        with self._changed:
            self._busy.discard(name)
            self._changed.notify_all()

    # --- the kinds -----------------------------------------------------------------------------------------

    def _kill(self, process: Process) -> None:
        down_s = self._rng.uniform(0, DOWN_S_MAX)
        self._say(f"{process.name} killed, down for {down_s:.1f} s")
        process.kill()
        time.sleep(down_s)
        self._revive(process)

    def _restart(self, process: Process) -> None:
        self._say(f"{process.name} restarted")
        code = process.stop()
        if code != 0:
            self.found.append(f"{process.name} ended with code {code} when it was asked to:\n{process.tail()}")
        self._revive(process)

    def _freeze(self, seconds: tuple[float, float], process: Process) -> None:
        stop_s = self._rng.uniform(*seconds)
        self._say(f"{process.name} stopped for {stop_s:.1f} s")
        process.freeze()
        time.sleep(stop_s)
        process.thaw()

    def _revive(self, process: Process) -> None:
        """Start it as a supervisor would: again, while what it needs (PostgreSQL, a coordinator) is away."""
        gives_up_s = time.monotonic() + REVIVE_S
        while True:
            try:
                process.start()
            except ProcessFailed:
                if time.monotonic() > gives_up_s:
                    raise
                time.sleep(PAUSE_S)
            else:
                return

    def _freeze_server(self) -> None:
        name = self._take([self._server.name])
        try:
            stop_s = self._rng.uniform(*LONG_STOP_S)
            self._say(f"PostgreSQL stopped for {stop_s:.1f} s")
            with self._server.frozen():
                time.sleep(stop_s)
        finally:
            self._give_back(name)

    def _kill_server(self) -> None:
        self._on_server(self._server.kill, self._rng.uniform(0, DOWN_S_MAX), "killed")

    def _restart_server(self) -> None:
        self._on_server(self._server.stop, 0.0, "restarted")

    def _on_server(self, end: Callable[[], None], down_s: float, verb: str) -> None:
        name = self._take([self._server.name])
        try:
            self._say(f"PostgreSQL {verb}, down for {down_s:.1f} s")
            end()
            time.sleep(down_s)
            gives_up_s = time.monotonic() + REVIVE_S
            while not self._server.running:
                try:
                    self._server.start()
                except PostgresUnavailable:
                    if time.monotonic() > gives_up_s:
                        raise
        finally:
            self._give_back(name)
