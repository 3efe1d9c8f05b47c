"""What happens in one call's local transaction, written once for both flavours and for every database.

Order is everything here: fence row first, then the handler, then the proof that the row is still there, then what has
to be stored, then COMMIT, and only then the answer. The proof is needed because a handler may have swallowed an error
that made the database roll everything back: then all is rolled back, and nothing is claimed to have happened. It is the
RELEASE of the SDK's own savepoint, if it does not lie in what is stored (see `databases`). What has to be stored says
that the handler ended: a row without it was committed by the handler itself, half way.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from participant_sdk import external
from participant_sdk.actions import Actions
from participant_sdk.call import IncomingCall, Outcome, Refusal, Reply
from participant_sdk.databases import Database
from participant_sdk.databases.database import REPLY_MARGIN_MS
from participant_sdk.errors import Refused
from participant_sdk.fence import Phase, Status, Verdict, decide
from participant_sdk.fence_row import FenceRow, Meeting, storable
from participant_sdk.handler import Handle
from participant_sdk.handling import (
    encode_result,
    find,
    handler_call,
    is_transient,
    lost_a_race,
    run_handler,
    tell_if_late,
    told,
)
from participant_sdk.payload import PayloadError
from participant_sdk.steps import CallFailed, RunAgain, Step

R = TypeVar("R")
Steps = Generator[Step, Any, Reply]

SUSPENDED: Final = Refusal("suspended", "this branch was cancelled before its Try arrived")
INVALID_PAYLOAD: Final = "invalid_payload"
TOO_OLD: Final = "too_old"

RUNS_MAX: Final = 10
TRY_AGE_MAX_MS: Final = 25 * 3_600_000
"""A transaction is decided within 24 hours; nothing is purged before this."""
PHASE2_SECONDS_MIN: Final = 1.0
"""Confirm and Cancel are owed however late they are: so long they run again in any case."""
RUN_SECONDS_MIN: Final = 2 * REPLY_MARGIN_MS / 1000
"""Less time than that is not worth another run; a wait for a lock that was in vain leaves about half of it."""
PAUSE_FIRST_SECONDS: Final = 0.005
PAUSE_MAX_SECONDS: Final = 0.5


class TimeIsUp(CallFailed):
    """Nobody waits for this Try any more, and its handler has not begun."""


@dataclass(frozen=True, slots=True)
class Fence:
    """A database with a proven fence, the actions whose calls it guards, and how long it remembers them at least."""

    database: Database
    fence_id: str
    actions: Actions
    retention_ms: int

    @property
    def try_age_max_ms(self) -> int:
        """What a Try may have behind it. Not the retention: rows that are gone stay gone when that is raised."""
        return min(TRY_AGE_MAX_MS, self.retention_ms)


def steps_of(call: IncomingCall, fence: Fence) -> Steps:
    """One call from BEGIN to COMMIT; returns its reply. An exception out of it means: roll back, outcome unknown."""
    return restoring(_steps_begun(call, fence), fence)


def restoring(steps: Generator[Step, Any, R], fence: Fence) -> Generator[Step, Any, R]:
    """Steps, and after them whatever gives the connection back to the user's pool as it was."""
    return _restoring(steps, fence) if fence.database.restores else steps


def _restoring(steps: Generator[Step, Any, R], fence: Fence) -> Generator[Step, Any, R]:
    try:
        reply = yield from steps
    except Exception:
        yield from fence.database.restored()
        raise
    yield from fence.database.restored()
    return reply


def _steps_begun(call: IncomingCall, fence: Fence) -> Steps:
    meeting: Meeting = yield from fence.database.meet(call)
    return (yield from decided(call, meeting, fence))


def decided(call: IncomingCall, meeting: Meeting, fence: Fence) -> Steps:
    """What the table says of a call that has met its row, carried out."""
    row, verdict = meeting.row, verdict_of(call, meeting)
    match verdict, row:
        case Verdict.RUN_TRY, None:
            return (yield from _run_try(call, fence, meeting))
        case Verdict.RUN_TRY_AGAIN, FenceRow(intent=intent):
            return (yield from _run_try_again(call, fence, intent))
        case Verdict.RUN_CONFIRM, FenceRow():
            return (yield from _run_phase2(call, fence, Status.COMMITTED, row))
        case Verdict.RUN_CANCEL, FenceRow():
            return (yield from _run_phase2(call, fence, Status.ROLLBACKED, row))
        case Verdict.SETTLE_COMMITTED, FenceRow():
            return (yield from _settle(call, fence, Status.COMMITTED, row))
        case Verdict.SETTLE_ROLLBACKED, FenceRow():
            return (yield from _settle(call, fence, Status.ROLLBACKED, row))
        case Verdict.SUSPEND, None:
            yield from fence.database.commit()
            return Reply(Outcome.DONE)
        case _:
            yield from fence.database.leave()
            return _answer(verdict, row)


def verdict_of(call: IncomingCall, meeting: Meeting) -> Verdict:
    """The table's cell for a call that has met its row. Raises CallFailed for a row of a newer version."""
    row = meeting.row
    if row is None:
        return decide(call.phase, None, True)
    return decide(call.phase, row.status, row.holds(call), row.progress)


def _answer(verdict: Verdict, row: FenceRow | None) -> Reply:
    """The reply where nothing is to be run, nor changed."""
    match verdict, row:
        case Verdict.DONE, _:
            return Reply(Outcome.DONE)
        case Verdict.REPLAY_RESULT, FenceRow(result=result):
            return Reply(Outcome.DONE, result=result)
        case Verdict.REPLAY_REFUSAL, FenceRow(refusal=refusal):
            return Reply.refused(refusal or SUSPENDED)
        case Verdict.REFUSE_SUSPENDED, _:
            return Reply.refused(SUSPENDED)
        case Verdict.TRY_RUNS, _:
            return Reply.unknown(verdict.value)
        case _:
            if not verdict.is_violation:  # a cell of the table that nothing here can carry out
                raise CallFailed(f"{verdict.name} does not fit a branch {'with' if row else 'without'} a row")
            return Reply(Outcome.VIOLATION, error=verdict.value)


def _run_try(call: IncomingCall, fence: Fence, meeting: Meeting) -> Steps:
    """A Try that has just inserted its row."""
    if meeting.now_ms is not None and meeting.now_ms - xid_ms(call.xid) > fence.try_age_max_ms:
        # What is that old may have been forgotten here, an earlier Cancel included (rule C7). Nothing is stored, and
        # a repeat is refused again, since it is older still.
        yield from fence.database.leave()
        return Reply.refused(Refusal(TOO_OLD, "its transaction began before what this participant still remembers"))
    action = find(call, fence.actions)
    try:
        payload = action.decode_payload(call.payload)
    except PayloadError as error:
        refusal = storable(INVALID_PAYLOAD, str(error))
        yield from fence.database.refuse(call, refusal, handled=False, intent=None)
        return Reply.refused(refusal)
    _check_time(call)
    if action.lease_ms is not None:
        return (yield from external.run_try(call, fence.database, action, handler_call(call, payload, None), None))
    yield from fence.database.savepoint()
    handle = Handle(action.try_handler, handler_call(call, payload, None), repeats=True)
    try:
        result = yield handle
    except Refused as refused:
        if is_transient(refused, fence.database):
            raise RunAgain(f"its refusal came of a lost race, which is no reason to refuse: {refused}") from refused
        refusal = storable(refused.reason, refused.message)
        met = yield from fence.database.refuse(call, refusal, handled=True, intent=None)
        tell_if_late(call)
        return Reply.refused(refusal) if met is None else _answer(verdict_of(call, met), met.row)
    stored = encode_result(result)
    yield from fence.database.finish(call, Status.TRIED, stored, None)
    tell_if_late(call)
    return Reply(Outcome.DONE, result=stored, tried_branch_ids=frozenset(handle.saw_tried))


def _run_try_again(call: IncomingCall, fence: Fence, intent: str | None) -> Steps:
    """An external Try that did not end within its lease. Its effect may be there, so nothing can be refused now."""
    action = find(call, fence.actions)
    if action.lease_ms is None:
        raise CallFailed(
            f"its Try is not finished, and action {call.action!r} is not external any more", attention=True
        )
    try:
        payload = action.decode_payload(call.payload)
    except PayloadError as error:
        raise CallFailed(f"{INVALID_PAYLOAD}: {error}", attention=True) from error
    _check_time(call)
    return (yield from external.run_try(call, fence.database, action, handler_call(call, payload, None), intent))


def _check_time(call: IncomingCall) -> None:
    if call.seconds_left() <= 0:
        raise TimeIsUp("its time was up before its handler could start")


def _run_phase2(call: IncomingCall, fence: Fence, status: Status, row: FenceRow) -> Steps:
    action = find(call, fence.actions)
    try:
        payload = action.decode_payload(call.payload)
    except PayloadError as error:
        raise CallFailed(f"{INVALID_PAYLOAD}: {error}", attention=True) from error
    try:
        result = action.decode_result(row.result)
    except PayloadError as error:
        raise CallFailed(f"the stored result of its Try does not decode: {error}", attention=True) from error
    yield from fence.database.start(call, row, status)
    handler = action.confirm_handler if call.phase is Phase.CONFIRM else action.cancel_handler
    yield from run_handler(call, handler, handler_call(call, payload, result))
    yield from fence.database.finish(call, status, None, None)
    tell_if_late(call)
    return Reply(Outcome.DONE)


def _settle(call: IncomingCall, fence: Fence, status: Status, row: FenceRow) -> Steps:
    """Write down what was done by hand. No handler is looked up, and nothing decoded: they may be why it was needed."""
    yield from fence.database.start(call, row, status)
    yield from fence.database.finish(call, status, None, None)
    return Reply(Outcome.DONE)


def xid_ms(xid: str) -> int:
    """When the transaction began, in ms since 1970: an xid is a UUIDv7, which starts with it."""
    return int(xid[:12], 16)


def after_error(call: IncomingCall, error: Exception, runs: int, seconds: float, database: Database) -> Reply | float:
    """What becomes of a call whose local transaction was rolled back: its reply, or a pause in s and another run.

    `runs` and `seconds`: how often, and for how long altogether, it has run.

    Lost races and lost connections are run again, COMMIT's own failure included: the insert at the start of the next
    run waits for the lost one and settles what became of it.
    """
    if lost_a_race(error, database) and runs < RUNS_MAX:
        pause = random.uniform(0, min(PAUSE_MAX_SECONDS, PAUSE_FIRST_SECONDS * 2**runs))
        in_time = call.seconds_left() > pause + RUN_SECONDS_MIN
        if in_time or (call.phase is not Phase.TRY and seconds < PHASE2_SECONDS_MIN):
            return pause
    if isinstance(error, CallFailed):
        return Reply.unknown(str(error), attention=error.attention)
    return Reply.unknown(told(error))
