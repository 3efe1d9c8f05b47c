"""Fixtures of the suite that a participant has to pass on every database and in both stacks."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.participant.records import Records
from tests.contract.participant.vault import Vault, open_vault
from tests.contract.participant.world import FLAVOURS, World, opened, postgres_url, sqlite_url
from tests.mariadb import asyncmy_url, pymysql_url


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    """Database and stack of a participant."""
    return str(request.param)


@pytest.fixture
def participant_url(flavour: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a fresh database of the flavour's kind, for SQLAlchemy."""
    database, stack, *_ = flavour.split("-")
    if database == "sqlite":
        return sqlite_url(tmp_path, asynchronous=stack == "async")
    if database == "mariadb":
        dsn = request.getfixturevalue("mariadb_database")
        return asyncmy_url(dsn) if stack == "async" else pymysql_url(dsn)
    return postgres_url(request.getfixturevalue("pg_database"))


@pytest.fixture
async def world(flavour: str, participant_url: str) -> AsyncIterator[World]:
    """A participant that serves."""
    async with opened(World(flavour, participant_url)) as world:
        yield world


@pytest.fixture
async def vault(flavour: str, participant_url: str) -> AsyncIterator[Vault]:
    """A participant that serves, and declares what it holds."""
    async with open_vault(World(flavour, participant_url)) as vault:
        yield vault


@pytest.fixture
async def records(tmp_path: Path) -> AsyncIterator[Records]:
    """A coordinator that has on record what the test puts there."""
    async with Records(tmp_path) as records:
        yield records
