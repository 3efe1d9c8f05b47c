"""How a whole transaction is executed: asked for until it has come as far as is waited for.

The one thing that must never go wrong here: once a request may have reached the coordinator, the transaction may exist
and be confirmed, and then only its outcome is a definite answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from participant_sdk.client_asking import CLOSED, Asking, Pace
from participant_sdk.client_request import BranchRequest, Wait, new_key, request_of
from participant_sdk.coordinator_messages import Failure, error_of, read_transaction
from participant_sdk.errors import ConfigurationError, OutcomeUnknown, TransactionCancelled
from participant_sdk.transaction import Transaction, TransactionState
from tricord.v1 import coordinator_pb2

TIMEOUT_ASSUMED_SECONDS: Final = 30.0
"""The coordinator's default time-out of a transaction, where the caller names none."""
PATIENCE_BEYOND_SECONDS: Final = 30.0


def start_execute(
    branches: tuple[BranchRequest, ...],
    idempotency_key: str | None,
    timeout: float | None,
    wait: Wait,
    patience: float | None,
    metadata: Mapping[str, str] | None,
    labels: Mapping[str, str] | None = None,
    ordered: bool = False,
) -> Asking[Transaction]:
    """See `TricordClient.execute`."""
    key = new_key() if idempotency_key is None else idempotency_key
    request = request_of(branches, key, timeout, wait, metadata, labels)
    request.ordered = ordered
    return executing(request, wait, patience_of(timeout, patience))


def patience_of(timeout: float | None, patience: float | None) -> float:
    """How many seconds to go on asking."""
    if patience is not None:
        return patience
    return (TIMEOUT_ASSUMED_SECONDS if timeout is None else max(timeout, 0)) + PATIENCE_BEYOND_SECONDS


def executing(request: coordinator_pb2.ExecuteRequest, wait: Wait, patience: float) -> Asking[Transaction]:
    """Ask until the transaction has the state that is waited for; returns it confirmed, or raises.

    `patience` is in seconds. Raises TransactionCancelled, OutcomeUnknown, or what `error_of` says.
    """
    pace = Pace(patience)
    seen: Transaction | None = None
    why = "there was no time to ask"
    while pace.left > 0:
        answer = yield pace.ask(request)
        if isinstance(answer, coordinator_pb2.ExecuteResponse):
            seen = read_transaction(answer.transaction)
            if is_outcome(seen, wait):
                return confirmed(seen)
            why = f"it is still {seen.state.value}"
            pause = pace.not_yet()
        elif isinstance(answer, Failure):
            why = str(answer)
            began = pace.may_have_arrived and not answer.never_began
            if answer.response_too_large or (not answer.retryable and began):
                break  # definite about this request, but not about what an earlier one may have begun
            if not answer.retryable:
                raise error_of(answer)
            pause = pace.failed(answer)
        else:
            if not pace.may_have_arrived:
                raise ConfigurationError(CLOSED)
            why = CLOSED
            break
        if pause is None:
            break
        yield pause
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
