"""Which call is admitted, which joins another, and which waits for its branch: bookkeeping, without threads or tasks.

Repeats of a call that is under way join it and get its reply; they hold no connection and no worker. Another phase
of the same branch queues behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from participant_sdk.call import IncomingCall, Reply
from participant_sdk.fence import Phase

OnReply: TypeAlias = Callable[[Reply], None]

WAITING_FOR_ONE_MAX: Final = 4
"""How many wait for the same reply. The coordinator has long given up on the calls before the last few."""
STOPPING: Final = Reply.unknown("the participant is stopping")
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
            return STOPPING
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
