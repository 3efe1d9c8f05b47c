"""A transaction whose initiator adds the branches one at a time, and sees what each Try returns.

    with client.transaction(timeout=30) as tx:
        hold = tx.try_(branch("bank-a", "debit", Debit("alice", 30)), Held)
        tx.try_(branch("bank-b", "credit", Credit("bob", 30, hold.hold_id)))

The end of the block confirms, an error in it cancels and goes on; the coordinator is told the error's type, not its
text. The block is the transaction's: `current_xid()` is its xid, and services that are called in it and that enlist
(see `Action.enlist`) are confirmed or cancelled with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from participant_sdk.client_asking import Asking
from participant_sdk.client_interacting import Interaction
from participant_sdk.client_request import BranchRequest
from participant_sdk.context import bound, collecting, in_context
from participant_sdk.payload import Payload
from participant_sdk.transaction import Branch, Transaction

T = TypeVar("T")
R = TypeVar("R")


class _Open:
    """What both flavours are."""

    def __init__(self, interaction: Interaction) -> None:
        self._interaction = interaction
        self._scope = ExitStack()
        self._seen: set[int] = set()

    @property
    def xid(self) -> str:
        """Names the transaction; empty before the block is entered."""
        return self._interaction.xid

    @property
    def idempotency_key(self) -> str:
        """The key that it was begun with; made if none was given."""
        return self._interaction.idempotency_key

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The branches that `try_` has seen tried, in their order."""
        return tuple(branch for _, branch in sorted(self._interaction.tried.items()))

    @property
    def ended(self) -> Transaction | None:
        """What became of it, after it was confirmed or cancelled; None while it is open, or not known."""
        return self._interaction.ended

    def _enter(self) -> None:
        self._scope.enter_context(bound(self.xid))
        self._seen = self._scope.enter_context(collecting(self.xid))

    def _name_seen(self) -> None:
        self._interaction.named |= self._seen


class OpenTransaction(_Open):
    """Made by `TricordClient.transaction`; use it in a `with` statement. Its calls are safe for threads."""

    def __init__(self, interaction: Interaction, run: Callable[[Asking[Any]], Any]) -> None:
        super().__init__(interaction)
        self._run = run

    def __enter__(self) -> Self:
        self._run(self._interaction.begin())
        self._enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._scope.close()
        self._name_seen()
        self._run(self._interaction.leave(error))

    @overload
    def try_(self, branch: BranchRequest, *, branch_key: str | None = None) -> Payload | None: ...
    @overload
    def try_(self, branch: BranchRequest, result_type: type[R], *, branch_key: str | None = None) -> R: ...
    def try_(
        self, branch: BranchRequest, result_type: type[Any] | None = None, *, branch_key: str | None = None
    ) -> Any:
        """Add a branch, have it tried, and return what its Try returned, decoded as `result_type` if one is given.

        A call that is lost is repeated under the same `branch_key`, which is made from its place among the calls
        unless you name one: 1 to 255 characters, unique in the transaction.

        Raises TransactionCancelled (it was refused, or the transaction has ended; `refusal` says why), OutcomeUnknown
        (it bars the confirm, unless a repeat under its `branch_key` is answered), AlreadyDecided (somebody else has
        confirmed it), UnknownParticipant, InvalidRequest, RequestFailed.
        """
        return _decoded(self._run(self._interaction.try_(branch, self._interaction.next_key(branch_key))), result_type)

    def try_all(self, *branches: BranchRequest) -> list[Payload | None]:
        """Have several tried at once; what each returned, in their order. Raises as `try_`, when all have ended."""
        if not branches:
            return []
        keys = [self._interaction.next_key(None) for _ in branches]
        with ThreadPoolExecutor(len(branches)) as pool:
            work = in_context(lambda branch, key: self._run(self._interaction.try_(branch, key)))
            running = [pool.submit(work, branch, key) for branch, key in zip(branches, keys, strict=True)]
        return [future.result() for future in running]

    def renew(self, timeout: float) -> None:
        """Move the deadline to so many seconds from now; at most 24 h after the beginning.

        Raises TransactionCancelled, AlreadyDecided, InvalidRequest, RequestFailed, OutcomeUnknown.
        """
        self._run(self._interaction.renew(timeout))

    def confirm(self) -> Transaction:
        """Confirm it now, rather than at the end of the block. Raises as the end of the block does."""
        self._name_seen()
        return self._run(self._interaction.confirm())  # type: ignore[no-any-return]

    def cancel(self, reason: str = "") -> Transaction:
        """Cancel it; the end of the block is quiet then. `reason` is for people, and stored with the transaction.

        Raises RequestFailed if it is confirmed, OutcomeUnknown (the end of the block tries again).
        """
        return self._run(self._interaction.cancel(reason))  # type: ignore[no-any-return]


class AsyncOpenTransaction(_Open):
    """As `OpenTransaction`, on asyncio: `async with`, and every call is awaited."""

    def __init__(self, interaction: Interaction, run: Callable[[Asking[Any]], Awaitable[Any]]) -> None:
        super().__init__(interaction)
        self._run = run

    async def __aenter__(self) -> Self:
        await self._run(self._interaction.begin())
        self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._scope.close()
        self._name_seen()
        if error is None:  # a task that is cancelled now leaves the transaction to the coordinator
            await self._run(self._interaction.leave(None))
            return
        # Whoever cancels the task does not cancel what it owes the transaction.
        leaving = asyncio.ensure_future(self._run(self._interaction.leave(error)))
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            await asyncio.wait([leaving])
            raise

    @overload
    async def try_(self, branch: BranchRequest, *, branch_key: str | None = None) -> Payload | None: ...
    @overload
    async def try_(self, branch: BranchRequest, result_type: type[R], *, branch_key: str | None = None) -> R: ...
    async def try_(
        self, branch: BranchRequest, result_type: type[Any] | None = None, *, branch_key: str | None = None
    ) -> Any:
        """See `OpenTransaction.try_`."""
        asking = self._interaction.try_(branch, self._interaction.next_key(branch_key))
        return _decoded(await self._run(asking), result_type)

    async def try_all(self, *branches: BranchRequest) -> list[Payload | None]:
        """See `OpenTransaction.try_all`."""
        asked = [self._run(self._interaction.try_(branch, self._interaction.next_key(None))) for branch in branches]
        ended = await asyncio.gather(*asked, return_exceptions=True)
        for each in ended:
            if isinstance(each, BaseException):
                raise each
        return ended  # type: ignore[return-value]

    async def renew(self, timeout: float) -> None:  # noqa: ASYNC109 - the transaction's, not this call's
        """See `OpenTransaction.renew`."""
        await self._run(self._interaction.renew(timeout))

    async def confirm(self) -> Transaction:
        """See `OpenTransaction.confirm`."""
        self._name_seen()
        return await self._run(self._interaction.confirm())  # type: ignore[no-any-return]

    async def cancel(self, reason: str = "") -> Transaction:
        """See `OpenTransaction.cancel`."""
        return await self._run(self._interaction.cancel(reason))  # type: ignore[no-any-return]


def _decoded(result: Payload | None, result_type: type[Any] | None) -> Any:
    if result_type is None:
        return result
    return (result or Payload(b"", "")).decode(result_type)
