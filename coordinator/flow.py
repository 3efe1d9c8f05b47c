"""The one loop: first run, retry, time-out, recovery, take-over, and what initiators ask of an open transaction.

    drive(tx):  send what is due; take replies and orders as they come; save what they make of it; until nothing moves

Two rules are structure here, not discipline. *Saved before sent*: calls are taken only from a value that ``Io.save``
has returned. *The row decides*: a save that meets another coordinator's row takes that row and applies the same
replies and orders to it.

A driver *owns* a transaction that it began, claimed or decided: then it sends all that is due. One that was only
asked to carry out an order, or that has met another's row, is a *visitor*: somebody else may be driving, so it sends
nothing but the first call of a branch that it has added, and leaves the rest under the lease that stands.

Pure but for its ``Io``, so the same loop runs under the asyncio engine, in the stories and in a simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .machine import apply, call_of, called, due, owes, rests, visitors_wake_at, wake_at, wanted
from .model import Attention, Call, Outcome, Phase, Policy, Reply, State, Transaction
from .orders import Denied, Order, carry_out

MayWait = Callable[[Sequence[Reply]], bool]
"""Whether it is plain that these replies bring about nothing yet; asked as soon as they have come."""


# See ``machine``: what every transaction comes by many times is looked up in this module.
_TRYING, _DONE, _CALM = State.TRYING, Outcome.DONE, Attention.NONE


class Io(Protocol):
    """What ``drive`` needs of the world, for one transaction."""

    def now_ms(self) -> int:
        """The store's clock."""

    def send(self, tx: Transaction, calls: Sequence[Call]) -> None:
        """Start these calls; each ends in exactly one reply, an UNKNOWN one at its time-out at the latest."""

    async def arrivals(self, until_ms: int | None, may_wait: MayWait) -> tuple[Sequence[Reply], Sequence[Order]]:
        """At least one reply or order, or none when the time has come.

        Replies that ``may_wait`` need not be given before others have come, or the policy's ``linger_ms`` are over.
        """

    def asked(self) -> bool:
        """Whether an order waits that ``arrivals`` has not given yet."""

    def claimed(self) -> Transaction | None:
        """The row as this process has claimed it while it was being driven here, told once; its time had come."""

    def answer(self, order: Order, tx: Transaction, denied: Denied | None) -> None:
        """An order was carried out, durably, or was denied; ``tx`` is the row that stands."""

    def new_save_id(self) -> int:
        """A random positive number of 63 bits."""

    async def read(self) -> Transaction:
        """The row as it stands in the store: what is held may be too old to answer an order that changes nothing."""

    async def save(self, tx: Transaction) -> Transaction:
        """Write the transaction over the version before it, and return the row that stands when it is durable.

        If another's row stands there, that one is returned instead: its ``save_id`` tells. A transaction that was
        decided before, and is finished by this, may be returned before its COMMIT, unless a branch was resolved by
        hand: it promises nothing new.
        """


async def drive(tx: Transaction, io: Io, policy: Policy, *, owner: bool = True) -> Transaction:
    """Drive a saved transaction until no call is out; what is owed later is in its ``wake_ms``.

    ``tx`` must be the row as it stands in the store. Returns the row as it then stands.
    """
    return await _Drive(tx, io, policy, owner=owner).run()


class _Drive:
    """One run of the loop."""

    __slots__ = ("_io", "_owner", "_park_until_ms", "_policy", "_replies", "_save_by_ms", "_sent", "_tx", "_waiting")

    def __init__(self, tx: Transaction, io: Io, policy: Policy, *, owner: bool) -> None:
        self._tx = tx
        self._io = io
        self._policy = policy
        self._owner = owner
        self._sent: set[tuple[int, Phase]] = set()
        """Calls whose replies are not in the saved row yet."""
        self._waiting = 0
        self._replies: list[Reply] = []
        """Not saved yet."""
        self._save_by_ms: int | None = None
        self._park_until_ms = io.now_ms() + policy.park_ms

    async def run(self) -> Transaction:
        """Until no call is out."""
        await self._save(())  # the deadline may have passed while nobody looked
        renewed = False
        while not self._tx.state.finished:
            now_ms = self._io.now_ms()
            self._take_claim()
            calls = self._calls(now_ms)
            if calls and not renewed and not self._outlasts(calls, now_ms):
                # The save took long. Without a lease that outlasts the calls, others would come and send them too.
                wake_ms = self._tx.wake_ms
                if not self._waiting and not self._replies and wake_ms is not None and wake_ms <= now_ms:
                    break  # whoever claims it, drives it
                await self._write(self._tx, now_ms + self._policy.lease_ms)
                renewed = True  # once: a store that is always so slow must not hold the calls up for ever
                continue
            renewed = False
            if calls:
                self._send(calls)
            if not self._waiting and not self._replies and not self._io.asked() and not self._parks(now_ms):
                await self._rest()
                break
            await self._take(now_ms)
        return self._tx

    def _take_claim(self) -> None:
        """Own what this process has claimed meanwhile: as a visitor only, nobody would send what is due."""
        claimed = self._io.claimed()
        if claimed is not None and claimed.version >= self._tx.version:  # else it was overtaken by a save
            self._tx = claimed
            self._owner = True

    def _calls(self, now_ms: int) -> list[Call]:
        if not self._owner:
            return []
        return [call for call in due(self._tx, now_ms, self._policy) if (call.branch, call.phase) not in self._sent]

    def _send(self, calls: Sequence[Call]) -> None:
        self._sent.update((call.branch, call.phase) for call in calls)
        self._waiting += len(calls)
        self._io.send(self._tx, calls)

    async def _take(self, now_ms: int) -> None:
        """Wait for something to come, and save it when it is time."""
        replies, orders = await self._io.arrivals(self._until(now_ms), self._may_wait)
        self._waiting -= len(replies)
        self._replies.extend(replies)
        now_ms = self._io.now_ms()
        if self._replies and self._save_by_ms is None:
            self._save_by_ms = now_ms + self._policy.linger_ms
        if orders:
            self._park_until_ms = now_ms + self._policy.park_ms
        elif self._waiting and not self._must_save(now_ms):
            return
        await self._save(orders)
        self._sent.difference_update((reply.branch, reply.phase) for reply in self._replies)
        self._replies.clear()
        self._save_by_ms = None

    def _may_wait(self, replies: Sequence[Reply]) -> bool:
        """As they come: those that may wait are progress to save from then on."""
        if self._waiting <= len(replies):
            return False
        now_ms = self._io.now_ms()
        if not leave_open(self._tx, [*self._replies, *replies], now_ms):
            return False
        if self._save_by_ms is None:
            self._save_by_ms = now_ms + self._policy.linger_ms
        return True

    def _outlasts(self, calls: Sequence[Call], now_ms: int) -> bool:
        """Whether the lease lasts longer than these calls (protocol A5)."""
        wake_ms = self._tx.wake_ms
        return wake_ms is not None and wake_ms >= now_ms + max(call.timeout_ms for call in calls)

    def _must_save(self, now_ms: int) -> bool:
        """Whether there is something to save now, with calls still out.

        Progress that decides nothing waits a little for company: losing it in a crash costs one repeated call.
        """
        if self._save_by_ms is not None and now_ms >= self._save_by_ms:
            return True
        tx = self._tx
        if leave_open(tx, self._replies, now_ms):
            return False
        after = apply(tx, self._replies, now_ms, self._policy)
        if after.state is not tx.state or after.attention is not tx.attention:
            return True
        # An initiator waits for each Try, and an ordered one's next Try for the one before it.
        return after is not tx and after.state is State.TRYING and (after.spec.interactive or after.spec.ordered)

    async def _save(self, orders: Sequence[Order]) -> None:
        """Save what replies, orders and the time make of the row; on another's row, what they make of that."""
        policy = self._policy
        fresh = False
        while True:
            before = self._tx
            now_ms = self._io.now_ms()
            after = apply(before, self._replies, now_ms, policy)
            verdicts: list[Denied | None] = []
            if orders:
                after, verdicts = carry_out(after, orders, now_ms, policy)
            if after is before:
                if fresh or not orders:
                    break
                fresh = True
                self._meet(before, await self._io.read())
                continue
            added = _added(before, after) if len(after.steps) > len(before.steps) else []
            decides = before.state is _TRYING and after.state is not _TRYING
            owner = self._owner or decides
            if owner:
                calls_out = self._waiting > 0 or bool(added) or owes(after, now_ms)
                wake_ms = wake_at(after, now_ms, policy, calls_out=calls_out)
            elif rests(before, now_ms) and owes(after, now_ms):
                wake_ms = now_ms  # nobody drives what an operator's order has made due: whoever claims it, does
            else:
                wake_ms = visitors_wake_at(after, [*self._branches_out(), *added], now_ms, policy)
            if await self._write(after, wake_ms):
                self._owner = owner  # whoever decides, drives what follows
                if added and (now_ms := self._io.now_ms()) < self._tx.deadline_ms:
                    self._send([call_of(self._tx, branch, now_ms, policy) for branch in added])
                break
        for order, denied in zip(orders, verdicts, strict=True):
            self._io.answer(order, self._tx, denied)

    async def _write(self, after: Transaction, wake_ms: int | None) -> bool:
        """Save this as the next version; whether it stands. The row that stands is held from then on."""
        mine = after.next_version(self._io.new_save_id(), wake_ms)
        stands = await self._io.save(mine)
        if stands.save_id == mine.save_id:
            self._tx = stands
            return True
        self._meet(self._tx, stands)
        return False

    def _meet(self, before: Transaction, stands: Transaction) -> None:
        """Take the row that stands in place of the one before it.

        Whoever claims a row lengthens its lease, and whoever decides drives: else only a visitor has been there.
        """
        self._tx = stands
        if stands.version != before.version:
            longer = stands.wake_ms is not None and before.wake_ms is not None and stands.wake_ms > before.wake_ms
            open_ = stands.state is State.TRYING and not stands.sealed  # others may send what they have added to it
            self._owner = self._owner and not open_ and stands.state is before.state and not longer

    async def _rest(self) -> None:
        """Leave the transaction so that whoever looks next comes at the right time, not at the end of a lease."""
        while self._owner and not self._tx.state.finished:
            wake_ms = wake_at(self._tx, self._io.now_ms(), self._policy, calls_out=False)
            if wake_ms is None or self._tx.wake_ms is None or self._tx.wake_ms <= wake_ms:
                break
            if await self._write(self._tx, wake_ms):
                break

    def _parks(self, now_ms: int) -> bool:
        """Whether to stay where an initiator's next order finds it at once, although there is nothing to do."""
        return self._tx.state is State.TRYING and not self._tx.sealed and now_ms < self._park_until_ms

    def _branches_out(self) -> set[int]:
        """Branches that owe the answer to a call of this driver."""
        answered = {(reply.branch, reply.phase) for reply in self._replies}
        return {branch for branch, phase in self._sent - answered if called(self._tx, branch) is phase}

    def _until(self, now_ms: int) -> int | None:
        """When to stop waiting: for a retry of another branch, the deadline, or to save progress."""
        tx = self._tx
        times = [] if self._save_by_ms is None else [self._save_by_ms]
        if self._owner:
            for branch, step in enumerate(tx.steps):
                phase = called(tx, branch)
                if phase is not None and (branch, phase) not in self._sent:
                    times.append(step.next_ms)
        if tx.state is _TRYING:
            times.append(tx.deadline_ms)
            if not tx.sealed and not self._waiting and not self._replies:
                times.append(self._park_until_ms)
        return max(now_ms, min(times)) if times else None


def _added(before: Transaction, after: Transaction) -> list[int]:
    """The branches that have come between, and are owed their first call."""
    if after.state is not State.TRYING:
        return []
    return [branch for branch in range(len(before.steps), len(after.steps)) if called(after, branch) is not None]


def leave_open(tx: Transaction, replies: Sequence[Reply], now_ms: int) -> bool:
    """Whether it is plain that these replies decide and flag nothing: others must come first.

    Only a short cut for the usual ones; ``apply`` has the last word, at the latest when they have lingered.
    """
    spec = tx.spec
    if spec.interactive or spec.ordered or tx.joined or tx.resolved or tx.attention is not _CALM:
        return False
    if tx.state is _TRYING and tx.deadline_ms <= now_ms:
        return False
    answered = set()
    for branch, phase, outcome, fence_id, *_ in replies:
        step = tx.steps[branch]
        if outcome is not _DONE or wanted(tx, branch, step) is not phase:
            return False
        if step.fence_id and step.fence_id != fence_id:
            return False
        answered.add(branch)
    return any(wanted(tx, n, step) is not None for n, step in enumerate(tx.steps) if n not in answered)
