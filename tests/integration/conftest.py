"""Fixtures of the guide's tests, and of the coordinator's cases."""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.contract.participant.world import postgres_url, sqlite_url
from tests.coordinators import CoordinatorProcess
from tests.integration.guide_programs import Guide
from tests.integration.participant_server import ParticipantServer
from tests.integration.scene import Scene
from tests.mariadb import asyncmy_url, pymysql_url

if TYPE_CHECKING:
    from tests.integration.served_shop import Shop

_items = count(1)


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


@pytest.fixture(
    scope="module",
    params=[
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.database),
        pytest.param("mariadb", marks=pytest.mark.database),
        "sqlite-threads",
        pytest.param("postgres-threads", marks=pytest.mark.database),
    ],
)
def web_shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Shop]":
    """The idempotent shop on each kind of database; a module's tests share it, each with items of its own."""
    from tests.integration.served_shop import opened  # it loads frameworks that no other test needs

    kind, _, threads = request.param.partition("-")
    with ExitStack() as stack:
        if kind == "sqlite":
            folder = tmp_path_factory.mktemp("shop")
            url, sync = sqlite_url(folder, asynchronous=not threads), sqlite_url(folder)
        else:
            dsn = stack.enter_context(request.getfixturevalue(f"{kind}_server").lent_database())
            url = postgres_url(dsn) if kind == "postgres" else asyncmy_url(dsn)
            sync = postgres_url(dsn) if kind == "postgres" else pymysql_url(dsn)
        yield stack.enter_context(opened(url, sync, threads=bool(threads)))


@pytest.fixture
def item() -> str:
    """A new thing to order from a shop; its name is the key too."""
    return f"item-{next(_items)}"
