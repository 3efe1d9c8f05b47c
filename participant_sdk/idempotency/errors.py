"""The errors of the idempotency-key store.

    TricordError
    ├── ConfigurationError            an operation, a door or a table is set up wrongly; raised at start
    ├── IdempotencyKeyReused          the key belongs to another request (also: of another operation)
    └── IdempotencyError
        ├── KeyMissing                the operation needs a key and the request has none
        ├── KeyMalformed              the key is not what the operation takes; `field` and the limit are in the text
        ├── ScopeMissing              whose request it is could not be told: nothing runs
        ├── FirstSentMalformed        when it was first sent is not said as it has to be
        ├── IntentTooOld              it was first sent so long ago that its record may be gone: nothing runs
        ├── TooManyKeys               its tenant brings more new keys than it may
        ├── RequestTooLarge           more than may be fingerprinted
        ├── InProgress                another run of the same request is not over; come back after `retry_after_ms`
        ├── AnswerNotStored           it was done; its answer was too large, or a stream, and cannot be said again
        ├── RunUnknown                whether it was done is not known; a person or a reconciliation has to say
        ├── NotComparable             the record is of a newer program, and this one cannot judge it
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
    "FirstSentMalformed",
    "IdempotencyError",
    "IdempotencyKeyReused",
    "InProgress",
    "IntentTooOld",
    "KeyMalformed",
    "KeyMissing",
    "LeaseLost",
    "NotComparable",
    "RequestTooLarge",
    "RunUnknown",
    "ScopeMissing",
    "StoreUnavailable",
    "TooManyKeys",
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


class FirstSentMalformed(IdempotencyError):
    """The time at which the request was first sent is missing where it has to be there, no time, or in the future."""

    reason = "IDEMPOTENCY_FIRST_SENT_MALFORMED"


class IntentTooOld(IdempotencyError):
    """The request was first sent so long ago that its record may have been deleted. Nothing runs."""

    reason = "IDEMPOTENCY_INTENT_TOO_OLD"

    def __init__(self, age_s_max: float) -> None:
        super().__init__(
            f"the request was first sent more than {age_s_max:.0f} seconds ago: whether it was done is not on record "
            "any more; find out what became of it, and send it with a new key only if it was not done"
        )


class TooManyKeys(IdempotencyError):
    """The tenant has brought more new keys than it may. Nothing is stored, nothing runs."""

    reason = "IDEMPOTENCY_TOO_MANY_KEYS"
    retryable: ClassVar[bool] = True

    def __init__(self, keys: int, window_s: float, retry_after_ms: int) -> None:
        super().__init__(f"more than {keys} new keys in {window_s:g} seconds; send it again later, with the same key")
        self.retry_after_ms = retry_after_ms


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
    """The record was written by a newer program: its fingerprint, state or codec is not known here. Nothing has run."""

    reason = "IDEMPOTENCY_FINGERPRINT_VERSION"
    retryable: ClassVar[bool] = True


class LeaseLost(IdempotencyError):
    """Raised in a run whose record is another's by now: all that it wrote in its local transaction rolls back."""

    reason = "IDEMPOTENCY_LEASE_LOST"
    retryable: ClassVar[bool] = True


class StoreUnavailable(IdempotencyError):
    """The store could not be asked. Nothing has run: fails closed.

    `down`: it could not be reached, so that nothing of the request is in it, nor is known of another run of it.
    """

    reason = "IDEMPOTENCY_STORE_UNAVAILABLE"
    retryable: ClassVar[bool] = True

    def __init__(self, message: str, retry_after_ms: int = 1_000, *, down: bool = False) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        self.down = down
