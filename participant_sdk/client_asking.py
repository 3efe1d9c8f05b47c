"""How the coordinator is asked: what is sent, when it is asked again, what is returned or raised.

Written once, for grpc and grpc.aio, and for initiators and participants: generators of steps that
`client_connection` carries out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import grpc

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
    TransactionNotFound,
    TricordError,
)
from participant_sdk.transaction import LookedUp, Transaction
from tricord.v1 import coordinator_pb2

ATTEMPT_SECONDS: Final = 5.0
"""How long the first attempt of a call waits for its answer, before the next coordinator is asked."""
ATTEMPT_SECONDS_MIN: Final = 0.1
ATTEMPT_SECONDS_MAX: Final = 20.0
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

    def within(self, gives_up_at: float) -> Ask:
        """The same, with what is left until then."""
        return Ask(self.request, max(ATTEMPT_SECONDS_MIN, min(self.seconds, gives_up_at - time.monotonic())))


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


def pause_seconds(tries: int, failure: Failure | None = None) -> float:
    """How long to wait before asking again: what the coordinator asks for, and at random more with each try."""
    longest = min(PAUSE_MAX_SECONDS, PAUSE_FIRST_SECONDS * 2 ** min(tries, 10))
    return (failure.retry_after if failure is not None else 0.0) + random.uniform(0, longest)


class Pace:
    """When one call asks again, and how long it waits for each answer; it gives up after `patience` seconds.

    The coordinator answers what it is asked to wait for with the state of the moment before the attempt is over: a long
    wait is several attempts, and one at a coordinator that hangs leaves time for the others. Each that lasts to its end
    doubles the next, so that a slow coordinator is heard in the end, and long waits are not many requests.
    """

    def __init__(self, patience: float, *, may_have_arrived: bool = False) -> None:
        self._gives_up_at = time.monotonic() + patience
        self._seconds = min(ATTEMPT_SECONDS, patience / 2)
        self._seconds_max = min(ATTEMPT_SECONDS_MAX, patience / 2)
        self._asked_at = 0.0
        self._tries = 0
        self.may_have_arrived = may_have_arrived
        """Whether a coordinator may have heard of the request."""

    @property
    def left(self) -> float:
        """How many seconds of patience are left."""
        return self._gives_up_at - time.monotonic()

    def ask(self, request: Request) -> Ask:
        """The next attempt."""
        self._asked_at = time.monotonic()
        return Ask(request, max(ATTEMPT_SECONDS_MIN, min(self.left, self._seconds)))

    def failed(self, failure: Failure) -> Pause | None:
        """What to do about a failure that asking again may mend; None: give up."""
        self.may_have_arrived = self.may_have_arrived or failure.may_have_arrived
        if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._seconds = min(2 * self._seconds, self._seconds_max)
        self._tries += 1
        return self._pause(failure)

    def not_yet(self) -> Pause | None:
        """What to do about an answer that is not what is waited for; None: give up."""
        self.may_have_arrived = True
        if time.monotonic() - self._asked_at >= self._seconds / 2:  # it was waited for
            self._tries = 0
            self._seconds = min(2 * self._seconds, self._seconds_max)
        else:
            self._tries += 1
        return self._pause(None)

    def _pause(self, failure: Failure | None) -> Pause | None:
        left = self.left
        if left <= 0 or (failure is not None and failure.retry_after >= left):
            return None
        return Pause(min(pause_seconds(self._tries, failure), left))


def getting(request: coordinator_pb2.GetRequest, patience: float) -> Asking[Transaction]:
    """Read a transaction, asking again while the coordinator cannot be reached."""
    named = {"idempotency_key": request.idempotency_key, "xid": request.xid}
    answer = yield from persisting(request, Pace(patience), CANNOT_BE_ASKED, **named)
    return read_transaction(answer.transaction)


def persisting(request: Request, pace: Pace, why: str, *, idempotency_key: str = "", xid: str = "") -> Asking[Any]:
    """Ask until there is an answer; every request here may be repeated.

    Raises OutcomeUnknown, saying `why` that matters and what the transaction is known by, when `pace` is over or the
    client is closed with the request under way; and what `error_of` says for a definite "no".
    """
    while True:
        answer = yield pace.ask(request)
        if isinstance(answer, Closed):
            if not pace.may_have_arrived:
                raise ConfigurationError(CLOSED)
            raise OutcomeUnknown(f"{why}: {CLOSED}", idempotency_key, xid=xid)
        if not isinstance(answer, Failure):
            pace.may_have_arrived = True
            return answer
        if not answer.retryable:
            raise error_of(answer)
        if (pause := pace.failed(answer)) is None:
            raise OutcomeUnknown(f"{why}: {answer}", idempotency_key, xid=xid)
        yield pause


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
