"""What an initiator does with an open transaction: the steps, written once for both flavours.

One rule stands over all: what was not seen tried is never confirmed (rule B3). A Try that was refused, or of which it
is not known whether it was done, bars the confirm, whoever swallowed its error; and once a Confirm was sent, the end of
the block sends nothing but its repeat any more, since it may have been decided.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from participant_sdk.client_asking import Asking, Pace, Request, persisting
from participant_sdk.client_executing import confirmed, is_outcome, patience_of
from participant_sdk.client_request import BranchRequest, Wait, begin_request, duration_faults, new_key
from participant_sdk.coordinator_messages import read_branch, read_transaction, write_payload
from participant_sdk.errors import (
    AlreadyDecided,
    ConfigurationError,
    InvalidRequest,
    OutcomeUnknown,
    RequestFailed,
    TransactionCancelled,
    TricordError,
)
from participant_sdk.payload import Payload
from participant_sdk.transaction import Branch, BranchState, Transaction, TransactionState
from tricord.v1 import coordinator_pb2, types_pb2

logger = logging.getLogger("tricord.client")

CANCEL_SECONDS: Final = 5.0
"""How long a block that failed tries to cancel. If that does not get through, the deadline does it."""
REASON_LENGTH_MAX: Final = 256
_NOT_CONFIRMED: Final = frozenset({"NO_BRANCHES", "BRANCHES_NOT_TRIED", "BRANCHES_NOT_NAMED"})
_NOTHING_HAPPENED: Final = frozenset({TransactionState.CANCELLING, TransactionState.CANCELLED})


class Interaction:
    """An open transaction, and what its initiator has seen of it."""

    def __init__(
        self,
        timeout: float | None,
        idempotency_key: str | None,
        metadata: Mapping[str, str] | None,
        labels: Mapping[str, str] | None,
        patience: float | None,
        wait: Wait,
    ) -> None:
        key = new_key() if idempotency_key is None else idempotency_key
        self._begin = begin_request(key, timeout, metadata, labels)
        self._key_is_ours = idempotency_key is None
        self._patience = patience_of(timeout, patience)
        self._patience_is_given = patience is not None
        self._wait = wait
        self._nonce = new_key()[-12:]
        self._position = 0
        self._doubtful: dict[str, str] = {}
        """Why it cannot be confirmed, as far as is known here: by the key of the branch that was asked for."""
        self._confirming = False
        """A Confirm may have been sent."""
        self._cancelling = False
        """The program has asked to cancel it."""
        self.idempotency_key = key
        self.xid = ""
        self.tried: dict[int, Branch] = {}
        """The branches that were seen tried, by their ids."""
        self.named: set[int] = set()
        """The ids of all that were seen tried, those of enlisted ones included."""
        self.ended: Transaction | None = None
        """What it was when it was seen decided."""

    def begin(self) -> Asking[None]:
        """Begin it, or take up the one under its key. Raises AlreadyDecided."""
        answer = yield from self._asked(self._begin, Pace(self._patience), "it is not known whether it was begun")
        self.xid = answer.transaction.xid
        if answer.transaction.state != types_pb2.TRANSACTION_STATE_TRYING:
            self.ended = read_transaction(answer.transaction)
            if self._key_is_ours:  # nobody else has it: its time was over before the answer came
                confirmed(self.ended)
            raise AlreadyDecided(self.ended)

    def next_key(self, branch_key: str | None) -> str:
        """The branch's key: its place among the calls, unless the caller names one."""
        self._position += 1
        return f"{self._nonce}-{self._position}" if branch_key is None else branch_key

    def try_(self, branch: BranchRequest, branch_key: str) -> Asking[Payload | None]:
        """Add a branch and have it tried; what its Try returned.

        Raises TransactionCancelled, AlreadyDecided, OutcomeUnknown.
        """
        request = coordinator_pb2.CoordinatorServiceTryRequest(xid=self.xid, branch_key=branch_key)
        request.branch.participant, request.branch.action = branch.participant, branch.action
        request.branch.payload.CopyFrom(write_payload(branch.payload))
        doubt = f"it is not known whether {branch.participant}/{branch.action} was tried"
        why = f"{doubt} in transaction {self.xid}"
        self._doubtful[branch_key] = doubt  # until something definite is heard, however this call ends
        pace = Pace(self._patience)
        try:
            while True:
                answer = yield from self._asked(request, pace, why)
                if answer.state != types_pb2.TRANSACTION_STATE_TRYING:
                    raise (yield from self._decided())
                told = read_branch(answer.branch)
                if told.state is BranchState.TRIED:
                    self.tried[told.branch_id] = told
                    self.named.update((told.branch_id, *answer.branch.tried_branch_ids))
                    self._doubtful.pop(branch_key, None)
                    return told.result
                if (pause := pace.not_yet()) is None:
                    raise OutcomeUnknown(f"{why}: it is still pending", self.idempotency_key, xid=self.xid)
                yield pause
        except RequestFailed as error:
            if error.reason == "NOT_TRYING":
                raise (yield from self._decided()) from error
            self._doubtful.pop(branch_key, None)
            raise
        except (InvalidRequest, ConfigurationError):  # nothing was added
            self._doubtful.pop(branch_key, None)
            raise

    def renew(self, timeout: float) -> Asking[None]:
        """Move the deadline to so many seconds from now."""
        if fault := duration_faults(timeout):
            raise InvalidRequest(f"the timeout is {timeout}", {"timeout": fault})
        request = coordinator_pb2.RenewRequest(xid=self.xid)
        request.timeout.FromNanoseconds(round(timeout * 1e9))
        why = f"it is not known whether the deadline of transaction {self.xid} was moved"
        try:
            yield from self._asked(request, Pace(self._patience), why)
        except RequestFailed as error:
            if error.reason == "NOT_TRYING":
                raise (yield from self._decided()) from error
            raise
        if not self._patience_is_given:
            self._patience = max(self._patience, patience_of(timeout, None))

    def confirm(self) -> Asking[Transaction]:
        """Confirm it, naming what was seen tried.

        Raises TransactionCancelled, AlreadyDecided, RequestFailed, OutcomeUnknown.
        """
        if self.ended is not None:
            if self.ended.state not in _NOTHING_HAPPENED and not self._confirming:
                raise AlreadyDecided(self.ended)
            return confirmed(self.ended)
        if self._doubtful:
            return confirmed((yield from self._cancel(next(iter(self._doubtful.values())))))
        request = coordinator_pb2.CoordinatorServiceConfirmRequest(
            xid=self.xid, tried_branch_ids=sorted(self.named), wait=self._wait.value
        )
        why = f"it is not known whether transaction {self.xid} is confirmed"
        pace = Pace(self._patience, may_have_arrived=self._confirming)
        self._confirming = True
        while True:
            try:
                answer = yield from self._asked(request, pace, why)
            except ConfigurationError:
                self._confirming = pace.may_have_arrived
                raise
            except RequestFailed as error:
                if error.reason == "NOT_TRYING":
                    raise (yield from self._decided()) from error
                if error.reason in _NOT_CONFIRMED:  # nothing was decided
                    self._confirming = False
                    yield from self._give_up(str(error))
                raise
            transaction = read_transaction(answer.transaction)
            if is_outcome(transaction, self._wait):
                self.ended = transaction
                return confirmed(transaction)
            if (pause := pace.not_yet()) is None:
                raise OutcomeUnknown(f"{why}: it is still {transaction.state.value}", self.idempotency_key, transaction)
            yield pause

    def cancel(self, reason: str) -> Asking[Transaction]:
        """Cancel it, as the program asks. Raises RequestFailed if it is confirmed, OutcomeUnknown."""
        self._cancelling = True
        return (yield from self._cancel(reason))

    def leave(self, error: BaseException | None) -> Asking[None]:
        """The end of the block: confirm, or cancel if it failed, unless either was done in it."""
        if error is not None:
            if self.ended is None and not self._confirming:
                yield from self._give_up(type(error).__name__)  # its text may hold what is nobody else's business
        elif self._cancelling:
            if self.ended is None:  # what became of it is not known
                yield from (self.confirm() if self._confirming else self._cancel(""))
        elif not self.named and not self._doubtful and self.ended is None:
            yield from self._cancel("nothing was tried in it")
        else:
            yield from self.confirm()

    def _asked(self, request: Request, pace: Pace, why: str) -> Asking[Any]:
        return persisting(request, pace, why, idempotency_key=self.idempotency_key, xid=self.xid)

    def _cancel(self, reason: str, patience: float | None = None) -> Asking[Transaction]:
        request = coordinator_pb2.CoordinatorServiceCancelRequest(
            xid=self.xid, reason=_reason(reason), wait=coordinator_pb2.WAIT_DECIDED
        )
        why = f"it is not known whether transaction {self.xid} is cancelled, and not confirmed"
        pace = Pace(self._patience if patience is None else patience)
        answer = yield from self._asked(request, pace, why)
        self.ended = read_transaction(answer.transaction)
        return self.ended

    def _give_up(self, reason: str) -> Asking[None]:
        """Cancel it while an error is on its way, which is not to be hidden."""
        try:
            yield from self._cancel(reason, min(self._patience, CANCEL_SECONDS))
        except TricordError as failure:
            logger.warning("transaction %s could not be cancelled, its deadline does it: %s", self.xid, failure)

    def _decided(self) -> Asking[TransactionCancelled | AlreadyDecided]:
        """The error that says what it is by the record, and which branch said no."""
        request = coordinator_pb2.GetRequest(xid=self.xid)
        why = f"transaction {self.xid} is not open any more, and it is not known why"
        answer = yield from self._asked(request, Pace(self._patience), why)
        self.ended = read_transaction(answer.transaction)
        if self.ended.state in _NOTHING_HAPPENED:
            return TransactionCancelled(self.ended, self.ended.refusal)
        return AlreadyDecided(self.ended)


def _reason(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)[:REASON_LENGTH_MAX]
