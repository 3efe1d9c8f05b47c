"""The errors of the participant SDK.

    Exception
    ├── Refused                      a Try says no: raised by your handler, never by the SDK
    └── TricordError                 everything that the SDK raises
        ├── ConfigurationError       the program is put together wrongly; nothing will work until it is changed
        ├── InvalidRequest           the request itself is wrong; asking again gives the same answer
        │   └── UnknownParticipant   it names a participant or an action that the coordinator does not know
        ├── IdempotencyKeyReused     the key belongs to another request
        ├── TransactionNotFound      the coordinator has no such transaction (for a key: not yet)
        ├── RequestFailed            any other definite "no" of the coordinator
        ├── NotEnlisted              a branch has no part in its transaction (enlist_errors)
        ├── BranchUnknown            it is not known whether an enlisted branch was tried (enlist_errors)
        ├── TransactionCancelled     decided: nothing of the transaction happened
        ├── AlreadyDecided           the key's transaction was decided before: the block's body did not run
        └── OutcomeUnknown           still undecided, still running, or the coordinator was not reached

They are split by what the caller has to do next. `reason` is stable and meant for programs, the message is for
people; `retryable` says whether asking again, with the same idempotency key, can end differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from participant_sdk.transaction import BranchRefusal, Transaction

ERROR_LENGTH_MAX = 500
REASON_LENGTH_MAX = 100
MESSAGE_LENGTH_MAX = 1_000


class Refused(Exception):
    """Raise it in a Try handler to say no for a business reason: nothing of the Try stays, the transaction cancels.

    `reason` is stable and for programs, such as "insufficient_funds"; `message` is for people. Raised from Confirm
    or Cancel it is a mistake: those only move what Try reserved, so the call stays unknown and a person is called.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        if not reason:
            raise ValueError("Refused needs a reason")
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}" if self.message else self.reason


class TricordError(Exception):
    """What every error of the SDK is a kind of."""

    reason: str = "TRICORD_ERROR"
    retryable: ClassVar[bool] = False


class ConfigurationError(TricordError):
    """The program is put together wrongly: a handler is missing, an engine cannot keep a promise, a port is taken."""

    reason = "CONFIGURATION"


class InvalidRequest(TricordError):
    """The coordinator (or the SDK, before sending) found the request wrong.

    `fields` holds what is wrong by field path, such as `{"branches[0].payload": "is larger than 1048576 bytes"}`.
    """

    reason = "INVALID_REQUEST"

    def __init__(self, message: str, fields: dict[str, str] | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.fields = dict(fields or {})
        if reason is not None:
            self.reason = reason


class UnknownParticipant(InvalidRequest):
    """The request names a participant, or an action of one, that the coordinator does not know."""

    reason = "UNKNOWN_PARTICIPANT"


class IdempotencyKeyReused(TricordError):
    """The idempotency key already belongs to a transaction with other branches."""

    reason = "IDEMPOTENCY_KEY_REUSED"


class TransactionNotFound(TricordError):
    """No such transaction. For an idempotency key that means "not yet known": send the same request again."""

    reason = "TRANSACTION_NOT_FOUND"


class RequestFailed(TricordError):
    """The coordinator answered with a definite error that has no class of its own; `reason` tells which."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class TransactionCancelled(TricordError):
    """The transaction was decided CANCELLED. `refusal` says which branch said no and why; None: nobody did (time)."""

    reason = "TRANSACTION_CANCELLED"

    def __init__(self, transaction: Transaction, refusal: BranchRefusal | None) -> None:
        why = str(refusal) if refusal is not None else transaction.cancel_reason or "cancelled"
        super().__init__(f"transaction {transaction.xid} was cancelled: {why}")
        self.transaction = transaction
        self.refusal = refusal


class AlreadyDecided(TricordError):
    """The transaction under this key was decided before, by another block: nothing of this one's is done in it.

    `state` says how: CONFIRMING or CONFIRMED (it is done: its results are in `transaction.branches`), CANCELLING or
    CANCELLED (nothing of it happened; trying again needs another key). `xid` names it.
    """

    reason = "ALREADY_DECIDED"

    def __init__(self, transaction: Transaction) -> None:
        super().__init__(f"transaction {transaction.xid} under this key is {transaction.state.value} already")
        self.transaction = transaction
        self.xid = transaction.xid
        self.state = transaction.state


class OutcomeUnknown(TricordError):
    """Not known yet: undecided, decided and still running, or the coordinator could not be reached.

    It is never a failure. Execute the same branches with the same `idempotency_key` again to learn the outcome, or look
    up by `xid` (empty if it was not told yet) what became of it. `transaction` is the last state that was seen, None if
    none was.
    """

    reason = "OUTCOME_UNKNOWN"
    retryable = True

    def __init__(
        self, message: str, idempotency_key: str, transaction: Transaction | None = None, *, xid: str = ""
    ) -> None:
        super().__init__(message)
        self.idempotency_key = idempotency_key
        self.transaction = transaction
        self.xid = xid or (transaction.xid if transaction is not None else "")


def printable(text: str, length_max: int = MESSAGE_LENGTH_MAX) -> str:
    """`text` on one line, without control characters, cut to `length_max` characters."""
    if len(text) <= length_max and text.isprintable() and " " not in text:
        return text
    clean = "".join(char if char.isprintable() else " " for char in text[: 4 * length_max])
    clean = " ".join(clean.split())
    return clean if len(clean) <= length_max else clean[: length_max - 1] + "…"


def describe(error: BaseException) -> str:
    """An error's type and text on one bounded line, for a reply's `error` field."""
    text = printable(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
