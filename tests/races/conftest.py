"""Where the races of the tests are run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.participant.world import postgres_url
from tests.mariadb import pymysql_url
from tests.races.bank import Bank
from tests.races.watch import watched


@pytest.fixture
def url_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """The address of a fresh database of a kind, for SQLAlchemy."""

    def url(database: str) -> str:
        if database == "sqlite":
            return f"sqlite:///{tmp_path / 'bank.db'}"
        if database == "mariadb":
            return pymysql_url(request.getfixturevalue("mariadb_database"))
        return postgres_url(request.getfixturevalue("pg_database"))

    return url


@pytest.fixture
def sqlite_bank(url_of: Callable[[str], str]) -> Iterator[Bank]:
    """A bank, ready to race."""
    with Bank("sqlite", "WAL", url_of("sqlite")) as bank, watched():
        yield bank
