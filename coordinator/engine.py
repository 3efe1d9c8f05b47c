"""Live transactions, the claim loop, and who waits for what.

Each live transaction is one task that runs ``flow.drive``; everything done to an xid in this process passes through
it. The claim loop looks for rows whose ``wake_ms`` has come: retries, deadlines, what a crash left behind, what
another coordinator dropped. There is no other timer: one that lives in memory would die with the process.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import structlog

from .codec import UnreadableRow, transaction
from .delivery import Delivery
from .flow import drive
from .ids import new_xid
from .journal import Journal, Overloaded
from .machine import begin
from .model import Attention, BranchSpec, Call, Outcome, Policy, Reply, Spec, State, Transaction
from .store.rows import Row, RowRejected, StoreError
from .store.store import Store, StoreClosed

_log = structlog.get_logger(__name__)

CLAIM_ROWS_MAX = 500
LIVE_MAX = 20_000
"""Live transactions beyond which due work is left to others, or to later."""
POLL_S_MIN = 0.02
POLL_S_MAX = 1.0
"""How long the claim loop sleeps at the most: another coordinator's work may have become due."""
NEVER_MS = 2**63
WATCH_S_MIN, WATCH_S_MAX = 0.1, 1.0
"""How often a row is read for somebody who waits for a transaction that another coordinator drives."""


class Until(Enum):
    """What a caller waits for."""

    DECIDED = "decided"
    FINISHED = "finished"

    def reached(self, tx: Transaction) -> bool:
        """Whether the wait is over."""
        return tx.state.finished if self is Until.FINISHED else tx.state is not State.TRYING


class KeyReused(Exception):
    """The idempotency key belongs to another request."""

    def __init__(self, xid: bytes) -> None:
        super().__init__(f"the idempotency key belongs to transaction {xid.hex()}, which has other branches")
        self.xid = xid


class Started(NamedTuple):
    """A transaction that was begun, now or before under the same key."""

    tx: Transaction
    new: bool


class Engine:
    """Runs transactions on one store."""

    def __init__(self, store: Store, delivery: Delivery, policy: Policy) -> None:
        self.store = store
        self.policy = policy
        self.journal = Journal(store)
        self.delivery = delivery
        self.counts = dict.fromkeys(("begun", "confirmed", "cancelled", "recovered"), 0)
        self._live: dict[bytes, Live] = {}
        self._waiters: dict[bytes, list[asyncio.Future[Transaction]]] = {}
        self._nudge = asyncio.Event()
        self._next_claim_ms = 0
        self._stopping = False
        self._ended = False
        self._claiming: asyncio.Task[None] | None = None

    @property
    def live(self) -> int:
        """How many transactions this process drives now."""
        return len(self._live)

    async def start(self) -> None:
        """Start taking over what is due."""
        self._claiming = asyncio.get_running_loop().create_task(self._claim_loop())

    def stop_claiming(self) -> None:
        """Take nothing over any more; what is live goes on."""
        self._stopping = True
        self._nudge.set()

    async def stop(self, grace_s: float) -> None:
        """Let live transactions go on for up to ``grace_s`` seconds, then leave them to the next coordinator.

        Ends also when the store does not answer: within ``grace_s`` and some seconds more.
        """
        if self._ended:
            return
        self.stop_claiming()
        tasks = [live.task for live in self._live.values() if live.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        self._ended = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        last = asyncio.get_running_loop().create_task(self.journal.drain())
        waiting = [last] if self._claiming is None else [last, self._claiming]
        _, open_ = await asyncio.wait(waiting, timeout=max(1.0, min(grace_s, 5.0)))
        if open_:
            _log.warning("engine.store_silent", hint="the last flush is open; recovery settles it")
            self.store.stop_waiting()
            await asyncio.wait(open_, timeout=1.0)
            last.cancel()

    # --- for the services ----------------------------------------------------------------------------------

    async def begin(
        self,
        key: bytes,
        timeout_ms: int,
        branches: tuple[BranchSpec, ...],
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Started:
        """Begin a transaction, or find the one that holds its key; what that one has stands, its metadata included.

        Raises KeyReused if the key belongs to another request, RowRejected if the store cannot take it and Overloaded
        if too much is waiting (nothing is stored then), StoreClosed if it is not known.
        """
        if len(self._live) >= LIVE_MAX:
            raise Overloaded(f"{LIVE_MAX} transactions are live")
        self.journal.check_room()
        now_ms = self.store.now_ms()
        spec = Spec(new_xid(now_ms), key, now_ms, timeout_ms, branches, metadata)
        tx = begin(spec, now_ms, self.policy)._replace(save_id=secrets.randbits(62))
        # Shielded: whether the caller still waits changes nothing for a record that is on its way.
        beginning = asyncio.get_running_loop().create_task(self._begin(tx))
        beginning.add_done_callback(_seen)
        try:
            begun = await asyncio.shield(beginning)
        finally:
            del beginning  # an error would hold this frame, and the frame the error, until the collector comes
        if not begun.new and not begun.tx.spec.asks_the_same(spec):
            raise KeyReused(begun.tx.spec.xid)
        return begun

    async def _begin(self, tx: Transaction) -> Started:
        begun = await self.journal.begin(tx)
        if begun.new:
            self.counts["begun"] += 1
            self._adopt(begun.tx)
        return Started(begun.tx, begun.new)

    async def wait(self, tx: Transaction, until: Until, timeout_s: float | None) -> Transaction:
        """The transaction when it has come so far, or as it stands when the time is over."""
        loop = asyncio.get_running_loop()
        end_s = None if timeout_s is None else loop.time() + timeout_s
        pause_s = WATCH_S_MIN
        while not until.reached(tx):
            left_s = POLL_S_MAX if end_s is None else end_s - loop.time()
            if left_s <= 0:
                break
            xid = tx.spec.xid
            live = self._live.get(xid)
            if live is not None:
                pause_s = POLL_S_MAX
                if live.tx.version > tx.version:
                    tx = live.tx
                    continue
            waiter: asyncio.Future[Transaction] = loop.create_future()
            self._waiters.setdefault(xid, []).append(waiter)
            try:
                done, _ = await asyncio.wait([waiter], timeout=min(pause_s, left_s))
            finally:
                self._forget(xid, waiter)
            if done:
                tx = waiter.result()
                continue
            pause_s = min(pause_s * 2, WATCH_S_MAX)
            if xid not in self._live:
                tx = await self._read(tx)
        return tx

    async def get(self, *, xid: bytes = b"", key: bytes = b"") -> Transaction | None:
        """A transaction by xid or key: as this process drives it, else as stored. Raises StoreError."""
        live = self._live.get(xid)
        if live is not None:
            return live.tx
        row = await self.store.get(xid=xid, key=key)
        return None if row is None else transaction(row)

    async def _read(self, tx: Transaction) -> Transaction:
        try:
            row = await self.store.get(xid=tx.spec.xid)
            return tx if row is None else transaction(row)
        except StoreError as error:
            _log.warning("engine.watch_failed", xid=tx.spec.xid.hex(), error=str(error))
            return tx

    def _forget(self, xid: bytes, waiter: asyncio.Future[Transaction]) -> None:
        waiters = self._waiters.get(xid)
        if waiters and waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[xid]

    # --- live transactions ---------------------------------------------------------------------------------

    def _adopt(self, tx: Transaction) -> None:
        """Drive a transaction, unless this process does so already."""
        xid = tx.spec.xid
        if xid not in self._live and not self._ended:
            self._live[xid] = live = Live(self, tx)
            live.task = asyncio.get_running_loop().create_task(self._drive(live))

    async def _drive(self, live: Live) -> None:
        xid = live.tx.spec.xid
        tx = None
        try:
            tx = await drive(live.tx, live, self.policy)
            if tx.wake_ms is not None:
                self._plan_claim(tx.wake_ms)
        except (StoreClosed, asyncio.CancelledError):
            pass  # the process stops; whoever comes next recovers it
        except RowRejected as error:
            _log.error("transaction.rejected", xid=xid.hex(), error=str(error))
        except Exception:
            _log.exception("transaction.driver_failed", xid=xid.hex())
        finally:
            live.ended = True
            del self._live[xid]
        if live.claimed is not None and tx is not None and tx.version == live.claimed.version:
            # It was claimed under the driver's hands, just as it came to rest: the claim is this process's to serve.
            self._recover(live.claimed)

    def moved(self, before: Transaction, tx: Transaction) -> None:
        """Tell whoever waits that a transaction has changed durably, and log what a person wants to find."""
        if tx.state is not before.state:
            if tx.state is State.CANCELLING:
                _log.info("transaction.cancelling", xid=tx.spec.xid.hex(), reason=tx.cancel_reason)
            elif tx.state is State.CONFIRMED:
                self.counts["confirmed"] += 1
            elif tx.state is State.CANCELLED:
                self.counts["cancelled"] += 1
            for waiter in self._waiters.pop(tx.spec.xid, ()):
                if not waiter.done():
                    waiter.set_result(tx)
        if tx.attention is not before.attention and tx.attention is not Attention.NONE:
            errors = [f"branch {n}: {step.error}" for n, step in enumerate(tx.steps, 1) if step.error]
            _log.warning("transaction.attention", xid=tx.spec.xid.hex(), why=tx.attention.name, errors=errors)

    # --- the claim loop ------------------------------------------------------------------------------------

    def _plan_claim(self, wake_ms: int) -> None:
        """Have the claim loop look no later than then."""
        if wake_ms < self._next_claim_ms:
            self._next_claim_ms = wake_ms
            self._nudge.set()

    async def _claim_loop(self) -> None:
        failures = 0
        while not self._stopping:
            pause_s = POLL_S_MAX
            self._next_claim_ms = NEVER_MS  # what becomes known from here on counts, also while the claim is on its way
            try:
                limit = min(CLAIM_ROWS_MAX, LIVE_MAX - len(self._live))
                claim = await self.store.claim(limit, self.policy.lease_ms)
                failures = 0
                for row in claim.rows:
                    self._recover(row)
                if claim.next_wake_ms is not None and limit > 0:
                    # A row that is due but was not to be had is in another's hands just now.
                    least_s = 0.0 if claim.rows else POLL_S_MIN
                    due_s = (claim.next_wake_ms - self.store.now_ms()) / 1000
                    pause_s = min(pause_s, max(least_s, due_s))
            except StoreError as error:
                failures += 1
                if failures in (1, 10, 100):
                    _log.warning("engine.claim_failed", error=str(error), failures=failures)
            except Exception:
                _log.exception("engine.claim_failed")  # whatever it is, due work must go on being looked for
            self._plan_claim(self.store.now_ms() + int(pause_s * 1000))
            await self._pause()

    async def _pause(self) -> None:
        """Sleep until it is time to claim, or a nearer time becomes known."""
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        while True:
            self._nudge.clear()
            if self._stopping:
                return
            left_s = (self._next_claim_ms - self.store.now_ms()) / 1000
            if left_s <= 0:
                return
            timer = loop.call_later(left_s, self._nudge.set)
            await self._nudge.wait()
            timer.cancel()

    def _recover(self, row: Row) -> None:
        live = self._live.get(row.xid)
        if live is not None:
            live.claimed = row
            return
        try:
            tx = transaction(row)
        except UnreadableRow as error:
            _log.error("transaction.unreadable", error=str(error))
            return
        self.counts["recovered"] += 1
        self._adopt(tx)


class Live:
    """One transaction that this process drives: the engine's ``flow.Io``."""

    def __init__(self, engine: Engine, tx: Transaction) -> None:
        self.tx = tx
        """The row as it is known to stand."""
        self.task: asyncio.Task[None] | None = None
        self.ended = False
        self.claimed: Row | None = None
        """The row as the claim loop met it while it was being driven."""
        self._engine = engine
        self._xid = tx.spec.xid.hex()
        self._inbox: list[Reply] = []
        self._wake: asyncio.Future[None] | None = None

    def now_ms(self) -> int:
        return self._engine.store.now_ms()

    def new_save_id(self) -> int:
        return secrets.randbits(62) + 1

    def send(self, tx: Transaction, calls: Sequence[Call]) -> None:
        for call in calls:
            self._engine.delivery.send(self._xid, tx.spec, call, self._receive)

    async def replies(self, until_ms: int | None) -> Sequence[Reply]:
        if not self._inbox:
            loop = asyncio.get_running_loop()
            self._wake = loop.create_future()
            timer = None
            if until_ms is not None:
                delay_s = max(0.0, (until_ms - self.now_ms()) / 1000)
                timer = loop.call_later(delay_s, _wake, self._wake)
            try:
                await self._wake
            finally:
                if timer is not None:
                    timer.cancel()
                self._wake = None
        replies, self._inbox = self._inbox, []
        return replies

    async def save(self, tx: Transaction) -> Transaction:
        before = self.tx
        if tx.state.finished:
            # It promises nothing new: every branch has answered for good. So nobody waits for its COMMIT.
            self._engine.journal.save_last(tx)
            stands = tx
        else:
            stands = await self._engine.journal.save(tx)
        self.tx = stands
        self._engine.moved(before, stands)
        return stands

    def _receive(self, reply: Reply) -> None:
        if self.ended:
            return
        if reply.outcome is not Outcome.DONE:
            branch = self.tx.spec.branches[reply.branch]
            _log.debug(
                "call.not_done", xid=self._xid, branch=reply.branch + 1, participant=branch.participant,
                phase=reply.phase.name, outcome=reply.outcome.name, error=reply.error,
            )  # fmt: skip
        self._inbox.append(reply)
        if self._wake is not None:
            _wake(self._wake)


def _seen(task: asyncio.Task[Started]) -> None:
    """Whoever began it may have gone; how it ended is then nobody's business."""
    if not task.cancelled():
        task.exception()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
