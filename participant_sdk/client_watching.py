"""How a transaction is watched: when a stream is opened again, and what is told."""

from __future__ import annotations

import random
import time

from participant_sdk.client_asking import PAUSE_FIRST_SECONDS, PAUSE_MAX_SECONDS
from participant_sdk.coordinator_messages import Failure, error_of, read_transaction
from participant_sdk.errors import InvalidRequest, OutcomeUnknown
from participant_sdk.transaction import Transaction
from tricord.v1 import coordinator_pb2


class Watching:
    """What was heard so far, and for how long nothing was."""

    def __init__(self, request: coordinator_pb2.WatchRequest, patience: float) -> None:
        self.request = request
        self._patience = patience
        self._silent_since = time.monotonic()
        self._tries = 0
        self._version = 0

    def heard(self, response: coordinator_pb2.WatchResponse) -> Transaction | None:
        """The transaction, if this is news: a stream that was opened again begins with what was told before."""
        self._silent_since = time.monotonic()
        self._tries = 0
        if response.transaction.version <= self._version:
            return None
        self._version = response.transaction.version
        return read_transaction(response.transaction)

    def broke(self, failure: Failure | None) -> float:
        """How many seconds to wait before the next stream. Raises what `error_of` says, OutcomeUnknown."""
        if failure is not None and not failure.retryable:
            raise error_of(failure)
        if time.monotonic() - self._silent_since >= self._patience:
            why = f": {failure}" if failure is not None else ""
            raise OutcomeUnknown(f"the transaction cannot be watched{why}", self.request.idempotency_key)
        self._tries += 1
        return random.uniform(0, min(PAUSE_MAX_SECONDS, PAUSE_FIRST_SECONDS * 2 ** min(self._tries, 10)))


def start_watch(xid: str | None, idempotency_key: str | None, patience: float) -> Watching:
    """See `TricordClient.watch`."""
    if (xid is None) == (idempotency_key is None):
        raise InvalidRequest("name either the xid or the idempotency_key")
    try:
        if xid is not None:
            return Watching(coordinator_pb2.WatchRequest(xid=xid), patience)
        return Watching(coordinator_pb2.WatchRequest(idempotency_key=idempotency_key or ""), patience)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the xid or idempotency_key cannot be sent: {error}") from None
