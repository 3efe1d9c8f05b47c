"""The table by Alembic, in a user's own migrations: it is the one that the store would have made, and stays it."""

import io
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, inspect, text

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency import Idempotency, Operation, RequestParts, keyed_request
from participant_sdk.idempotency.record import Answer, Codec
from participant_sdk.idempotency.tables import DEFAULT
from tests.contract.participant.world import sync_url

ENV = """
from alembic import context
from sqlalchemy import MetaData, create_engine

import participant_sdk.idempotency

own = MetaData()

engine = create_engine(context.config.get_main_option("sqlalchemy.url"))
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=[own, participant_sdk.idempotency.metadata])
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""
OPERATION = Operation(name="orders.create")

pytestmark = pytest.mark.parametrize("flavour", ["sqlite-sync", "postgres-sync", "mariadb-sync"], indirect=True)


@pytest.fixture
def config(tmp_path: Path, database_url: str) -> Config:
    """As after `alembic init`, with env.py as the guide has it."""
    config = Config(tmp_path / "alembic.ini")
    config.stdout = io.StringIO()
    command.init(config, str(tmp_path / "migrations"))
    (tmp_path / "migrations" / "env.py").write_text(ENV, encoding="utf-8")
    config.set_main_option("script_location", str(tmp_path / "migrations"))
    config.set_main_option("path_separator", "os")
    config.set_main_option("sqlalchemy.url", sync_url(database_url).replace("%", "%%"))
    return config


def shape(engine: Engine) -> Any:
    """All that the database says of the table."""
    with engine.connect() as db:
        match engine.dialect.name:
            case "sqlite":
                return db.execute(text(f"PRAGMA table_info({DEFAULT.records_name})")).all()
            case "postgresql":
                options = "SELECT reloptions FROM pg_class WHERE oid = :name ::regclass"
                there = inspect(db).get_columns(DEFAULT.records_name)
                return db.scalar(text(options), {"name": DEFAULT.records_name}), str(there)
            case _:
                return db.execute(text(f"SHOW CREATE TABLE {DEFAULT.records_name}")).all()


def test_alembic_makes_the_table_and_the_store_finds_it_in_order(config: Config, database_url: str) -> None:
    engine = create_engine(sync_url(database_url))
    command.revision(config, "keys", autogenerate=True)
    command.upgrade(config, "head")
    made = shape(engine)
    answer = Answer(Codec.VALUE, body=b"done")
    request = keyed_request("k1", "", RequestParts(body=b"order"))
    with Idempotency(engine, sweep=None) as store:
        run: Any = store.begin(OPERATION, request)
        with run:
            run.succeed(answer)
        replay: Any = store.begin(OPERATION, request)
        assert replay.answer == answer
    command.check(config)  # raises if it would change anything
    with engine.begin() as db:
        db.execute(text(f"DROP TABLE {DEFAULT.records_name}"))
    with Idempotency(engine, sweep=None):
        assert shape(engine) == made
    command.check(config)
    engine.dispose()


def test_alembic_finds_what_the_start_has_named(config: Config, database_url: str) -> None:
    engine = create_engine(sync_url(database_url))
    command.revision(config, "keys", autogenerate=True)
    command.upgrade(config, "head")
    with engine.begin() as db:
        db.execute(text(f"ALTER TABLE {DEFAULT.records_name} DROP COLUMN phase_data"))
    with pytest.raises(ConfigurationError, match=r"it has no column phase_data\. Migrate it: with Alembic"):
        Idempotency(engine, sweep=None).start()
    command.revision(config, "newer", autogenerate=True)
    command.upgrade(config, "head")
    with Idempotency(engine, sweep=None):
        pass
    engine.dispose()
