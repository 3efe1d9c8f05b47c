"""What PostgreSQL's connections may do to the fence's prepared statements, and pools to its local transactions."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import event, text

from tests.contract.participant.world import CANCEL, CONFIRM, DONE, REFUSED, TRY, UNKNOWN, World, new_xid, opened
from tests.engines import prepared_on

FLAVOURS = ["postgres-sync", "postgres-async"]


@pytest.fixture
async def world(request: pytest.FixtureRequest, flavour: str, participant_url: str) -> AsyncIterator[World]:
    """A participant on an engine with the test's own options."""
    options = getattr(request, "param", {})

    class OwnWorld(World):
        def make_engine(self, **more: Any) -> Any:
            return super().make_engine(**options, **more)

    async with opened(OwnWorld(flavour, participant_url)) as world:
        yield world


async def every_phase(world: World) -> None:
    """Confirm, Cancel, a refusal, repeats and an empty rollback."""
    for phase, effect in ((CONFIRM, "confirm"), (CANCEL, "cancel")):
        xid = new_xid()
        for step in (TRY, TRY, phase, phase):
            assert (await world.call(step, xid)).outcome == DONE
        assert world.effects(xid) == ["try", f"{effect} {xid}#1"]
    xid = new_xid()
    for _ in range(2):
        reply = await world.call(TRY, xid, "refuse")
        assert (reply.outcome, reply.refusal.message) == (REFUSED, "alice has too little")
    xid = new_xid()
    assert (await world.call(CANCEL, xid)).outcome == DONE
    assert (await world.call(TRY, xid)).refusal.reason == "suspended"
    assert world.effects(xid) == []


@pytest.mark.parametrize("flavour", FLAVOURS, indirect=True)
class TestPrepared:
    @pytest.mark.parametrize("world", [{"connect_args": {"prepare_threshold": None}}], indirect=True)
    async def test_nothing_is_prepared_where_the_driver_may_not(self, world: World) -> None:
        """As behind a pooler that gives each transaction another connection."""
        prepared = prepared_on(world.engine)
        await every_phase(world)
        assert prepared == []

    async def test_statements_that_were_discarded_are_prepared_again(self, world: World) -> None:
        await every_phase(world)

        @event.listens_for(getattr(world.engine, "sync_engine", world.engine), "checkout")
        def discard(connection: Any, record: Any, proxy: Any) -> None:
            cursor = connection.cursor()
            cursor.execute("DEALLOCATE ALL")
            cursor.close()
            connection.commit()

        await every_phase(world)

    async def test_a_changed_table_outdates_no_statement_for_long(self, world: World) -> None:
        await every_phase(world)
        with world.auditor.begin() as db:
            db.execute(text("ALTER TABLE tcc_fence_log ALTER COLUMN action TYPE varchar(65)"))
            db.execute(text("ALTER TABLE tcc_fence_log ALTER COLUMN refusal_reason TYPE varchar(200)"))
        await every_phase(world)


@pytest.mark.parametrize("flavour", [*FLAVOURS, "mariadb-sync", "mariadb-async"], indirect=True)
@pytest.mark.parametrize("world", [{"pool_reset_on_return": None}, {"pool_reset_on_return": "commit"}], indirect=True)
async def test_what_a_pool_does_with_what_it_gets_back_does_not_matter(world: World) -> None:
    """A call that ends without a COMMIT has rolled back before the pool may think of anything else."""
    await every_phase(world)
    xid = new_xid()
    assert (await world.call(TRY, xid, "raise")).outcome == UNKNOWN
    assert (world.effects(xid), world.status(xid)) == ([], None)
    assert (await world.call(TRY, xid)).outcome == DONE
    await every_phase(world)


@pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async-serializable", "mariadb-async"], indirect=True)
async def test_an_engine_may_execute_something_at_every_beginning(world: World) -> None:
    """For row level security, for example."""
    begun: list[int] = []

    @event.listens_for(getattr(world.engine, "sync_engine", world.engine), "begin")
    def begin(connection: Any) -> None:
        begun.append(connection.execute(text("SELECT 1")).scalar_one())

    await every_phase(world)
    assert begun
