"""A connection that the server ends while a handler runs: nothing of the call is left, and it runs again by itself."""

import asyncio
from contextlib import suppress

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from participant_sdk.steps import Look
from tests.contract.participant.world import CANCEL, CONFIRM, DONE, TRY, World, new_xid

OTHERS = {
    "postgres": "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
    "mariadb": "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()",
}


def end_connections(world: World) -> None:
    """Kill all but the auditor's, those that nobody uses included."""
    with world.auditor.connect() as db:
        for (number,) in db.execute(text(OTHERS[world.flavour.split("-")[0]])).all():
            with suppress(OperationalError):  # it may have gone by itself: an aborted connect, for example
                db.execute(text(f"SELECT pg_terminate_backend({number})" if world.is_postgres else f"KILL {number}"))


@pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async", "mariadb-sync", "mariadb-async"], indirect=True)
async def test_a_connection_lost_in_the_handler_ends_in_one_effect(world: World) -> None:
    for phase, what in ((CONFIRM, "confirm"), (CANCEL, "cancel")):
        account = f"slow {what}"
        gate = world.gate(account)
        xid = new_xid()
        trying = asyncio.create_task(world.call(TRY, xid, account=account))
        await gate.wait_reached()
        end_connections(world)
        gate.opened.set()
        assert (await trying).outcome == DONE
        assert (gate.count, world.effects(xid)) == (2, ["try"])
        assert (await world.call(phase, xid, account=account)).outcome == DONE
        assert world.effects(xid) == ["try", f"{what} {xid}#1"]


@pytest.mark.parametrize("flavour", ["postgres-async", "mariadb-async"], indirect=True)
async def test_a_look_at_a_lost_connection_makes_a_new_one(world: World) -> None:
    """What asks for a connection that is lost connects again, which asyncio can do in a greenlet only."""
    engine = world.make_engine()  # without other connections that could stand in
    async with engine.connect() as connection:
        await connection.invalidate()
        assert await Look(lambda sync: sync.info.get("nothing")).perform_async(connection) is None
        assert (await connection.execute(text("SELECT 1"))).scalar_one() == 1
    await world.dispose(engine)
