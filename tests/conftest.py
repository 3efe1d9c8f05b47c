"""Fixtures for all tests. Under pytest-xdist each worker has a PostgreSQL and a MariaDB server of its own."""

import atexit
import gc
import itertools
import os
import shutil
import ssl
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from participant_sdk.context import bound, current_xid
from tests.mariadb import MariaDbServer
from tests.postgres import PostgresServer
from tests.redis import RedisServer
from tests.servers import LocalServer, ServerUnavailable

IN_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}
DATABASE_FIXTURES = {
    "postgres_server", "pg_database", "own_server", "mariadb_server", "mariadb_database", "redis_server", "redis_url",
}  # fmt: skip

MEMORY = "/dev/shm"
MEMORY_BYTES_MIN = 4 * 1024**3
"""More than the servers of some workers write."""

TESTS_BETWEEN_FREEZES = 50

Server = TypeVar("Server", bound=LocalServer)


def pytest_configure() -> None:
    """Temporary files go to memory, where nobody waits for a disk, if it has room and TMPDIR names no other place."""
    if "TMPDIR" not in os.environ:
        with suppress(OSError):
            lacks = os.statvfs(MEMORY).f_flag & (os.ST_NOEXEC | os.ST_RDONLY)
            if not lacks and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES_MIN:
                os.environ["TMPDIR"] = MEMORY
                tempfile.tempdir = None  # it is looked for again
    if "SSL_CERT_FILE" not in os.environ:
        _trust_one()


def _trust_one() -> None:
    """Have one of the authorities that the system trusts.

    PyMySQL for each connection, and httpx for each client, reads all of them, which takes 20 ms of work. No test needs
    any.
    """
    if trusted := ssl.create_default_context().get_ca_certs(binary_form=True):
        one = Path(tempfile.mkdtemp(prefix="tricord-trusted-")) / "one.pem"
        one.write_text(ssl.DER_cert_to_PEM_cert(trusted[0]))
        atexit.register(shutil.rmtree, one.parent)
        os.environ.update(SSL_CERT_FILE=str(one), SSL_CERT_DIR=os.devnull)


def pytest_collection_finish() -> None:
    """Thousands of collected tests stay until the end: no collection of garbage need look at them again."""
    gc.collect()
    gc.freeze()


_ended = itertools.count(1)


def pytest_runtest_logfinish() -> None:
    """Nor at what has outlived tests, reports for one, so that a collection takes as long late as early."""
    if next(_ended) % TESTS_BETWEEN_FREEZES == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _no_transaction_is_left() -> Iterator[None]:
    """Whoever leaves a transaction in the context that all tests share fails himself, and not those after him."""
    yield
    left = current_xid()
    if left is not None:
        bound(None).__enter__()
        pytest.fail(f"it has left transaction {left} in the context")


@contextmanager
def started(server: Server) -> Iterator[Server]:
    """The server, running; where it cannot be had the test is skipped."""
    try:
        server.start()
    except ServerUnavailable as unavailable:
        pytest.skip(f"no {server.name}: {unavailable}")
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A running server; `server.external` tells that it is not ours to stop or kill."""
    with started(PostgresServer.from_environment()) as server:
        yield server


@pytest.fixture
def pg_database(postgres_server: PostgresServer) -> Iterator[str]:
    """The address (postgresql://...) of a fresh database, dropped after the test."""
    with postgres_server.lent_database() as dsn:
        yield dsn


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that is ours whatever the environment names, and may be stopped and killed."""
    with started(PostgresServer()) as server:
        yield server


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariaDbServer]:
    """A running server, not durable; `server.external` tells that it is not ours to stop or kill."""
    with started(MariaDbServer.from_environment()) as server:
        yield server


@pytest.fixture
def mariadb_database(mariadb_server: MariaDbServer) -> Iterator[str]:
    """The address (mysql://...) of a fresh database, dropped after the test; see pymysql_url() and asyncmy_url()."""
    with mariadb_server.lent_database() as dsn:
        yield dsn


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A running server of our own; a test that stops or kills it starts it again."""
    with started(RedisServer(external_dsn=None)) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The address (redis://...) of an empty database."""
    redis_server.start()
    redis_server.flush()
    return redis_server.dsn()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI every database is there: a database test that skips has found something broken."""
    try:
        report = yield
    except SystemError:  # CPython 3.11 fails now and then to parse the lines that failed; it does not twice
        report = pytest.TestReport.from_item_and_call(item, call)
    needs_database = DATABASE_FIXTURES.intersection(getattr(item, "fixturenames", ())) or item.get_closest_marker(
        "database"
    )
    if IN_CI and needs_database and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: a database test must not be skipped in CI: {report.longrepr}"
    return report
