"""What is checked and made at the start, on every database: the table, and the proof that work can be undone."""

import asyncio
import re
import secrets
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.dialects import oracle
from sqlalchemy.pool import StaticPool

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import StoreUnavailable
from participant_sdk.idempotency.prepare import check_engine, errors_told, make_table
from participant_sdk.idempotency.store import Held
from participant_sdk.idempotency.stores import store_of
from participant_sdk.idempotency.tables import DEFAULT, IdempotencyTables
from tests.contract.idempotency.world import DONE, TABLE, World, claim_of
from tests.contract.participant.world import postgres_url, sync_url
from tests.postgres import PostgresServer


async def test_many_may_start_together(world: World) -> None:
    for _ in range(3):
        world.change(f"DROP TABLE {TABLE}")
        await asyncio.gather(*(world.prepare() for _ in range(4)))
        await world.write(claim_of(), DONE)


async def test_the_table_of_a_migration_will_do(world: World) -> None:
    world.change(f"DROP TABLE {TABLE}")
    with world.auditor.begin() as db:
        for statement in DEFAULT.ddl(db.dialect):
            db.exec_driver_sql(statement)
    await world.prepare()
    await world.write(claim_of(), DONE)
    await world.prepare()
    assert world.query(f"SELECT count(*) FROM {TABLE}") == [(1,)]


async def test_a_table_of_an_older_shape(world: World) -> None:
    world.change(f"DROP TABLE {TABLE}")
    world.change(f"CREATE TABLE {TABLE} (key_hash int PRIMARY KEY, tenant varchar(20))")
    with pytest.raises(ConfigurationError, match=f"{TABLE} is not of this version's shape: .*operation, key_hint"):
        await world.prepare()


@pytest.mark.parametrize(
    ("there", "other", "said"),
    [
        (r"\n *phase_data [^\n]*", "", "it has no column phase_data"),
        (r"operation VARCHAR\(200\)", "operation VARCHAR(20)", "column operation has room for 20, and needs 200"),
        (r"\n *state ", r"\n region VARCHAR(9) NOT NULL, state ", "this version does not fill column region"),
    ],
)
async def test_a_table_of_another_versions_shape(world: World, there: str, other: str, said: str) -> None:
    world.change(f"DROP TABLE {TABLE}")
    with world.auditor.begin() as db:
        (statement,) = DEFAULT.ddl(db.dialect)
        changed, count = re.subn(there, other, statement)
        assert count == 1
        db.exec_driver_sql(changed)
    with pytest.raises(ConfigurationError, match=rf"{TABLE} is not of this version's shape: {said}\. Migrate it"):
        await world.prepare()


async def test_a_table_of_a_newer_version_that_adds_what_may_be_left_out(world: World) -> None:
    """As while a newer version is rolled out, whose migration has run: the older programs go on."""
    world.change(f"ALTER TABLE {TABLE} ADD COLUMN region varchar(9)")
    world.change(f"ALTER TABLE {TABLE} ADD COLUMN zone varchar(9) NOT NULL DEFAULT 'eu'")
    await world.prepare()
    claim = claim_of()
    await world.write(claim, DONE)
    held = await world.claimed(claim_of())
    async with world.transaction() as transaction:
        await transaction.run(world.store.complete(held, DONE, commit=True))
    assert (await world.read(held.key_hash)).answer == DONE.answer


async def test_a_table_without_its_key(world: World) -> None:
    world.change(f"DROP TABLE {TABLE}")
    with world.auditor.begin() as db:
        for statement in DEFAULT.ddl(db.dialect):
            db.exec_driver_sql(statement.replace("PRIMARY KEY (key_hash)", "UNIQUE (fence)"))
    with pytest.raises(ConfigurationError, match=r"has not the primary key \(key_hash\): two runs of a key would not"):
        await world.prepare()


async def test_a_table_by_another_name_and_schema(world: World) -> None:
    odd = await world.another_store("Re %% cords {x} :y")
    assert odd.channel is None or world.is_postgres
    if world.is_postgres:
        world.change('CREATE SCHEMA "my schema"')
        odd = await world.prepare(IdempotencyTables("records", schema="my schema"))
    claim = claim_of()
    async with world.transaction() as transaction:
        met = await transaction.run(odd.meet(claim.key_hash, 100))
        await transaction.work("order")
        await transaction.run(odd.write(claim, met.record, DONE, commit=True))
    record = await world.do(odd.read(claim.key_hash))
    assert record is not None
    assert record.answer == DONE.answer


def test_an_engine_in_autocommit_mode(database_url: str) -> None:
    engine = create_engine(sync_url(database_url), isolation_level="AUTOCOMMIT")
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT mode: the rows of the idempotency store and the business"):
        check_engine(engine, DEFAULT)
    engine.dispose()


def test_a_driver_in_autocommit_mode(database_url: str) -> None:
    """Which SQLAlchemy does not know of: the proof is run."""
    engine = create_engine(sync_url(database_url))

    @event.listens_for(engine, "connect")
    def autocommit(connection: object, record: object) -> None:
        if engine.dialect.name == "sqlite":
            connection.isolation_level = None  # type: ignore[attr-defined]
        elif engine.dialect.name == "postgresql":
            connection.autocommit = True  # type: ignore[attr-defined]
        else:
            connection.autocommit(True)  # type: ignore[attr-defined]

    store = check_engine(engine, DEFAULT)
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="has no transactions"):
        make_table(connection, store)
    with engine.connect() as connection:
        assert connection.execute(text(f"SELECT count(*) FROM {TABLE}")).scalar() == 0
    engine.dispose()


def test_a_table_that_cannot_roll_back(mariadb_database: str) -> None:
    engine = create_engine(mariadb_database.replace("mysql://", "mysql+pymysql://"))
    with engine.begin() as db:
        for statement in DEFAULT.ddl(db.dialect):
            db.exec_driver_sql(statement.replace("InnoDB", "MyISAM"))
    store = check_engine(engine, DEFAULT)
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="may not support transactions"):
        make_table(connection, store)
    engine.dispose()


def test_a_server_that_can_only_be_read(pg_database: str) -> None:
    engine = create_engine(postgres_url(pg_database) + "?options=-cdefault_transaction_read_only%3Don")
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="can only be read"):
        make_table(connection, check_engine(engine, DEFAULT))
    engine.dispose()


def test_a_program_that_may_not_create_tables(pg_database: str) -> None:
    """It needs no more than to read and write the rows of the table that a migration has made."""
    role = f"poor_{secrets.token_hex(4)}"
    owner = create_engine(postgres_url(pg_database))
    engine = create_engine(f"{postgres_url(pg_database)}?options=-crole%3D{role}")
    with owner.begin() as db:
        db.exec_driver_sql(f"CREATE ROLE {role}")
    store = check_engine(engine, DEFAULT)
    try:
        told = pytest.raises(ConfigurationError, match=r"cannot be set up in the database: .*permission denied")
        with told, errors_told(engine, store), engine.connect() as connection:
            make_table(connection, store)
        DEFAULT.metadata.create_all(owner)
        with owner.begin() as db:
            db.exec_driver_sql(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {TABLE} TO {role}")
        with engine.connect() as connection:
            make_table(connection, store)
    finally:
        engine.dispose()
        with owner.begin() as db:
            db.exec_driver_sql(f"DROP OWNED BY {role}")
            db.exec_driver_sql(f"DROP ROLE {role}")
        owner.dispose()


def test_a_replica(own_server: PostgresServer) -> None:
    """It would answer that there is no record, when there is one."""
    dsn = own_server.create_database()
    engine = create_engine(postgres_url(dsn))
    store = check_engine(engine, DEFAULT)
    with engine.connect() as connection:
        make_table(connection, store)
    engine.dispose()
    with psycopg.connect(dsn) as connection_of_psycopg:
        (folder,) = connection_of_psycopg.execute("SHOW data_directory").fetchone() or ("",)
    signal = Path(folder) / "standby.signal"
    own_server.stop()
    signal.touch()
    try:
        own_server.start()
        with engine.connect() as connection, pytest.raises(ConfigurationError, match="can only be read"):
            make_table(connection, store)
    finally:
        engine.dispose()
        own_server.stop()
        signal.unlink()
        own_server.start()


@pytest.mark.parametrize(
    "address", ["postgresql+psycopg://nobody@127.0.0.1:1/nothing", "mysql+pymysql://nobody@127.0.0.1:1/nothing"]
)
def test_a_database_that_is_away(address: str) -> None:
    """Which may be another thing in a moment: no mistake of the program's."""
    engine = create_engine(address)
    store = check_engine(engine, DEFAULT)
    told = pytest.raises(StoreUnavailable, match="the idempotency store cannot be set up in the database")
    with told, errors_told(engine, store), engine.connect() as connection:
        make_table(connection, store)


def test_a_database_without_what_is_asked_for(pg_database: str) -> None:
    engine = create_engine(postgres_url(pg_database))
    store = check_engine(engine, IdempotencyTables("records", schema="nowhere"))
    told = pytest.raises(ConfigurationError, match=r"cannot be set up in the database.+nowhere")
    with told, errors_told(engine, store), engine.connect() as connection:
        make_table(connection, store)
    engine.dispose()


def test_databases_that_will_not_do() -> None:
    with pytest.raises(ConfigurationError, match="oracle is not supported: the idempotency store needs PostgreSQL"):
        store_of(oracle.dialect(), DEFAULT)  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigurationError, match="in-memory SQLite database cannot hold the idempotency store"):
        check_engine(create_engine("sqlite://", poolclass=StaticPool), DEFAULT)


async def test_a_long_name(world: World) -> None:
    """Of a table it may have more bytes than PostgreSQL has room for in that of a channel."""
    name = "\u00e4" * 30
    store = await world.another_store(name)
    claim = claim_of()
    held = await world.do(store.claim(claim))
    assert isinstance(held, Held)
    record = await world.do(store.read(claim.key_hash))
    assert record is not None
    await world.do(store.await_end(record))
    async with world.transaction() as transaction:
        await transaction.work("order")
        await transaction.run(store.complete(held, DONE, commit=True))
    assert world.effects() == ["order"]
