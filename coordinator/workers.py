"""Several coordinator processes on one machine, one address and one store, under a parent that serves nothing itself.

The parent holds the port, brings the store's schema up once, starts the workers, starts one that dies again, and
stops all of them when it is told to. To each other they are coordinators like any others: what one leaves behind
another takes over, and none drives what another drives. They end with their parent, however that ends (``worker``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import sqlalchemy as sa
import structlog

from . import logs
from .config import RunError, Settings, masked_url
from .listening import HeldPort
from .store.rows import StoreError, StoreUnreachable
from .store.schema import ensure_schema
from .store.store import usable_engine
from .worker import Start

_log = structlog.get_logger(__name__)
_SIGNALS = {number.value: number.name for number in signal.Signals}

PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 5.0
"""How long it takes until one that has died is started again; doubled with each death in a row."""
SETTLED_S = 60.0
"""Of one that has served for so long, earlier deaths do not count any more."""
AT_ONCE_S = 1.0
"""One that dies before it serves, or so soon after, is said to have died at once."""
AT_ONCE_MAX = 5
"""So many deaths at once in a row, and it is given up, and all with it: something is wrong for good."""
STOP_S = 30.0
"""How much longer than ``drain_ms`` a worker may take to stop, before it is killed."""


class Ending(NamedTuple):
    """How a worker came to its end."""

    code: int
    served_s: float | None
    """None: it never did."""
    failed: str = ""
    """Why it could not start, in its own words."""
    unreachable: bool = False
    """Whether that was the store."""
    passing: bool = False
    """Whether it may go better in a while, with nobody's help."""
    counts: Mapping[str, int] = {}
    """What it told when it stopped in order."""

    def __str__(self) -> str:
        if self.failed:
            return self.failed
        if self.code < 0:
            return f"killed by {_SIGNALS.get(-self.code, f'signal {-self.code}')}"
        return f"exit code {self.code}"


class Deaths:
    """Those of one worker in a row, and what follows from them."""

    def __init__(self) -> None:
        self.at_once = 0
        self._pause_s = PAUSE_S_MIN

    def add(self, end: Ending) -> float:
        """One more; how many seconds to wait before it is started again."""
        if end.served_s is not None and end.served_s >= SETTLED_S:
            self._pause_s = PAUSE_S_MIN
        if end.served_s is not None and end.served_s >= AT_ONCE_S:
            self.at_once = 0
        elif not end.passing:
            self.at_once += 1
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, PAUSE_S_MAX)
        return random.uniform(pause_s / 2, pause_s)

    @property
    def hopeless(self) -> bool:
        """Whether to try no more."""
        return self.at_once >= AT_ONCE_MAX


def run_workers(settings: Settings) -> None:
    """Run ``settings.workers`` coordinators until SIGTERM or SIGINT. Raises RunError, also if one is given up."""
    logs.configure(settings.log_format, settings.log_level)
    try:
        held = HeldPort(settings.listen)
    except OSError as error:
        raise RunError(str(error)) from error
    with contextlib.closing(held):
        try:
            with usable_engine(settings.store, settings.lease_ms) as engine:
                ensure_schema(engine)
        except StoreError as error:
            raise RunError(str(error), unreachable=isinstance(error, StoreUnreachable)) from error
        except sa.exc.SQLAlchemyError as error:
            raise RunError(f"the store cannot be set up: {' '.join(str(error).split())[:500]}") from error
        listen = f"{settings.listen.rpartition(':')[0]}:{held.port}"
        asyncio.run(Workers(settings.model_copy(update={"listen": listen})).run())


class Workers:
    """The workers of one parent."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._failure: RunError | None = None
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._never_ready = set(range(1, settings.workers + 1))
        self._all_ready = asyncio.Event()
        self._counts: Counter[str] = Counter()
        self._last: list[Ending] = []
        """Of those that ran when all were stopped."""
        self._restarts = 0

    async def run(self) -> None:
        """Until a signal. Raises RunError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        keeping = [loop.create_task(self._keep(number)) for number in range(1, self._settings.workers + 1)]
        waits = [loop.create_task(self._all_ready.wait()), loop.create_task(self._stop.wait())]
        try:
            await asyncio.wait([*waits, *keeping], return_when=asyncio.FIRST_COMPLETED)
            if self._all_ready.is_set() and not self._stop.is_set():
                listen, store = self._settings.listen, masked_url(self._settings.store)
                _log.info("coordinator.ready", listen=listen, store=store, workers=self._settings.workers)
                print(f"tricord: listening on {listen}", flush=True)
                await asyncio.wait([waits[1], *keeping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._end(keeping)
            for task in waits:
                task.cancel()
        self._tell_end()

    def _on_signal(self) -> None:
        """The first one stops, the second ends at once."""
        (self._kill if self._stop.is_set() else self._stop).set()

    async def _keep(self, number: int) -> None:
        """Keep one worker running until all stop."""
        deaths = Deaths()
        while not self._stop.is_set():
            end = await self._run_once(number)
            self._counts.update(end.counts)
            if self._stop.is_set():
                self._last.append(end)
                return
            pause_s = deaths.add(end)
            if end.failed and number in self._never_ready:  # it will not come to anything else, as with one process
                self._give_up(RunError(end.failed, unreachable=end.unreachable))
            elif deaths.hopeless:
                times = f"{deaths.at_once} times in a row as soon as it had started"
                self._give_up(RunError(f"worker {number} ended {times}, the last time: {end}"))
            else:
                served_s = None if end.served_s is None else round(end.served_s, 1)
                _log.error("worker.ended", worker=number, why=str(end), served_s=served_s, again_s=round(pause_s, 2))
                self._restarts += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), pause_s)

    def _give_up(self, failure: RunError) -> None:
        self._failure = failure
        self._stop.set()

    async def _run_once(self, number: int) -> Ending:
        """Start it and wait for its end."""
        command = (sys.executable, "-m", "coordinator.worker")
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        except OSError as error:  # too little memory, or too many processes: it passes, as a store comes back
            served_before = number not in self._never_ready
            return Ending(1, None, f"a process cannot be started: {error.strerror}", passing=served_before)
        assert process.stdin is not None
        assert process.stdout is not None
        self._running[number] = process
        _log.info("worker.started", worker=number, pid=process.pid)
        if self._stop.is_set():
            process.terminate()
        # Its standard input stays open: its end is the parent's.
        process.stdin.write(Start(number, self._settings.model_dump(mode="json")).line())
        told: dict[str, Any] = {}
        ready_s = None
        async for line in process.stdout:
            with contextlib.suppress(ValueError):  # it died in the middle of it
                told |= json.loads(line)
            if "ready" in told and ready_s is None:
                ready_s = time.monotonic()
                self._became_ready(number)
        code = await process.wait()
        del self._running[number]
        process.stdin.close()
        served_s = None if ready_s is None else time.monotonic() - ready_s
        counts = told.get("stopped", {})
        unreachable = told.get("unreachable", False)  # it comes back; the others wait for it, and must not be given up
        return Ending(code, served_s, told.get("failed", ""), unreachable, unreachable, counts)

    def _became_ready(self, number: int) -> None:
        self._never_ready.discard(number)
        if not self._never_ready:
            self._all_ready.set()

    async def _end(self, keeping: list[asyncio.Task[None]]) -> None:
        """Stop all of them in order; kill what is left when their time is over, or at a second signal."""
        self._stop.set()
        for process in self._running.values():
            _signal(process, signal.SIGTERM)
        killing = asyncio.get_running_loop().create_task(self._kill.wait())
        ended = asyncio.gather(*keeping)
        waits: list[asyncio.Future[Any]] = [killing, ended]
        timeout_s = self._settings.drain_ms / 1000 + STOP_S
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        for number, process in self._running.items():
            _log.error("worker.killed", worker=number, why="a second signal" if self._kill.is_set() else "it hangs")
            _signal(process, signal.SIGKILL)
        await ended

    def _tell_end(self) -> None:
        """What they have counted, but for those that died. Raises RunError if one has not stopped in order."""
        _log.info("coordinator.stopped", workers=self._settings.workers, restarts=self._restarts, **self._counts)
        if self._failure is not None:
            raise self._failure
        bad = [str(end) for end in self._last if end.code and end.served_s is not None]
        if bad:
            raise RunError(f"not all workers have stopped in order: {'; '.join(bad)}")


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
