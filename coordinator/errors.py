"""What callers are told when their request cannot be served.

    RpcError
        InvalidRequest      INVALID_ARGUMENT     a field is wrong; names it and the limit
        UnknownName         FAILED_PRECONDITION  a participant or action that nobody has registered
        Conflict            FAILED_PRECONDITION  it contradicts what is stored
        NotFound            NOT_FOUND
        NotAllowed          PERMISSION_DENIED
        TooMuch             RESOURCE_EXHAUSTED   too much is waiting; with the time to wait before trying again
        Unavailable         UNAVAILABLE          the store is away; with the time to wait before trying again
        TooLate             DEADLINE_EXCEEDED    the caller's patience was over before anything was stored

Each carries a stable ``reason`` for programs. None of them leaves anything stored, except that after Unavailable or
TooLate it is not known whether a starting call was stored: ask again with the same idempotency key.
"""

from __future__ import annotations

from typing import NamedTuple

import grpc

DOMAIN = "tricord"


class Violation(NamedTuple):
    """One wrong field: its path in the request, and what is wrong with it."""

    field: str
    description: str


class RpcError(Exception):
    """A request that is answered with an error."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        violations: tuple[Violation, ...] = (),
        metadata: dict[str, str] | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason or self.reason
        self.violations = violations
        self.metadata = metadata or {}
        self.retry_s = retry_s


class InvalidRequest(RpcError):
    """Wrong fields."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, *violations: Violation) -> None:
        text = "; ".join(f"{v.field}: {v.description}" for v in violations[:3])
        if len(violations) > 3:
            text = f"{len(violations)} fields are wrong: {text}; …"
        super().__init__(text, violations=violations)


class UnknownName(RpcError):
    """A participant or action that nobody has registered."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "UNKNOWN_PARTICIPANT"


class Conflict(RpcError):
    """The request contradicts what is stored."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class NotFound(RpcError):
    """There is no such transaction (yet)."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "TRANSACTION_NOT_FOUND"


class NotAllowed(RpcError):
    """The coordinator was not started for this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "REGISTRATION_NOT_ALLOWED"


class TooMuch(RpcError):
    """More than this coordinator takes at a time."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"


class Unavailable(RpcError):
    """The store did not answer."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "STORE_UNAVAILABLE"


class TooLate(RpcError):
    """A call of a stream whose caller waits no longer; a unary call is told so by gRPC."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"
