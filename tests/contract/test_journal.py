"""Group commit: who shares a flush, what a transaction costs, and what is told to whom."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest

from coordinator import journal as journal_module
from coordinator.delivery import Delivery, OnReply
from coordinator.engine import Engine, Until
from coordinator.ids import new_xid
from coordinator.journal import Journal
from coordinator.machine import begin
from coordinator.model import BranchSpec, Call, Outcome, Policy, Reply, Spec, State, Transaction
from coordinator.participants import Participants
from coordinator.store.rows import RowRejected
from coordinator.store.store import Store

from .stores import KINDS, empty_store, stores

POLICY = Policy()
BRANCHES = (BranchSpec("bank", "debit"), BranchSpec("bank", "credit"))


class InstantDelivery(Delivery):
    """Every call is done at once: what is left is what the journal costs."""

    def send(self, xid: str, spec: Spec, call: Call, on_reply: OnReply) -> None:
        reply = Reply(call.branch, call.phase, Outcome.DONE, "fence-1")
        asyncio.get_running_loop().call_soon(on_reply, reply)


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An open store of each kind."""
    url = empty_store(request)
    async with stores() as open_one:
        yield await open_one(url)


@pytest.fixture
async def journal(store: Store) -> AsyncIterator[Journal]:
    """A journal on it, written out at the end."""
    journal = Journal(store)
    yield journal
    await journal.drain()


@pytest.fixture
async def engine(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    """An engine whose last saves wait for a flush to ride on, however slow this machine is."""
    monkeypatch.setattr(journal_module, "LINGER_S", 30.0)
    engine = Engine(store, InstantDelivery(Participants(store)), POLICY)
    yield engine
    await engine.stop(5.0)


def new(store: Store, key: bytes = b"") -> Transaction:
    """A transaction that is not stored yet."""
    now_ms = store.now_ms()
    spec = Spec(new_xid(now_ms), key, now_ms, 30_000, BRANCHES)
    return begin(spec, now_ms, POLICY)._replace(save_id=secrets.randbits(62))


def after(tx: Transaction, **changes: object) -> Transaction:
    """Its next version."""
    return tx._replace(version=tx.version + 1, save_id=secrets.randbits(62) + 1, **changes)  # type: ignore[arg-type]


async def test_many_begins_at_once_share_few_flushes(store: Store, journal: Journal) -> None:
    transactions = [new(store) for _ in range(500)]
    before = store.flushes
    begun = await asyncio.gather(*(journal.begin(tx) for tx in transactions))
    assert all(one.new and one.tx is tx for one, tx in zip(begun, transactions, strict=True))
    assert store.flushes - before == 1  # all were there in the same turn of the loop
    saves = [after(tx, state=State.CONFIRMING) for tx in transactions]
    assert await asyncio.gather(*(journal.save(tx) for tx in saves)) == saves
    assert store.flushes - before == 2


async def test_what_comes_during_a_flush_shares_the_next(store: Store, journal: Journal) -> None:
    before = store.flushes
    first = asyncio.ensure_future(journal.begin(new(store)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # it has left by now
    rest = [asyncio.ensure_future(journal.begin(new(store))) for _ in range(50)]
    await asyncio.gather(first, *rest)
    assert store.flushes - before == 2


async def test_a_taken_key_returns_its_holder(store: Store, journal: Journal) -> None:
    transactions = [new(store, b"\0same") for _ in range(20)]
    begun = await asyncio.gather(*(journal.begin(tx) for tx in transactions))
    assert sum(one.new for one in begun) == 1
    assert len({one.tx.spec.xid for one in begun}) == 1


async def test_a_stale_save_gets_the_standing_row(store: Store, journal: Journal) -> None:
    tx = (await journal.begin(new(store))).tx
    winner, loser = after(tx, state=State.CONFIRMING), after(tx, cancel_reason="late")
    assert await journal.save(winner) == winner
    assert await journal.save(loser) == winner


async def test_a_rejected_row_fails_alone(store: Store, journal: Journal) -> None:
    good = [new(store) for _ in range(4)]
    bad = new(store)._replace(updated_ms=2**70)
    told = await asyncio.gather(*(journal.begin(tx) for tx in (*good[:2], bad, *good[2:])), return_exceptions=True)
    assert [isinstance(one, RowRejected) for one in told] == [False, False, True, False, False]
    with pytest.raises(RowRejected, match="not in the store any more"):
        await journal.save(after(new(store)))


async def test_two_saves_of_one_transaction_at_once_are_a_bug(store: Store, journal: Journal) -> None:
    """A flush must never hold two records of one xid (A2)."""
    tx = new(store)
    first = asyncio.ensure_future(journal.begin(tx))
    with pytest.raises(AssertionError, match="at once"):
        await journal.save(after(tx))
    await first


async def test_a_caller_that_is_gone_leaves_its_record(store: Store, journal: Journal) -> None:
    tx = new(store)
    caller = asyncio.ensure_future(journal.begin(tx))
    await asyncio.sleep(0)
    caller.cancel()
    other = await journal.begin(new(store))
    assert other.new
    await journal.drain()
    assert await store.get(xid=tx.spec.xid) is not None


async def test_one_client_waits_for_two_flushes_and_the_last_save_rides_along(store: Store, engine: Engine) -> None:
    """Begin and decision; what ends a transaction shares the next one's begin."""
    before = store.flushes
    for n in range(1, 11):
        started = await engine.begin(b"", 30_000, BRANCHES)
        assert store.flushes - before == 2 * n - 1
        tx = await engine.wait(started.tx, Until.FINISHED, 30)
        assert tx.state is State.CONFIRMED
        assert store.flushes - before == 2 * n
    await engine.journal.drain()
    assert store.flushes - before == 21
    row = await store.get(xid=tx.spec.xid)
    assert row is not None
    assert (row.state, row.wake_ms) == (State.CONFIRMED, None)


async def test_many_clients_share_flushes(store: Store, engine: Engine) -> None:
    before = store.flushes

    async def client() -> None:
        for _ in range(10):
            started = await engine.begin(b"", 30_000, BRANCHES)
            assert (await engine.wait(started.tx, Until.FINISHED, 30)).state is State.CONFIRMED

    await asyncio.gather(*(client() for _ in range(64)))
    assert store.flushes - before < 640


async def test_a_last_save_alone_does_not_wait_long(store: Store) -> None:
    """With nobody to ride along with, it is written after a moment all the same."""
    journal = Journal(store)
    tx = (await journal.begin(new(store))).tx
    journal.save_last(after(tx, state=State.CONFIRMED, wake_ms=None))
    while True:
        row = await store.get(xid=tx.spec.xid)
        if row is not None and row.state == State.CONFIRMED:
            break
    await journal.drain()
