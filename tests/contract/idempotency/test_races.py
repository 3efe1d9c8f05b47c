"""Two and more connections at the same key, on every database and in both stacks: one of them wins, nobody hangs."""

import asyncio

import pytest
from sqlalchemy import Connection, event, text

from participant_sdk.idempotency.errors import LeaseLost
from participant_sdk.idempotency.record import Record, State
from participant_sdk.idempotency.store import Held
from tests.contract.idempotency.world import DONE, FAILED, TABLE, WAIT_SECONDS, Transaction, World, claim_of

AT_ONCE = 4


async def in_no_hurry(transaction: Transaction) -> None:
    """Whatever waits for a lock waits for ever, or for so long that the test is over before."""
    sql = {"postgresql": "SET lock_timeout = 0", "mysql": "SET innodb_lock_wait_timeout = 600"}
    name = transaction.world.auditor.dialect.name
    if name in sql:
        await transaction.call(lambda db: db.execute(text(sql[name])))
        await transaction.commit()


async def impatient(transaction: Transaction) -> None:
    """On SQLite, where all who write wait for one lock."""
    if transaction.world.is_sqlite:
        await transaction.call(lambda db: db.execute(text("PRAGMA busy_timeout = 50")))
        await transaction.rollback()


async def test_claims_at_once(world: World) -> None:
    claim = claim_of()
    for _ in range(5):
        claim = claim_of()
        met = await asyncio.gather(*(world.do(world.store.claim(claim)) for _ in range(AT_ONCE)))
        held = [each for each in met if isinstance(each, Held)]
        records = [each for each in met if isinstance(each, Record)]
        assert len(held) == 1
        assert {record.fence for record in records} == {held[0].fence}
        assert {record.state for record in records} == {State.PROCESSING}


@pytest.mark.parametrize("how", ["lapsed", "failed", "expired"])
async def test_take_overs_at_once(world: World, how: str) -> None:
    for _ in range(5):
        claim = claim_of()
        held = await world.claimed(claim)
        if how == "lapsed":
            world.lapse(claim.key_hash)
        else:
            await world.do(world.store.settle(held, FAILED))
            if how == "expired":
                world.expire(claim.key_hash)
        met = await world.read(claim.key_hash)
        taken = await asyncio.gather(*(world.do(world.store.take_over(claim, met)) for _ in range(AT_ONCE)))
        assert len([each for each in taken if each is not None]) == 1


async def test_renewed_or_taken_over(world: World) -> None:
    """A lease that was renewed after all is not taken over; one that was taken over is not renewed."""
    claim = claim_of()
    held = await world.claimed(claim)
    world.lapse(claim.key_hash)
    met = await world.read(claim.key_hash)
    renew, take = world.store.renew([(held, 20_000)]), world.store.take_over(claim, met)
    renewed, taken = await asyncio.gather(world.do(renew), world.do(take))
    record = await world.read(claim.key_hash)
    if taken is None:
        assert renewed == {claim.key_hash}
        assert record.fence == held.fence
    else:
        assert record.fence == taken.fence
        assert await world.do(world.store.renew([(held, 20_000)])) == frozenset()


@pytest.mark.parametrize("ends", ["commit", "rollback"])
async def test_a_completion_that_is_not_committed_is_waited_for_by_nobody(world: World, ends: str) -> None:
    claim = claim_of()
    held = await world.claimed(claim)
    world.lapse(claim.key_hash)
    met = await world.read(claim.key_hash)
    async with world.transaction() as first, world.transaction() as second:
        await in_no_hurry(second)
        await impatient(second)
        await first.work("order")
        await first.run(world.store.complete(held, DONE))
        async with asyncio.timeout(WAIT_SECONDS):
            seen = await second.run(world.store.claim(claim))
            assert isinstance(seen, Record)
            assert seen.fence == held.fence
            if world.is_sqlite:
                for script in (world.store.take_over(claim, met), world.store.renew([(held, 1_000)])):
                    with pytest.raises(Exception, match="locked") as caught:
                        await second.run(script)
                    assert world.store.is_transient(caught.value)
            else:
                assert await second.run(world.store.take_over(claim, met)) is None
                assert not await second.run(world.store.give_up(met, "why"))
                assert await second.run(world.store.renew([(held, 1_000)])) == {claim.key_hash}
                await second.run(world.store.await_end(met))
        await (first.commit() if ends == "commit" else first.rollback())
        taken = await second.run(world.store.take_over(claim, met))
        assert (taken is None) == (ends == "commit")
    assert world.effects() == (["order"] if ends == "commit" else [])


@pytest.mark.parametrize("commit", [False, True])
async def test_a_zombie_that_had_begun_before_it_was_taken_over(world: World, commit: bool) -> None:
    """Its local transaction may see the record as it was: it must not be able to write it."""
    if world.is_sqlite:
        pytest.skip("on SQLite nobody takes over while the run has something written")
    claim = claim_of()
    zombie = await world.claimed(claim)
    async with world.transaction() as transaction:
        await transaction.work("zombie")
        await transaction.call(lambda db: db.execute(text(f"SELECT state FROM {TABLE}")).all())
        world.lapse(claim.key_hash)
        taken = await world.do(world.store.take_over(claim, await world.read(claim.key_hash)))
        assert taken is not None
        with pytest.raises(LeaseLost):
            await transaction.run(world.store.complete(zombie, DONE, commit=commit))
    assert world.effects() == []


async def test_who_waits_costs_the_run_nothing(world: World) -> None:
    """Under whatever isolation: that somebody waits is noted after the work has begun."""
    claim = claim_of()
    held = await world.claimed(claim)
    async with world.transaction() as transaction:
        await transaction.call(lambda db: db.execute(text(f"SELECT state FROM {TABLE}")).all())
        await world.do(world.store.await_end(await world.read(claim.key_hash)))
        await transaction.work("order")
        await transaction.run(world.store.complete(held, DONE, commit=True))
    assert world.effects() == ["order"]


async def test_atomic_runs_at_once(world: World) -> None:
    for number in range(5):
        claim = claim_of()
        ran = await asyncio.gather(*(_run(world, claim.key_hash, number) for _ in range(AT_ONCE)))
        assert sum(ran) >= 1, "one run, unless all met while another one was about to leave"
        assert len([what for what in world.effects() if what == f"order {number}"]) == 1


async def _run(world: World, key_hash: bytes, number: int) -> bool:
    """As a door would: until it has run, or there is an answer."""
    claim = claim_of(key_hash=key_hash)
    async with world.transaction() as transaction, asyncio.timeout(WAIT_SECONDS):
        while True:
            met = await transaction.run(world.store.meet(key_hash, 10_000))
            if met.record is not None:
                await transaction.run(world.store.leave())
                return False
            if met.free:
                try:
                    await transaction.work(f"order {number}")
                    await transaction.run(world.store.write(claim, None, DONE, commit=True))
                except Exception as error:
                    await transaction.rollback()
                    if not isinstance(error, LeaseLost) and not world.store.is_transient(error):
                        raise
                else:
                    return True
            await transaction.run(world.store.leave())
            await asyncio.sleep(0)


async def test_expired_and_met_by_two(world: World) -> None:
    claim = claim_of()
    await world.write(claim, DONE)
    world.expire(claim.key_hash)
    async with world.transaction() as first, world.transaction() as second:
        met = await first.run(world.store.meet(claim.key_hash, 100))
        assert met.free
        assert not (await second.run(world.store.meet(claim.key_hash, 100))).free
        await second.run(world.store.leave())
        await first.run(world.store.write(claim, met.record, DONE, commit=True))


@pytest.mark.parametrize("ends", ["commit", "rollback"])
async def test_two_write_the_same_record(world: World, ends: str) -> None:
    """Which takes a fault, since the key is barred to the second: it learns of the first one's end."""
    if world.is_sqlite:
        pytest.skip("on SQLite the second cannot even begin")
    claim = claim_of()
    async with world.transaction() as first, world.transaction() as second:
        await first.work("first")
        await first.run(world.store.write(claim, None, DONE))
        await second.work("second")
        waiting = asyncio.ensure_future(second.run(world.store.write(claim, None, DONE, commit=True)))
        done, _ = await asyncio.wait({waiting}, timeout=0.2)
        assert not done
        await (first.commit() if ends == "commit" else first.rollback())
        async with asyncio.timeout(WAIT_SECONDS):
            if ends == "commit":
                with pytest.raises(LeaseLost):
                    await waiting
            else:
                await waiting
    assert world.effects() == (["first"] if ends == "commit" else ["second"])


async def test_a_claim_while_others_work(world: World) -> None:
    """A claim of another key waits for no work; on SQLite all who write wait for one another."""
    async with world.transaction() as first, world.transaction() as second:
        await in_no_hurry(second)
        await impatient(second)
        await first.run(world.store.meet(claim_of().key_hash, 100))
        await first.work("order")
        async with asyncio.timeout(WAIT_SECONDS):
            if world.is_sqlite:
                with pytest.raises(Exception, match="locked") as caught:
                    await second.run(world.store.claim(claim_of()))
                assert world.store.is_transient(caught.value)
            else:
                assert isinstance(await second.run(world.store.claim(claim_of())), Held)


async def test_what_loses_a_race_is_run_again(world: World) -> None:
    """The engine's listener has a snapshot taken at every beginning; and the record is changed just behind it."""
    claim = claim_of()
    held = await world.claimed(claim)
    begins = 0

    @event.listens_for(world.engine.sync_engine if world.is_async else world.engine, "begin")
    def look(connection: Connection) -> None:
        nonlocal begins
        begins += 1
        connection.exec_driver_sql(f"SELECT * FROM {TABLE}").all()
        if begins == 1:
            world.change(f"UPDATE {TABLE} SET lease_until_ms = 1")

    assert await world.do(world.store.settle(held, FAILED))
    assert (begins > 1) == world.has_snapshots
    assert (await world.read(claim.key_hash)).state is State.FAILED_RETRYABLE
    assert await world.do(world.store.take_over(claim, await world.read(claim.key_hash))) is not None
    assert isinstance(await world.do(world.store.claim(claim_of())), Held)


async def test_a_storm_of_claims(world: World) -> None:
    """A storm of serialization failures, deadlocks and the like never comes out of a claim."""
    claims = [claim_of() for _ in range(6)]

    async def storm(order: list[int]) -> None:
        for number in order:
            met = await world.do(world.store.claim(claims[number]))
            held = met if isinstance(met, Held) else Held(met.key_hash, met.fence, met.attempt)
            await world.do(world.store.renew([(held, 5_000), (held, 5_000)]))
            if not isinstance(met, Held) and met.state is State.FAILED_RETRYABLE:
                taken = await world.do(world.store.take_over(claims[number], met))
                held = taken or held
            await world.do(world.store.settle(held, FAILED))

    numbers = list(range(len(claims)))
    async with asyncio.timeout(3 * WAIT_SECONDS):
        await asyncio.gather(*(storm(order) for order in (numbers, numbers[::-1], numbers[3:] + numbers[:3])))
    assert {(await world.read(claim.key_hash)).state for claim in claims} == {State.FAILED_RETRYABLE}


def closed(db: Connection) -> None:
    """Lost, as by a crash of the process."""
    db.invalidate()


async def test_who_dies_bars_nobody(world: World) -> None:
    claim = claim_of()
    async with world.transaction() as first:
        assert (await first.run(world.store.meet(claim.key_hash, 100))).free
        await first.work("order")
        await first.call(closed)
    async with world.transaction() as second, asyncio.timeout(WAIT_SECONDS):
        while not (await second.run(world.store.meet(claim.key_hash, 100))).free:  # until the server has seen it
            await second.run(world.store.leave())
            await asyncio.sleep(0.01)
    assert world.effects() == []
