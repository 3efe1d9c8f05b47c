"""Fixtures for all tests. Under pytest-xdist each worker has a PostgreSQL server of its own."""

import os
from collections.abc import Generator, Iterator

import pytest

from tests.postgres import PostgresServer, PostgresUnavailable

IN_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}
DATABASE_FIXTURES = {"postgres_server", "pg_database", "own_server"}


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A running server; `server.external` tells that it is not ours to stop or kill."""
    server = PostgresServer.from_environment()
    try:
        server.start()
    except PostgresUnavailable as unavailable:
        pytest.skip(f"no PostgreSQL: {unavailable}")
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def pg_database(postgres_server: PostgresServer) -> Iterator[str]:
    """The address (postgresql://...) of a fresh database, dropped after the test."""
    dsn = postgres_server.create_database()
    yield dsn
    if not postgres_server.running:  # the test stopped or killed it
        postgres_server.start()
    postgres_server.drop_database(dsn)


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that is ours whatever the environment names, and may be stopped and killed."""
    try:
        with PostgresServer() as server:
            yield server
    except PostgresUnavailable as unavailable:
        pytest.skip(f"no PostgreSQL: {unavailable}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI every database is there: a database test that skips has found something broken."""
    report = yield
    needs_database = DATABASE_FIXTURES.intersection(getattr(item, "fixturenames", ())) or item.get_closest_marker(
        "database"
    )
    if IN_CI and needs_database and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: a database test must not be skipped in CI: {report.longrepr}"
    return report
