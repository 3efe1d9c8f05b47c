"""Which call runs when: one at a time per branch, Try and phase 2 in lanes of their own, and never too many.

Confirm and Cancel have their own workers, so that slow Trys never hold them up: what is decided must end. `desk` and
`gathering` are the bookkeeping; `ThreadLanes` and `TaskLanes` run what they let through: calls, and batches of them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from queue import SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar

from participant_sdk.call import IncomingCall, Reply
from participant_sdk.desk import STOPPING, Desk, OnReply, Replaced, Work, is_try
from participant_sdk.errors import describe
from participant_sdk.gathering import Answers, Gathering, KeyOf, Line, no_key

T = TypeVar("T")

logger = logging.getLogger("tricord.participant")

CANCEL_SECONDS: Final = 2.0
_CANCELLED: Final = Reply.unknown("the call was cancelled in this process")
_BATCH_FAILED: Final = "a batch of %d calls failed, they run one by one"


Job: TypeAlias = Work | Line[Work]
"""What a worker runs: a call, or the next batch of a line."""


class Workers:
    """Daemon threads that run what is put: a handler that never ends does not keep the process from ending."""

    def __init__(self, count: int, name: str, run: Callable[[Job], None]) -> None:
        self._count = count
        self._run = run
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        for number in range(1, count + 1):
            threading.Thread(target=self._loop, name=f"{name}-{number}", daemon=True).start()

    def put(self, job: Job) -> None:
        """Run `job` as soon as a thread is free."""
        self._queue.put(job)

    def stop(self) -> None:
        """End the threads when all that was put has run."""
        for _ in range(self._count):
            self._queue.put(None)

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            self._run(job)


class ThreadLanes:
    """Runs calls in two sets of threads. `submit` may come from any thread; replies come in the workers'."""

    def __init__(
        self,
        execute: Callable[[IncomingCall], Reply],
        try_workers: int,
        phase2_workers: int,
        waiting_max: int,
        execute_batch: Callable[[list[IncomingCall]], Answers] | None = None,
        batch_key_of: KeyOf = no_key,
    ) -> None:
        self._execute = execute
        self._execute_batch = execute_batch or _none_together
        self._gathering: Gathering[Work] = Gathering(batch_key_of)
        self._desk = Desk(waiting_max)
        self._changed = threading.Condition()
        self._workers = {
            True: Workers(try_workers, "tricord-try", self._run),
            False: Workers(phase2_workers, "tricord-phase2", self._run),
        }

    def submit(self, call: IncomingCall, on_reply: OnReply) -> None:
        """Have `call` run or join its like; `on_reply` is called once."""
        with self._changed:
            admitted = self._desk.admit(call, on_reply)
        _follow(admitted, on_reply, self._start)

    def _start(self, work: Work) -> None:
        job: Job | None = work
        key = self._gathering.key_of(work.call)  # the user's code, which must not hold the lock
        if key is not None:
            with self._changed:
                job = self._gathering.join(key, work)
        if job is not None:
            self._workers[is_try(work.call)].put(job)

    def _run(self, job: Job) -> None:
        if isinstance(job, Work):
            self._run_alone(job)
        else:
            self._run_batch(job)

    def _run_batch(self, line: Line[Work]) -> None:
        with self._changed:
            works = line.take()
            for work in works:
                work.started = True
        if len(works) == 1:
            self._run_alone(works[0])
        else:
            for work in self._run_together(works):
                self._workers[is_try(work.call)].put(work)
        with self._changed:
            goes_on = self._gathering.ended(line)
        if goes_on:
            self._workers[is_try(works[0].call)].put(line)

    def _run_together(self, works: list[Work]) -> list[Work]:
        """Run a batch; what of it is to be run by itself."""
        answers = Answers()
        try:
            answers = self._execute_batch([work.call for work in works])
        except BaseException:
            logger.exception(_BATCH_FAILED, len(works))
        alone = [work for work in works if work.call.key not in answers.replies]
        with self._changed:
            self._gathering.learn(answers)
            for work in alone:
                work.started = False
        self._finish([(work, answers.replies[work.call.key]) for work in works if work.call.key in answers.replies])
        return alone

    def _run_alone(self, work: Work) -> None:
        with self._changed:
            work.started = True
        try:
            reply = self._execute(work.call)
        except BaseException as error:  # a handler that calls sys.exit() ends its call, not the worker
            logger.exception("%s: unknown", work.call)
            reply = Reply.unknown(describe(error))
        self._finish([(work, reply)])

    def _finish(self, ended: list[tuple[Work, Reply]]) -> None:
        with self._changed:
            finished = [(*self._desk.finish(work), reply) for work, reply in ended]
        for waiting, following, reply in finished:
            _tell(waiting, reply)
            if following is not None:
                self._start(following)
        with self._changed:
            self._changed.notify_all()

    def drain(self, grace: float) -> bool:
        """Admit no more calls and wait up to `grace` seconds for those under way; whether all have ended."""
        with self._changed:
            self._desk.close()
            idle = self._changed.wait_for(lambda: self._desk.idle, grace)
        if idle:
            for workers in self._workers.values():
                workers.stop()
        return idle


class TaskLanes:
    """Runs calls as tasks of their own: whatever becomes of the stream that brought a call, its task goes on."""

    def __init__(
        self,
        execute: Callable[[IncomingCall], Awaitable[Reply]],
        try_workers: int,
        phase2_workers: int,
        waiting_max: int,
        execute_batch: Callable[[list[IncomingCall]], Awaitable[Answers]] | None = None,
        batch_key_of: KeyOf = no_key,
    ) -> None:
        self._execute = execute
        self._execute_batch = execute_batch or _none_together_async
        self._gathering: Gathering[Work] = Gathering(batch_key_of)
        self._desk = Desk(waiting_max)
        self._places = {True: asyncio.Semaphore(try_workers), False: asyncio.Semaphore(phase2_workers)}
        self._tasks: set[asyncio.Task[None]] = set()
        self._abandoned = False

    def submit(self, call: IncomingCall, on_reply: OnReply) -> None:
        """Have `call` run or join its like; `on_reply` is called once, in the event loop."""
        admitted = self._desk.admit(call, on_reply)
        _follow(admitted, on_reply, self._start)

    def _start(self, work: Work) -> None:
        key = self._gathering.key_of(work.call)
        if key is None:
            self._spawn(self._run_alone, work)
        elif (line := self._gathering.join(key, work)) is not None:
            self._spawn(self._run_batch, line)

    def _spawn(self, run: Callable[[T], Coroutine[Any, Any, None]], what: T) -> None:
        loop = asyncio.get_running_loop()  # where there is none any more, no coroutine is made that nobody awaits
        task = loop.create_task(run(what))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_alone(self, work: Work) -> None:
        reply = _CANCELLED
        try:
            async with self._places[is_try(work.call)]:
                reply = await self._reply(work)
        finally:  # also when a handler lets a CancelledError out
            self._finish(work, reply)

    async def _reply(self, work: Work) -> Reply:
        work.started = True
        try:
            return await self._execute(work.call)
        except Exception as error:
            logger.exception("%s: unknown", work.call)
            return Reply.unknown(describe(error))

    async def _run_batch(self, line: Line[Work]) -> None:
        """The next batch of a line; in the end, a task for what has come meanwhile."""
        works: list[Work] = []
        answers: Answers | None = None
        try:
            async with self._places[is_try(line.waiting[0].call)]:
                works = line.take()
                answers = await self._together(works)
        finally:
            for work in works:
                if answers is None:
                    self._finish(work, _CANCELLED)
                elif (reply := answers.replies.get(work.call.key)) is not None:
                    self._finish(work, reply)
                elif self._abandoned:
                    self._finish(work, STOPPING)
                else:
                    work.started = False
                    self._spawn(self._run_alone, work)
            while self._abandoned and line.waiting:
                self._finish(line.waiting.popleft(), STOPPING)
            if self._gathering.ended(line):
                self._spawn(self._run_batch, line)

    async def _together(self, works: list[Work]) -> Answers:
        if len(works) == 1:
            return Answers({works[0].call.key: await self._reply(works[0])})
        for work in works:
            work.started = True
        try:
            answers = await self._execute_batch([work.call for work in works])
        except Exception:
            logger.exception(_BATCH_FAILED, len(works))
            return Answers()
        self._gathering.learn(answers)
        return answers

    def _finish(self, work: Work, reply: Reply) -> None:
        waiting, following = self._desk.finish(work)
        _tell(waiting, reply)
        while following is not None and self._abandoned:
            waiting, following = self._desk.finish(following)
            _tell(waiting, STOPPING)
        if following is not None:
            self._start(following)

    async def drain(self, grace: float) -> bool:
        """Admit no more calls and wait up to `grace` seconds for those under way; whether all have ended.

        Those that have not are cancelled, which rolls them back: nothing of them may outlive the event loop.
        """
        self._desk.close()
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + grace
        while self._tasks:
            left = ends_at - loop.time()
            if left <= 0:
                await self._abandon()
                return False
            await asyncio.wait(self._tasks, timeout=left)
        return True

    async def _abandon(self) -> None:
        self._abandoned = True
        await asyncio.sleep(0)  # a task that is cancelled before its first step would tell nobody
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=CANCEL_SECONDS)  # a handler may not let itself be cancelled


def _none_together(calls: list[IncomingCall]) -> Answers:
    return Answers()


async def _none_together_async(calls: list[IncomingCall]) -> Answers:
    return Answers()


def _follow(admitted: Work | Reply | Replaced | None, on_reply: OnReply, start: Callable[[Work], None]) -> None:
    """Do what the desk has said of a call."""
    match admitted:
        case Work():
            start(admitted)
        case Replaced():
            _tell([admitted.on_reply], admitted.reply)
        case Reply():
            on_reply(admitted)


def _tell(waiting: list[OnReply], reply: Reply) -> None:
    for on_reply in waiting:
        try:
            on_reply(reply)
        except Exception:
            logger.exception("a reply could not be handed on")
