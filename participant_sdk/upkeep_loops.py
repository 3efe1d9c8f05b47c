"""The upkeep in the background: one thread or task per serving participant, one round at a time.

A round that fails, because the coordinator or the database does not answer, is told and tried again, later each time.
Nothing else of the participant waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Final

from participant_sdk.background import Moves, Rest
from participant_sdk.call import IncomingCall, Reply
from participant_sdk.engines import AsyncEngineFence, SyncEngineFence
from participant_sdk.lanes import TaskLanes, ThreadLanes
from participant_sdk.service_messages import STILL_RUNNING
from participant_sdk.upkeep import PurgeReport, Report, ResolveReport, UpkeepState
from participant_sdk.upkeep_hands import TaskHands, ThreadHands
from participant_sdk.upkeep_purge import purging
from participant_sdk.upkeep_resolve import Scan, resolving
from participant_sdk.upkeep_steps import Job, finish

logger = logging.getLogger("tricord.participant")

FIRST_SECONDS_MAX: Final = 60.0
BACKOFF_SECONDS_MAX: Final = 600.0
STOP_SECONDS: Final = 5.0
REPLY_MARGIN_SECONDS: Final = 0.5


class Rounds:
    """Which round comes when, and what they have done so far (`state`, replaced as a whole after each)."""

    def __init__(self, job: Job) -> None:
        self.state = UpkeepState()
        self._job = job
        self._scan = Scan()
        self._errors: dict[type[Report], str] = {}
        self._failures: dict[type[Report], int] = {}

    def run(self) -> Moves[None]:
        """Rounds for ever. The first come soon, at times of their own: many instances may have started at once."""
        settings = self._job.settings
        plan = ((PurgeReport, settings.purge_every), (ResolveReport, settings.resolve_every))
        every: dict[type[Report], float] = {kind: each.total_seconds() for kind, each in plan if each is not None}
        due_at = {
            kind: time.monotonic() + random.uniform(0, min(each, FIRST_SECONDS_MAX)) for kind, each in every.items()
        }
        while due_at:
            kind = min(due_at, key=due_at.__getitem__)
            yield Rest(max(0.0, due_at[kind] - time.monotonic()))
            report: Report = yield from (
                purging(self._job) if kind is PurgeReport else resolving(self._job, self._scan)
            )
            self._take(kind, report)
            due_at[kind] = time.monotonic() + self._pause(kind, every[kind])

    def _take(self, kind: type[Report], report: Report) -> None:
        self.state = self.state.after(report)
        self._failures[kind] = self._failures.get(kind, 0) + 1 if report.error else 0
        error_before, self._errors[kind] = self._errors.get(kind, ""), report.error
        finish(self._job, report, error_before)

    def _pause(self, kind: type[Report], every: float) -> float:
        longest = max(every, BACKOFF_SECONDS_MAX)
        return random.uniform(0.9, 1.1) * min(longest, every * 2.0 ** min(self._failures[kind], 10))


class ThreadUpkeep:
    """Keeps a participant's fence in order, in a thread of its own, until `stop`."""

    def __init__(self, coordinator: str, job: Job, engine_fence: SyncEngineFence, lanes: ThreadLanes) -> None:
        self._lanes = lanes
        self._rounds = Rounds(job)
        self._answer: Future[Reply] = Future()
        self._hands = ThreadHands(coordinator, engine_fence, job.fence.database, self._through_the_lanes)
        self._thread = threading.Thread(target=self._loop, name="tricord-upkeep", daemon=True)
        self._thread.start()

    @property
    def state(self) -> UpkeepState:
        """What it has done so far."""
        return self._rounds.state

    def stop(self) -> None:
        """Do no more; a call that it has begun goes on in its lane."""
        self._hands.close()
        _settle(self._answer, STILL_RUNNING)
        if threading.current_thread() is not self._thread:  # on_report may be what stops it
            self._thread.join(STOP_SECONDS)

    def _loop(self) -> None:
        try:
            self._hands.run(self._rounds.run())
        except Exception:
            logger.exception("the upkeep of the fence has ended")

    def _through_the_lanes(self, call: IncomingCall) -> Reply:
        answer = self._answer = Future()
        if self._hands.stopping:
            return STILL_RUNNING
        self._lanes.submit(call, lambda reply: _settle(answer, reply))
        try:
            return answer.result(call.seconds_left() + REPLY_MARGIN_SECONDS)
        except FutureTimeoutError:
            return STILL_RUNNING


def _settle(answer: Future[Reply], reply: Reply) -> None:
    with suppress(InvalidStateError):  # it has one: it was given up, or the other way round
        answer.set_result(reply)


class TaskUpkeep:
    """As `ThreadUpkeep`, in a task of its own."""

    def __init__(self, coordinator: str, job: Job, engine_fence: AsyncEngineFence, lanes: TaskLanes) -> None:
        self._lanes = lanes
        self._rounds = Rounds(job)
        self._hands = TaskHands(coordinator, engine_fence, job.fence.database, self._through_the_lanes)
        self._task = asyncio.get_running_loop().create_task(self._loop())

    @property
    def state(self) -> UpkeepState:
        """As `ThreadUpkeep.state`."""
        return self._rounds.state

    async def stop(self) -> None:
        """As `ThreadUpkeep.stop`."""
        await self._hands.close()
        await asyncio.wait([self._task], timeout=STOP_SECONDS)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _loop(self) -> None:
        try:
            await self._hands.run(self._rounds.run())
        except Exception:
            logger.exception("the upkeep of the fence has ended")

    async def _through_the_lanes(self, call: IncomingCall) -> Reply:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def settle(reply: Reply) -> None:
            if not answer.done():
                answer.set_result(reply)

        self._lanes.submit(call, settle)
        stopping = asyncio.get_running_loop().create_task(self._hands.wait_stopping())
        seconds = call.seconds_left() + REPLY_MARGIN_SECONDS
        await asyncio.wait((answer, stopping), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        return answer.result() if answer.done() else STILL_RUNNING
