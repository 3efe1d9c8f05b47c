"""A participant's messages: what is a call to it, and a reply as it is sent.

Every text that leaves is made printable and short here, whoever wrote it: one reply that cannot be sent would take
the stream, and every other reply on it, with it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from typing import Final

from participant_sdk.call import IncomingCall, Outcome, Reply, fingerprint
from participant_sdk.context import XID_FORM, is_xid
from participant_sdk.errors import ERROR_LENGTH_MAX, MESSAGE_LENGTH_MAX, REASON_LENGTH_MAX, printable
from participant_sdk.fence import Phase
from participant_sdk.initiator_metadata import metadata_excess
from participant_sdk.payload import Payload
from tricord.v1 import participant_pb2, types_pb2

TIMEOUT_DEFAULT_SECONDS: Final = 5.0
TIMEOUT_MAX_SECONDS: Final = 24 * 3600.0
REPLY_MARGIN_SECONDS: Final = 0.05
MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024

_ACTION: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")

_OUTCOMES: Final = {
    Outcome.DONE: participant_pb2.OUTCOME_DONE,
    Outcome.REFUSED: participant_pb2.OUTCOME_REFUSED,
    Outcome.UNKNOWN: participant_pb2.OUTCOME_UNKNOWN,
    Outcome.VIOLATION: participant_pb2.OUTCOME_VIOLATION,
}


def read_call(
    message: participant_pb2.Call, participants: Collection[str], phase: Phase | None = None
) -> IncomingCall | Reply:
    """The call in a message, or the reply to one that cannot be taken: always UNKNOWN, nothing is stored for it.

    `participants` are those that are served here, `phase` is that of the unary method that brought it.
    """
    if phase is None or message.phase not in (participant_pb2.PHASE_UNSPECIFIED, int(phase)):
        try:
            if phase is not None:
                raise ValueError
            phase = Phase(message.phase)
        except ValueError:
            return Reply.unknown(f"the call has phase {message.phase}, which does not fit its method")
    if message.participant not in participants:
        here = " and ".join(repr(name) for name in sorted(participants))
        return Reply.unknown(f"this is participant {here}, not {message.participant!r}", attention=True)
    if not is_xid(message.xid):
        return Reply.unknown(f"the xid is not {XID_FORM}", attention=True)
    if message.branch_id < 1:
        return Reply.unknown("the branch_id is not 1 or more", attention=True)
    if not _ACTION.fullmatch(message.action):
        return Reply.unknown("the action is not 1 to 64 characters of A-Z a-z 0-9 . _ -", attention=True)
    metadata: dict[str, str] = {}
    if message.metadata:
        metadata = dict(message.metadata)
        if excess := metadata_excess(metadata):
            return Reply.unknown(excess, attention=True)
    payload = Payload(message.payload.data, message.payload.content_type)
    seconds = TIMEOUT_DEFAULT_SECONDS
    if message.HasField("timeout"):
        seconds = min(message.timeout.seconds + message.timeout.nanos / 1e9, TIMEOUT_MAX_SECONDS)
    return IncomingCall(
        phase=phase,
        xid=message.xid,
        branch_id=message.branch_id,
        participant=message.participant,
        action=message.action,
        payload=payload,
        attempt=message.attempt,
        expires_at=time.monotonic() + seconds,
        fingerprint=fingerprint(message.action, payload),
        metadata=metadata,
    )


def settle_phase(message: participant_pb2.Call) -> Phase:
    """The phase of a unary Settle: there are two, and a message of any other does not fit either."""
    cancelled = message.phase == participant_pb2.PHASE_SETTLE_CANCELLED
    return Phase.SETTLE_CANCELLED if cancelled else Phase.SETTLE_CONFIRMED


def write_reply(call_id: int, reply: Reply, fence_id: str) -> participant_pb2.Reply:
    """The message of a reply."""
    message = participant_pb2.Reply(
        call_id=call_id,
        outcome=_OUTCOMES[reply.outcome],
        error=printable(reply.error, ERROR_LENGTH_MAX),
        attention=reply.attention,
        fence_id=fence_id,
    )
    if reply.tried_branch_ids:
        message.tried_branch_ids.extend(sorted(reply.tried_branch_ids))
    if reply.result is not None:
        result = types_pb2.Payload(data=reply.result.data, content_type=reply.result.content_type)
        message.result.CopyFrom(result)
    if reply.refusal is not None:
        message.refusal.reason = printable(reply.refusal.reason, REASON_LENGTH_MAX)
        message.refusal.message = printable(reply.refusal.message, MESSAGE_LENGTH_MAX)
    return message


NO_WORKER: Final = Reply.unknown("the participant is overloaded: too many unary Trys are waiting")
STILL_RUNNING: Final = Reply.unknown("the call is still running")


def unary_wait(message: participant_pb2.Call) -> float:
    """Seconds that a unary call waits for its reply: a little less than the coordinator does."""
    if not message.HasField("timeout"):
        return TIMEOUT_DEFAULT_SECONDS
    seconds = min(message.timeout.seconds + message.timeout.nanos / 1e9, TIMEOUT_MAX_SECONDS)
    return max(0.0, seconds - min(REPLY_MARGIN_SECONDS, seconds / 10))
