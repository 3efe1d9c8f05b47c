"""The pattern for confirming less than was reserved: Try holds up to so much, Confirm takes what it came to.

How much that is, the business learns after Try and writes down itself: what a payload said once, it says in every
phase. Confirm reads it, moves that much, and gives the rest back, in one local transaction with the fence row.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from participant_sdk import Call, Participant, Refused
from participant_sdk.payload import encode
from tests.contract.participant.world import CANCEL, CONFIRM, DONE, REFUSED, TRY, UNKNOWN, World, new_xid

FULL = 1_000


@dataclass(frozen=True)
class Weigh:
    """Up to so many grams for this order."""

    order: str
    grams_max: int


def hold(db: Connection, call: Call[Weigh]) -> None:
    """Try."""
    values = {"xid": call.xid, "branch": call.branch_id, "order": call.payload.order, "grams": call.payload.grams_max}
    taken = db.execute(text("UPDATE stock SET free = free - :grams WHERE free >= :grams"), values).rowcount
    if not taken:
        raise Refused("sold_out")
    db.execute(text("INSERT INTO holds VALUES (:xid, :branch, :order, :grams, NULL)"), values)


def take(db: Connection, call: Call[Weigh]) -> None:
    """Confirm."""
    key = {"xid": call.xid, "branch": call.branch_id}
    of_hold = "xid = :xid AND branch_id = :branch"
    held, weighed = db.execute(text(f"SELECT held, weighed FROM holds WHERE {of_hold}"), key).one()
    grams = held if weighed is None else weighed
    if grams > held:
        raise ValueError(f"{grams} g were weighed, but only {held} g are held")
    moved = {"sold": grams, "rest": held - grams}
    db.execute(text("UPDATE stock SET sold = sold + :sold, free = free + :rest"), moved)
    db.execute(text(f"DELETE FROM holds WHERE {of_hold}"), key)


def release(db: Connection, call: Call[Weigh]) -> None:
    """Cancel."""
    key = {"xid": call.xid, "branch": call.branch_id}
    held = db.execute(text("SELECT held FROM holds WHERE xid = :xid AND branch_id = :branch"), key).scalar_one()
    db.execute(text("UPDATE stock SET free = free + :held"), {"held": held})
    db.execute(text("DELETE FROM holds WHERE xid = :xid AND branch_id = :branch"), key)


def define(scales: Participant) -> None:
    @scales.action("weigh")
    def weigh(call: Call[Weigh], db: Connection) -> None:
        hold(db, call)

    @weigh.confirm
    def take_weighed(call: Call[Weigh], db: Connection) -> None:
        take(db, call)

    @weigh.cancel
    def release_held(call: Call[Weigh], db: Connection) -> None:
        release(db, call)


def define_async(scales: Participant) -> None:
    @scales.action("weigh")
    async def weigh(call: Call[Weigh], db: AsyncConnection) -> None:
        await db.run_sync(hold, call)

    @weigh.confirm
    async def take_weighed(call: Call[Weigh], db: AsyncConnection) -> None:
        await db.run_sync(take, call)

    @weigh.cancel
    async def release_held(call: Call[Weigh], db: AsyncConnection) -> None:
        await db.run_sync(release, call)


@pytest.fixture
async def world(flavour: str, participant_url: str) -> AsyncIterator[World]:
    world = World(flavour, participant_url)
    (define_async if world.is_async else define)(world.participant)
    try:
        with world.auditor.begin() as db:
            db.execute(text("CREATE TABLE stock (free int, sold int)"))
            db.execute(text("INSERT INTO stock VALUES (:full, 0)"), {"full": FULL})
            columns = "xid varchar(32), branch_id int, order_id varchar(32), held int, weighed int"
            db.execute(text(f"CREATE TABLE holds ({columns}, PRIMARY KEY (xid, branch_id))"))
        await world.start()
        yield world
    finally:
        await world.close()


async def ask(world: World, phase: Any, xid: str, grams_max: int) -> Any:
    return await world.call(phase, xid, action="weigh", payload=encode(Weigh(xid, grams_max)))


def weighed(world: World, xid: str, grams: int) -> None:
    """What the business does between Try and Confirm, in a local transaction of its own."""
    with world.auditor.begin() as db:
        db.execute(text("UPDATE holds SET weighed = :grams WHERE order_id = :xid"), {"grams": grams, "xid": xid})


def stock(world: World) -> tuple[int, int, int]:
    """Free, held and sold."""
    ((free, sold),) = world.query("SELECT free, sold FROM stock")
    ((held,),) = world.query("SELECT coalesce(sum(held), 0) FROM holds")
    assert free + held + sold == FULL
    return free, int(held), sold


async def test_less_is_taken_and_the_rest_is_free_again(world: World) -> None:
    xid = new_xid()
    assert (await ask(world, TRY, xid, 600)).outcome == DONE
    assert stock(world) == (400, 600, 0)
    assert (await ask(world, TRY, new_xid(), 600)).outcome == REFUSED
    weighed(world, xid, 437)
    for _ in range(2):
        assert (await ask(world, CONFIRM, xid, 600)).outcome == DONE
        assert stock(world) == (563, 0, 437)


async def test_nothing_weighed_is_all_and_nothing_taken_is_nothing(world: World) -> None:
    first, second = new_xid(), new_xid()
    for xid in (first, second):
        assert (await ask(world, TRY, xid, 300)).outcome == DONE
    weighed(world, second, 0)
    assert [(await ask(world, CONFIRM, xid, 300)).outcome for xid in (first, second)] == [DONE, DONE]
    assert stock(world) == (700, 0, 300)


async def test_more_than_is_held_is_never_taken(world: World) -> None:
    """It raises: Confirm stays owed, nothing has moved, and what is wrong can be set right."""
    xid = new_xid()
    await ask(world, TRY, xid, 300)
    weighed(world, xid, 301)
    reply = await ask(world, CONFIRM, xid, 300)
    assert (reply.outcome, stock(world), world.status(xid)) == (UNKNOWN, (700, 300, 0), 1)
    assert "301 g were weighed, but only 300 g are held" in reply.error
    weighed(world, xid, 299)
    assert (await ask(world, CONFIRM, xid, 300)).outcome == DONE
    assert stock(world) == (701, 0, 299)


async def test_a_cancel_gives_all_back_whatever_was_weighed(world: World) -> None:
    xid = new_xid()
    await ask(world, TRY, xid, 300)
    weighed(world, xid, 100)
    assert (await ask(world, CANCEL, xid, 300)).outcome == DONE
    assert stock(world) == (FULL, 0, 0)
