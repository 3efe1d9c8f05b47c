"""The engine on a real store, in this process: claims under a driver's hands, callers that go, more work than room."""

import asyncio
import gc
import sqlite3
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from coordinator import engine as engine_module
from coordinator import flow
from coordinator import journal as journal_module
from coordinator.delivery import Delivery, OnReply
from coordinator.engine import Engine, Until
from coordinator.flow import Io
from coordinator.ids import new_xid
from coordinator.journal import Overloaded, Started
from coordinator.live import Live, _to_blame
from coordinator.machine import begin
from coordinator.model import (
    Attention,
    BranchSpec,
    BranchStatus,
    Call,
    Joined,
    Outcome,
    Payload,
    Phase,
    Policy,
    Reply,
    Spec,
    State,
    Step,
    Transaction,
)
from coordinator.orders import AddBranch
from coordinator.participants import Participants
from coordinator.store.store import Store, backend_for

END_S = 30.0
TIMEOUT_MS = 3_600_000
LEASE_MS = 3_600_000
"""So long that whatever comes only after a lease never comes in a test."""
POLICY = Policy(call_timeout_ms=5_000, lease_ms=LEASE_MS, backoff_base_ms=50, backoff_cap_ms=50)
BRANCHES = (BranchSpec("bank", "debit"),)


class Scripted(Delivery):
    """Answers each call with the next of these outcomes; ``None`` is no answer. When they are used up: done."""

    def __init__(self, participants: Participants, outcomes: Sequence[Outcome | None] = ()) -> None:
        super().__init__(participants)
        self.outcomes = list(outcomes)
        self.calls = 0
        self.called = asyncio.Event()

    def send(self, xid: str, spec: Spec, call: Call, on_reply: OnReply) -> None:
        self.calls += 1
        self.called.set()
        outcome = self.outcomes.pop(0) if self.outcomes else Outcome.DONE
        if outcome is not None:
            asyncio.get_running_loop().call_soon(on_reply, Reply(call.branch, call.phase, outcome, "fence-1"))


class World:
    """An engine and its parts. Its claim loop runs only if a test starts it."""

    def __init__(self, path: Path, store: Store) -> None:
        self.path = path
        self.store = store
        self.delivery = Scripted(Participants(store))
        self.engine = Engine(store, self.delivery, POLICY)

    async def claim(self, tx: Transaction) -> None:
        """Claim as the claim loop does, once this transaction, the only one, is due."""
        assert tx.wake_ms is not None
        claim = await self.store.claim(0, 0)  # takes none, tells the clock
        await asyncio.sleep((tx.wake_ms - claim.now_ms + 1) / 1000)
        (row,) = (await self.store.claim(10, LEASE_MS)).rows
        self.engine._recover(row)

    def rows(self) -> int:
        """How many transactions are stored."""
        with closing(sqlite3.connect(self.path)) as connection:
            (count,) = connection.execute("SELECT count(*) FROM tricord_transaction").fetchone()
            return int(count)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """On a SQLite file of its own."""
    path = tmp_path / "tricord.db"
    store = Store(backend_for(str(path), LEASE_MS))
    await store.open()
    world = World(path, store)
    try:
        yield world
    finally:
        await world.engine.stop(0.0)
        await world.delivery.close()
        await store.close()


async def test_an_attention_that_comes_with_the_end_is_told_when_it_is_stored(world: World) -> None:
    """Nobody waits for a last save, but for one that calls for a person."""
    told: list[tuple[int, int]] = []

    def on_attention(tx: Transaction, branch: int | None) -> None:
        assert branch == 0
        with closing(sqlite3.connect(world.path)) as connection:
            told.append(connection.execute("SELECT state, attention FROM tricord_transaction").fetchone())

    world.engine.on_attention = on_attention
    tx = begin(Spec(new_xid(1), b"", 1, TIMEOUT_MS, BRANCHES), 1, POLICY)
    await world.engine.journal.begin(tx)
    live = Live(world.engine, tx)
    tx = await live.save(tx._replace(state=State.CONFIRMING, version=2, save_id=1))
    assert told == []
    ended = tx._replace(state=State.CONFIRMED, version=3, save_id=2, wake_ms=None, attention=Attention.VIOLATION)
    await live.save(ended)
    assert told == [(State.CONFIRMED, Attention.VIOLATION)]


class TestCompany:
    """Answers that bring about nothing yet wait for others, and wake no driver meanwhile."""

    TWO = (BranchSpec("bank", "debit"), BranchSpec("shop", "debit"))

    async def test_it_is_woken_when_the_last_has_come(self, world: World) -> None:
        world.engine.policy = POLICY._replace(linger_ms=3_600_000)
        world.delivery.outcomes = [Outcome.DONE, None]
        started = await world.engine.begin(b"", TIMEOUT_MS, self.TWO)
        live = world.engine._live[started.tx.spec.xid]
        for _ in range(20):
            await asyncio.sleep(0)
        assert live._lingers
        assert live._wake is not None
        assert not live._wake.done()
        live._receive(Reply(1, Phase.TRY, Outcome.DONE, "fence-1"))
        tx = await world.engine.wait(started.tx, Until.FINISHED, END_S)
        assert (tx.state, tx.version) == (State.CONFIRMED, 3)
        assert not live._lingers

    async def test_they_wait_no_longer_than_the_policy_says(self, world: World) -> None:
        world.engine.policy = POLICY._replace(linger_ms=1)
        world.delivery.outcomes = [Outcome.DONE, None]
        started = await world.engine.begin(b"", TIMEOUT_MS, self.TWO)
        tx = await world.engine.wait(started.tx, lambda tx: tx.version > 1, END_S)
        assert [step.status for step in tx.steps] == [BranchStatus.TRIED, BranchStatus.PENDING]

    async def test_what_decides_waits_for_nobody(self, world: World) -> None:
        world.engine.policy = POLICY._replace(linger_ms=3_600_000)
        world.delivery.outcomes = [Outcome.REFUSED, None]
        started = await world.engine.begin(b"", TIMEOUT_MS, self.TWO)
        tx = await world.engine.wait(started.tx, Until.DECIDED, END_S)
        assert tx.state is State.CANCELLING

    async def test_nothing_is_left_for_the_collector(self, world: World) -> None:
        """Driver and transaction refer to each other only while the one waits for the other."""
        started = await world.engine.begin(b"", TIMEOUT_MS, self.TWO)
        task = world.engine._live[started.tx.spec.xid].task
        assert task is not None
        ended = weakref.ref(task)
        del task
        gc.collect()
        gc.disable()
        try:
            await world.engine.wait(started.tx, Until.FINISHED, END_S)
            for _ in range(20):
                await asyncio.sleep(0)
            assert ended() is None
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("before", "after", "blamed"),
    [
        ([("", 0), ("", 0)], [("", 0), ("no", 1)], 1),
        ([("old", 9), ("", 0)], [("old", 9), ("no", 1)], 1),
        ([("no", 1), ("no", 3)], [("no", 2), ("no", 4)], 1),
        ([("", 0)], [("", 0), ("no", 1)], 1),  # that branch came with the same save
        ([("", 0), ("old", 1)], [("", 0), ("old", 1)], 1),
        ([("", 0)], [("", 0)], 0),
    ],
)
def test_whom_an_attention_names(before: list[tuple[str, int]], after: list[tuple[str, int]], blamed: int) -> None:
    def with_steps(steps: list[tuple[str, int]]) -> Transaction:
        tx = begin(Spec(new_xid(1), b"", 1, TIMEOUT_MS, BRANCHES * len(steps)), 1, POLICY)
        return tx._replace(steps=tuple(Step(error=error, attempts=attempts) for error, attempts in steps))

    assert _to_blame(with_steps(before), with_steps(after)) == blamed


class TestClaimedWhileLive:
    """A row is claimed while the driver that brought it to rest is not quite gone."""

    async def test_it_is_driven_at_once(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """The claim comes between the driver's last save and its end; the next one would come a lease later."""
        world.delivery.outcomes = [Outcome.UNKNOWN] * 8
        save = world.engine.journal.save
        claims = 0

        async def save_and_be_claimed(tx: Transaction) -> Transaction:
            nonlocal claims
            stands = await save(tx)
            if stands.wake_ms is not None and stands.wake_ms < world.store.now_ms() + END_S * 1000:  # at rest
                claims += 1
                await world.claim(stands)
            return stands

        monkeypatch.setattr(world.engine.journal, "save", save_and_be_claimed)
        started = await world.engine.begin(b"", TIMEOUT_MS, BRANCHES)
        tx = await world.engine.wait(started.tx, Until.FINISHED, END_S)
        assert tx.state is State.CONFIRMED
        assert world.engine.counts["recovered"] == claims >= 1

    async def test_between_the_driver_and_its_task(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """As above, later still: ``drive`` has returned."""
        world.delivery.outcomes = [Outcome.UNKNOWN] * 8
        drives = 0

        async def drive_and_be_claimed(tx: Transaction, io: Io, policy: Policy, *, owner: bool) -> Transaction:
            nonlocal drives
            drives += 1
            stands = await flow.drive(tx, io, policy, owner=owner)
            if not stands.state.finished:
                await world.claim(stands)
            return stands

        monkeypatch.setattr(engine_module, "drive", drive_and_be_claimed)
        started = await world.engine.begin(b"", TIMEOUT_MS, BRANCHES)
        tx = await world.engine.wait(started.tx, Until.FINISHED, END_S)
        assert tx.state is State.CONFIRMED
        assert world.engine.counts["recovered"] == drives - 1 >= 1

    async def test_a_claim_that_was_overtaken_by_a_save_is_not_driven(self, world: World) -> None:
        """The driver has saved since, with a time of its own: nothing of the claimed version may be done again."""
        world.delivery.outcomes = [None]
        started = await world.engine.begin(b"", TIMEOUT_MS, BRANCHES)
        live = world.engine._live[started.tx.spec.xid]
        await asyncio.wait_for(world.delivery.called.wait(), END_S)
        row = await world.store.get(xid=started.tx.spec.xid)
        assert row is not None
        world.engine._recover(row)
        assert live.claimed_row is not None
        live._receive(Reply(0, Phase.TRY, Outcome.DONE, "fence-1"))
        tx = await world.engine.wait(started.tx, Until.FINISHED, END_S)
        assert live.task is not None
        await live.task
        assert (tx.state, world.delivery.calls) == (State.CONFIRMED, 2)
        assert world.engine.counts["recovered"] == 0


async def test_a_visitor_that_claims_the_row_drives_it(world: World) -> None:
    """The branch's adder is gone with its Try. Who is asked again parks; when the row is due it has that to send."""
    policy = Policy(call_timeout_ms=100, lease_ms=200, lease_margin_ms=50, park_ms=3_600_000)
    order = AddBranch(BRANCHES[0], Joined("debit"))
    world.delivery.outcomes = [None]
    adder = Engine(world.store, world.delivery, policy)
    xid = (await adder.begin(b"", TIMEOUT_MS, (), interactive=True)).tx.spec.xid
    await adder.order(xid, order)
    await asyncio.wait_for(world.delivery.called.wait(), END_S)
    await adder.stop(0.0)
    visitor = Engine(world.store, world.delivery, policy)
    await visitor.start()
    try:
        tx = await visitor.order(xid, order)
        tx = await visitor.wait(tx, lambda tx: tx.steps[0].status is BranchStatus.TRIED, END_S)
        assert tx.steps[0].status is BranchStatus.TRIED
        assert world.delivery.calls == 2
    finally:
        await visitor.stop(0.0)


class TestCallersThatGo:
    """A caller's end takes with it what was kept for it, and nothing else."""

    async def test_no_waiter_is_left_behind(self, world: World) -> None:
        world.delivery.outcomes = [None]
        started = await world.engine.begin(b"", TIMEOUT_MS, BRANCHES)
        for _ in range(10):
            waits = [
                asyncio.ensure_future(world.engine.wait(started.tx, Until.FINISHED, timeout))
                for timeout in (None, END_S)
                for _ in range(50)
            ]
            await asyncio.sleep(0)
            assert len(world.engine._waiters[started.tx.spec.xid]) == 100
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            assert not world.engine._waiters

    async def test_others_go_on_waiting(self, world: World) -> None:
        world.delivery.outcomes = [None]
        started = await world.engine.begin(b"", TIMEOUT_MS, BRANCHES)
        stays, goes = [asyncio.ensure_future(world.engine.wait(started.tx, Until.FINISHED, END_S)) for _ in range(2)]
        await asyncio.wait_for(world.delivery.called.wait(), END_S)
        goes.cancel()
        live = world.engine._live[started.tx.spec.xid]
        live._receive(Reply(0, Phase.TRY, Outcome.DONE, "fence-1"))
        assert (await stays).state is State.CONFIRMED

    async def test_a_begin_that_nobody_waits_for_is_stored(self, world: World) -> None:
        world.delivery.outcomes = [None]
        caller = asyncio.ensure_future(world.engine.begin(b"\0gone", TIMEOUT_MS, BRANCHES))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        again = await world.engine.begin(b"\0gone", TIMEOUT_MS, BRANCHES)
        assert not again.new
        assert world.rows() == 1


class TestRoom:
    """While the store is away, what waits for it is bounded: beginnings beyond that are refused, and not stored."""

    async def test_rows(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(journal_module, "WAITING_ROWS_MAX", 5)
        assert await self.begun_while_away(world, BRANCHES) == 1 + 5  # the first has left with its flush

    async def test_bytes(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of the flush itself count as well: it may hang for as long as the store is away."""
        monkeypatch.setattr(journal_module, "WAITING_BYTES_MAX", 50_000)
        large = (BranchSpec("bank", "debit", Payload(bytes(10_000))),)
        assert await self.begun_while_away(world, large) == 5

    async def begun_while_away(self, world: World, branches: tuple[BranchSpec, ...]) -> int:
        """Begin one by one while the store does not answer, until it is refused; how many had been begun by then."""
        world.delivery.outcomes = [None] * 100
        begins: list[asyncio.Future[Started]] = []
        refused = 0
        with closing(sqlite3.connect(world.path, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            while refused < 20:
                try:
                    begins.append(world.engine.begin(b"", TIMEOUT_MS, branches))
                except Overloaded as error:
                    refused += "wait for the store" in str(error)
                else:
                    assert not refused
                    assert len(begins) < 100
                for _ in range(4):  # until a flush holds it
                    await asyncio.sleep(0)
        assert all(started.new for started in await asyncio.gather(*begins))
        assert world.rows() == len(begins)
        assert (await world.engine.begin(b"", TIMEOUT_MS, branches)).new  # there is room again
        return len(begins)

    async def test_live_transactions(self, world: World) -> None:
        world.engine.live_max = 3
        world.delivery.outcomes = [None] * 3
        for _ in range(3):
            await world.engine.begin(b"", TIMEOUT_MS, BRANCHES)
        with pytest.raises(Overloaded, match="3 transactions are live"):
            await world.engine.begin(b"", TIMEOUT_MS, BRANCHES)
        assert world.rows() == 3
