"""The one loop: first run, retry, time-out, recovery and take-over.

    drive(tx):  send what is due; take replies as they come; save what they make of it; until nothing moves

Two rules are structure here, not discipline. *Saved before sent*: calls are taken only from a value that ``Io.save``
has returned. *The row decides*: a save that meets another coordinator's row takes that row and applies the same
replies to it.

Pure but for its ``Io``, so the same loop runs under the asyncio engine, in the stories and in a simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .machine import apply, due, owed, wake_at
from .model import Call, Phase, Policy, Reply, State, Transaction


class Io(Protocol):
    """What ``drive`` needs of the world, for one transaction."""

    def now_ms(self) -> int:
        """The store's clock."""

    def send(self, tx: Transaction, calls: Sequence[Call]) -> None:
        """Start these calls; each ends in exactly one reply, an UNKNOWN one at its time-out at the latest."""

    async def replies(self, until_ms: int | None) -> Sequence[Reply]:
        """At least one reply, or none when the time has come."""

    def new_save_id(self) -> int:
        """A random positive number of 63 bits."""

    async def save(self, tx: Transaction) -> Transaction:
        """Write the transaction over the version before it, and return the row that stands when it is durable.

        If another's row stands there, that one is returned instead: its ``save_id`` tells. A finished transaction
        may be returned before its COMMIT: it promises nothing new.
        """


async def drive(tx: Transaction, io: Io, policy: Policy) -> Transaction:
    """Drive a saved transaction until no call is out; what is owed later is in its ``wake_ms``.

    ``tx`` must be the row as it stands in the store. Returns the row as it then stands.
    """
    sent: set[tuple[int, Phase]] = set()  # calls whose replies are not in the saved row yet
    unsaved: list[Reply] = []
    waiting = 0
    save_by_ms: int | None = None
    renewed = False
    tx = await _save(tx, (), io, policy, waiting=0)  # the deadline may have passed while nobody looked
    while not tx.state.finished:
        now_ms = io.now_ms()
        calls = [call for call in due(tx, now_ms, policy) if (call.branch, call.phase) not in sent]
        if calls and not renewed and not _outlasts(tx, calls, now_ms):
            # The save took long. Without a lease that outlasts the calls, others would come and send them as well.
            if not waiting and not unsaved and tx.wake_ms is not None and tx.wake_ms <= now_ms:
                return tx  # whoever claims it, drives it
            tx = await io.save(_next(tx, now_ms + policy.lease_ms, io))
            renewed = True  # once: a store that is always so slow must not hold the calls up for ever
            continue
        renewed = False
        if calls:
            sent.update((call.branch, call.phase) for call in calls)
            waiting += len(calls)
            io.send(tx, calls)
        if not waiting and not unsaved:
            return await _rest(tx, io, policy)
        replies = await io.replies(_until(tx, now_ms, sent, save_by_ms))
        waiting -= len(replies)
        unsaved.extend(replies)
        now_ms = io.now_ms()
        if unsaved and save_by_ms is None:
            save_by_ms = now_ms + policy.linger_ms
        if waiting and not _must_save(tx, unsaved, now_ms, save_by_ms, policy):
            continue
        tx = await _save(tx, unsaved, io, policy, waiting=waiting)
        sent.difference_update((reply.branch, reply.phase) for reply in unsaved)
        unsaved.clear()
        save_by_ms = None
    return tx


def _outlasts(tx: Transaction, calls: Sequence[Call], now_ms: int) -> bool:
    """Whether the lease lasts longer than these calls (protocol A5)."""
    return tx.wake_ms is not None and tx.wake_ms >= now_ms + max(call.timeout_ms for call in calls)


def _must_save(tx: Transaction, unsaved: Sequence[Reply], now_ms: int, save_by_ms: int | None, policy: Policy) -> bool:
    """Whether there is something to save now, with calls still out.

    Progress that decides nothing waits a little for company: losing it in a crash costs one repeated call.
    """
    if save_by_ms is not None and now_ms >= save_by_ms:
        return True
    after = apply(tx, unsaved, now_ms, policy)
    return after.state is not tx.state or after.attention is not tx.attention


async def _save(tx: Transaction, replies: Sequence[Reply], io: Io, policy: Policy, *, waiting: int) -> Transaction:
    """Save what the replies and the time make of the row; on another's row, what they make of that."""
    while True:
        now_ms = io.now_ms()
        after = apply(tx, replies, now_ms, policy)
        if after is tx:
            return tx
        calls_out = waiting > 0 or bool(due(after, now_ms, policy))
        mine = _next(after, wake_at(after, now_ms, policy, calls_out=calls_out), io)
        tx = await io.save(mine)
        if tx.save_id == mine.save_id:
            return tx


async def _rest(tx: Transaction, io: Io, policy: Policy) -> Transaction:
    """Leave the transaction so that whoever looks next comes at the right time, not at the end of a lease."""
    while not tx.state.finished:
        wake_ms = wake_at(tx, io.now_ms(), policy, calls_out=False)
        if wake_ms is None or tx.wake_ms is None or tx.wake_ms <= wake_ms:
            break
        mine = _next(tx, wake_ms, io)
        tx = await io.save(mine)
        if tx.save_id == mine.save_id:
            break
    return tx


def _next(tx: Transaction, wake_ms: int | None, io: Io) -> Transaction:
    return tx._replace(version=tx.version + 1, save_id=io.new_save_id(), wake_ms=wake_ms)


def _until(tx: Transaction, now_ms: int, sent: set[tuple[int, Phase]], save_by_ms: int | None) -> int | None:
    """When to stop waiting for replies: for a retry of another branch, the deadline, or to save progress."""
    times = [] if save_by_ms is None else [save_by_ms]
    for branch, step in enumerate(tx.steps):
        phase = owed(tx.state, step)
        if phase is not None and (branch, phase) not in sent:
            times.append(step.next_ms)
    if tx.state is State.TRYING:
        times.append(tx.spec.deadline_ms)
    return max(now_ms, min(times)) if times else None
