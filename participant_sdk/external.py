"""A Try whose effect lies outside its database, such as an authorisation at a payment provider (rule C4).

The fence row cannot be in one local transaction with such an effect. So an intent is committed before the handler
runs: TRIED, not finished, with a lease. Whatever happens to this process then, Cancel will reach the effect. Until
the lease has run out, Cancel and repeats of Try keep away, since the handler may still be running; after it, a repeat
runs the handler again, under the same key at the provider. The handler's end is stored in exactly the intent that it
began with. If Cancel has been faster, the effect may have come after it: Cancel's handler runs once more, and a
person is told. A run that says no after another was lost, whose effect may be there, does not count as a refusal:
Cancel has to come.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, TypeVar

from participant_sdk.actions import Action
from participant_sdk.call import Call, IncomingCall, Outcome, Reply
from participant_sdk.databases import Database
from participant_sdk.errors import Refused
from participant_sdk.fence import Phase, Status
from participant_sdk.fence_row import RowGone, storable
from participant_sdk.handler import Handle
from participant_sdk.handling import encode_result, is_transient, lost_a_race, run_handler, tell_if_late, told
from participant_sdk.steps import CallFailed, Look, Rollback, RunAgain, Step
from participant_sdk.turns import give_turn

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection

logger = logging.getLogger("tricord.participant")

R = TypeVar("R")
Steps = Generator[Step, Any, Reply]

AFTERMATH_RUNS: Final = 5
"""After so many that failed it is told."""
AFTERMATH_PAUSE_SECONDS: Final = 0.2
"""The first pause; it doubles with each."""
AFTERMATH_PAUSE_SECONDS_MAX: Final = 2.0

_OVERTAKEN: Final = "Cancel came before this Try's handler had ended: its effect may have come after what Cancel undid"
_NOT_YET: Final = (
    "the end of its Try cannot be stored yet. It is tried on until this process ends; after that, if Cancel has run "
    "before, nobody undoes what its Try has done"
)
_TAKEN_OVER: Final = "its Try outlived its lease, and by then another call had taken over its branch"


@dataclass(frozen=True, slots=True)
class Pause:
    """The step that waits."""

    seconds: float

    def perform(self, connection: Connection) -> None:
        """See Step."""
        time.sleep(self.seconds)

    async def perform_async(self, connection: AsyncConnection) -> None:
        """See Step."""
        await asyncio.sleep(self.seconds)


def run_try(call: IncomingCall, database: Database, action: Action, handed: Call[Any], old: str | None) -> Steps:
    """Run the handler of an external Try under an intent of its own, which takes over from `old`, if there is one."""
    if action.lease_ms is None:
        raise AssertionError("only an external action has a lease")
    intent = token_hex(16)
    yield from database.lease(call, old, intent, action.lease_ms)
    yield Rollback()  # SQLAlchemy need not know that a script has committed
    yield Look(give_turn)
    try:
        return (yield from _run(call, database, action, handed, intent, again=old is not None))
    except Exception as error:
        # Patient as a Cancel, which it may become: the call's own time may be up.
        reply = yield from _aftermath(replace(call, phase=Phase.CANCEL), database, action, handed, intent)
        if reply is not None:
            return reply
        if isinstance(error, RowGone):
            raise CallFailed(_TAKEN_OVER, attention=True) from error
        raise


def _run(
    call: IncomingCall, database: Database, action: Action, handed: Call[Any], intent: str, *, again: bool
) -> Steps:
    handle = Handle(action.try_handler, handed, partial(database.begin_within, call=call), repeats=True)
    try:
        result = yield handle
    except Refused as refused:
        if is_transient(refused, database):
            raise RunAgain(f"its refusal came of a lost race, which is no reason to refuse: {refused}") from refused
        if again:  # after a refusal no Cancel would come for it
            raise CallFailed(
                f"refused, but an earlier run may have had its effect, which only Cancel undoes: {refused}"
            ) from refused
        yield Rollback()
        refusal = storable(refused.reason, refused.message)
        yield from database.begin(call)
        yield from database.refuse(call, refusal, handled=False, intent=intent)
        tell_if_late(call)
        return Reply.refused(refusal)
    stored = encode_result(result)
    if not (yield Look(lambda connection: connection.in_transaction())):  # the handler has not used it
        yield from database.begin(call)
    yield from database.finish(call, Status.TRIED, stored, intent)
    tell_if_late(call)
    return Reply(Outcome.DONE, result=stored, tried_branch_ids=frozenset(handle.saw_tried))


def _aftermath(
    cancel: IncomingCall, database: Database, action: Action, handed: Call[Any], intent: str
) -> Generator[Step, Any, Reply | None]:
    """What follows a Try that did not end well, or whose end came too late to be stored. None: nothing else changes.

    Its lease ends now, since it runs no more: a repeat, or Cancel, need not wait. If the intent is not its own any
    more, and Cancel was the one to take it, Cancel's handler runs again. Nobody else would do that: it is waited for
    the database for as long as this process lives, and the calls of this branch that come to it wait behind.
    """
    try:
        if (yield from _patiently(cancel, database, partial(database.lapse, cancel, intent))):
            return None
    except Exception:
        logger.warning(
            "%s: the lease of its Try could not be ended, and stands until it runs out", cancel, exc_info=True
        )
        return None
    try:
        return (yield from _patiently(cancel, database, partial(_overtaken, cancel, database, action, handed)))
    except Exception as error:
        logger.exception("%s: Cancel's handler has failed when it ran again, and will not be run any more", cancel)
        return Reply.unknown(f"{_OVERTAKEN}; Cancel's handler has failed: {told(error)}", attention=True)


def _patiently(
    cancel: IncomingCall, database: Database, script: Callable[[], Generator[Step, Any, R]]
) -> Generator[Step, Any, R]:
    """Run a script, and again while it loses races or the database is away; raises what else it raises."""
    pause = AFTERMATH_PAUSE_SECONDS
    for run in count(1):
        try:
            yield Rollback()
            return (yield from script())
        except Exception as error:
            if not lost_a_race(error, database):
                raise
            if run == AFTERMATH_RUNS:
                logger.error("%s: %s: %s", cancel, _NOT_YET, told(error))
        with suppress(Exception):
            yield Rollback()  # nothing is held in the pause
        yield Pause(pause)
        pause = min(2 * pause, AFTERMATH_PAUSE_SECONDS_MAX)
    raise AssertionError("unreachable")


def _overtaken(
    cancel: IncomingCall, database: Database, action: Action, handed: Call[Any]
) -> Generator[Step, Any, Reply | None]:
    """The intent is another's, or cancelled; what the handler wrote to the database has been rolled back."""
    row = (yield from database.meet(cancel)).row
    # With a refusal in it the row is this Try's own: its COMMIT was done, and what it gave was lost.
    if row is None or row.status is not Status.ROLLBACKED or not row.finished or row.refusal is not None:
        yield Rollback()
        return None
    logger.error("%s: %s; Cancel's handler runs again", cancel, _OVERTAKEN)
    yield from database.start(cancel, row, Status.ROLLBACKED)
    yield from run_handler(cancel, action.cancel_handler, handed)
    yield from database.finish(cancel, Status.ROLLBACKED, None, None)
    return Reply.unknown(f"{_OVERTAKEN}; Cancel's handler has run again", attention=True)
