"""Atomic runs: the record is written once, in the local transaction of the work, on every database and stack."""

import asyncio
from contextlib import suppress

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from participant_sdk.idempotency.errors import LeaseLost
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.store import Outcome, Store
from tests.contract.idempotency.world import ANSWER, DONE, FAILED, TABLE, WAIT_SECONDS, Transaction, World, claim_of


@pytest.mark.parametrize("commit", [False, True])
async def test_the_record_commits_with_the_work(world: World, commit: bool) -> None:
    claim = claim_of()
    async with world.transaction() as transaction:
        met = await transaction.run(world.store.meet(claim.key_hash, 100))
        assert met.free
        assert met.record is None
        await transaction.work("order")
        await transaction.run(world.store.write(claim, met.record, DONE, commit=commit))
        if not commit:
            assert await world.do(world.store.read(claim.key_hash)) is None
            await transaction.commit()
    record = await world.read(claim.key_hash)
    assert (record.state, record.answer, record.attempt) == (State.SUCCEEDED, ANSWER, 1)
    assert (record.tenant, record.operation, record.fingerprint) == (claim.tenant, claim.operation, claim.fingerprint)
    assert world.effects() == ["order"]
    async with world.transaction() as transaction:
        met = await transaction.run(world.store.meet(claim.key_hash, 100))
        await transaction.run(world.store.leave())
    assert met.record is not None
    assert met.record.answer == ANSWER


async def test_one_run_of_a_key_at_a_time(world: World) -> None:
    claim = claim_of()
    async with world.transaction() as first, world.transaction() as second:
        assert (await first.run(world.store.meet(claim.key_hash, 100))).free
        await first.work("order")
        async with asyncio.timeout(WAIT_SECONDS):
            met = await second.run(world.store.meet(claim.key_hash, 100))
        assert not met.free
        assert met.record is None
        await second.run(world.store.leave())
        await first.run(world.store.write(claim, None, DONE, commit=True))
        met = await second.run(world.store.meet(claim.key_hash, 100))
        assert met.record is not None
        assert met.record.answer == ANSWER


async def test_another_key_is_free(world: World) -> None:
    async with world.transaction() as first, world.transaction() as second:
        assert (await first.run(world.store.meet(claim_of().key_hash, 100))).free
        met = await second.run(world.store.meet(claim_of().key_hash, 100))
        assert met.free != world.is_sqlite, "on SQLite one local transaction writes at a time"


@pytest.mark.parametrize("how", ["leave", "rollback", "close"])
async def test_who_leaves_nothing_bars_nobody(world: World, how: str) -> None:
    claim = claim_of()
    async with world.transaction() as transaction:
        assert (await transaction.run(world.store.meet(claim.key_hash, 100))).free
        if how == "leave":
            await transaction.run(world.store.leave())
        else:
            await transaction.work("order")
            await (transaction.rollback() if how == "rollback" else transaction.call(Connection.close))
        assert await world.do(world.store.read(claim.key_hash)) is None
        async with world.transaction() as second:
            assert (await second.run(world.store.meet(claim.key_hash, 100))).free
    assert world.effects() == []


async def test_a_run_that_commits_without_a_record_bars_nobody(world: World) -> None:
    claim = claim_of()
    async with world.transaction() as transaction:
        await transaction.run(world.store.meet(claim.key_hash, 100))
        await transaction.work("order")
        await transaction.commit()
    async with world.transaction() as transaction:
        met = await transaction.run(world.store.meet(claim.key_hash, 100))
        assert met.free
        assert met.record is None
        await transaction.run(world.store.write(claim, None, DONE, commit=True))
    assert (await world.read(claim.key_hash)).answer == ANSWER


@pytest.mark.parametrize("commit", [False, True])
async def test_who_comes_too_late_leaves_nothing(world: World, commit: bool) -> None:
    """The key was barred to it, so that this takes a fault; but the record decides."""
    claim = claim_of()
    await world.write(claim, DONE)
    async with world.transaction() as transaction:
        await transaction.work("twice")
        with pytest.raises(LeaseLost):
            await transaction.run(world.store.write(claim, None, DONE, commit=commit))
    assert world.effects() == []


@pytest.mark.parametrize("commit", [False, True])
@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED_FINAL, State.TOMBSTONE, State.FAILED_RETRYABLE])
async def test_an_expired_record_is_replaced(world: World, state: State, commit: bool) -> None:
    claim = claim_of("k")
    old = await world.write(claim, Outcome(state, ANSWER, 60_000, "old"))
    world.expire(claim.key_hash)
    other = claim_of("k", tenant="other", operation="orders.cancel")
    async with world.transaction() as transaction:
        met = (await transaction.run(world.store.meet(claim.key_hash, 100))).record
        assert met is not None
        await transaction.work("order")
        await transaction.run(world.store.write(other, met, DONE, commit=commit))
        await transaction.commit()
    record = await world.read(claim.key_hash)
    assert (record.tenant, record.operation, record.attempt) == ("other", "orders.cancel", 1)
    assert (record.state, record.reason, record.fence > old.fence) == (State.SUCCEEDED, "", True)
    async with world.transaction() as transaction:
        await transaction.work("twice")
        with pytest.raises(LeaseLost):
            await transaction.run(world.store.write(other, met, DONE, commit=commit))
    assert world.effects() == ["order"]


@pytest.mark.parametrize("commit", [False, True])
async def test_what_has_failed_runs_again(world: World, commit: bool) -> None:
    claim = claim_of()
    old = await world.write(claim, FAILED)
    async with world.transaction() as transaction:
        met = (await transaction.run(world.store.meet(claim.key_hash, 100))).record
        assert met is not None
        await transaction.work("order")
        await transaction.run(world.store.write(claim, met, DONE, commit=commit))
        await transaction.commit()
    record = await world.read(claim.key_hash)
    assert (record.state, record.attempt, record.fence > old.fence) == (State.SUCCEEDED, 2, True)
    assert record.fingerprint == claim.fingerprint


async def test_a_record_that_has_not_expired_is_not_replaced(world: World) -> None:
    claim = claim_of()
    await world.write(claim, DONE)
    world.expire(claim.key_hash)
    met = await world.read(claim.key_hash)
    world.change(f"UPDATE {TABLE} SET expires_ms = 4000000000000")
    async with world.transaction() as transaction:
        await transaction.work("twice")
        with pytest.raises(LeaseLost):
            await transaction.run(world.store.write(claim, met, DONE))
    assert world.effects() == []


async def test_in_a_local_transaction_that_has_begun(world: World) -> None:
    """The user's, which goes on."""
    claim = claim_of()
    async with world.transaction() as transaction:
        await transaction.work("before")
        met = await transaction.run(world.store.meet(claim.key_hash, 100))
        assert met.free
        await transaction.work("order")
        await transaction.run(world.store.write(claim, met.record, DONE))
        await transaction.commit()
    assert world.effects() == ["before", "order"]
    assert (await world.read(claim.key_hash)).state is State.SUCCEEDED


async def test_a_savepoint_of_the_work_costs_nothing_of_it(world: World) -> None:
    """psycopg deallocates all prepared statements once something was rolled back, if it has some of its own."""
    claim = claim_of()
    async with world.transaction() as transaction:
        await transaction.run(world.store.meet(claim.key_hash, 100))
        for number in range(8):
            await transaction.work(f"order {number}")
        await transaction.call(_fail_within)
        await transaction.work("order 8")
        await transaction.run(world.store.write(claim, None, DONE, commit=True))
    assert len(world.effects()) == 9
    assert (await world.read(claim.key_hash)).answer == ANSWER


def _fail_within(db: Connection) -> None:
    with suppress(DBAPIError), db.begin_nested():
        db.execute(text("SELECT nothing FROM nowhere"))


async def test_a_work_that_is_refused_at_the_commit_leaves_nothing(world: World) -> None:
    if not world.is_postgres:
        pytest.skip("only PostgreSQL defers constraints")
    world.change("CREATE TABLE things (id int PRIMARY KEY)")
    world.change("CREATE TABLE parts (thing int REFERENCES things DEFERRABLE INITIALLY DEFERRED)")
    claim = claim_of()
    async with world.transaction() as transaction:
        await transaction.run(world.store.meet(claim.key_hash, 100))
        await transaction.call(lambda db: db.execute(text("INSERT INTO parts VALUES (1)")))
        with pytest.raises(Exception, match="violates foreign key"):
            await transaction.run(world.store.write(claim, None, DONE, commit=True))
    assert await world.do(world.store.read(claim.key_hash)) is None


async def test_two_stores_in_one_database(world: World) -> None:
    """Each has its own statements on the connections that both share."""
    other = await world.another_store("records_of_b")
    claim = claim_of()
    async with world.transaction() as transaction:
        for store in (world.store, other, world.store, other):
            await _atomic(transaction, store)
    await world.write(claim, DONE)
    assert await world.do(other.read(claim.key_hash)) is None


async def _atomic(transaction: Transaction, store: Store) -> None:
    claim = claim_of()
    met = await transaction.run(store.meet(claim.key_hash, 100))
    await transaction.work("order")
    await transaction.run(store.write(claim, met.record, DONE, commit=True))
