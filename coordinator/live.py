"""One live transaction: what its driver is given of the world, and who waits for its orders."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import structlog

from .codec import UnreadableRow, transaction
from .delivery import Delivery
from .delivery_deadlines import Deadlines
from .flow import MayWait
from .ids import Ids
from .journal import Journal
from .model import Call, Outcome, Policy, Reply, State, Transaction
from .orders import Denied, Order
from .store.rows import Row, RowRejected, StoreError
from .store.store import Store, StoreClosed

_log = structlog.get_logger(__name__)

_DONE = Outcome.DONE
"""Looked up in this module for each reply: see ``machine``."""
READ_AGAIN_S = 1.0
"""How long a read that has failed waits before it is tried again."""


class Host(Protocol):
    """What it needs of the engine."""

    store: Store
    delivery: Delivery
    journal: Journal
    ids: Ids
    policy: Policy
    loop: asyncio.AbstractEventLoop
    lingering: Deadlines[Live]
    """Those that have answers which bring about nothing yet."""
    counts: dict[str, int]

    def moved(self, before: Transaction, tx: Transaction) -> None:
        """The row has changed, durably."""

    def tell_attention(self, tx: Transaction, branch: int | None) -> None:
        """A save of this process has given it attention, because of this branch."""


class Carried(NamedTuple):
    """What became of an order."""

    tx: Transaction
    denied: Denied | None


class Live:
    """One transaction that this process drives: its ``flow.Io``."""

    __slots__ = (
        "_answers", "_host", "_inbox", "_lingers", "_may_wait", "_orders", "_wake", "_xid", "claimed_row", "ended",
        "new_save_id", "now_ms", "task", "tx", "visits",
    )  # fmt: skip

    def __init__(self, host: Host, tx: Transaction) -> None:
        self.tx = tx
        """The row as it is known to stand."""
        self.task: asyncio.Task[None] | None = None
        self.ended = False
        self.visits = False
        """Whether another coordinator may be driving it too."""
        self.claimed_row: Row | None = None
        """The row as the claim loop met it while it was being driven."""
        self.now_ms = host.store.now_ms
        self.new_save_id = host.ids.save_id
        self._host = host
        self._xid = tx.spec.xid.hex()
        self._inbox: list[Reply] = []
        self._orders: list[Order] = []
        self._answers: list[tuple[Order, asyncio.Future[Carried | None]]] = []
        self._wake: asyncio.Future[None] | None = None
        self._may_wait: MayWait | None = None
        self._lingers = False

    @property
    def may_be_old(self) -> bool:
        """Whether the row may have been changed by another coordinator, as that of an open transaction at any time."""
        return self.visits or not self.tx.sealed

    def send(self, tx: Transaction, calls: Sequence[Call]) -> None:
        for call in calls:
            self._host.delivery.send(self._xid, tx.spec, call, self._receive)

    def order(self, order: Order) -> asyncio.Future[Carried | None]:
        """Done when the order was carried out or denied; None if this driver came to its end before."""
        answer: asyncio.Future[Carried | None] = self._host.loop.create_future()
        answer.add_done_callback(seen)
        self._answers.append((order, answer))
        self._orders.append(order)
        self.take_in()
        return answer

    def asked(self) -> bool:
        return bool(self._orders)

    def claim(self, row: Row) -> None:
        """The claim loop has met the row while it is being driven."""
        self.claimed_row = row
        if self.visits:  # an owner comes by it soon enough
            self.take_in()

    def claimed(self) -> Transaction | None:
        row, self.claimed_row = self.claimed_row, None
        try:
            tx = None if row is None else transaction(row)
        except UnreadableRow as error:
            _log.error("transaction.unreadable", error=str(error))
            return None
        if tx is not None and tx.version >= self.tx.version:
            self.tx, self.visits = tx, False
            self._host.counts["recovered"] += 1
        return tx

    def answer(self, order: Order, tx: Transaction, denied: Denied | None) -> None:
        for n, (asked, answer) in enumerate(self._answers):
            if asked is order:  # the very same: equal orders have answers of their own
                del self._answers[n]
                if not answer.done():
                    answer.set_result(Carried(tx, denied))
                return

    def end_orders(self, failure: Exception | None) -> None:
        """What was not taken any more is to be asked anew, unless the driver has failed."""
        for _, answer in self._answers:
            if answer.done():
                continue
            if failure is not None:
                answer.set_exception(failure)
            else:
                answer.set_result(None)
        self._answers.clear()

    async def arrivals(self, until_ms: int | None, may_wait: MayWait) -> tuple[Sequence[Reply], Sequence[Order]]:
        if not self._inbox and not self._orders:
            host = self._host
            self._wake = host.loop.create_future()
            self._may_wait = may_wait
            timer = None
            if until_ms is not None:
                delay_s = max(0.0, (until_ms - self.now_ms()) / 1000)
                timer = host.loop.call_later(delay_s, wake, self._wake)
            try:
                await self._wake
            finally:
                if timer is not None:
                    timer.cancel()
                if self._lingers:
                    self._lingers = False
                    host.lingering.remove(self)
                self._wake = self._may_wait = None  # the driver refers to this: a cycle would be the collector's work
        replies, self._inbox = self._inbox, []
        orders, self._orders = self._orders, []
        return replies, orders

    def take_in(self) -> None:
        """Let the driver have what has come."""
        if self._wake is not None:
            wake(self._wake)

    async def read(self) -> Transaction:
        while True:
            try:
                row = await self._host.store.get(xid=self.tx.spec.xid)
            except StoreClosed:
                raise
            except StoreError as error:
                _log.warning("engine.read_failed", xid=self._xid, error=str(error))
                await asyncio.sleep(READ_AGAIN_S)
                continue
            if row is None:
                raise RowRejected(f"transaction {self._xid} is not in the store any more")
            stands = transaction(row)
            if stands.version <= self.tx.version:
                return self.tx
            before, self.tx = self.tx, stands
            self._host.moved(before, stands)
            return stands

    async def save(self, tx: Transaction) -> Transaction:
        before = self.tx
        raises = tx.attention is not before.attention and tx.attention.lasting > before.attention.lasting
        if tx.state.finished and before.state is not State.TRYING and not raises and not tx.resolved:
            # It promises nothing new: every branch has answered for good. So nobody waits for its COMMIT. (But that
            # of what was resolved by hand is the promise that it cannot be reversed any more.)
            self._host.journal.save_last(tx)
            stands = tx
        else:
            stands = await self._host.journal.save(tx)
            self.visits = self.visits or stands.save_id != tx.save_id
        self.tx = stands
        self._host.moved(before, stands)
        if raises and stands.save_id == tx.save_id:  # else whoever saved what stands there has told
            self._host.tell_attention(stands, _to_blame(before, stands))
        return stands

    def _receive(self, reply: Reply) -> None:
        if self.ended:
            return
        if reply.outcome is not _DONE:
            branch = self.tx.spec.branches[reply.branch]
            _log.debug(
                "call.not_done", xid=self._xid, branch=reply.branch + 1, participant=branch.participant,
                phase=reply.phase.name, outcome=reply.outcome.name, error=reply.error,
            )  # fmt: skip
        self._inbox.append(reply)
        if self._wake is None:
            return
        if self._may_wait is None or not self._may_wait(self._inbox):
            wake(self._wake)
        elif not self._lingers:  # to be woken for each of several answers would cost more than the answers
            self._lingers = True
            self._host.lingering.add(self, self._host.loop.time() + self._host.policy.linger_ms / 1000)


def _to_blame(before: Transaction, tx: Transaction) -> int:
    """The branch whose answer has raised the attention: of those that changed, the one that has failed most often."""
    changed = [n for n, step in enumerate(tx.steps) if step.error and step not in before.steps[n : n + 1]]
    failed = changed or [n for n, step in enumerate(tx.steps) if step.error] or range(len(tx.steps))
    return max(failed, key=lambda n: tx.steps[n].attempts)


def seen(future: asyncio.Future[Any]) -> None:
    """Whoever began it may have gone; how it ended is then nobody's business."""
    if not future.cancelled():
        future.exception()


def wake(future: asyncio.Future[None]) -> None:
    """Have whoever awaits it go on."""
    if not future.done():
        future.set_result(None)
