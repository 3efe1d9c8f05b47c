"""Several calls of one kind in one local transaction, as a generator of steps (rules F1 and F2).

All fence rows are taken first, in the order of their keys; then the members run in that order, each in a savepoint of
its own whose RELEASE is the proof that its row is still there; one COMMIT ends them all. What becomes of a member is
decided by the same `local_transaction.decided` as that of a call by itself, which here works on a view of the database
that keeps what is to be stored until the next member begins. A refused member, or one whose time is up, fails alone.
Any error rolls everything back: then nothing has happened, and the calls are run one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final

from participant_sdk.call import IncomingCall, Refusal, Reply
from participant_sdk.databases import Database
from participant_sdk.databases.database import Ended, Finished, SaidNo, Script, Start, Withdrawn, most_patient
from participant_sdk.fence import Phase, Status, Verdict
from participant_sdk.fence_row import FenceRow, Meeting
from participant_sdk.gathering import Answers
from participant_sdk.handling import lost_a_race, told
from participant_sdk.local_transaction import Fence, TimeIsUp, decided, restoring, verdict_of
from participant_sdk.payload import Payload
from participant_sdk.steps import CallFailed, Step

if TYPE_CHECKING:
    from sqlalchemy import Connection

logger = logging.getLogger("tricord.participant")


@dataclass(slots=True)
class Batch:
    """Calls of one action and phase, each of another branch, sorted by branch, and how far they have come.

    `begun`: how many members there are up to the last whose handler has begun. `culprit`: whose doing an error would be
    now. `ended`: what is to be stored before the next handler begins. `mark`: what new rows of its Trys carry until
    they are finished.
    """

    calls: Sequence[IncomingCall]
    begun: int = 0
    culprit: IncomingCall | None = None
    ended: list[Ended] = field(default_factory=list)
    mark: int = field(default_factory=lambda: -1 - int(token_hex(7), 16))

    def __post_init__(self) -> None:
        self.calls = sorted(self.calls, key=lambda call: call.key)

    @property
    def patient(self) -> IncomingCall:
        """The member by whose time waits are bounded."""
        return most_patient(self.calls)

    @property
    def last_begun(self) -> IncomingCall | None:
        """The member whose handler was the last to begin."""
        return self.calls[self.begun - 1] if self.begun else None


def batch_of(calls: Sequence[IncomingCall]) -> Batch | None:
    """What can run together: not a Try whose time is up. None: nothing is left that needs a batch."""
    on_time = [call for call in calls if call.phase is not Phase.TRY or call.seconds_left() > 0]
    return Batch(on_time) if len(on_time) > 1 else None


def dissolved(batch: Batch, error: Exception, database: Database) -> Answers:
    """What is known after an error: nothing has happened. A lost race is nobody's fault."""
    culprit = None if lost_a_race(error, database) else batch.culprit
    logger.info(
        "a batch of %d calls was rolled back, they run one by one: %s: %s", len(batch.calls), culprit, told(error)
    )
    return Answers(culprit=None if culprit is None else culprit.key)


def steps_of_batch(batch: Batch, fence: Fence) -> Generator[Step, Any, list[Reply]]:
    """The batch from BEGIN to COMMIT; returns the replies in the order of `batch.calls`.

    An exception out of it means: roll back; the calls have to be run one by one.
    """
    return restoring(_steps(batch, fence), fence)


def clearing(batch: Batch, fence: Fence) -> Generator[Step, Any, None] | None:
    """What is to be done after a batch that was rolled back, on a new connection; None: nothing.

    A handler that committed behind the SDK's back has committed the rows of those that were to come after it. They
    look as if their handlers had done the same, and have not even begun: the mark tells, and the rows go.
    """
    left = batch.calls[batch.begun :]
    if not batch.begun or not left or left[0].phase is not Phase.TRY:
        return None
    return restoring(fence.database.clear(left, batch.mark), fence)


def _steps(batch: Batch, fence: Fence) -> Generator[Step, Any, list[Reply]]:
    database = fence.database
    meetings: list[Meeting] = yield from database.meet_all(batch.calls, batch.mark)
    view = MemberView(database, batch, meetings)
    try:
        replies = yield from _members(batch, meetings, view, replace(fence, database=view))
        batch.culprit = batch.last_begun
        yield from database.end_batch(batch.ended)
    except Exception:
        if not (yield from database.has_begun()):
            view.take_back()
        raise
    return replies


def _members(
    batch: Batch, meetings: Sequence[Meeting], view: MemberView, fence: Fence
) -> Generator[Step, Any, list[Reply]]:
    replies: list[Reply] = []
    for call, meeting in zip(batch.calls, meetings, strict=True):
        view.turn_to_next()
        try:
            replies.append((yield from decided(call, meeting, fence)))
        except TimeIsUp as error:
            yield from view.leave()
            replies.append(Reply.unknown(str(error)))
    return replies


_STARTS: Final = {Verdict.RUN_CONFIRM: Status.COMMITTED, Verdict.RUN_CANCEL: Status.ROLLBACKED}


class MemberView(Database):
    """The database as a member of a batch finds it: its row is met, and nothing is committed.

    As soon as a handler has ended, the next one is made ready: its savepoint is set while this process is still busy
    with the former's result. `ready` is the number of the member (from 1) for which that was done.
    """

    def __init__(self, database: Database, batch: Batch, meetings: Sequence[Meeting]) -> None:
        self._database = database
        self._batch = batch
        self._meetings = meetings
        self._number = 0
        self._ready = 0
        self._begun_when_readied = 0

    def turn_to_next(self) -> None:
        """The next member is at work."""
        self._number += 1
        self._batch.culprit = self._batch.calls[self._number - 1]

    def take_back(self) -> None:
        """The last savepoint was not set, as was known only later: it is the member before it that went wrong."""
        self._batch.begun = self._begun_when_readied
        self._batch.culprit = self._batch.last_begun

    def savepoint(self) -> Script[None]:
        """See Database."""
        yield from self._begin(None)

    def start(self, call: IncomingCall, row: FenceRow, status: Status) -> Script[None]:
        """See Database."""
        yield from self._begin(Start(call, row, status))

    def _begin(self, start: Start | None) -> Script[None]:
        if self._ready != self._number:
            yield from self._make_ready(self._number, start)
        self._batch.begun = self._number

    def _make_ready(self, number: int, start: Start | None) -> Script[None]:
        ended, self._batch.ended = self._batch.ended, []
        self._begun_when_readied = self._batch.begun
        yield from self._database.next_member(ended, start)
        self._ready = number

    def finish(self, call: IncomingCall, status: Status, result: Payload | None, intent: str | None) -> Script[None]:
        """See Database."""
        yield from self._end(Finished(call, status, result))

    def refuse(
        self, call: IncomingCall, refusal: Refusal, *, handled: bool, intent: str | None
    ) -> Script[Meeting | None]:
        """See Database."""
        yield from self._end(SaidNo(call, refusal, handled))
        return None

    def _end(self, ended: Ended) -> Script[None]:
        self._batch.ended.append(ended)
        for number in range(self._number, len(self._batch.calls)):
            call, meeting = self._batch.calls[number], self._meetings[number]
            try:
                verdict = verdict_of(call, meeting)
            except CallFailed:  # it will be told when it is that one's turn
                return
            if verdict is Verdict.RUN_TRY or (meeting.row is not None and verdict in _STARTS):
                start = None if meeting.row is None else Start(call, meeting.row, _STARTS[verdict])
                yield from self._make_ready(number + 1, start)
                return

    def commit(self) -> Script[None]:
        """What `meet_all` has inserted stays."""
        yield from ()

    def leave(self) -> Script[None]:
        """What was inserted for a Try that is not to be stored goes."""
        call = self._batch.calls[self._number - 1]
        if self._meetings[self._number - 1].row is None and call.phase is Phase.TRY:
            self._batch.ended.append(Withdrawn(call, self._batch.mark))
        yield from ()

    def is_transient(self, error: BaseException) -> bool:
        """See Database."""
        return self._database.is_transient(error)

    def meet(self, call: IncomingCall) -> Script[Meeting]:
        """It was met."""
        raise _apart()

    def meet_all(self, calls: Sequence[IncomingCall], mark: int) -> Script[list[Meeting]]:
        """It was met."""
        raise _apart()

    def next_member(self, ended: Sequence[Ended], start: Start | None) -> Script[None]:
        """Of the batch."""
        raise _apart()

    def end_batch(self, ended: Sequence[Ended]) -> Script[None]:
        """Of the batch."""
        raise _apart()

    def clear(self, calls: Sequence[IncomingCall], mark: int) -> Script[None]:
        """Of the batch."""
        raise _apart()

    def lease(self, call: IncomingCall, old: str | None, new: str, milliseconds: int) -> Script[None]:
        """Of external actions, which have no batches."""
        raise _apart()

    def begin_within(self, connection: Connection, call: IncomingCall) -> None:
        """Of external actions."""
        raise _apart()

    def begin(self, call: IncomingCall) -> Script[None]:
        """Of external actions."""
        raise _apart()

    def lapse(self, call: IncomingCall, intent: str) -> Script[bool]:
        """Of external actions."""
        raise _apart()


def _apart() -> CallFailed:
    return CallFailed("a call in a batch came to a step that it cannot share with others")
