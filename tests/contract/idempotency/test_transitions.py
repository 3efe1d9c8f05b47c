"""Every way from state to state that `machine.TRANSITIONS` allows can be gone, and no other, on every database."""

from itertools import product

import pytest

from participant_sdk.idempotency.errors import LeaseLost
from participant_sdk.idempotency.machine import TRANSITIONS
from participant_sdk.idempotency.record import Record, State
from participant_sdk.idempotency.store import Claim, Held, Outcome
from tests.contract.idempotency.world import World, claim_of

WAYS = ("claim", "take over", "complete", "settle", "give up", "write")


def outcome_of(state: State) -> Outcome:
    return Outcome(state, None, None if state is State.UNKNOWN else 60_000, "why")


async def made(world: World, claim: Claim, state: State | None) -> Record | None:
    """A record in that state, whose lease has ended if it has one; or none."""
    if state is None:
        return None
    held = await world.claimed(claim)
    if state is State.PROCESSING:
        world.lapse(claim.key_hash)
    else:
        assert await world.do(world.store.settle(held, outcome_of(state)))
    record = await world.read(claim.key_hash)
    assert record.state is state
    return record


async def go(world: World, way: str, claim: Claim, met: Record | None, to: State) -> None:
    """Try to get there; whatever is refused is refused."""
    held = Held(claim.key_hash, met.fence if met else 1, met.attempt if met else 1)
    try:
        async with world.transaction() as transaction:
            match way:
                case "claim" if to is State.PROCESSING:
                    await transaction.run(world.store.claim(claim))
                case "take over" if to is State.PROCESSING and met is not None:
                    await transaction.run(world.store.take_over(claim, met))
                case "give up" if to is State.UNKNOWN and met is not None:
                    await transaction.run(world.store.give_up(met, "why"))
                case "settle":
                    await transaction.run(world.store.settle(held, outcome_of(to)))
                case "complete":
                    await transaction.run(world.store.complete(held, outcome_of(to), commit=True))
                case "write":
                    await transaction.run(world.store.meet(claim.key_hash, 1_000))
                    await transaction.run(world.store.write(claim, met, outcome_of(to), commit=True))
    except LeaseLost:
        pass
    except ValueError as error:
        if "is no end of a run" not in str(error):
            raise


@pytest.mark.parametrize("before", [None, *State])
async def test_all_ways(world: World, before: State | None) -> None:
    reached = set()
    for way, to in product(WAYS, State):
        claim = claim_of()
        met = await made(world, claim, before)
        await go(world, way, claim, met, to)
        after = await world.do(world.store.read(claim.key_hash))
        changed = after is not None and (met is None or (after.fence, after.state) != (met.fence, met.state))
        if after is not None and changed:
            assert after.state is to, f"by {way}"
            reached.add(to)
    assert reached == TRANSITIONS[before]


@pytest.mark.parametrize("before", [State.SUCCEEDED, State.FAILED_FINAL, State.TOMBSTONE, State.FAILED_RETRYABLE])
async def test_what_has_expired_is_as_if_it_were_not_there(world: World, before: State) -> None:
    for to in TRANSITIONS[None]:
        claim = claim_of()
        await made(world, claim, before)
        world.expire(claim.key_hash)
        met = await world.read(claim.key_hash)
        await go(world, "take over" if to is State.PROCESSING else "write", claim, met, to)
        after = await world.read(claim.key_hash)
        assert (after.state, after.attempt, after.fence > met.fence) == (to, 1, True)


@pytest.mark.parametrize("way", ["take over", "give up", "settle", "complete"])
async def test_without_a_record_nothing_comes_of(world: World, way: str) -> None:
    claim = claim_of()
    met = await made(world, claim, State.PROCESSING)
    world.change("DELETE FROM tricord_idempotency")
    for to in State:
        await go(world, way, claim, met, to)
    assert await world.do(world.store.read(claim.key_hash)) is None
