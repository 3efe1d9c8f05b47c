"""Fence tables of other names, in another schema, shared, or made by hand; several participants and databases."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, inspect, make_url, text

from participant_sdk import ConfigurationError, FenceTables, Participant, Refused
from tests.contract.participant.till import Provider, Till, fail
from tests.contract.participant.world import (
    CANCEL,
    CONFIRM,
    DONE,
    REFUSED,
    TRY,
    UNKNOWN,
    VIOLATION,
    World,
    new_xid,
    sqlite_url,
)

three = pytest.mark.parametrize("flavour", ["sqlite-sync", "postgres-async", "mariadb-sync"], indirect=True)


class Own(Till):
    """A participant with tables of its own."""

    def __init__(self, flavour: str, url: str, tables: FenceTables, name: str = "bank") -> None:
        super().__init__(flavour, url, Provider(), name=name, tables=tables)
        self.tables = tables

    def rows(self, xid: str) -> list[tuple[Any, ...]]:
        """Participant, branch and status."""
        log = self.tables.log
        query = log.select().where(log.c.xid == xid).order_by(log.c.branch_id)
        with self.auditor.connect() as db:
            return [(row.participant, row.branch_id, row.status) for row in db.execute(query)]


@asynccontextmanager
async def started(*worlds: Own) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for world in worlds:
            stack.push_async_callback(world.close)
            await world.start()
        yield


async def try_all(world: Own) -> None:
    """Every statement that the SDK has."""
    plain, refused, cancelled, external, declined, failed = (new_xid() for _ in range(6))
    assert (await world.call(TRY, plain)).outcome == DONE
    assert (await world.call(TRY, plain)).outcome == DONE
    assert (await world.call(CONFIRM, plain)).outcome == DONE
    assert (await world.call(CONFIRM, new_xid())).outcome == VIOLATION
    assert (await world.call(TRY, refused, "refuse")).outcome == REFUSED
    assert (await world.call(CANCEL, cancelled)).outcome == DONE
    assert (await world.call(TRY, cancelled)).outcome == REFUSED
    assert (await world.ask(TRY, external)).outcome == DONE
    assert (await world.ask(CANCEL, external)).outcome == DONE
    world.script = [fail(Refused("declined"))]
    assert (await world.ask(TRY, declined)).outcome == REFUSED
    world.script = [fail(ValueError())]
    for _ in range(2):
        assert (await world.ask(TRY, failed)).outcome == UNKNOWN
    assert (await world.ask(CANCEL, failed)).outcome == DONE
    statuses = [world.rows(xid)[0][-1] for xid in (plain, refused, cancelled, external, declined, failed)]
    assert statuses == [2, 3, 4, 3, 3, 3]


@pytest.fixture
def schema(flavour: str, participant_url: str) -> Iterator[str]:
    """A schema beside the default one; of MariaDB's servers that is another database."""
    world = World(flavour, participant_url)
    name = f"{make_url(participant_url).database}_own"[-60:]
    with world.auditor.begin() as db:
        db.execute(text(f"CREATE SCHEMA {name}"))
    yield name
    with world.auditor.begin() as db:
        db.execute(text(f"DROP SCHEMA {name} {'CASCADE' if world.is_postgres else ''}"))
    world.auditor.dispose()


@pytest.mark.parametrize(
    ("log_name", "info_name"), [("orders_fence", "orders_fence_info"), ("Fence-Log", "select"), ('a "b" %s', "100%")]
)
async def test_other_names(flavour: str, participant_url: str, log_name: str, info_name: str) -> None:
    """Also such as have to be quoted, and such as a driver could take for a place where a parameter goes."""
    world = Own(flavour, participant_url, FenceTables(log_name, info_name))
    async with started(world):
        await try_all(world)
        assert {log_name, info_name} <= set(inspect(world.auditor).get_table_names())
        assert "tcc_fence_log" not in inspect(world.auditor).get_table_names()


@pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async", "mariadb-sync", "mariadb-async"], indirect=True)
async def test_another_schema(flavour: str, participant_url: str, schema: str) -> None:
    world = Own(flavour, participant_url, FenceTables(schema=schema))
    async with started(world):
        await try_all(world)
        names = {"tcc_fence_log", "tcc_fence_info"}
        assert names == set(inspect(world.auditor).get_table_names(schema))
        assert not names & set(inspect(world.auditor).get_table_names())
        again = Own(flavour, participant_url, FenceTables(schema=schema))
        async with started(again):
            assert again.serving.fence_id == world.serving.fence_id


@three
async def test_two_participants_share_the_tables(flavour: str, participant_url: str) -> None:
    """Two branches of one transaction, one row each; neither answers for the other."""
    tables = FenceTables()
    shop, bank = (Own(flavour, participant_url, tables, name) for name in ("shop", "bank"))
    async with started(shop, bank):
        assert shop.serving.fence_id == bank.serving.fence_id
        xid = new_xid()
        assert (await shop.call(TRY, xid, branch_id=1)).outcome == DONE
        assert (await bank.call(TRY, xid, branch_id=2)).outcome == DONE
        for phase in (TRY, CONFIRM, CANCEL):
            assert (await bank.call(phase, xid, branch_id=1)).outcome == VIOLATION
        assert (await shop.call(CONFIRM, xid, branch_id=1)).outcome == DONE
        assert (await bank.call(CANCEL, xid, branch_id=2)).outcome == DONE
        assert shop.rows(xid) == [("shop", 1, 2), ("bank", 2, 3)]


@three
async def test_two_participants_with_tables_of_their_own(flavour: str, participant_url: str) -> None:
    shop = Own(flavour, participant_url, FenceTables("shop_log", "shop_info"), "shop")
    bank = Own(flavour, participant_url, FenceTables("bank_log", "bank_info"), "bank")
    async with started(shop, bank):
        assert shop.serving.fence_id != bank.serving.fence_id
        xid = new_xid()
        for world in (shop, bank):  # even the same branch: two fences are two
            assert (await world.call(TRY, xid)).outcome == DONE
        assert (await shop.call(CANCEL, xid)).outcome == DONE
        assert (shop.rows(xid), bank.rows(xid)) == ([("shop", 1, 3)], [("bank", 1, 1)])


@three
async def test_two_databases_in_one_process(flavour: str, participant_url: str, tmp_path: Path) -> None:
    """Case 31: each action fences where its participant's business is. (One table object may serve both.)"""
    (tmp_path / "second").mkdir()
    tables = FenceTables()
    first = Own(flavour, participant_url, tables, "first")
    second = Own("sqlite-sync", sqlite_url(tmp_path / "second"), tables, "second")
    async with started(first, second):
        assert first.serving.fence_id != second.serving.fence_id
        xid = new_xid()
        await asyncio.gather(first.call(TRY, xid, branch_id=1), second.call(TRY, xid, branch_id=2))
        assert first.rows(xid) == [("first", 1, 1)]
        assert second.rows(xid) == [("second", 2, 1)]
        assert (first.effects(xid), second.effects(xid)) == (["try"], ["try"])
        assert (await second.call(CONFIRM, xid, branch_id=1)).outcome == VIOLATION


@three
async def test_one_action_twice_in_a_transaction(flavour: str, participant_url: str) -> None:
    """Case 30: equal in all but the number, and fenced apart."""
    world = Own(flavour, participant_url, FenceTables())
    async with started(world):
        xid = new_xid()
        replies = await asyncio.gather(*(world.call(TRY, xid, branch_id=n) for n in (1, 2)))
        assert [reply.result.data for reply in replies] == [f'{{"hold":"{xid}#{n}"}}'.encode() for n in (1, 2)]
        assert (await world.call(CONFIRM, xid, branch_id=1)).outcome == DONE
        assert (await world.call(CANCEL, xid, branch_id=2)).outcome == DONE
        assert world.rows(xid) == [("bank", 1, 2), ("bank", 2, 3)]


async def test_tables_made_by_the_printed_statements(flavour: str, participant_url: str) -> None:
    """`tricord fence ddl` prints them; a program that may not create tables finds all that it needs."""
    tables = FenceTables("made_log", "made_info")
    world = Own(flavour, participant_url, tables)
    with world.auditor.begin() as db:
        for statement in tables.ddl(world.auditor.dialect):
            db.exec_driver_sql(statement.replace("%", "%%"))
    async with started(world):
        await try_all(world)


def _without(column: str) -> Callable[[Engine, FenceTables], None]:
    def spoil(engine: Engine, tables: FenceTables) -> None:
        tables.metadata.create_all(engine)
        with engine.begin() as db:
            db.execute(text(f"ALTER TABLE {tables.log.name} DROP COLUMN {column}"))

    return spoil


def _another_table(engine: Engine, tables: FenceTables) -> None:
    with engine.begin() as db:
        db.execute(text(f"CREATE TABLE {tables.log.name} (id int PRIMARY KEY, xid varchar(32))"))


def _another_info(engine: Engine, tables: FenceTables) -> None:
    tables.metadata.create_all(engine)
    with engine.begin() as db:
        db.execute(text(f"DROP TABLE {tables.info.name}"))
        db.execute(text(f"CREATE TABLE {tables.info.name} (version int)"))


def _no_key(engine: Engine, tables: FenceTables) -> None:
    """As CREATE TABLE … AS SELECT makes one: every column, and nothing that makes two calls meet."""
    tables.metadata.create_all(engine)
    with engine.begin() as db:
        db.execute(text(f"CREATE TABLE copied AS SELECT * FROM {tables.log.name}"))
        db.execute(text(f"DROP TABLE {tables.log.name}"))
        db.execute(text(f"ALTER TABLE copied RENAME TO {tables.log.name}"))


@three
@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (_without("intent"), "cannot be set up in the database: .*intent"),
        (_without("finished_at"), "cannot be set up in the database: .*finished_at"),
        (_another_table, "cannot be set up in the database: .*(branch_id|participant)"),
        (_another_info, "cannot be set up in the database: .*(singleton|fence_id)"),
        (_no_key, "own_log.* primary key .*xid, branch_id"),
    ],
)
async def test_a_table_that_is_not_a_fence_is_told_at_the_start(
    flavour: str, participant_url: str, spoil: Callable[[Engine, FenceTables], None], error: str
) -> None:
    world = Own(flavour, participant_url, FenceTables("own_log", "own_info"))
    try:
        spoil(world.auditor, world.tables)
        with pytest.raises(ConfigurationError, match=error):
            await prepared(world.participant, world.is_async)
    finally:
        await world.close()


async def prepared(participant: Participant, asynchronous: bool) -> str:
    return await (participant.prepare_async() if asynchronous else asyncio.to_thread(participant.prepare))
