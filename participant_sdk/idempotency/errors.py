"""The errors of the idempotency-key store.

    TricordError
    ├── ConfigurationError            an operation, a door or a table is set up wrongly; raised at start
    ├── IdempotencyKeyReused          the key belongs to another request (also: of another operation)
    └── IdempotencyError
        ├── KeyMissing                the operation needs a key and the request has none
        ├── KeyMalformed              the key is not what the operation takes; `field` and the limit are in the text
        ├── ScopeMissing              whose request it is could not be told: nothing runs
        ├── RequestTooLarge           more than may be fingerprinted
        ├── InProgress                another run of the same request is not over; come back after `retry_after_ms`
        ├── AnswerNotStored           it was done; its answer was too large, or a stream, and cannot be said again
        ├── RunUnknown                whether it was done is not known; a person or a reconciliation has to say
        ├── NotComparable             the record's fingerprint is of a newer program
        ├── LeaseLost                 raised in a run: another one has taken over, and nothing of this one stays
        ├── StoreUnavailable          the store cannot be reached; nothing has run
        └── RetriesExhausted          for clients (retry_errors): no try was answered

`retryable` says whether the same request, with the same key, can end differently when it is sent again.
"""

from __future__ import annotations

from typing import ClassVar

from participant_sdk.errors import ConfigurationError, IdempotencyKeyReused, TricordError

__all__ = [
    "AnswerNotStored",
    "ConfigurationError",
    "IdempotencyError",
    "IdempotencyKeyReused",
    "InProgress",
    "KeyMalformed",
    "KeyMissing",
    "LeaseLost",
    "NotComparable",
    "RequestTooLarge",
    "RunUnknown",
    "ScopeMissing",
    "StoreUnavailable",
]


class IdempotencyError(TricordError):
    """What every error of this package is a kind of, but for the two that the SDK has already."""

    reason = "IDEMPOTENCY"


class KeyMissing(IdempotencyError):
    """The operation needs an idempotency key, and the request has none."""

    reason = "IDEMPOTENCY_KEY_MISSING"


class KeyMalformed(IdempotencyError):
    """The key is not of the form that the operation takes; the text names where it was and the limit."""

    reason = "IDEMPOTENCY_KEY_MALFORMED"


class ScopeMissing(IdempotencyError):
    """The operation's tenant could not be told from the request. Fails closed: nothing is looked up, nothing runs."""

    reason = "IDEMPOTENCY_SCOPE_MISSING"


class RequestTooLarge(IdempotencyError):
    """The request is larger than the operation may take; it is refused, never run unprotected."""

    reason = "IDEMPOTENCY_REQUEST_TOO_LARGE"

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"the request is larger than the {bytes_max} bytes that an idempotent operation takes here")
        self.bytes_max = bytes_max


class InProgress(IdempotencyError):
    """Another run of the same request is not over yet."""

    reason = "IDEMPOTENCY_IN_PROGRESS"
    retryable: ClassVar[bool] = True

    def __init__(self, retry_after_ms: int) -> None:
        super().__init__("the same request is being processed; send it again with the same key")
        self.retry_after_ms = retry_after_ms


class AnswerNotStored(IdempotencyError):
    """The work was done once and will not be done again; its answer is not stored."""

    reason = "IDEMPOTENCY_ANSWER_NOT_STORED"


class RunUnknown(IdempotencyError):
    """An earlier run of the request may or may not have had its effect; it will not run again by itself."""

    reason = "IDEMPOTENCY_OUTCOME_UNKNOWN"


class NotComparable(IdempotencyError):
    """The record was written with a fingerprint algorithm that this program does not know: it is newer."""

    reason = "IDEMPOTENCY_FINGERPRINT_VERSION"
    retryable: ClassVar[bool] = True


class LeaseLost(IdempotencyError):
    """Raised in a run whose record is another's by now: all that it wrote in its local transaction rolls back."""

    reason = "IDEMPOTENCY_LEASE_LOST"
    retryable: ClassVar[bool] = True


class StoreUnavailable(IdempotencyError):
    """The store could not be asked. Nothing has run: fails closed."""

    reason = "IDEMPOTENCY_STORE_UNAVAILABLE"
    retryable: ClassVar[bool] = True

    def __init__(self, message: str, retry_after_ms: int = 1_000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
