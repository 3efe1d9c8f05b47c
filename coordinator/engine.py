"""Live transactions, the claim loop, and who waits for what.

Each live transaction is one task that runs ``flow.drive``; everything done to an xid in this process passes through
it. The claim loop looks for rows whose ``wake_ms`` has come: retries, deadlines, what a crash left behind, what
another coordinator dropped. There is no other timer: one that lives in memory would die with the process.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable
from enum import Enum

import structlog

from .codec import UnreadableRow, transaction
from .delivery import Delivery
from .delivery_deadlines import Deadlines
from .flow import drive
from .ids import Ids
from .journal import Journal, Overloaded, Started
from .live import Live, wake
from .machine import begin
from .model import Attention, BranchSpec, Policy, Spec, State, Transaction
from .orders import AddBranch, Order, Renew, Resolve, carry_out
from .store.rows import CLAIMS_MAX, Row, RowRejected, StoreError
from .store.store import Store, StoreClosed

_log = structlog.get_logger(__name__)

CLAIM_ROWS_MAX = 500
LIVE_MAX = 20_000
"""Live transactions beyond which new ones are refused, and due work is left to others, or to later."""
OPEN_FORMAT = 2
"""The row format that interactive, ordered, enlisted and renewed transactions need."""
LABEL_FORMAT = 3
"""The row format that labels need."""
RESOLVED_FORMAT = 3
"""That of transactions with branches that were resolved by hand."""
POLL_S_MIN = 0.02
POLL_S_MAX = 1.0
"""How long the claim loop sleeps at the most: another coordinator's work may have become due."""
STAGGER_S = 0.05
"""By up to so much later a row is looked for that a claim has seen coming: else all coordinators come at once."""
SILENT_S = 5 * POLL_S_MAX
"""Without a good answer of the store for so long the coordinator counts as not SERVING, until the next one."""
NEVER_MS = 2**63
WATCH_S_MIN, WATCH_S_MAX = 0.1, 1.0
"""How often a row is read for somebody who waits for a transaction that another coordinator drives."""


Reached = Callable[[Transaction], bool]
"""Whether a transaction has come as far as a caller waits for."""
Waiter = Callable[[Transaction], bool]
"""Is told a transaction as it has become durable; returns whether it waits no longer. Raises nothing."""


class Until(Enum):
    """What callers wait for."""

    ACCEPTED = "accepted"
    DECIDED = "decided"
    FINISHED = "finished"

    def __call__(self, tx: Transaction) -> bool:
        """Whether the wait is over."""
        if self is _FINISHED:
            return tx.state.finished
        return self is Until.ACCEPTED or tx.state is not State.TRYING


# Looked up in this module for each change: see ``machine``.
_FINISHED = Until.FINISHED
_CONFIRMING, _CONFIRMED = State.CONFIRMING, State.CONFIRMED


class KeyReused(Exception):
    """The idempotency key belongs to another request."""

    def __init__(self, xid: bytes) -> None:
        super().__init__(f"the idempotency key belongs to transaction {xid.hex()}, which was another request")
        self.xid = xid


class UnknownXid(Exception):
    """There is no such transaction."""


class FormatNotReady(Exception):
    """The store may still be served by programs that could not read what this would write."""


class _Moved:
    """The ``Waiter`` of somebody who waits for a transaction to come so far."""

    __slots__ = ("_reached", "future", "tx")

    def __init__(self, tx: Transaction, reached: Reached, future: asyncio.Future[None]) -> None:
        self.tx = tx
        """As it stood when it last moved here."""
        self.future = future
        self._reached = reached

    def __call__(self, tx: Transaction) -> bool:
        self.tx = tx
        try:
            if not self.future.done() and self._reached(tx):
                self.future.set_result(None)
        except Exception as error:
            self.future.set_exception(error)  # it is the waiter's, and none of the driver's
        return self.future.done()


class Engine:
    """Runs transactions on one store."""

    def __init__(self, store: Store, delivery: Delivery, policy: Policy, live_max: int = LIVE_MAX) -> None:
        self.store = store
        self.live_max = live_max
        self.on_attention: Callable[[Transaction, int | None], None] = lambda tx, branch: None
        """Called once when a save of this process has given a transaction attention, and is in the store; with the
        index of the branch that is why, or None where opening the store has found another history, or it is stuck."""
        self.policy = policy
        self.journal = Journal(store)
        self.delivery = delivery
        self.ids = Ids()
        self.loop = asyncio.get_running_loop()
        self.lingering = Deadlines(self.loop, Live.take_in)
        self.counts = dict.fromkeys(("begun", "confirmed", "cancelled", "recovered"), 0)
        self._live: dict[bytes, Live] = {}
        self._waiters: dict[bytes, list[Waiter]] = {}
        self._nudge = asyncio.Event()
        self._next_claim_ms = 0
        self._stopping = False
        self._ended = False
        self._claiming: asyncio.Task[None] | None = None
        self._alone: tuple[Live, int] | None = None
        """What was claimed alone last, and the version that it had then."""
        self._telling: asyncio.Task[None] | None = None

    @property
    def live(self) -> int:
        """How many transactions this process drives now."""
        return len(self._live)

    async def start(self) -> None:
        """Start taking over what is due, and tell what opening the store has given attention."""
        self._claiming = self.loop.create_task(self._claim_loop())
        self._telling = self.loop.create_task(self._tell_history_changed())

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
        self.lingering.close()
        last = asyncio.get_running_loop().create_task(self.journal.drain())
        waiting = [last] if self._claiming is None else [last, self._claiming]
        _, open_ = await asyncio.wait(waiting, timeout=max(1.0, min(grace_s, 5.0)))
        if open_:
            _log.warning("engine.store_silent", hint="the last flush is open; recovery settles it")
            self.store.stop_waiting()
            await asyncio.wait(open_, timeout=1.0)
            last.cancel()

    # --- for the services ----------------------------------------------------------------------------------

    def begin(
        self,
        key: bytes,
        timeout_ms: int,
        branches: tuple[BranchSpec, ...],
        metadata: tuple[tuple[str, str], ...] = (),
        *,
        labels: tuple[tuple[str, str], ...] = (),
        interactive: bool = False,
        ordered: bool = False,
    ) -> asyncio.Future[Started]:
        """Begin a transaction, or find the one that holds its key; its metadata and labels stand.

        Raises FormatNotReady if the store cannot take it yet, and Overloaded if too much is waiting. The future raises
        KeyReused if the key belongs to another request, RowRejected if the store cannot take it (nothing is stored
        then), StoreClosed if it is not known. Whether somebody waits for it changes nothing.
        """
        if interactive or ordered:
            self._check_format(OPEN_FORMAT)
        if labels:
            self._check_format(LABEL_FORMAT)
        if len(self._live) >= self.live_max:
            raise Overloaded(f"{self.live_max} transactions are live")
        self.journal.check_room()
        now_ms = self.store.now_ms()
        spec = Spec(self.ids.xid(now_ms), key, now_ms, timeout_ms, branches, metadata, interactive, ordered, labels)
        return self._begin(begin(spec, now_ms, self.policy, self.ids.save_id()))

    def _begin(self, tx: Transaction) -> asyncio.Future[Started]:
        told: asyncio.Future[Started] = self.loop.create_future()
        self.journal.begin(tx).add_done_callback(functools.partial(self._begun, tx.spec, told))
        return told

    def _begun(self, spec: Spec, told: asyncio.Future[Started], beginning: asyncio.Future[Started]) -> None:
        error = beginning.exception()
        if error is None:
            begun = beginning.result()
            if begun.new:
                self.counts["begun"] += 1
                self._adopt(begun.tx)
            elif not begun.tx.asks_the_same(spec):
                error = KeyReused(begun.tx.spec.xid)
        if told.done():
            return  # nobody waits any more
        if error is None:
            told.set_result(begun)
        else:
            told.set_exception(error)

    async def order(self, xid: bytes, order: Order) -> Transaction:
        """Have an order carried out; returns the row that stands, durably.

        Raises Denied (nothing was changed), UnknownXid, FormatNotReady, RowRejected, Overloaded, UnreadableRow, and
        StoreError, after which it is not known whether it was carried out: ask again.
        """
        self.check_format_for(order)
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

    def check_format_for(self, order: Order) -> None:
        """Raises FormatNotReady if what the order leaves cannot be stored yet."""
        if isinstance(order, AddBranch | Renew):
            self._check_format(OPEN_FORMAT)
        elif isinstance(order, Resolve):
            self._check_format(RESOLVED_FORMAT)

    def _check_format(self, needed: int) -> None:
        if self.store.format < needed:
            raise FormatNotReady(
                f"the store's row format is {self.store.format}, this needs {needed}: when no older coordinator "
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
            newest = self.newest(tx)
            if newest is not tx:
                tx = newest
                continue
            if self.drives(tx):
                pause_s = POLL_S_MAX
            moved = _Moved(tx, reached, loop.create_future())
            self.tell(tx, moved)
            timer = loop.call_later(min(pause_s, left_s), wake, moved.future)
            try:
                await moved.future
            finally:
                timer.cancel()
                self.forget(tx, moved)
            if moved.tx is not tx:
                tx = moved.tx
                continue
            pause_s = min(pause_s * 2, WATCH_S_MAX)
            if not self.drives(tx):
                tx = await self._read(tx)
        return tx

    def tell(self, tx: Transaction, waiter: Waiter) -> None:
        """Have the waiter told whenever this process learns that the transaction has changed, until it says so.

        What another coordinator changes is learnt of by whoever drives the transaction here: see ``drives``.
        """
        self._waiters.setdefault(tx.spec.xid, []).append(waiter)

    def forget(self, tx: Transaction, waiter: Waiter) -> None:
        """Have the waiter told no more."""
        waiters = self._waiters.get(tx.spec.xid)
        if waiters and waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[tx.spec.xid]

    def drives(self, tx: Transaction) -> bool:
        """Whether the transaction changes here, and not in another coordinator's hands."""
        live = self._live.get(tx.spec.xid)
        return live is not None and not live.may_be_old

    def newest(self, tx: Transaction) -> Transaction:
        """The transaction as it is known here."""
        live = self._live.get(tx.spec.xid)
        return tx if live is None or live.tx.version <= tx.version else live.tx

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

    # --- live transactions ---------------------------------------------------------------------------------

    def _adopt(self, tx: Transaction, *, owner: bool = True) -> Live | None:
        """Drive a transaction, unless this process does so already; None if it does, or has ended."""
        xid = tx.spec.xid
        if xid in self._live or self._ended:
            return None
        self._live[xid] = live = Live(self, tx)
        live.visits = not owner
        live.task = self.loop.create_task(self._drive(live, owner=owner))
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
        state = tx.state
        if state is not before.state and state is not _CONFIRMING:
            if state is _CONFIRMED:
                self.counts["confirmed"] += 1
            elif state is State.CANCELLED:
                self.counts["cancelled"] += 1
            elif state is State.CANCELLING:
                _log.info("transaction.cancelling", xid=tx.spec.xid.hex(), reason=tx.cancel_reason)
        waiters = self._waiters.pop(tx.spec.xid, None)
        if waiters is not None and (still := [waiter for waiter in waiters if not waiter(tx)]):
            self._waiters[tx.spec.xid] = still

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
                claim = await self.store.claim(limit, self.policy.lease_ms, put_off, alone=self._may_claim_alone())
                failures = 0
                for row in claim.rows:
                    self._recover(row, claim.claims)
                if put_off is not None and claim.put_off:
                    self.delivery.were_put_off(put_off, claim.put_off)
                if claim.next_wake_ms is not None and limit > 0:
                    # A row that is due but was not to be had is in another's hands just now.
                    least_s = 0.0 if claim.rows or claim.put_off == limit else POLL_S_MIN
                    due_s = (claim.next_wake_ms - self.store.now_ms()) / 1000
                    if due_s > 0:  # whoever has put it to rest knows the time too
                        due_s += secrets.randbits(10) / 1024 * STAGGER_S
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

    def _recover(self, row: Row, claims: int = 0) -> None:
        """Drive a row that was claimed; ``claims``: how often in vain, if it was claimed alone (protocol A7)."""
        if claims:
            _log.error("transaction.claimed_in_vain", xid=row.xid.hex(), claims=claims)
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
        if claims == CLAIMS_MAX + 1 and tx.attention is Attention.STUCK:
            self.tell_attention(tx, None)
        live = self._adopt(tx)
        if claims and live is not None:
            self._alone = live, tx.version

    def _may_claim_alone(self) -> bool:
        """Whether the last row that was claimed alone is saved, or at rest: the next may kill it before (A7)."""
        if self._alone is None:
            return True
        live, version = self._alone
        return live.ended or live.tx.version > version
