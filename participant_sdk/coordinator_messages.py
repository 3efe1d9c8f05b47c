"""What the coordinator's messages and errors mean to an initiator.

Errors are told apart by ErrorInfo.reason, which is stable, and not by their text; without a reason by the gRPC
status. Whether a failure may be met by asking again with the same key is decided here: everything that may be the
network's or a restart's doing is retryable, a definite answer is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2, status_pb2

from participant_sdk.context import XID_FORM, is_xid
from participant_sdk.errors import (
    ConfigurationError,
    IdempotencyKeyReused,
    InvalidRequest,
    RequestFailed,
    TransactionNotFound,
    TricordError,
    UnknownParticipant,
    printable,
)
from participant_sdk.payload import Payload
from participant_sdk.transaction import Branch, BranchRefusal, BranchState, LookedUp, Transaction, TransactionState
from tricord.v1 import coordinator_pb2, types_pb2

LOOK_UP_XIDS_MAX: Final = 1_000

_RETRYABLE: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A gRPC status other than OK, with what its details say."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    retry_after: float = 0.0
    """How many seconds the coordinator asks to wait before asking again."""

    @property
    def retryable(self) -> bool:
        """Whether asking again can end differently."""
        return self.code in _RETRYABLE and self.reason not in _DEFINITE and not self._too_large

    @property
    def request_too_large(self) -> bool:
        """Whether gRPC would not carry the request: it never got as far as the coordinator's code."""
        return self._too_large and any(text in self.message for text in _REQUEST_TOO_LARGE)

    @property
    def response_too_large(self) -> bool:
        """Whether gRPC would not carry the answer: there is one, and it would be too large again."""
        return self._too_large and not self.request_too_large

    @property
    def _too_large(self) -> bool:
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in self.message

    @property
    def may_have_arrived(self) -> bool:
        """Whether the request may have reached the coordinator, for a failure that is retryable."""
        return self.code is not grpc.StatusCode.UNAVAILABLE or not self.message.startswith(_NEVER_SENT)

    @property
    def never_began(self) -> bool:
        """Whether no earlier request with the same key and content can have begun a transaction either."""
        return self.reason == "IDEMPOTENCY_KEY_REUSED"

    def __str__(self) -> str:
        return f"{self.reason or self.code.name}: {self.message}"


def read_failure(error: grpc.RpcError) -> Failure:
    """What a failed call says."""
    metadata: Any = error.trailing_metadata()
    details: dict[str, Any] = {}
    for key, value in metadata or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):  # the status itself still says enough
                details = _read_details(status_pb2.Status.FromString(value).details)
    return Failure(error.code(), printable(error.details() or ""), **details)


def read_stream_failure(error: coordinator_pb2.ExecuteStreamError) -> Failure:
    """What a call of a stream says that has failed alone."""
    code = _CODES.get(error.code, grpc.StatusCode.UNKNOWN)
    return Failure(code, printable(error.message), **_read_details(error.details))


_CODES: Final[dict[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}


def _read_details(details: Iterable[any_pb2.Any]) -> dict[str, Any]:
    """What they say, as the fields of a Failure."""
    found: dict[str, Any] = {"fields": {}}
    info, bad_request, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    with contextlib.suppress(DecodeError):  # what was read before still counts
        for detail in details:
            if detail.Unpack(info):
                found["reason"] = info.reason
            elif detail.Unpack(bad_request):
                found["fields"].update({each.field: each.description for each in bad_request.field_violations})
            elif detail.Unpack(retry):
                found["retry_after"] = max(0.0, retry.retry_delay.ToNanoseconds() / 1e9)
    return found


def error_of(failure: Failure) -> TricordError:
    """The error to raise for a failure that is not retryable."""
    if failure.reason in ("UNKNOWN_PARTICIPANT", "UNKNOWN_ACTION"):
        return UnknownParticipant(failure.message, dict(failure.fields), failure.reason)
    if failure.reason == "IDEMPOTENCY_KEY_REUSED":
        return IdempotencyKeyReused(failure.message)
    if failure.reason == "TRANSACTION_NOT_FOUND" or failure.code is grpc.StatusCode.NOT_FOUND:
        return TransactionNotFound(failure.message)
    if failure.code is grpc.StatusCode.UNIMPLEMENTED:
        text = f"what answers at this endpoint is not a Tricord coordinator, or an older one: {failure.message}"
        return ConfigurationError(text)
    invalid = failure.reason == "INVALID_REQUEST" or failure.code is grpc.StatusCode.INVALID_ARGUMENT
    if invalid or failure.request_too_large:
        return InvalidRequest(failure.message, dict(failure.fields), failure.reason or None)
    return RequestFailed(failure.message, failure.reason or failure.code.name)


_REQUEST_TOO_LARGE: Final = ("CLIENT: Sent message larger", "SERVER: Received message larger")
_NEVER_SENT: Final = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")

_DEFINITE: Final = frozenset(
    {"INVALID_REQUEST", "UNKNOWN_PARTICIPANT", "UNKNOWN_ACTION", "IDEMPOTENCY_KEY_REUSED", "TRANSACTION_NOT_FOUND"}
)


def write_payload(payload: Payload) -> types_pb2.Payload:
    """The message of a payload."""
    return types_pb2.Payload(data=payload.data, content_type=payload.content_type)


def read_transaction(message: types_pb2.Transaction) -> Transaction:
    """The value of a transaction's message."""
    return Transaction(
        xid=message.xid,
        idempotency_key=message.idempotency_key,
        state=_TRANSACTION_STATES.get(message.state, TransactionState.UNKNOWN),
        needs_attention=message.attention not in (types_pb2.ATTENTION_UNSPECIFIED, types_pb2.ATTENTION_NONE),
        branches=tuple(read_branch(each) for each in message.branches),
        cancel_reason=message.cancel_reason,
        created_at=_read_time(message.create_time) if message.HasField("create_time") else None,
        decided_at=_read_time(message.decide_time) if message.HasField("decide_time") else None,
        metadata=dict(message.metadata),
        labels=dict(message.labels),
        mixed=message.mixed,
    )


def look_up_request(xids: Sequence[str]) -> coordinator_pb2.LookUpRequest:
    """The message of a look-up. Raises InvalidRequest.

    Only the one form of an xid is taken, as the answer names each in that form: in another, it would seem absent.
    """
    if not 0 < len(xids) <= LOOK_UP_XIDS_MAX:
        text = f"has {len(xids)} xids; 1 to {LOOK_UP_XIDS_MAX} are needed"
        raise InvalidRequest(f"xids: {text}", {"xids": text})
    wrong = {f"xids[{n}]": f"is not {XID_FORM}" for n, xid in enumerate(xids) if not _names_one(xid)}
    if wrong:
        raise InvalidRequest(f"{len(wrong)} of {len(xids)} xids are not {XID_FORM}", wrong)
    return coordinator_pb2.LookUpRequest(xids=xids)


def _names_one(xid: object) -> bool:
    return isinstance(xid, str) and is_xid(xid)


def read_looked_up(message: coordinator_pb2.LookUpResponse) -> LookedUp:
    """The value of a look-up's answer."""
    states = {each.xid: _TRANSACTION_STATES.get(each.state, TransactionState.UNKNOWN) for each in message.transactions}
    return LookedUp(states, message.store_id, message.incarnation)


_TRANSACTION_STATES: Final[dict[int, TransactionState]] = {
    types_pb2.TRANSACTION_STATE_TRYING: TransactionState.TRYING,
    types_pb2.TRANSACTION_STATE_CONFIRMING: TransactionState.CONFIRMING,
    types_pb2.TRANSACTION_STATE_CONFIRMED: TransactionState.CONFIRMED,
    types_pb2.TRANSACTION_STATE_CANCELLING: TransactionState.CANCELLING,
    types_pb2.TRANSACTION_STATE_CANCELLED: TransactionState.CANCELLED,
}

_BRANCH_STATES: Final[dict[int, BranchState]] = {
    types_pb2.BRANCH_STATE_PENDING: BranchState.PENDING,
    types_pb2.BRANCH_STATE_TRIED: BranchState.TRIED,
    types_pb2.BRANCH_STATE_REFUSED: BranchState.REFUSED,
    types_pb2.BRANCH_STATE_CONFIRMED: BranchState.CONFIRMED,
    types_pb2.BRANCH_STATE_CANCELLED: BranchState.CANCELLED,
}


def read_branch(message: types_pb2.Branch) -> Branch:
    """The value of a branch's message."""
    refusal = None
    if message.HasField("refusal"):
        refusal = BranchRefusal(
            message.branch_id, message.participant, message.action, message.refusal.reason, message.refusal.message
        )
    return Branch(
        branch_id=message.branch_id,
        participant=message.participant,
        action=message.action,
        payload=_read_payload(message.payload),
        state=_BRANCH_STATES.get(message.state, BranchState.UNKNOWN),
        result=_read_payload(message.result) if message.HasField("result") else None,
        refusal=refusal,
        attempts=message.attempts,
        last_error=message.last_error,
        resolved=_BRANCH_STATES.get(message.resolution.resolved_state, BranchState.UNKNOWN)
        if message.HasField("resolution")
        else None,
    )


def _read_payload(message: types_pb2.Payload) -> Payload:
    return Payload(message.data, message.content_type)


def _read_time(message: Timestamp) -> datetime:
    return message.ToDatetime(UTC)
