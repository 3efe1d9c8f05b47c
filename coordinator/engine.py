"""Live transactions, the claim loop, and who waits for what.

Each live transaction is one task that runs ``flow.drive``; everything done to an xid in this process passes through
it. The claim loop looks for rows whose ``wake_ms`` has come: retries, deadlines, what a crash left behind, what
another coordinator dropped. There is no other timer: one that lives in memory would die with the process.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import structlog

from .codec import UnreadableRow, transaction
from .delivery import Delivery
from .flow import drive
from .ids import new_xid
from .journal import Journal, Overloaded
from .machine import begin
from .model import BranchSpec, Call, Outcome, Policy, Reply, Spec, State, Transaction
from .orders import AddBranch, Denied, Order, Renew, carry_out
from .store.rows import Row, RowRejected, StoreError
from .store.store import Store, StoreClosed

_log = structlog.get_logger(__name__)

CLAIM_ROWS_MAX = 500
LIVE_MAX = 20_000
"""Live transactions beyond which new ones are refused, and due work is left to others, or to later."""
OPEN_FORMAT = 2
"""The row format that interactive, ordered, enlisted and renewed transactions need."""
POLL_S_MIN = 0.02
POLL_S_MAX = 1.0
"""How long the claim loop sleeps at the most: another coordinator's work may have become due."""
NEVER_MS = 2**63
WATCH_S_MIN, WATCH_S_MAX = 0.1, 1.0
"""How often a row is read for somebody who waits for a transaction that another coordinator drives."""


Reached = Callable[[Transaction], bool]
"""Whether a transaction has come as far as a caller waits for."""


class Until(Enum):
    """What callers wait for."""

    ACCEPTED = "accepted"
    DECIDED = "decided"
    FINISHED = "finished"

    def __call__(self, tx: Transaction) -> bool:
        """Whether the wait is over."""
        if self is Until.FINISHED:
            return tx.state.finished
        return self is Until.ACCEPTED or tx.state is not State.TRYING


class KeyReused(Exception):
    """The idempotency key belongs to another request."""

    def __init__(self, xid: bytes) -> None:
        super().__init__(f"the idempotency key belongs to transaction {xid.hex()}, which was another request")
        self.xid = xid


class UnknownXid(Exception):
    """There is no such transaction."""


class FormatNotReady(Exception):
    """The store may still be served by programs that could not read what this would write."""


class Started(NamedTuple):
    """A transaction that was begun, now or before under the same key."""

    tx: Transaction
    new: bool


class Engine:
    """Runs transactions on one store."""

    def __init__(self, store: Store, delivery: Delivery, policy: Policy, live_max: int = LIVE_MAX) -> None:
        self.store = store
        self.live_max = live_max
        self.on_attention: Callable[[Transaction, int | None], None] = lambda tx, branch: None
        """Called once when a save of this process has given a transaction attention, and is in the store; with the
        index of the branch that is why, or None where opening the store has found another history."""
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
        self._telling: asyncio.Task[None] | None = None

    @property
    def live(self) -> int:
        """How many transactions this process drives now."""
        return len(self._live)

    async def start(self) -> None:
        """Start taking over what is due, and tell what opening the store has given attention."""
        loop = asyncio.get_running_loop()
        self._claiming = loop.create_task(self._claim_loop())
        self._telling = loop.create_task(self._tell_history_changed())

    def stop_claiming(self) -> None:
        """Take nothing over any more; what is live goes on."""
        self._stopping = True
        self._nudge.set()
        if self._telling is not None:
            self._telling.cancel()

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
        *,
        interactive: bool = False,
        ordered: bool = False,
    ) -> Started:
        """Begin a transaction, or find the one that holds its key; what that one has stands, its metadata included.

        Raises KeyReused if the key belongs to another request, RowRejected if the store cannot take it, FormatNotReady
        if it must not yet, and Overloaded if too much is waiting (nothing is stored then), StoreClosed if it is not
        known.
        """
        if interactive or ordered:
            self._check_format()
        if len(self._live) >= self.live_max:
            raise Overloaded(f"{self.live_max} transactions are live")
        self.journal.check_room()
        now_ms = self.store.now_ms()
        spec = Spec(new_xid(now_ms), key, now_ms, timeout_ms, branches, metadata, interactive, ordered)
        tx = begin(spec, now_ms, self.policy)._replace(save_id=secrets.randbits(62))
        # Shielded: whether the caller still waits changes nothing for a record that is on its way.
        beginning = asyncio.get_running_loop().create_task(self._begin(tx))
        beginning.add_done_callback(_seen)
        try:
            begun = await asyncio.shield(beginning)
        finally:
            del beginning  # an error would hold this frame, and the frame the error, until the collector comes
        if not begun.new and not begun.tx.asks_the_same(spec):
            raise KeyReused(begun.tx.spec.xid)
        return begun

    async def _begin(self, tx: Transaction) -> Started:
        begun = await self.journal.begin(tx)
        if begun.new:
            self.counts["begun"] += 1
            self._adopt(begun.tx)
        return Started(begun.tx, begun.new)

    async def order(self, xid: bytes, order: Order) -> Transaction:
        """Have an order carried out; returns the row that stands, durably.

        Raises Denied (nothing was changed), UnknownXid, FormatNotReady, RowRejected, Overloaded, UnreadableRow, and
        StoreError, after which it is not known whether it was carried out: ask again.
        """
        if isinstance(order, AddBranch | Renew):
            self._check_format()
        while True:
            live = self._live.get(xid)
            if live is None:
                tx = await self.get_by_xid(xid)
                if tx.state.finished:
                    _, (denied,) = carry_out(tx, [order], self.store.now_ms(), self.policy)
                    if denied is not None:
                        raise denied
                    return tx
                if len(self._live) >= self.live_max and isinstance(order, AddBranch):  # all others make it less
                    raise Overloaded(f"{self.live_max} transactions are live")
                live = self._live.get(xid) or self._adopt(tx, owner=False)
            if live is None:
                raise StoreClosed("the coordinator stops")
            answer = await asyncio.shield(live.order(order))
            if answer is not None:
                if answer.denied is not None:
                    raise answer.denied
                return answer.tx

    def _check_format(self) -> None:
        if self.store.format < OPEN_FORMAT:
            raise FormatNotReady(
                f"the store's row format is {self.store.format}, this needs {OPEN_FORMAT}: when no older coordinator "
                "uses it any more, run `tricord migrate --finish`"
            )

    async def wait(self, tx: Transaction, reached: Reached, timeout_s: float | None) -> Transaction:
        """The transaction when it has come so far, or as it stands when the time is over."""
        loop = asyncio.get_running_loop()
        end_s = None if timeout_s is None else loop.time() + timeout_s
        pause_s = WATCH_S_MIN
        while not reached(tx):
            left_s = POLL_S_MAX if end_s is None else end_s - loop.time()
            if left_s <= 0:
                break
            xid = tx.spec.xid
            live = self._live.get(xid)
            if live is not None and live.tx.version > tx.version:
                tx = live.tx
                continue
            if live is not None and not live.may_be_old:
                pause_s = POLL_S_MAX
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
            live = self._live.get(xid)
            if live is None or live.may_be_old:
                tx = await self._read(tx)
        return tx

    async def get(self, *, xid: bytes = b"", key: bytes = b"") -> Transaction | None:
        """A transaction by xid or key: as this process drives it, else as stored. Raises StoreError."""
        live = self._live.get(xid)
        if live is not None and not live.may_be_old:
            return live.tx
        row = await self.store.get(xid=xid, key=key)
        return None if row is None else transaction(row)

    async def get_by_xid(self, xid: bytes) -> Transaction:
        """As ``get``. Raises UnknownXid, StoreError."""
        found = await self.get(xid=xid)
        if found is None:
            raise UnknownXid(xid.hex())
        return found

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

    def _adopt(self, tx: Transaction, *, owner: bool = True) -> Live | None:
        """Drive a transaction, unless this process does so already; None if it does, or has ended."""
        xid = tx.spec.xid
        if xid in self._live or self._ended:
            return None
        self._live[xid] = live = Live(self, tx)
        live.visits = not owner
        live.task = asyncio.get_running_loop().create_task(self._drive(live, owner=owner))
        return live

    async def _drive(self, live: Live, *, owner: bool) -> None:
        xid = live.tx.spec.xid
        tx = None
        failure: Exception | None = None
        try:
            tx = await drive(live.tx, live, self.policy, owner=owner)
            if tx.wake_ms is not None:
                self._plan_claim(tx.wake_ms)
        except (StoreClosed, asyncio.CancelledError):
            failure = StoreClosed("the coordinator stops")  # whoever comes next recovers it
        except RowRejected as error:
            _log.error("transaction.rejected", xid=xid.hex(), error=str(error))
            failure = error
        except Exception as error:
            _log.exception("transaction.driver_failed", xid=xid.hex())
            failure = error
        finally:
            live.ended = True
            del self._live[xid]
            live.end_orders(failure)
        if live.claimed_row is not None and tx is not None and tx.version == live.claimed_row.version:
            # It was claimed under the driver's hands, just as it came to rest: the claim is this process's to serve.
            self._recover(live.claimed_row)

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

    def tell_attention(self, tx: Transaction, branch: int | None) -> None:
        """Log that a transaction has been given attention, durably and by this process, and tell who wants to know."""
        _log.warning("transaction.attention", xid=tx.spec.xid.hex(), why=tx.attention.name, errors=tx.errors())
        self.on_attention(tx, branch)

    async def _tell_history_changed(self) -> None:
        for xid in self.store.flagged:
            tx = None
            while tx is None:
                try:
                    tx = await self.get_by_xid(xid)
                except StoreError as error:
                    _log.warning("engine.read_failed", xid=xid.hex(), error=str(error))
                    await asyncio.sleep(WATCH_S_MAX)
                except (UnknownXid, UnreadableRow):
                    break
            else:
                self.tell_attention(tx, None)

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
                limit = min(CLAIM_ROWS_MAX, self.live_max - len(self._live))
                put_off = self.delivery.put_off()
                claim = await self.store.claim(limit, self.policy.lease_ms, put_off)
                failures = 0
                for row in claim.rows:
                    self._recover(row)
                if put_off is not None and claim.put_off:
                    self.delivery.were_put_off(put_off, claim.put_off)
                if claim.next_wake_ms is not None and limit > 0:
                    # A row that is due but was not to be had is in another's hands just now.
                    least_s = 0.0 if claim.rows or claim.put_off == limit else POLL_S_MIN
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
            live.claim(row)
            return
        try:
            tx = transaction(row)
        except UnreadableRow as error:
            _log.error("transaction.unreadable", error=str(error))
            return
        self.counts["recovered"] += 1
        self._adopt(tx)


class Carried(NamedTuple):
    """What became of an order."""

    tx: Transaction
    denied: Denied | None


class Live:
    """One transaction that this process drives: the engine's ``flow.Io``."""

    def __init__(self, engine: Engine, tx: Transaction) -> None:
        self.tx = tx
        """The row as it is known to stand."""
        self.task: asyncio.Task[None] | None = None
        self.ended = False
        self.visits = False
        """Whether another coordinator may be driving it too."""
        self.claimed_row: Row | None = None
        """The row as the claim loop met it while it was being driven."""
        self._engine = engine
        self._xid = tx.spec.xid.hex()
        self._inbox: list[Reply] = []
        self._orders: list[Order] = []
        self._answers: list[tuple[Order, asyncio.Future[Carried | None]]] = []
        self._wake: asyncio.Future[None] | None = None

    @property
    def may_be_old(self) -> bool:
        """Whether the row may have been changed by another coordinator, as that of an open transaction at any time."""
        return self.visits or not self.tx.sealed

    def now_ms(self) -> int:
        return self._engine.store.now_ms()

    def new_save_id(self) -> int:
        return secrets.randbits(62) + 1

    def send(self, tx: Transaction, calls: Sequence[Call]) -> None:
        for call in calls:
            self._engine.delivery.send(self._xid, tx.spec, call, self._receive)

    def order(self, order: Order) -> asyncio.Future[Carried | None]:
        """Done when the order was carried out or denied; None if this driver came to its end before."""
        answer: asyncio.Future[Carried | None] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_seen)
        self._answers.append((order, answer))
        self._orders.append(order)
        if self._wake is not None:
            _wake(self._wake)
        return answer

    def asked(self) -> bool:
        return bool(self._orders)

    def claim(self, row: Row) -> None:
        """The claim loop has met the row while it is being driven."""
        self.claimed_row = row
        if self._wake is not None and self.visits:  # an owner comes by it soon enough
            _wake(self._wake)

    def claimed(self) -> Transaction | None:
        row, self.claimed_row = self.claimed_row, None
        try:
            tx = None if row is None else transaction(row)
        except UnreadableRow as error:
            _log.error("transaction.unreadable", error=str(error))
            return None
        if tx is not None and tx.version >= self.tx.version:
            self.tx, self.visits = tx, False
            self._engine.counts["recovered"] += 1
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

    async def arrivals(self, until_ms: int | None) -> tuple[Sequence[Reply], Sequence[Order]]:
        if not self._inbox and not self._orders:
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
        orders, self._orders = self._orders, []
        return replies, orders

    async def read(self) -> Transaction:
        while True:
            try:
                row = await self._engine.store.get(xid=self.tx.spec.xid)
            except StoreClosed:
                raise
            except StoreError as error:
                _log.warning("engine.read_failed", xid=self._xid, error=str(error))
                await asyncio.sleep(WATCH_S_MAX)
                continue
            if row is None:
                raise RowRejected(f"transaction {self._xid} is not in the store any more")
            stands = transaction(row)
            if stands.version <= self.tx.version:
                return self.tx
            before, self.tx = self.tx, stands
            self._engine.moved(before, stands)
            return stands

    async def save(self, tx: Transaction) -> Transaction:
        before = self.tx
        raises = tx.attention > before.attention
        if tx.state.finished and before.state is not State.TRYING and not raises:
            # It promises nothing new: every branch has answered for good. So nobody waits for its COMMIT.
            self._engine.journal.save_last(tx)
            stands = tx
        else:
            stands = await self._engine.journal.save(tx)
            self.visits = self.visits or stands.save_id != tx.save_id
        self.tx = stands
        self._engine.moved(before, stands)
        if raises and stands.save_id == tx.save_id:  # else whoever saved what stands there has told
            self._engine.tell_attention(stands, _to_blame(before, stands))
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


def _to_blame(before: Transaction, tx: Transaction) -> int:
    """The branch whose answer has raised the attention: of those that changed, the one that has failed most often."""
    changed = [n for n, step in enumerate(tx.steps) if step.error and step not in before.steps[n : n + 1]]
    failed = changed or [n for n, step in enumerate(tx.steps) if step.error] or range(len(tx.steps))
    return max(failed, key=lambda n: tx.steps[n].attempts)


def _seen(future: asyncio.Future[Any]) -> None:
    """Whoever began it may have gone; how it ended is then nobody's business."""
    if not future.cancelled():
        future.exception()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
