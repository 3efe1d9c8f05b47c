"""What happens in one call's local transaction, written once for both flavours.

Order is everything here: fence row first, then the handler inside the SDK's own savepoint, then that savepoint's
RELEASE or ROLLBACK TO, then what has to be stored, then COMMIT, and only then the answer. The savepoint is the proof
that the fence row is still there: a handler may have swallowed an error that made the database roll everything
back, and then RELEASE fails, all is rolled back, and nothing is claimed to have happened. What has to be stored says
that the handler ended: a row without it was committed by the handler itself, half way.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Executable
from sqlalchemy import exc as sqlalchemy_errors

from participant_sdk import fence_log
from participant_sdk.actions import Action, Actions
from participant_sdk.call import Call, IncomingCall, Outcome, Refusal, Reply
from participant_sdk.databases import REPLY_MARGIN_MS, ROLLBACK_TO, SAVEPOINT, Database
from participant_sdk.errors import Refused, describe
from participant_sdk.fence import Phase, Status, Verdict, decide
from participant_sdk.payload import Payload, PayloadError, encode
from participant_sdk.steps import Ask, CallFailed, Commit, Fetch, Handle, RunAgain, Script, Step

Steps = Generator[Step, Any, Reply]

SUSPENDED: Final = Refusal("suspended", "this branch was cancelled before its Try arrived")
INVALID_PAYLOAD: Final = "invalid_payload"
_FENCE_ID: Final = "tricord.fence_id"

RESULT_BYTES_MAX: Final = 64 * 1024
"""What a coordinator stores and hands on."""
_CONTENT_TYPE: Final = re.compile(r"[ -~]{0,255}")

RUNS_MAX: Final = 4
RUN_SECONDS_MIN: Final = 2 * REPLY_MARGIN_MS / 1000
"""Less time than that is not worth another run; a wait for a lock that was in vain leaves about half of it."""
PAUSE_FIRST_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class Fence:
    """A database with a proven fence, and the actions whose calls it guards."""

    database: Database
    insert: Executable
    fence_id: str
    actions: Actions


def steps_of(call: IncomingCall, fence: Fence) -> Steps:
    """One call from BEGIN to COMMIT; returns its reply. An exception out of it means: roll back, outcome unknown."""
    before = yield from fence.database.begin(call)
    try:
        reply = yield from _steps_begun(call, fence)
    except Exception:
        yield from _restore(fence.database, before)
        raise
    yield from _restore(fence.database, before)
    return reply


def _restore(database: Database, before: Any) -> Generator[Step, Any, None]:
    with suppress(Exception):  # the call has ended: nothing that happens now may change its reply
        yield from database.restore(before)


def _steps_begun(call: IncomingCall, fence: Fence) -> Steps:
    yield from _check_fence_id(fence.fence_id)
    row = yield from fence_log.meet(call, fence.insert)
    verdict = decide(call.phase, row.status, row.holds(call), row.finished) if row else decide(call.phase, None, True)
    match verdict:
        case Verdict.RUN_TRY:
            return (yield from _run_try(call, fence))
        case Verdict.RUN_CONFIRM:
            return (yield from _run_phase2(call, fence, Status.COMMITTED, row.result if row else None))
        case Verdict.RUN_CANCEL:
            return (yield from _run_phase2(call, fence, Status.ROLLBACKED, row.result if row else None))
        case Verdict.SUSPEND:
            yield Commit()
            return Reply(Outcome.DONE)
        case Verdict.DONE:
            return Reply(Outcome.DONE)
        case Verdict.REPLAY_RESULT:
            return Reply(Outcome.DONE, result=row.result if row else None)
        case Verdict.REPLAY_REFUSAL:
            return Reply.refused((row.refusal if row else None) or SUSPENDED)
        case Verdict.REFUSE_SUSPENDED:
            return Reply.refused(SUSPENDED)
        case _:
            return Reply(Outcome.VIOLATION, error=verdict.value)


def _check_fence_id(fence_id: str) -> Generator[Step, Any, None]:
    """Raises CallFailed if this is not the database that the replies will name, asked once per connection.

    The engine may have been led elsewhere since the start (a restored copy, another host behind the name): its
    answers would be those of another fence, under this one's id.
    """
    if (yield Ask(lambda connection: connection.info.get(_FENCE_ID))) == fence_id:
        return
    rows = yield Fetch(fence_log.FENCE_ID)
    found = rows[0].fence_id if rows else None
    if found != fence_id:
        raise CallFailed(
            f"the fence database is not the one it was at the start: its id is {found}, not {fence_id}", attention=True
        )
    yield Ask(lambda connection: connection.info.update({_FENCE_ID: fence_id}))


def _run_try(call: IncomingCall, fence: Fence) -> Steps:
    action = _find(call, fence)
    try:
        payload = action.decode_payload(call.payload)
    except PayloadError as error:
        return (yield from _refuse(call, fence_log.storable(INVALID_PAYLOAD, str(error))))
    if call.seconds_left() <= 0:
        raise CallFailed("its time was up before its handler could start")
    yield Script(SAVEPOINT)
    try:
        result = yield Handle(action.try_handler, _handler_call(call, payload, None))
    except Refused as refused:
        if is_transient(refused, fence.database):
            raise RunAgain(f"its refusal came of a lost race, which is no reason to refuse: {refused}") from refused
        yield Script(ROLLBACK_TO)
        return (yield from _refuse(call, fence_log.storable(refused.reason, refused.message)))
    stored = _encode_result(action, result)
    for sql in fence.database.release:
        yield Script(sql)
    yield from fence_log.finish(call, Status.TRIED, stored)
    yield Commit()
    return Reply(Outcome.DONE, result=stored)


def _refuse(call: IncomingCall, refusal: Refusal) -> Steps:
    yield from fence_log.finish_refused(call, refusal)
    yield Commit()
    return Reply.refused(refusal)


def _run_phase2(call: IncomingCall, fence: Fence, status: Status, stored: Payload | None) -> Steps:
    action = _find(call, fence)
    try:
        payload = action.decode_payload(call.payload)
    except PayloadError as error:
        raise CallFailed(f"{INVALID_PAYLOAD}: {error}", attention=True) from error
    try:
        result = action.decode_result(stored)
    except PayloadError as error:
        raise CallFailed(f"the stored result of its Try does not decode: {error}", attention=True) from error
    yield from fence_log.start(call, status)
    yield Script(SAVEPOINT)
    handler = action.confirm_handler if call.phase is Phase.CONFIRM else action.cancel_handler
    try:
        yield Handle(handler, _handler_call(call, payload, result))
    except Refused as refused:
        phase = call.phase.name.capitalize()
        raise CallFailed(f"{phase} may not refuse, all checks belong in Try: {refused}", attention=True) from refused
    for sql in fence.database.release:
        yield Script(sql)
    yield from fence_log.finish(call, status)
    yield Commit()
    return Reply(Outcome.DONE)


def _find(call: IncomingCall, fence: Fence) -> Action:
    action = fence.actions.get(call.action)
    if action is None:
        raise CallFailed(f"participant {call.participant} has no action {call.action!r}", attention=True)
    return action


def _handler_call(call: IncomingCall, payload: Any, result: Any) -> Call[Any]:
    return Call(
        payload=payload,
        xid=call.xid,
        branch_id=call.branch_id,
        participant=call.participant,
        action=call.action,
        attempt=call.attempt,
        result=result,
        expires_at=call.expires_at,
    )


def _encode_result(action: Action, result: Any) -> Payload | None:
    if result is None:
        return None
    try:
        stored = encode(result)
    except (TypeError, ValueError) as error:
        raise CallFailed(
            f"the result of Try cannot be stored: {error}; return None, a dataclass, protobuf message, dict or bytes",
            attention=True,
        ) from error
    if len(stored.data) > RESULT_BYTES_MAX:
        text = f"the result of Try has {len(stored.data)} bytes, {RESULT_BYTES_MAX} are allowed: return a key to it"
        raise CallFailed(text, attention=True)
    if not _CONTENT_TYPE.fullmatch(stored.content_type):
        raise CallFailed(f"the content type of Try's result is {stored.content_type!r}", attention=True)
    return stored


def after_error(call: IncomingCall, error: Exception, runs: int, database: Database) -> Reply | float:
    """What becomes of a call whose local transaction was rolled back: its reply, or a pause in s and another run.

    Lost races and lost connections are run again, COMMIT's own failure included: the insert at the start of the next
    run waits for the lost one and settles what became of it.
    """
    transient = isinstance(error, RunAgain) or is_transient(error, database)
    if transient and runs < RUNS_MAX:
        pause = random.uniform(0, PAUSE_FIRST_SECONDS * 2**runs)
        if call.seconds_left() > pause + RUN_SECONDS_MIN:
            return pause
    if isinstance(error, CallFailed):
        return Reply.unknown(str(error), attention=error.attention)
    if isinstance(error, sqlalchemy_errors.DBAPIError) and error.orig is not None:
        return Reply.unknown(describe(error.orig))  # without the statement and its parameters
    return Reply.unknown(describe(error))


def is_transient(error: BaseException | None, database: Database) -> bool:
    """Whether `error`, or what a handler wrapped in it, only means that the local transaction lost a race."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, sqlalchemy_errors.TimeoutError):  # no free connection in the pool
            return True
        if isinstance(error, sqlalchemy_errors.DBAPIError) and (
            error.connection_invalidated or database.is_transient(error)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
