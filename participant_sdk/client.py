"""The initiator's client: run a transaction and learn its outcome for certain, or that it is not certain.

    client = TricordClient("127.0.0.1:7800")
    client.execute(branch("bank-a", "debit", Debit("alice", 30)), branch("bank-b", "credit", Credit("bob", 30)))

Every request carries an idempotency key, so that asking again is always safe: lost connections and coordinators that
start again are met by the same request with the same key, for as long as the caller's patience lasts. That is
written once, in `client_asking`; `client_connection` carries its steps out on grpc and on grpc.aio.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping

from participant_sdk.client_asking import start_get
from participant_sdk.client_connection import AsyncCoordinatorConnection, CoordinatorConnection
from participant_sdk.client_executing import start_execute
from participant_sdk.client_interacting import Interaction
from participant_sdk.client_request import BranchRequest, Wait
from participant_sdk.client_watching import start_watch
from participant_sdk.interactive import AsyncOpenTransaction, OpenTransaction
from participant_sdk.transaction import Transaction


class TricordClient(CoordinatorConnection):
    """Starts transactions at the coordinator at `endpoint` ("host:port"). Safe for threads; close it at the end."""

    def execute(
        self,
        *branches: BranchRequest,
        idempotency_key: str | None = None,
        timeout: float | None = None,
        wait: Wait = Wait.FINISHED,
        patience: float | None = None,
        metadata: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        ordered: bool = False,
    ) -> Transaction:
        """Run all branches as one transaction; returns it when it is confirmed (with DECIDED: decided to be).

        `timeout` is the transaction's, in seconds: undecided after that, it is cancelled. `patience` (default:
        timeout + 30) is how many seconds this call goes on asking. With an `idempotency_key` of your own a repeat
        of this call, even by another process, is the same transaction and gives the same answer.

        `metadata` is handed to every handler as `call.metadata`: a tenant, a trace. At most 16 entries; keys of 1 to
        64 characters A-Z a-z 0-9 . _ -, values of at most 256 printable characters. It is not part of what makes two
        requests the same: a repeat with other metadata finds the transaction with its first one.

        `labels` is what people find the transaction by (`tricord list --label order=42`); participants do not see it.
        At most 16; a name is a letter a-z and up to 62 more characters of a-z 0-9 _ . -, a value has 1 to 255 printable
        characters. The first ones stand, as with `metadata`.

        With `ordered` the branches are tried one after another, each when the one before it is tried: cheap checks
        first.

        Raises TransactionCancelled (decided; nothing happened), OutcomeUnknown (patience over; it carries the key),
        InvalidRequest, UnknownParticipant, IdempotencyKeyReused, RequestFailed (nothing was started),
        ConfigurationError (no coordinator answers there, or this client is closed).
        """
        return self._run(start_execute(branches, idempotency_key, timeout, wait, patience, metadata, labels, ordered))

    def get(self, *, xid: str | None = None, idempotency_key: str | None = None, patience: float = 10.0) -> Transaction:
        """Read a transaction in whatever state. Raises TransactionNotFound, OutcomeUnknown (not reached)."""
        return self._run(start_get(xid, idempotency_key, patience))

    def transaction(
        self,
        *,
        timeout: float | None = None,
        idempotency_key: str | None = None,
        metadata: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        patience: float | None = None,
        wait: Wait = Wait.FINISHED,
    ) -> OpenTransaction:
        """An interactive transaction: `with client.transaction(timeout=30) as tx: hold = tx.try_(branch(...), Held)`.

        Leaving the block confirms, with any exception it cancels. What was refused, or not seen tried, is never
        confirmed. Leaving it raises TransactionCancelled, or OutcomeUnknown when the coordinator could not tell for
        `patience` seconds whether it is confirmed; after `tx.cancel()` it is quiet. Entering it raises AlreadyDecided
        if the transaction under an `idempotency_key` of your own was decided before: the body does not run again.

        `patience` (default: timeout + 30) is how many seconds each call goes on asking. `wait` says how far the
        confirm is waited for. The other arguments are those of `execute`. Raises InvalidRequest.
        """
        return OpenTransaction(Interaction(timeout, idempotency_key, metadata, labels, patience, wait), self._run)

    def watch(
        self, *, xid: str | None = None, idempotency_key: str | None = None, patience: float = 30.0
    ) -> Iterator[Transaction]:
        """The transaction as it stands, then after every change, until it is finished.

        A stream that breaks is opened again, and so is one that was silent for some seconds, as its coordinator may
        hang; nothing is lost by it but steps in between. Raises TransactionNotFound, OutcomeUnknown (no coordinator
        told anything for `patience` seconds of asking), InvalidRequest, ConfigurationError (this client is closed).
        """
        return self._watch(start_watch(xid, idempotency_key, patience))


class AsyncTricordClient(AsyncCoordinatorConnection):
    """As `TricordClient`, on asyncio. Make and use it in one event loop."""

    async def execute(
        self,
        *branches: BranchRequest,
        idempotency_key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the transaction's, not this call's
        wait: Wait = Wait.FINISHED,
        patience: float | None = None,
        metadata: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        ordered: bool = False,
    ) -> Transaction:
        """See `TricordClient.execute`. Cancelling this call does not cancel the transaction."""
        return await self._run(
            start_execute(branches, idempotency_key, timeout, wait, patience, metadata, labels, ordered)
        )

    async def get(
        self, *, xid: str | None = None, idempotency_key: str | None = None, patience: float = 10.0
    ) -> Transaction:
        """See `TricordClient.get`."""
        return await self._run(start_get(xid, idempotency_key, patience))

    def transaction(
        self,
        *,
        timeout: float | None = None,
        idempotency_key: str | None = None,
        metadata: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        patience: float | None = None,
        wait: Wait = Wait.FINISHED,
    ) -> AsyncOpenTransaction:
        """See `TricordClient.transaction`; with `async with`.

        A task that is cancelled in the block cancels the transaction. One that is cancelled while the end of the block
        waits for its Confirm ends at once, and leaves it to the coordinator: it may be confirmed.
        """
        return AsyncOpenTransaction(Interaction(timeout, idempotency_key, metadata, labels, patience, wait), self._run)

    def watch(
        self, *, xid: str | None = None, idempotency_key: str | None = None, patience: float = 30.0
    ) -> AsyncIterator[Transaction]:
        """See `TricordClient.watch`."""
        return self._watch(start_watch(xid, idempotency_key, patience))
