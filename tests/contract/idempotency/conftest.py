"""Fixtures of the suite that the idempotency-key store has to pass on every database and in both stacks."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.contract.idempotency.world import World
from tests.contract.participant.world import FLAVOURS, postgres_url, sqlite_url
from tests.mariadb import asyncmy_url, pymysql_url

EVERYWHERE = ("test_races",)
"""Suites of what differs by isolation level as well as by database and driver."""
ELSEWHERE = (
    "sqlite-sync",
    "sqlite-async",
    "postgres-sync",
    "postgres-async-serializable",
    "mariadb-sync-read_committed",
    "mariadb-async",
)
"""Where everything else is tested: each database, both stacks, and the level that loses most races."""
HAVE = {"listening": ("postgres-sync",), "proxied": ("postgres-sync", "postgres-async-serializable")}
"""Fixtures that only these flavours can have."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """In which flavours a test runs that does not say so itself."""
    marks = metafunc.definition.iter_markers("parametrize")
    if "flavour" in metafunc.fixturenames and not any("flavour" in mark.args[0] for mark in marks):
        name = metafunc.module.__name__.rpartition(".")[2]
        flavours: Sequence[str] = FLAVOURS if name in EVERYWHERE else ELSEWHERE
        for fixture in HAVE.keys() & set(metafunc.fixturenames):
            flavours = HAVE[fixture]
        metafunc.parametrize("flavour", flavours, indirect=True)


@pytest.fixture
def flavour(request: pytest.FixtureRequest) -> str:
    """Database, stack, and isolation level of a store."""
    return str(request.param)


@pytest.fixture
def database_url(flavour: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a fresh database of the flavour's kind, for SQLAlchemy."""
    database, stack, *_ = flavour.split("-")
    if database == "sqlite":
        return sqlite_url(tmp_path, asynchronous=stack == "async")
    if database == "mariadb":
        dsn = request.getfixturevalue("mariadb_database")
        return asyncmy_url(dsn) if stack == "async" else pymysql_url(dsn)
    return postgres_url(request.getfixturevalue("pg_database"))


@pytest.fixture
async def world(flavour: str, database_url: str) -> AsyncIterator[World]:
    """An engine of the flavour, with the store's table and one for the work in its database."""
    async with World(flavour, database_url) as world:
        yield world


@pytest.fixture
def other_url(flavour: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Gives the address of another database of the same server."""
    database, stack, *_ = flavour.split("-")
    with ExitStack() as stack_of:

        def make() -> str:
            if database == "sqlite":
                (tmp_path / "other").mkdir()
                return sqlite_url(tmp_path / "other", asynchronous=stack == "async")
            server = request.getfixturevalue("mariadb_server" if database == "mariadb" else "postgres_server")
            dsn = stack_of.enter_context(server.lent_database())
            if database == "mariadb":
                return asyncmy_url(dsn) if stack == "async" else pymysql_url(dsn)
            return postgres_url(dsn)

        yield make
