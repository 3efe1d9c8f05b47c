"""How a participant that was called directly makes its Try a branch: the steps, written once for both flavours.

Enlist, Try, Report, in this order (rules B2, B3). Enlist comes first, so that whatever becomes of this process the
coordinator owes the branch a Cancel; unless it is answered OK nothing is run. Try is run through the fence like a call
of the coordinator. Only a Report after its COMMIT makes the branch count as tried: until then it bars the confirm, and
so does every way in which this can go wrong. All three may be repeated at will: the branch key makes Enlist find the
same branch, the fence makes Try give the same answer, and a report is monotone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc

from participant_sdk.call import IncomingCall, Outcome, Refusal, Reply, fingerprint
from participant_sdk.client_asking import CLOSED, Ask, Closed, Pause, pause_seconds
from participant_sdk.coordinator_messages import Failure, error_of, write_payload
from participant_sdk.enlist_errors import BranchUnknown, NotEnlisted
from participant_sdk.errors import (
    MESSAGE_LENGTH_MAX,
    REASON_LENGTH_MAX,
    ConfigurationError,
    Refused,
    TricordError,
    printable,
)
from participant_sdk.fence import Phase
from participant_sdk.payload import Payload
from tricord.v1 import coordinator_pb2, types_pb2

logger = logging.getLogger("tricord.participant")

SEND_SECONDS_MAX: Final = 5.0
"""How long one answer is waited for before the same is sent again."""
REPORT_SECONDS_MIN: Final = 2.0
"""So long a report is repeated in any case: it spares the transaction from waiting for its deadline."""

_NO: Final = frozenset({grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND})
_CANCELLED: Final = frozenset({types_pb2.TRANSACTION_STATE_CANCELLING, types_pb2.TRANSACTION_STATE_CANCELLED})
_TRIED: Final = frozenset({types_pb2.BRANCH_STATE_TRIED, types_pb2.BRANCH_STATE_CONFIRMED})


@dataclass(frozen=True, slots=True)
class Wanted:
    """The branch to enlist. `expires_at` (of `time.monotonic()`): when its caller stops waiting."""

    xid: str
    parent_branch_id: int
    branch_key: str
    participant: str
    action: str
    payload: Payload
    fence_id: str
    expires_at: float

    def unknown(self, why: str, branch_id: int | None = None) -> BranchUnknown:
        """The error for a branch of which it is not known whether it was tried."""
        what = f"branch {branch_id}" if branch_id is not None else "a branch"
        text = f"it is not known whether {what} of {self.xid} ({self.participant}/{self.action}) was tried: {why}"
        return BranchUnknown(text, self.xid, self.branch_key, branch_id)


@dataclass(frozen=True, slots=True)
class Enlisted:
    """A branch that counts as tried: what its Try returned, and what branches it saw tried itself."""

    branch_id: int
    result: Payload | None
    tried_branch_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class RunTry:
    """Run this call through the fence; gives its Reply, an unknown one when its time is up."""

    call: IncomingCall


EnlistStep: TypeAlias = Ask | Pause | RunTry
Enlisting: TypeAlias = Generator[EnlistStep, Any, Enlisted]


def enlisting(wanted: Wanted) -> Enlisting:
    """Make it a branch that was tried. Raises Refused, NotEnlisted, BranchUnknown, InvalidRequest, ConfigurationError.

    What was reported before is not run again, but answered from the coordinator's record.
    """
    branch: types_pb2.Branch = (yield from _enlisted(wanted)).branch
    branch_id = branch.branch_id
    if branch.HasField("refusal"):
        raise Refused(branch.refusal.reason, branch.refusal.message)
    if branch.state in _TRIED:
        result = Payload(branch.result.data, branch.result.content_type) if branch.HasField("result") else None
        told = Reply(Outcome.DONE, result=result, tried_branch_ids=frozenset(branch.tried_branch_ids))
        if branch.state == types_pb2.BRANCH_STATE_TRIED:  # its transaction may be cancelling: a report tells
            return (yield from _done(wanted, branch_id, told))
        return Enlisted(branch_id, told.result, told.tried_branch_ids)
    if branch.state == types_pb2.BRANCH_STATE_CANCELLED:
        raise NotEnlisted(f"branch {branch_id} of {wanted.xid} was cancelled", "NOT_TRYING")
    reply: Reply = yield RunTry(_call_of(wanted, branch_id))
    match reply:
        case Reply(outcome=Outcome.DONE):
            return (yield from _done(wanted, branch_id, reply))
        case Reply(outcome=Outcome.REFUSED, refusal=Refusal() as refusal):
            yield from _refused(wanted, branch_id, refusal)
            raise Refused(refusal.reason, refusal.message)
        case _:  # not reported: it bars the confirm
            raise wanted.unknown(reply.error or reply.outcome.value, branch_id)


def _call_of(wanted: Wanted, branch_id: int) -> IncomingCall:
    return IncomingCall(
        phase=Phase.TRY,
        xid=wanted.xid,
        branch_id=branch_id,
        participant=wanted.participant,
        action=wanted.action,
        payload=wanted.payload,
        attempt=1,
        expires_at=wanted.expires_at,
        fingerprint=fingerprint(wanted.action, wanted.payload),
    )


def _enlisted(wanted: Wanted) -> Generator[EnlistStep, Any, coordinator_pb2.EnlistResponse]:
    branch = coordinator_pb2.BranchRequest(
        participant=wanted.participant, action=wanted.action, payload=write_payload(wanted.payload)
    )
    request = coordinator_pb2.EnlistRequest(
        xid=wanted.xid, branch_key=wanted.branch_key, branch=branch, parent_branch_id=wanted.parent_branch_id
    )
    answer = yield from _asked(request, wanted.expires_at)
    if isinstance(answer, coordinator_pb2.EnlistResponse):
        return answer
    if isinstance(answer, Failure) and answer.retryable:
        raise wanted.unknown(f"the coordinator did not answer, and its Try was not run: {answer}")
    raise _definite(answer, ran=False)


def _done(wanted: Wanted, branch_id: int, reply: Reply) -> Enlisting:
    tried = coordinator_pb2.Tried(tried_branch_ids=sorted(reply.tried_branch_ids))
    if reply.result is not None:
        tried.result.CopyFrom(write_payload(reply.result))
    request = coordinator_pb2.ReportRequest(xid=wanted.xid, branch_id=branch_id, tried=tried, fence_id=wanted.fence_id)
    answer = yield from _reported(wanted, request)
    if isinstance(answer, coordinator_pb2.ReportResponse):
        if answer.state in _CANCELLED:
            text = f"{wanted.xid} was cancelled before branch {branch_id} was reported tried; Cancel undoes its Try"
            raise NotEnlisted(text, "NOT_TRYING", ran=True)
        return Enlisted(branch_id, reply.result, reply.tried_branch_ids)
    if isinstance(answer, Failure) and not answer.retryable:
        raise _definite(answer, ran=True)
    raise wanted.unknown(f"its Try was done, but the coordinator did not take the report: {answer}", branch_id)


def _refused(wanted: Wanted, branch_id: int, refusal: Refusal) -> Generator[EnlistStep, Any, None]:
    """Tell of a refusal. It is final in the fence, and without the report too the branch bars the confirm."""
    message = types_pb2.Refusal(
        reason=printable(refusal.reason, REASON_LENGTH_MAX), message=printable(refusal.message, MESSAGE_LENGTH_MAX)
    )
    request = coordinator_pb2.ReportRequest(
        xid=wanted.xid, branch_id=branch_id, refusal=message, fence_id=wanted.fence_id
    )
    answer = yield from _reported(wanted, request)
    if not isinstance(answer, coordinator_pb2.ReportResponse):
        logger.warning("%s#%d: the coordinator was not told of the refusal: %s", wanted.xid, branch_id, answer)


def _reported(wanted: Wanted, request: coordinator_pb2.ReportRequest) -> Generator[EnlistStep, Any, Any]:
    return (yield from _asked(request, max(wanted.expires_at, time.monotonic() + REPORT_SECONDS_MIN)))


def _asked(
    request: coordinator_pb2.EnlistRequest | coordinator_pb2.ReportRequest, until: float
) -> Generator[EnlistStep, Any, Any]:
    """Ask until there is a definite answer, or the time is up; gives the last answer."""
    answer: Any = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "there was no time to ask")
    tries = 0
    while (left := until - time.monotonic()) > 0:
        answer = yield Ask(request, min(left, SEND_SECONDS_MAX))
        if not isinstance(answer, Failure) or not answer.retryable:
            break
        yield Pause(min(pause_seconds(tries, answer), max(0.0, until - time.monotonic())))
        tries += 1
    return answer


def _definite(answer: Failure | Closed, *, ran: bool) -> TricordError:
    if isinstance(answer, Closed):
        return ConfigurationError(CLOSED)
    if answer.code in _NO or answer.reason == "TOO_MANY_BRANCHES":
        return NotEnlisted(answer.message, answer.reason or answer.code.name, ran=ran)
    return error_of(answer)
