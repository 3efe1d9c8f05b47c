"""Fixtures of the guide's tests, and of the coordinator's cases."""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.contract.participant.world import postgres_url, sqlite_url
from tests.coordinators import CoordinatorProcess
from tests.integration.guide_programs import Guide
from tests.integration.participant_server import ParticipantServer
from tests.integration.scene import Scene
from tests.mariadb import asyncmy_url, pymysql_url


@pytest.fixture
def bank(coordinator: CoordinatorProcess) -> Iterator[ParticipantServer]:
    """A participant that says yes to everything, registered with the module's coordinator while a test runs."""
    with ParticipantServer() as participant:
        coordinator.register("bank", participant.address)
        yield participant
        coordinator.withdraw("bank", participant.address)


@pytest.fixture(params=("sqlite", "postgres", "mariadb"))
def guide_urls(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The addresses of a fresh database, for an Engine and for an AsyncEngine."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path), sqlite_url(tmp_path, asynchronous=True)
    if request.param == "postgres":
        return (postgres_url(request.getfixturevalue("pg_database")),) * 2
    dsn = request.getfixturevalue("mariadb_database")
    return pymysql_url(dsn), asyncmy_url(dsn)


@pytest.fixture
async def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Guide]:
    """The guide's files in a folder from which they can be imported; their databases are files in it."""
    guide = Guide(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield guide
    await guide.close()


@pytest.fixture
async def guide_on(guide: Guide, guide_urls: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Guide:
    """The same, on each kind of database."""
    for name, url in zip(("DATABASE_URL", "ASYNC_DATABASE_URL"), guide_urls, strict=True):
        monkeypatch.setenv(name, url)
    return guide


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.database)])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    store = request.getfixturevalue("pg_database") if request.param == "postgresql" else None
    store = store or str(request.getfixturevalue("tmp_path") / "tricord.db")
    with ExitStack() as stack:
        yield Scene(stack, store)


@pytest.fixture
def shared(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """Of several coordinators."""
    with ExitStack() as stack:
        yield Scene(stack, request.getfixturevalue("pg_database"))
