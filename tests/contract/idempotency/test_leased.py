"""Claims, take-overs, renewals and ends of leased runs, on every database and in both stacks."""

import itertools

import pytest
from sqlalchemy import Connection

from participant_sdk.idempotency.errors import LeaseLost
from participant_sdk.idempotency.record import Answer, Codec, Fingerprint, Record, State
from participant_sdk.idempotency.store import Held, Outcome
from tests.contract.idempotency.world import ANSWER, DONE, FAILED, TABLE, World, claim_of


async def test_a_claim_makes_the_record(world: World) -> None:
    claim = claim_of()
    held = await world.claimed(claim)
    record = await world.read(claim.key_hash)
    assert (held.key_hash, held.attempt, held.fence) == (claim.key_hash, 1, record.fence)
    assert (record.state, record.tenant, record.operation) == (State.PROCESSING, "shop", "orders.create")
    assert record.fingerprint == claim.fingerprint
    assert (record.key_hint, record.reason, record.answer, record.expires_left_ms) == ("abc", "", None, None)
    assert 0 < record.lease_left_ms <= 30_000
    assert 0 <= record.age_ms < 30_000
    assert world.query(f"SELECT owner FROM {TABLE}") == [("host:1:a",)]


async def test_a_second_claim_gets_the_record(world: World) -> None:
    claim = claim_of()
    held = await world.claimed(claim)
    met = await world.do(world.store.claim(claim))
    assert isinstance(met, Record)
    assert met == await world.read(claim.key_hash) or met.fence == held.fence
    assert await world.do(world.store.read(claim_of().key_hash)) is None


@pytest.mark.parametrize("commit", [False, True])
async def test_completion_commits_with_the_work(world: World, commit: bool) -> None:
    claim = claim_of()
    held = await world.claimed(claim)
    async with world.transaction() as transaction:
        await transaction.work("order")
        assert not await transaction.run(world.store.complete(held, DONE, commit=commit))
        if not commit:
            assert world.effects() == []
            assert (await world.read(claim.key_hash)).state is State.PROCESSING
            await transaction.commit()
    record = await world.read(claim.key_hash)
    assert record.state is State.SUCCEEDED
    assert record.answer == ANSWER
    assert record.expires_left_ms is not None
    assert 0 < record.expires_left_ms <= 60_000
    assert record.lease_left_ms == 0
    assert world.effects() == ["order"]


@pytest.mark.parametrize("commit", [False, True])
async def test_what_a_zombie_has_written_rolls_back(world: World, commit: bool) -> None:
    claim = claim_of()
    zombie = await world.claimed(claim)
    world.lapse(claim.key_hash)
    taken = await world.do(world.store.take_over(claim, await world.read(claim.key_hash)))
    assert isinstance(taken, Held)
    assert taken.attempt == 2
    assert taken.fence > zombie.fence
    async with world.transaction() as transaction:
        await transaction.work("zombie")
        with pytest.raises(LeaseLost):
            await transaction.run(world.store.complete(zombie, DONE, commit=commit))
        await transaction.rollback()
        await transaction.work("order")
        await transaction.run(world.store.complete(taken, DONE, commit=True))
    assert world.effects() == ["order"]
    assert not await world.do(world.store.settle(zombie, FAILED))
    assert (await world.read(claim.key_hash)).state is State.SUCCEEDED


async def test_a_live_lease_is_not_taken_over(world: World) -> None:
    claim = claim_of()
    await world.claimed(claim)
    met = await world.read(claim.key_hash)
    assert await world.do(world.store.take_over(claim, met)) is None
    world.lapse(claim.key_hash)  # as it was met, it had not lapsed: the database decides
    assert await world.do(world.store.take_over(claim, met)) is not None


async def test_a_take_over_keeps_what_was_asked_first(world: World) -> None:
    """The fingerprint that was met is the one that others may know; the lease and the owner are new."""
    claim = claim_of("k")
    await world.claimed(claim)
    world.lapse(claim.key_hash)
    other = claim_of("k", fingerprint=Fingerprint(2, b"y" * 32), owner="host:2:b", lease_ms=5_000)
    assert await world.do(world.store.take_over(other, await world.read(claim.key_hash))) is not None
    record = await world.read(claim.key_hash)
    assert record.fingerprint == claim.fingerprint
    assert 0 < record.lease_left_ms <= 5_000
    assert world.query(f"SELECT owner FROM {TABLE}") == [("host:2:b",)]


async def test_a_failure_keeps_the_record_and_runs_again(world: World) -> None:
    claim = claim_of()
    held = await world.claimed(claim)
    assert await world.do(world.store.settle(held, FAILED))
    met = await world.read(claim.key_hash)
    assert (met.state, met.reason, met.fingerprint) == (State.FAILED_RETRYABLE, "it failed", claim.fingerprint)
    taken = await world.do(world.store.take_over(claim, met))
    assert taken is not None
    assert taken.attempt == 2
    assert not await world.do(world.store.settle(held, FAILED))
    assert (await world.read(claim.key_hash)).reason == ""


async def test_an_expired_record_is_replaced(world: World) -> None:
    claim = claim_of("k")
    held = await world.claimed(claim)
    async with world.transaction() as transaction:
        await transaction.run(world.store.reach(held, "charged", b"42", commit=True))
        await transaction.run(world.store.complete(held, DONE, commit=True))
    met = await world.read(claim.key_hash)
    other = claim_of("k", tenant="other", operation="orders.cancel", key_hint="xyz", lease_ms=5_000)
    assert await world.do(world.store.take_over(other, met)) is None
    world.expire(claim.key_hash)
    assert await world.do(world.store.take_over(other, met)) is None, "it had not expired when it was met"
    taken = await world.do(world.store.take_over(other, await world.read(claim.key_hash)))
    assert taken is not None
    assert taken.attempt == 1
    assert taken.fence > held.fence
    record = await world.read(claim.key_hash)
    assert (record.tenant, record.operation, record.key_hint) == ("other", "orders.cancel", "xyz")
    assert (record.state, record.answer, record.expires_left_ms) == (State.PROCESSING, None, None)
    assert (record.recovery_point, record.phase_data) == (None, None)


async def test_fences_grow_over_a_record_that_was_swept(world: World) -> None:
    claim = claim_of()
    first = await world.claimed(claim)
    world.change(f"DELETE FROM {TABLE}")
    # SQLite's clock goes by milliseconds, and nothing is swept in the one that it was claimed in.
    later = (str(number) for number in itertools.count())
    while (await world.claimed(claim_of(next(later)))).fence == first.fence:
        pass
    second = await world.claimed(claim)
    assert second.fence > first.fence
    async with world.transaction() as transaction:
        with pytest.raises(LeaseLost):
            await transaction.run(world.store.complete(first, DONE))


async def test_a_clock_that_was_set_back_does_not_set_fences_back(world: World) -> None:
    claim = claim_of()
    await world.claimed(claim)
    world.change(f"UPDATE {TABLE} SET fence = 8000000000000000000")
    world.lapse(claim.key_hash)
    taken = await world.do(world.store.take_over(claim, await world.read(claim.key_hash)))
    assert taken is not None
    assert taken.fence == 8_000_000_000_000_000_001


async def test_renew(world: World) -> None:
    mine, more, other, ended = claim_of(), claim_of(), claim_of(), claim_of()
    held, held_more, lost = [await world.claimed(claim) for claim in (mine, more, other)]
    gone = await world.claimed(ended)
    await world.do(world.store.settle(gone, FAILED))
    lost = Held(lost.key_hash, lost.fence - 1, 1)
    world.lapse(mine.key_hash)  # and nobody has taken it
    leases = [(held, 20_000), (held_more, 50_000), (lost, 20_000), (gone, 20_000)]
    assert await world.do(world.store.renew(leases)) == {mine.key_hash, more.key_hash}
    assert 0 < (await world.read(mine.key_hash)).lease_left_ms <= 20_000
    assert 30_000 < (await world.read(more.key_hash)).lease_left_ms <= 50_000
    assert (await world.read(other.key_hash)).lease_left_ms > 20_000
    assert (await world.read(ended.key_hash)).lease_left_ms == 0
    assert await world.do(world.store.renew([])) == frozenset()


async def test_give_up(world: World) -> None:
    claim = claim_of()
    held = await world.claimed(claim)
    assert not await world.do(world.store.give_up(await world.read(claim.key_hash), "nobody knows"))
    world.lapse(claim.key_hash)
    met = await world.read(claim.key_hash)
    assert await world.do(world.store.give_up(met, "nobody knows"))
    record = await world.read(claim.key_hash)
    assert (record.state, record.reason, record.expires_left_ms) == (State.UNKNOWN, "nobody knows", None)
    assert not await world.do(world.store.give_up(met, "again"))
    assert not await world.do(world.store.give_up(record, "again"))
    assert await world.do(world.store.take_over(claim, record)) is None
    async with world.transaction() as transaction:
        with pytest.raises(LeaseLost):
            await transaction.run(world.store.complete(held, DONE))
    assert (await world.read(claim.key_hash)).reason == "nobody knows"


async def test_a_person_says_what_became_of_it(world: World) -> None:
    claim = claim_of()
    held = await world.claimed(claim)
    assert await world.do(world.store.settle(held, Outcome(State.UNKNOWN, None, None, "why")))
    assert not await world.do(world.store.settle(held, Outcome(State.UNKNOWN, None, None, "another")))
    assert (await world.read(claim.key_hash)).reason == "why"
    assert await world.do(world.store.settle(held, DONE))
    record = await world.read(claim.key_hash)
    assert (record.state, record.answer) == (State.SUCCEEDED, ANSWER)


@pytest.mark.parametrize("commit", [False, True])
async def test_recovery_points(world: World, commit: bool) -> None:
    claim = claim_of()
    held = await world.claimed(claim)
    async with world.transaction() as transaction:
        await transaction.work("charge")
        await transaction.run(world.store.reach(held, "charged", b"\x00\xff", commit=commit))
        if not commit:
            await transaction.commit()
    record = await world.read(claim.key_hash)
    assert (record.state, record.recovery_point, record.phase_data) == (State.PROCESSING, "charged", b"\x00\xff")
    await world.do(world.store.settle(held, FAILED))
    taken = await world.do(world.store.take_over(claim, await world.read(claim.key_hash)))
    assert taken is not None
    assert (await world.read(claim.key_hash)).recovery_point == "charged"
    async with world.transaction() as transaction:
        await transaction.work("zombie")
        with pytest.raises(LeaseLost):
            await transaction.run(world.store.reach(held, "shipped", b"", commit=commit))
    assert world.effects() == ["charge"]


@pytest.mark.parametrize("how", ["complete", "complete and commit", "settle", "give up"])
async def test_whether_anybody_waits(world: World, how: str) -> None:
    claim = claim_of()
    held = await world.claimed(claim)
    await world.do(world.store.await_end(await world.read(claim.key_hash)))
    tells = world.store.channel is not None and not world.has_snapshots
    async with world.listening() as notified, world.transaction() as transaction:
        if how == "settle":
            assert await transaction.run(world.store.settle(held, FAILED))
        elif how == "give up":
            world.lapse(claim.key_hash)
            assert await transaction.run(world.store.give_up(await world.read(claim.key_hash), "why"))
        else:
            commit = how == "complete and commit"
            await transaction.work("order")
            assert await transaction.run(world.store.complete(held, DONE, commit=commit)) == tells
            if not commit:
                assert notified(0) == []
                await transaction.commit()
        assert notified(tells) == ([claim.key_hash.hex()] if tells else [])


async def test_nobody_is_told_where_nobody_waits(world: World) -> None:
    held = await world.claimed(claim_of())
    async with world.listening() as notified, world.transaction() as transaction:
        assert not await transaction.run(world.store.complete(held, DONE, commit=True))
        assert notified(0) == []


async def test_a_run_that_is_not_this_one_is_not_waited_for(world: World) -> None:
    claim = claim_of()
    await world.claimed(claim)
    met = await world.read(claim.key_hash)
    world.lapse(claim.key_hash)
    taken = await world.do(world.store.take_over(claim, await world.read(claim.key_hash)))
    assert taken is not None
    await world.do(world.store.await_end(met))
    async with world.transaction() as transaction:
        assert not await transaction.run(world.store.complete(taken, DONE, commit=True))


async def test_a_run_may_end_without_an_answer(world: World) -> None:
    held = await world.claimed(claim_of())
    async with world.transaction() as transaction:
        outcome = Outcome(State.TOMBSTONE, None, 60_000, "too large")
        await transaction.run(world.store.complete(held, outcome, commit=True))
    record = await world.read(held.key_hash)
    assert (record.state, record.answer, record.reason) == (State.TOMBSTONE, None, "too large")


async def test_an_answer_may_be_empty(world: World) -> None:
    held = await world.claimed(claim_of())
    async with world.transaction() as transaction:
        outcome = Outcome(State.FAILED_FINAL, Answer(Codec.VALUE), 60_000)
        await transaction.run(world.store.complete(held, outcome, commit=True))
    assert (await world.read(held.key_hash)).answer == Answer(Codec.VALUE)


async def test_a_claim_that_need_not_survive_a_crash(world: World) -> None:
    """It is there for everybody, all the same; and the completion after it is as durable as any."""
    claim = claim_of(durable=False)
    held = await world.claimed(claim)
    assert (await world.read(claim.key_hash)).fence == held.fence
    async with world.transaction() as transaction:
        setting = await transaction.call(_synchronous_commit)
        await transaction.work("order")
        await transaction.run(world.store.complete(held, DONE, commit=True))
    assert setting in (None, "on")
    assert world.effects() == ["order"]


def _synchronous_commit(db: Connection) -> object:
    return db.exec_driver_sql("SHOW synchronous_commit").scalar() if db.dialect.name == "postgresql" else None
