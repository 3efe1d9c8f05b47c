"""Which call runs when: one at a time per branch, Try and phase 2 in lanes of their own, and never too many.

Repeats of a call that is under way join it and get its reply; they hold no connection and no worker. Another phase
of the same branch queues behind it. Confirm and Cancel have their own workers, so that slow Trys never hold them
up: what is decided must end. `Desk` is the bookkeeping, without threads or tasks; `ThreadLanes` and `TaskLanes`
run what it lets through.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Final, TypeAlias

from participant_sdk.call import IncomingCall, Reply
from participant_sdk.errors import describe
from participant_sdk.fence import Phase

logger = logging.getLogger("tricord.participant")

OnReply: TypeAlias = Callable[[Reply], None]

WAITING_FOR_ONE_MAX: Final = 4
"""How many wait for the same reply. The coordinator has long given up on the calls before the last few."""
CANCEL_SECONDS: Final = 2.0
_STOPPING: Final = Reply.unknown("the participant is stopping")
_REPLACED: Final = Reply.unknown("a later repeat of the call waits in its place")


@dataclass(slots=True, eq=False)
class Work:
    """A call that runs or will run, and who waits for its reply."""

    call: IncomingCall
    waiting: list[OnReply]
    started: bool = False


@dataclass(frozen=True, slots=True)
class Replaced:
    """Who need not wait any longer, and what to say."""

    on_reply: OnReply
    reply: Reply


class Desk:
    """Admits calls and says what may start. Not safe for threads: its owner locks."""

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._waiting = {True: 0, False: 0}
        self._branches: dict[tuple[str, int], deque[Work]] = {}
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether no call is under way."""
        return not self._branches

    def close(self) -> None:
        """Admit nothing any more."""
        self._closed = True

    def admit(self, call: IncomingCall, on_reply: OnReply) -> Work | Reply | Replaced | None:
        """Work to start now, a reply to give at once, or None: the reply comes when other work ends.

        Replaced: so it does, and another waiter is to be told at once. A call that hangs is repeated for as long as
        it hangs: if all its repeats waited, they would in time be all that is admitted.
        """
        if self._closed:
            return _STOPPING
        lane = is_try(call)
        queue = self._branches.get(call.key, ())
        same = next((work for work in queue if work.call.identity == call.identity), None)
        if same is not None and len(same.waiting) >= WAITING_FOR_ONE_MAX:
            self._join(same, call, on_reply)
            return Replaced(same.waiting.pop(0), _REPLACED)
        if self._waiting[lane] >= self._waiting_max:
            return Reply.unknown(f"the participant is overloaded: {self._waiting_max} calls are waiting")
        self._waiting[lane] += 1
        if same is not None:
            self._join(same, call, on_reply)
            return None
        work = Work(call, [on_reply])
        queue = self._branches.setdefault(call.key, deque())
        queue.append(work)
        return work if len(queue) == 1 else None

    def _join(self, work: Work, call: IncomingCall, on_reply: OnReply) -> None:
        if not work.started and call.expires_at > work.call.expires_at:
            work.call = replace(work.call, expires_at=call.expires_at)
        work.waiting.append(on_reply)

    def finish(self, work: Work) -> tuple[list[OnReply], Work | None]:
        """Take ended work away: who waited for it, and the work of its branch that may start now."""
        self._waiting[is_try(work.call)] -= len(work.waiting)
        queue = self._branches[work.call.key]
        queue.popleft()
        if queue:
            return work.waiting, queue[0]
        del self._branches[work.call.key]
        return work.waiting, None


def is_try(call: IncomingCall) -> bool:
    """Which of the two lanes a call takes."""
    return call.phase is Phase.TRY


class Workers:
    """Daemon threads that run what is put: a handler that never ends does not keep the process from ending."""

    def __init__(self, count: int, name: str, run: Callable[[Work], None]) -> None:
        self._count = count
        self._run = run
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        for number in range(1, count + 1):
            threading.Thread(target=self._loop, name=f"{name}-{number}", daemon=True).start()

    def put(self, work: Work) -> None:
        """Run `work` as soon as a thread is free."""
        self._queue.put(work)

    def stop(self) -> None:
        """End the threads when all that was put has run."""
        for _ in range(self._count):
            self._queue.put(None)

    def _loop(self) -> None:
        while (work := self._queue.get()) is not None:
            self._run(work)


class ThreadLanes:
    """Runs calls in two sets of threads. `submit` may come from any thread; replies come in the workers'."""

    def __init__(
        self, execute: Callable[[IncomingCall], Reply], try_workers: int, phase2_workers: int, waiting_max: int
    ) -> None:
        self._execute = execute
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
        self._workers[is_try(work.call)].put(work)

    def _run(self, work: Work) -> None:
        with self._changed:
            work.started = True
        try:
            reply = self._execute(work.call)
        except BaseException as error:  # a handler that calls sys.exit() ends its call, not the worker
            logger.exception("%s: unknown", work.call)
            reply = Reply.unknown(describe(error))
        with self._changed:
            waiting, following = self._desk.finish(work)
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
    ) -> None:
        self._execute = execute
        self._desk = Desk(waiting_max)
        self._places = {True: asyncio.Semaphore(try_workers), False: asyncio.Semaphore(phase2_workers)}
        self._tasks: set[asyncio.Task[None]] = set()
        self._abandoned = False

    def submit(self, call: IncomingCall, on_reply: OnReply) -> None:
        """Have `call` run or join its like; `on_reply` is called once, in the event loop."""
        admitted = self._desk.admit(call, on_reply)
        _follow(admitted, on_reply, self._start)

    def _start(self, work: Work) -> None:
        task = asyncio.get_running_loop().create_task(self._run(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, work: Work) -> None:
        reply = Reply.unknown("the call was cancelled in this process")
        try:
            async with self._places[is_try(work.call)]:
                work.started = True
                reply = await self._execute(work.call)
        except Exception as error:
            logger.exception("%s: unknown", work.call)
            reply = Reply.unknown(describe(error))
        finally:  # also when a handler lets a CancelledError out
            waiting, following = self._desk.finish(work)
            _tell(waiting, reply)
            while following is not None and self._abandoned:
                waiting, following = self._desk.finish(following)
                _tell(waiting, _STOPPING)
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
