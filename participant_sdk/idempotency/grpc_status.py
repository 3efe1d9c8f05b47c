"""What a gRPC client is told when its request gets no answer of its own: a status, and the same as google.rpc.Status.

Each holds one ErrorInfo, of the domain "tricord", by whose reason a program tells them apart, and RetryInfo where the
same request with the same key may end differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from participant_sdk.errors import ConfigurationError, IdempotencyKeyReused, InvalidRequest, TricordError, printable
from participant_sdk.idempotency.errors import (
    AnswerNotStored,
    FirstSentMalformed,
    IdempotencyError,
    InProgress,
    IntentTooOld,
    KeyMalformed,
    KeyMissing,
    LeaseLost,
    NotComparable,
    RequestTooLarge,
    RunUnknown,
    ScopeMissing,
    StoreUnavailable,
    TooManyKeys,
)
from participant_sdk.idempotency.faults import lost_a_race

DOMAIN: Final = "tricord"
DETAILS_KEY: Final = "grpc-status-details-bin"
RETRY_AFTER_MS: Final = 1_000
"""Where an error says that a repeat helps, but not when."""

_REUSED: Final = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ALREADY_EXISTS)
_IN_PROGRESS: Final = (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)

_CODES: Final[tuple[tuple[type[TricordError], grpc.StatusCode], ...]] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (KeyMissing, grpc.StatusCode.INVALID_ARGUMENT),
    (KeyMalformed, grpc.StatusCode.INVALID_ARGUMENT),
    (FirstSentMalformed, grpc.StatusCode.INVALID_ARGUMENT),
    (IntentTooOld, grpc.StatusCode.FAILED_PRECONDITION),
    (TooManyKeys, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ScopeMissing, grpc.StatusCode.PERMISSION_DENIED),
    (RequestTooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (AnswerNotStored, grpc.StatusCode.FAILED_PRECONDITION),
    (RunUnknown, grpc.StatusCode.FAILED_PRECONDITION),
    (NotComparable, grpc.StatusCode.FAILED_PRECONDITION),
    (StoreUnavailable, grpc.StatusCode.UNAVAILABLE),
    (LeaseLost, grpc.StatusCode.ABORTED),
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status other than OK that is not the handler's."""

    code: grpc.StatusCode
    message: str
    details: bytes
    """A google.rpc.Status, serialized."""

    @property
    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """What goes with it."""
        return ((DETAILS_KEY, self.details),)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcCodes:
    """Where a status is a matter of taste. Raises ConfigurationError for a code that does not fit.

    `reused`: the key belongs to another request; FAILED_PRECONDITION or ALREADY_EXISTS. `in_progress`: another run is
    not over; ABORTED, or UNAVAILABLE so that gRPC's own retry policies send it again.
    """

    reused: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION
    in_progress: grpc.StatusCode = grpc.StatusCode.ABORTED

    def __post_init__(self) -> None:
        for field, code, allowed in (
            ("reused", self.reused, _REUSED),
            ("in_progress", self.in_progress, _IN_PROGRESS),
        ):
            if code not in allowed:
                raise ConfigurationError(f"{field} {code} is not {' or '.join(each.name for each in allowed)}")

    def refusal(self, error: TricordError) -> Refusal:
        """What the client of a request is told that ended with `error`."""
        after_ms = getattr(error, "retry_after_ms", RETRY_AFTER_MS) if error.retryable else None
        return refused(self._code(error), printable(str(error)), error.reason, after_ms)

    def of_run(self, error: Exception) -> Refusal | None:
        """The same for an error that a run has ended with; None for one that is the handler's own."""
        if isinstance(error, IdempotencyError):
            return self.refusal(error)
        return _RACE if lost_a_race(error) else None

    def _code(self, error: TricordError) -> grpc.StatusCode:
        if isinstance(error, IdempotencyKeyReused):
            return self.reused
        if isinstance(error, InProgress):
            return self.in_progress
        return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def refused(code: grpc.StatusCode, message: str, reason: str, retry_after_ms: int | None = None) -> Refusal:
    """A status with its details. `retry_after_ms` None: a repeat does not help."""
    status = status_pb2.Status(code=code.value[0], message=message)
    _add(status, error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    if retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(max(0, retry_after_ms))
        _add(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return Refusal(code, message, status.SerializeToString())


def _add(status: status_pb2.Status, detail: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


_RACE: Final = refused(
    grpc.StatusCode.ABORTED,
    "the work lost a race in the database, and nothing of it stays; send it again with the same key",
    "IDEMPOTENCY_RACE_LOST",
    retry_after_ms=0,
)
