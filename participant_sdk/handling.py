"""What surrounds a handler: finding its action, what it is handed, what it returned, and what its errors mean."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator
from typing import Any, Final

from sqlalchemy.exc import StatementError

from participant_sdk.actions import Action, Actions
from participant_sdk.call import Call, IncomingCall
from participant_sdk.databases import Database
from participant_sdk.errors import Refused, describe
from participant_sdk.handler import Handle, Handler
from participant_sdk.payload import JSON, Payload, encode
from participant_sdk.steps import CallFailed, RunAgain, Step

logger = logging.getLogger("tricord.participant")

RESULT_BYTES_MAX: Final = 64 * 1024
"""What a coordinator stores and hands on."""
_CONTENT_TYPE: Final = re.compile(r"[ -~]{0,255}")


def run_handler(call: IncomingCall, handler: Handler, handed: Call[Any]) -> Generator[Step, Any, None]:
    """Confirm's or Cancel's handler, which may not refuse."""
    try:
        yield Handle(handler, handed)
    except Refused as refused:
        phase = call.phase.name.capitalize()
        raise CallFailed(f"{phase} may not refuse, all checks belong in Try: {refused}", attention=True) from refused


def tell_if_late(call: IncomingCall) -> None:
    """One warning about a handler that outlived its call. What it has committed stands: the repeat will tell so."""
    if (late := -call.seconds_left()) > 0:
        logger.warning(
            "%s: action %r ended %.1f s after the coordinator stopped waiting for it", call, call.action, late
        )


def find(call: IncomingCall, actions: Actions) -> Action:
    """The action that is called; raises CallFailed."""
    action = actions.get(call.action)
    if action is None:
        raise CallFailed(f"participant {call.participant} has no action {call.action!r}", attention=True)
    return action


def handler_call(call: IncomingCall, payload: Any, result: Any) -> Call[Any]:
    """What the handler gets."""
    return Call(
        payload=payload,
        xid=call.xid,
        branch_id=call.branch_id,
        participant=call.participant,
        action=call.action,
        attempt=call.attempt,
        result=result,
        metadata=call.metadata,
        expires_at=call.expires_at,
    )


def encode_result(result: Any) -> Payload | None:
    """What Try returned, as it is stored; raises CallFailed if it cannot be."""
    if result is None:
        return None
    try:
        stored = encode(result)
    except (TypeError, ValueError) as error:
        raise CallFailed(
            f"the result of Try cannot be stored: {error}; return None or a value of a payload type", attention=True
        ) from error
    if len(stored.data) > RESULT_BYTES_MAX:
        text = f"the result of Try has {len(stored.data)} bytes, {RESULT_BYTES_MAX} are allowed: return a key to it"
        raise CallFailed(text, attention=True)
    if stored.content_type is not JSON and not _CONTENT_TYPE.fullmatch(stored.content_type):
        raise CallFailed(f"the content type of Try's result is {stored.content_type!r}", attention=True)
    return stored


def told(error: BaseException) -> str:
    """An error on one line, as it may leave this process: without a statement's parameters, which say too much."""
    if isinstance(error, StatementError) and error.orig is not None:
        error = error.orig
    return describe(error)


def lost_a_race(error: BaseException, database: Database) -> bool:
    """Whether what ended so is worth another run from its start."""
    return isinstance(error, RunAgain) or is_transient(error, database)


def is_transient(error: BaseException | None, database: Database) -> bool:
    """Whether `error`, or what a handler wrapped in it, only means that the local transaction lost a race."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if database.is_transient(error):
            return True
        error = error.__cause__ or error.__context__
    return False
