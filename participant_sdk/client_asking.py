"""How the coordinator is asked: what is sent, when it is asked again, what is returned or raised.

Written once, for grpc and grpc.aio, and for initiators and participants.

Generators of steps that `client_connection` carries out. The one thing that must never go wrong here: once a request
may have reached the coordinator, the transaction may exist and be confirmed, and then only its outcome is a definite
answer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from participant_sdk.client_request import BranchRequest, Wait, new_key, request_of
from participant_sdk.coordinator_messages import (
    Failure,
    error_of,
    look_up_request,
    read_looked_up,
    read_transaction,
)
from participant_sdk.errors import (
    ConfigurationError,
    InvalidRequest,
    OutcomeUnknown,
    TransactionCancelled,
    TransactionNotFound,
    TricordError,
)
from participant_sdk.transaction import LookedUp, Transaction, TransactionState
from tricord.v1 import coordinator_pb2

TIMEOUT_ASSUMED_SECONDS: Final = 30.0
"""The coordinator's default time-out of a transaction, where the caller names none."""
PATIENCE_BEYOND_SECONDS: Final = 30.0
ASK_SECONDS_MAX: Final = 30.0
PAUSE_FIRST_SECONDS: Final = 0.05
PAUSE_MAX_SECONDS: Final = 2.0
CLOSED: Final = "the client is closed"
CANNOT_BE_ASKED: Final = "the coordinator cannot be asked"


Request: TypeAlias = (
    coordinator_pb2.ExecuteRequest
    | coordinator_pb2.GetRequest
    | coordinator_pb2.LookUpRequest
    | coordinator_pb2.BeginRequest
    | coordinator_pb2.CoordinatorServiceTryRequest
    | coordinator_pb2.CoordinatorServiceConfirmRequest
    | coordinator_pb2.CoordinatorServiceCancelRequest
    | coordinator_pb2.RenewRequest
    | coordinator_pb2.EnlistRequest
    | coordinator_pb2.ReportRequest
)
METHODS: Final[Mapping[type[Any], str]] = {
    coordinator_pb2.ExecuteRequest: "Execute",
    coordinator_pb2.GetRequest: "Get",
    coordinator_pb2.LookUpRequest: "LookUp",
    coordinator_pb2.BeginRequest: "Begin",
    coordinator_pb2.CoordinatorServiceTryRequest: "Try",
    coordinator_pb2.CoordinatorServiceConfirmRequest: "Confirm",
    coordinator_pb2.CoordinatorServiceCancelRequest: "Cancel",
    coordinator_pb2.RenewRequest: "Renew",
    coordinator_pb2.EnlistRequest: "Enlist",
    coordinator_pb2.ReportRequest: "Report",
}
"""Which RPC a request is for."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Send `request` and wait up to `seconds`; gives the response, a Failure, or Closed."""

    request: Request
    seconds: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing was sent: the client is closed."""


T = TypeVar("T")
Answer: TypeAlias = Any
"""The response to a request, a Failure, or Closed; None after a pause."""
Asking: TypeAlias = Generator[Ask | Pause, Answer, T]


def executing(request: coordinator_pb2.ExecuteRequest, wait: Wait, patience: float) -> Asking[Transaction]:
    """Ask until the transaction has the state that is waited for; returns it confirmed, or raises.

    `patience` is in seconds. Raises TransactionCancelled, OutcomeUnknown, or what `error_of` says.
    """
    clock = time.monotonic
    gives_up_at = clock() + patience
    seen: Transaction | None = None
    may_have_begun = False
    why = "there was no time to ask"
    tries = 0
    while (left := gives_up_at - clock()) > 0:
        asked_at = clock()
        answer = yield Ask(request, min(left, ASK_SECONDS_MAX))
        if isinstance(answer, coordinator_pb2.ExecuteResponse):
            seen, may_have_begun = read_transaction(answer.transaction), True
            if is_outcome(seen, wait):
                return confirmed(seen)
            why = f"it is still {seen.state.value}"
            tries = 0 if clock() - asked_at >= 1 else tries + 1
        elif isinstance(answer, Failure):
            why = str(answer)
            if answer.response_too_large or (not answer.retryable and may_have_begun and not answer.never_began):
                break  # definite about this request, but not about what an earlier one may have begun
            if not answer.retryable:
                raise error_of(answer)
            may_have_begun = may_have_begun or answer.may_have_arrived
            tries += 1
        elif isinstance(answer, Closed):
            if not may_have_begun:
                raise ConfigurationError(CLOSED)
            why = CLOSED
            break
        longest = min(PAUSE_MAX_SECONDS, PAUSE_FIRST_SECONDS * 2 ** min(tries, 10))
        yield Pause(min(random.uniform(0, longest), max(0.0, gives_up_at - clock())))
    raise _outcome_unknown(request.idempotency_key, why, seen)


def _outcome_unknown(key: str, why: str, seen: Transaction | None) -> OutcomeUnknown:
    text = f"the outcome of the transaction with key {key} is not known yet: {why}"
    return OutcomeUnknown(f"{text}; execute the same branches with this idempotency_key again", key, seen)


def is_outcome(transaction: Transaction, wait: Wait) -> bool:
    """Whether it has come as far as is waited for."""
    if wait is Wait.ACCEPTED:
        return True
    if wait is Wait.DECIDED and transaction.state in (TransactionState.CONFIRMING, TransactionState.CANCELLING):
        return True
    return transaction.state.finished


def confirmed(transaction: Transaction) -> Transaction:
    """The transaction, unless it is cancelled, or being cancelled: raises TransactionCancelled."""
    if transaction.state in (TransactionState.CANCELLING, TransactionState.CANCELLED):
        raise TransactionCancelled(transaction, transaction.refusal)
    return transaction


def getting(request: coordinator_pb2.GetRequest, patience: float) -> Asking[Transaction]:
    """Read a transaction, asking again while the coordinator cannot be reached."""
    answer = yield from persisting(request, time.monotonic() + patience, CANNOT_BE_ASKED)
    return read_transaction(answer.transaction)


def persisting(request: Request, gives_up_at: float, why: str) -> Asking[Any]:
    """Ask until there is an answer; every request here may be repeated.

    `gives_up_at` is of `time.monotonic()`. Raises OutcomeUnknown, saying `why` that matters, when the time is over,
    and what `error_of` says for a definite "no".
    """
    tries = 0
    while True:
        left = gives_up_at - time.monotonic()
        answer = yield Ask(request, max(0.1, min(left, ASK_SECONDS_MAX)))
        if isinstance(answer, Closed):
            raise ConfigurationError(CLOSED)
        if not isinstance(answer, Failure):
            return answer
        if not answer.retryable:
            raise error_of(answer)
        if time.monotonic() >= gives_up_at:
            raise OutcomeUnknown(f"{why}: {answer}", getattr(request, "idempotency_key", ""))
        tries += 1
        longest = min(PAUSE_MAX_SECONDS, PAUSE_FIRST_SECONDS * 2 ** min(tries, 10))
        yield Pause(min(random.uniform(0, longest), max(0.0, gives_up_at - time.monotonic())))


def looking_up(xids: Sequence[str], seconds: float) -> Asking[LookedUp]:
    """See `CoordinatorLookup.look_up`."""
    answer = yield Ask(look_up_request(xids), seconds)
    if isinstance(answer, coordinator_pb2.LookUpResponse):
        return read_looked_up(answer)
    raise _unanswered(answer)


def fetching(xid: str, seconds: float) -> Asking[Transaction | None]:
    """See `CoordinatorLookup.fetch`."""
    answer = yield Ask(_get_request(xid, None), seconds)
    if isinstance(answer, coordinator_pb2.GetResponse):
        return read_transaction(answer.transaction)
    error = _unanswered(answer)
    if isinstance(error, TransactionNotFound):
        return None
    raise error


def _unanswered(answer: Answer) -> TricordError:
    """The error for a question that got no answer; only what asking again may change is retryable."""
    if isinstance(answer, Closed):
        return ConfigurationError(CLOSED)
    if isinstance(answer, Failure) and not answer.retryable:
        return error_of(answer)
    return OutcomeUnknown(f"{CANNOT_BE_ASKED}: {answer}", "")


def start_execute(
    branches: tuple[BranchRequest, ...],
    idempotency_key: str | None,
    timeout: float | None,
    wait: Wait,
    patience: float | None,
    metadata: Mapping[str, str] | None,
    ordered: bool = False,
) -> Asking[Transaction]:
    """See `TricordClient.execute`."""
    request = request_of(branches, new_key() if idempotency_key is None else idempotency_key, timeout, wait, metadata)
    request.ordered = ordered
    return executing(request, wait, patience_of(timeout, patience))


def patience_of(timeout: float | None, patience: float | None) -> float:
    """How many seconds to go on asking."""
    if patience is not None:
        return patience
    return (TIMEOUT_ASSUMED_SECONDS if timeout is None else max(timeout, 0)) + PATIENCE_BEYOND_SECONDS


def start_get(xid: str | None, idempotency_key: str | None, patience: float) -> Asking[Transaction]:
    """See `TricordClient.get`."""
    if (xid is None) == (idempotency_key is None):
        raise InvalidRequest("name either the xid or the idempotency_key")
    return getting(_get_request(xid, idempotency_key), patience)


def _get_request(xid: str | None, idempotency_key: str | None) -> coordinator_pb2.GetRequest:
    try:
        if xid is not None:
            return coordinator_pb2.GetRequest(xid=xid)
        return coordinator_pb2.GetRequest(idempotency_key=idempotency_key or "")
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the xid or idempotency_key cannot be sent: {error}") from None
