"""A Try whose effect lies outside its database, such as an authorisation at a payment provider (rule C4).

The fence row cannot be in one local transaction with such an effect. So an intent is committed before the handler
runs: TRIED, not finished, with a lease. Whatever happens to this process then, Cancel will reach the effect. Until
the lease has run out, Cancel and repeats of Try keep away, since the handler may still be running; after it, a repeat
runs the handler again, under the same key at the provider. The handler's end is stored in exactly the intent that it
began with. If Cancel has been faster, the effect may have come after it: Cancel's handler runs once more, and a
person is told.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from functools import partial
from secrets import token_hex
from typing import Any, Final

from participant_sdk.actions import Action
from participant_sdk.call import Call, IncomingCall, Outcome, Reply
from participant_sdk.databases import Database
from participant_sdk.errors import Refused
from participant_sdk.fence import Status
from participant_sdk.fence_row import RowGone, storable
from participant_sdk.handler import Handle
from participant_sdk.handling import encode_result, is_transient, run_handler, tell_if_late
from participant_sdk.steps import CallFailed, Look, Rollback, RunAgain, Step

logger = logging.getLogger("tricord.participant")

Steps = Generator[Step, Any, Reply]

_OVERTAKEN: Final = "Cancel came before this Try's handler had ended: its effect may have come after what Cancel undid"


def run_try(call: IncomingCall, database: Database, action: Action, handed: Call[Any], old: str | None) -> Steps:
    """Run the handler of an external Try under an intent of its own, which takes over from `old`, if there is one."""
    if action.lease_ms is None:
        raise AssertionError("only an external action has a lease")
    intent = token_hex(16)
    yield from database.lease(call, old, intent, action.lease_ms)
    yield Rollback()  # SQLAlchemy need not know that a script has committed
    try:
        return (yield from _run(call, database, action, handed, intent))
    except RowGone:
        yield Rollback()
        return (yield from _overtaken(call, database, action, handed))
    except Exception:
        yield Rollback()
        yield from database.lapse(call, intent)  # it runs no more: a repeat, or Cancel, need not wait
        raise


def _run(call: IncomingCall, database: Database, action: Action, handed: Call[Any], intent: str) -> Steps:
    try:
        result = yield Handle(action.try_handler, handed, partial(database.begin_within, call=call))
    except Refused as refused:
        return (yield from _refuse(call, database, refused, intent))
    stored = encode_result(result)
    if not (yield Look(lambda connection: connection.in_transaction())):  # the handler has not used it
        yield from database.begin(call)
    yield from database.finish(call, Status.TRIED, stored, intent)
    tell_if_late(call)
    return Reply(Outcome.DONE, result=stored)


def _refuse(call: IncomingCall, database: Database, refused: Refused, intent: str) -> Steps:
    if is_transient(refused, database):
        raise RunAgain(f"its refusal came of a lost race, which is no reason to refuse: {refused}") from refused
    yield Rollback()
    refusal = storable(refused.reason, refused.message)
    yield from database.begin(call)
    yield from database.refuse(call, refusal, handled=False, intent=intent)
    tell_if_late(call)
    return Reply.refused(refusal)


def _overtaken(call: IncomingCall, database: Database, action: Action, handed: Call[Any]) -> Steps:
    """The intent is another's, or cancelled; what the handler wrote to the database has been rolled back."""
    row = (yield from database.meet(call)).row
    if row is None or row.status is not Status.ROLLBACKED or not row.finished:
        raise CallFailed("another call has taken over this branch, because its Try outlived its lease", attention=True)
    logger.error("%s: %s; Cancel's handler runs again", call, _OVERTAKEN)
    yield from database.start(call, row, Status.ROLLBACKED)
    yield from run_handler(call, action.cancel_handler, handed)
    yield from database.finish(call, Status.ROLLBACKED, None, None)
    return Reply.unknown(f"{_OVERTAKEN}; Cancel's handler has run again", attention=True)
