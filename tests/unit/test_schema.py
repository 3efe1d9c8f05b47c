"""Alembic's migrations make what the MetaData says, on every database; other revisions are refused."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from coordinator.model import FORMAT
from coordinator.store import schema
from coordinator.store.identity import store_identity
from coordinator.store.rows import Row, StoreError
from tests.contract.stores import at_revision
from tests.servers import eventually


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.database)])
def engine(request: pytest.FixtureRequest) -> Iterator[sa.Engine]:
    """An empty database of each kind."""
    if request.param == "sqlite":
        url = f"sqlite:///{request.getfixturevalue('tmp_path') / 'schema.db'}"
    else:
        url = request.getfixturevalue("pg_database").replace("postgresql://", "postgresql+psycopg://")
    engine = sa.create_engine(url)
    yield engine
    engine.dispose()


def described(engine: sa.Engine) -> dict[str, object]:
    """Tables, columns, keys, constraints and indexes, as the database tells them."""
    inspector = sa.inspect(engine)
    return {
        name: (
            [(c["name"], str(c["type"]), c["nullable"], c["default"]) for c in inspector.get_columns(name)],
            inspector.get_pk_constraint(name)["constrained_columns"],
            inspector.get_unique_constraints(name),
            sorted(
                (
                    str(i["name"]),
                    i["column_names"],
                    i["unique"],
                    sorted(f"{k}: {v}" for k, v in i["dialect_options"].items()),
                )
                for i in inspector.get_indexes(name)
            ),
            inspector.get_table_options(name) if engine.dialect.name == "postgresql" else None,
        )
        for name in sorted(inspector.get_table_names())
        if name != schema.VERSION_TABLE
    }


def test_migrations_make_what_the_metadata_says(engine: sa.Engine) -> None:
    schema.ensure_schema(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": schema.VERSION_TABLE, "compare_type": True}
        )
        assert compare_metadata(context, schema.metadata) == []
    migrated = described(engine)
    with engine.begin() as connection:
        schema.metadata.drop_all(connection)
        schema.metadata.create_all(connection)
    assert migrated == described(engine)
    assert set(migrated) == {table.name for table in schema.metadata.sorted_tables}


def test_the_index_of_due_work_holds_open_rows_only(engine: sa.Engine) -> None:
    schema.ensure_schema(engine)
    (index,) = [i for i in sa.inspect(engine).get_indexes("tricord_transaction") if i["name"] and "due" in i["name"]]
    where = index["dialect_options"][f"{engine.dialect.name}_where"]
    assert str(where).strip("()") == "wake_ms IS NOT NULL"


def test_rows_have_the_tables_columns_in_order() -> None:
    columns = [column.name for column in schema.transactions.columns]
    assert columns == [*Row._fields, "claims", "claimed_version"]


def test_creating_it_again_changes_nothing(engine: sa.Engine) -> None:
    schema.ensure_schema(engine)
    with engine.begin() as connection:
        values = {"name": "a", "address": "b:1", "actions": {}, "withdrawn": {}, "updated_ms": 1}
        connection.execute(schema.participants.insert().values(**values))
    schema.ensure_schema(engine)
    with engine.connect() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(schema.participants)).scalar() == 1


def claims_to_be(engine: sa.Engine, revision: str, oldest_program: int = FORMAT) -> None:
    """As a store that another program has migrated."""
    with engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE {schema.VERSION_TABLE} SET version_num = '{revision}'"))
        connection.execute(schema.store_info.update().values(oldest_program=oldest_program))


@pytest.mark.parametrize(("revision", "oldest"), [("9999", FORMAT + 1), ("0003", FORMAT + 1), ("0000", 1), ("abc", 1)])
def test_another_revision_is_refused_and_left_alone(engine: sa.Engine, revision: str, oldest: int) -> None:
    schema.ensure_schema(engine)
    claims_to_be(engine, revision, oldest)
    for refused in (schema.ensure_schema, lambda engine: schema.migrate(engine, finish=True)):
        with pytest.raises(StoreError, match=f"schema revision {revision} .*, this program runs on {schema.REVISION}"):
            refused(engine)
    with engine.connect() as connection:
        version = connection.execute(sa.text(f"SELECT version_num FROM {schema.VERSION_TABLE}")).scalar()
        assert connection.execute(sa.select(schema.store_info.c.oldest_program)).scalar() == oldest
    assert version == revision


def test_a_later_revision_that_lets_this_program_run_is_taken(engine: sa.Engine) -> None:
    schema.ensure_schema(engine)
    claims_to_be(engine, "9999", FORMAT)
    schema.ensure_schema(engine)
    assert schema.migrate(engine, finish=True) == schema.Stand("9999", FORMAT, FORMAT)


def test_an_empty_store_is_finished_at_once(engine: sa.Engine) -> None:
    assert schema.read_stand(engine) == schema.Stand("")
    schema.ensure_schema(engine)
    assert schema.read_stand(engine) == schema.Stand(schema.REVISION, FORMAT, FORMAT)


def test_an_older_store_is_migrated_in_two_steps(engine: sa.Engine) -> None:
    at_revision(engine, "0001")
    assert schema.read_stand(engine) == schema.Stand("0001")
    with pytest.raises(schema.StoreBehind, match="run `tricord migrate`"):
        schema.ensure_schema(engine)
    for finish, expected in ((False, 1), (False, 1), (True, FORMAT), (True, FORMAT), (False, FORMAT)):
        assert schema.migrate(engine, finish=finish) == schema.Stand(schema.REVISION, expected, expected)
        schema.ensure_schema(engine)
    assert store_identity(engine, "one") == ("old", False, ())


@contextmanager
def connected(dsn: str, program: str) -> Iterator[psycopg.Connection]:
    """A program's session; after the block the server has none of that name, which is a moment after it was closed."""
    with psycopg.connect(dsn, application_name=program) as session:
        yield session
    count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
    with psycopg.connect(dsn, autocommit=True) as onlooker:
        assert eventually(lambda: onlooker.execute(count, [program]).fetchone() == (0,), 60)


@pytest.mark.database
def test_a_store_is_not_finished_while_an_older_program_is_connected(pg_database: str) -> None:
    engine = sa.create_engine(pg_database.replace("postgresql://", "postgresql+psycopg://"))
    at_revision(engine, "0001")
    for name, refused in (
        ("tricord", True),
        ("tricord/1", True),
        (schema.APPLICATION_NAME, False),
        ("tricorder", False),
    ):
        with connected(pg_database, name):
            assert schema.migrate(engine, finish=False) == schema.Stand(schema.REVISION)
            if refused:
                with pytest.raises(
                    StoreError, match=r"of an older version still use the store, from 127\.0\.0\.1: stop"
                ):
                    schema.migrate(engine, finish=True)
                assert schema.read_stand(engine) == schema.Stand(schema.REVISION)
            else:
                assert schema.migrate(engine, finish=True) == schema.Stand(schema.REVISION, FORMAT, FORMAT)
                with engine.begin() as connection:
                    connection.execute(schema.store_info.update().values(format=1, oldest_program=1))
    engine.dispose()


@pytest.mark.database
def test_an_older_program_that_starts_while_a_store_is_finished_is_found(pg_database: str) -> None:
    engine = sa.create_engine(pg_database.replace("postgresql://", "postgresql+psycopg://"))
    at_revision(engine, "0001")
    schema.migrate(engine, finish=False)
    sessions = ExitStack()
    started: list[psycopg.Connection] = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def start(_connection: object, _cursor: object, statement: str, *_more: object) -> None:
        if statement.startswith("UPDATE tricord_store") and not started:
            started.append(sessions.enter_context(connected(pg_database, "tricord")))

    with sessions:
        with pytest.raises(StoreError, match="of an older version still use the store"):
            schema.migrate(engine, finish=True)
        assert schema.read_stand(engine) == schema.Stand(schema.REVISION)
    assert schema.migrate(engine, finish=True) == schema.Stand(schema.REVISION, FORMAT, FORMAT)
    engine.dispose()


def test_the_identity_is_made_once(engine: sa.Engine) -> None:
    schema.ensure_schema(engine)
    first, *rest = store_identity(engine, "one")
    assert rest == [False, ()]
    assert store_identity(engine, "one") == (first, False, ())
    assert store_identity(engine, "two") == (first, True, [])
    assert store_identity(engine, "two") == (first, False, ())
