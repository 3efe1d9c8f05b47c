"""How a transaction is watched: when a stream is opened again, and what is told."""

from __future__ import annotations

import time
from typing import Final

import grpc

from participant_sdk.client_asking import ATTEMPT_SECONDS_MIN, pause_seconds
from participant_sdk.coordinator_messages import Failure, error_of, read_transaction
from participant_sdk.errors import InvalidRequest, OutcomeUnknown
from participant_sdk.transaction import Transaction
from tricord.v1 import coordinator_pb2

STREAM_SECONDS: Final = 10.0
"""How long one stream lasts. A coordinator that hangs cannot be told from a transaction in which nothing happens, but
the first answer on a new stream comes at once."""


class Watching:
    """What was heard so far, and for how long nothing was."""

    def __init__(self, request: coordinator_pb2.WatchRequest, patience: float) -> None:
        self.request = request
        self._patience = patience
        self._silent_since: float | None = None
        """Since when is asked without hearing anything."""
        self._tries = 0
        self._version = 0

    def opening(self) -> float:
        """For how many seconds to open the next stream."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        left = self._silent_since + self._patience - now
        return max(ATTEMPT_SECONDS_MIN, min(STREAM_SECONDS, self._patience / 2, left))

    def heard(self, response: coordinator_pb2.WatchResponse) -> Transaction | None:
        """The transaction, if this is news: a stream that was opened again begins with what was told before."""
        self._silent_since = None
        self._tries = 0
        if response.transaction.version <= self._version:
            return None
        self._version = response.transaction.version
        return read_transaction(response.transaction)

    def had_its_time(self, failure: Failure) -> bool:
        """Whether nothing is wrong with the coordinator: the stream told something, and its time is over."""
        return self._silent_since is None and failure.code is grpc.StatusCode.DEADLINE_EXCEEDED

    def broke(self, failure: Failure | None) -> float:
        """How many seconds to wait before the next stream. Raises what `error_of` says, OutcomeUnknown."""
        if failure is not None and not failure.retryable:
            raise error_of(failure)
        if failure is not None and self.had_its_time(failure):
            return 0.0
        if self._silent_since is None:  # the silence begins here, however long the answers were thought about
            self._silent_since = time.monotonic()
        self._tries += 1
        if time.monotonic() + (failure.retry_after if failure else 0.0) >= self._silent_since + self._patience:
            why = f": {failure}" if failure is not None else ""
            known = self.request
            raise OutcomeUnknown(f"the transaction cannot be watched{why}", known.idempotency_key, xid=known.xid)
        return pause_seconds(self._tries, failure)


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
