"""What an initiator does with an open transaction: the steps, written once for both flavours.

One rule stands over all: what was not seen tried is never confirmed (rule B3). A Try that was refused, or of which it
is not known whether it was done, bars the confirm, whoever swallowed its error; and once a Confirm was sent, nothing
but its repeat is sent any more, since it may have been decided.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Final

from participant_sdk.client_asking import Asking, confirmed, is_outcome, patience_of, persisting
from participant_sdk.client_request import BranchRequest, Wait, begin_request, duration_faults, new_key
from participant_sdk.coordinator_messages import read_branch, read_transaction, write_payload
from participant_sdk.errors import InvalidRequest, OutcomeUnknown, RequestFailed, TransactionCancelled, TricordError
from participant_sdk.payload import Payload
from participant_sdk.transaction import Branch, BranchState, Transaction
from tricord.v1 import coordinator_pb2, types_pb2

logger = logging.getLogger("tricord.client")

CANCEL_SECONDS: Final = 5.0
"""How long a block that failed tries to cancel. If that does not get through, the deadline does it."""
REASON_LENGTH_MAX: Final = 256
_NOT_CONFIRMED: Final = frozenset({"NO_BRANCHES", "BRANCHES_NOT_TRIED", "BRANCHES_NOT_NAMED"})


class Interaction:
    """An open transaction, and what its initiator has seen of it."""

    def __init__(
        self,
        timeout: float | None,
        idempotency_key: str | None,
        metadata: Mapping[str, str] | None,
        patience: float | None,
        wait: Wait,
    ) -> None:
        key = new_key() if idempotency_key is None else idempotency_key
        self._begin = begin_request(key, timeout, metadata)
        self._gives_up_at = 0.0
        self._patience = patience_of(timeout, patience)
        self._wait = wait
        self._nonce = new_key()[-12:]
        self._position = 0
        self._doubtful = ""
        """Why it cannot be confirmed any more, as far as is known here."""
        self._confirming = False
        self.idempotency_key = key
        self.xid = ""
        self.tried: dict[int, Branch] = {}
        """The branches that were seen tried, by their ids."""
        self.named: set[int] = set()
        """The ids of all that were seen tried, those of enlisted ones included."""
        self.ended: Transaction | None = None
        """What it was when it was confirmed or cancelled here."""

    def begin(self) -> Asking[None]:
        """Begin it."""
        self._gives_up_at = time.monotonic() + self._patience
        answer = yield from persisting(self._begin, self._gives_up_at, "it is not known whether it was begun")
        self.xid = answer.transaction.xid

    def next_key(self, branch_key: str | None) -> str:
        """The branch's key: its place among the calls, unless the caller names one."""
        self._position += 1
        return f"{self._nonce}-{self._position}" if branch_key is None else branch_key

    def try_(self, branch: BranchRequest, branch_key: str) -> Asking[Payload | None]:
        """Add a branch and have it tried; what its Try returned. Raises TransactionCancelled, OutcomeUnknown."""
        request = coordinator_pb2.CoordinatorServiceTryRequest(xid=self.xid, branch_key=branch_key)
        request.branch.participant, request.branch.action = branch.participant, branch.action
        request.branch.payload.CopyFrom(write_payload(branch.payload))
        what = f"{branch.participant}/{branch.action}"
        why = f"it is not known whether {what} was tried in transaction {self.xid}"
        try:
            while True:
                answer = yield from persisting(request, self._gives_up_at, why)
                told = read_branch(answer.branch)
                if told.state is BranchState.TRIED:
                    self.tried[told.branch_id] = told
                    self.named.update((told.branch_id, *answer.branch.tried_branch_ids))
                    return told.result
                if answer.state != types_pb2.TRANSACTION_STATE_TRYING:
                    raise (yield from self._cancelled())
                if time.monotonic() >= self._gives_up_at:
                    raise OutcomeUnknown(f"{why}: it is still pending", self.idempotency_key)
        except RequestFailed as error:
            if error.reason == "NOT_TRYING":
                raise (yield from self._cancelled()) from error
            raise
        except OutcomeUnknown as error:
            self._doubtful = str(error)
            raise

    def renew(self, timeout: float) -> Asking[None]:
        """Move the deadline to so many seconds from now."""
        if fault := duration_faults(timeout):
            raise InvalidRequest(f"the timeout is {timeout}", {"timeout": fault})
        request = coordinator_pb2.RenewRequest(xid=self.xid)
        request.timeout.FromNanoseconds(round(timeout * 1e9))
        try:
            yield from persisting(request, self._gives_up_at, "it is not known whether the deadline was moved")
        except RequestFailed as error:
            if error.reason == "NOT_TRYING":
                raise (yield from self._cancelled()) from error
            raise
        self._gives_up_at = max(self._gives_up_at, time.monotonic() + patience_of(timeout, None))

    def confirm(self) -> Asking[Transaction]:
        """Confirm it, naming what was seen tried. Raises TransactionCancelled, RequestFailed, OutcomeUnknown."""
        if self.ended is not None:
            return confirmed(self.ended)
        if self._doubtful:
            yield from self.cancel(self._doubtful)
            raise OutcomeUnknown(f"not confirmed, but cancelled: {self._doubtful}", self.idempotency_key, self.ended)
        self._confirming = True
        request = coordinator_pb2.CoordinatorServiceConfirmRequest(
            xid=self.xid, tried_branch_ids=sorted(self.named), wait=self._wait.value
        )
        why = f"it is not known whether transaction {self.xid} is confirmed"
        while True:
            try:
                answer = yield from persisting(request, self._gives_up_at, why)
            except RequestFailed as error:
                if error.reason == "NOT_TRYING":
                    raise (yield from self._cancelled()) from error
                if error.reason in _NOT_CONFIRMED:  # nothing was decided
                    self._confirming = False
                    yield from self.cancel(str(error))
                raise
            transaction = read_transaction(answer.transaction)
            if is_outcome(transaction, self._wait):
                self.ended = transaction
                return confirmed(transaction)
            if time.monotonic() >= self._gives_up_at:
                raise OutcomeUnknown(f"{why}: it is still {transaction.state.value}", self.idempotency_key, transaction)

    def cancel(self, reason: str) -> Asking[Transaction]:
        """Cancel it. Raises RequestFailed if it is confirmed, OutcomeUnknown."""
        request = coordinator_pb2.CoordinatorServiceCancelRequest(
            xid=self.xid, reason=_reason(reason), wait=coordinator_pb2.WAIT_DECIDED
        )
        gives_up_at = min(self._gives_up_at, time.monotonic() + CANCEL_SECONDS)
        answer = yield from persisting(request, gives_up_at, f"it is not known whether {self.xid} is cancelled")
        self.ended = read_transaction(answer.transaction)
        return self.ended

    def leave(self, error: BaseException | None) -> Asking[None]:
        """The end of the block: confirm, or cancel if it failed, unless either was done in it."""
        if error is None:
            if not self.named and not self._doubtful and self.ended is None:
                yield from self.cancel("nothing was tried in it")
            else:
                yield from self.confirm()
            return
        if self.ended is not None or self._confirming:
            return
        try:
            yield from self.cancel(f"{type(error).__name__}: {error}")
        except TricordError as failure:
            logger.warning("transaction %s could not be cancelled, its deadline does it: %s", self.xid, failure)

    def _cancelled(self) -> Asking[TransactionCancelled]:
        """The error that says what it is by the record, and which branch said no."""
        request = coordinator_pb2.GetRequest(xid=self.xid)
        why = f"transaction {self.xid} is not open any more, and it is not known why"
        answer = yield from persisting(request, self._gives_up_at, why)
        self.ended = read_transaction(answer.transaction)
        return TransactionCancelled(self.ended, self.ended.refusal)


def _reason(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)[:REASON_LENGTH_MAX]
