"""A moderate number of races on every database; `python -m tests.races.run` plays many more."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.races.bank import LEVELS, Bank
from tests.races.broken import WORST, Broken
from tests.races.job import ASYNCIO, EXTERNAL, PROCESSES, THREADS, Job, perform
from tests.races.mutate import rounds_until_noticed
from tests.races.stories import KINDS, MEETINGS, cells

ROUNDS = 80
ASYNCIO_ROUNDS = 40
DEATHS = 6


def places() -> list[Any]:
    """Every database with every isolation level."""
    return [
        pytest.param(database, level, id=f"{database}-{level.replace(' ', '_').lower()}", marks=_marks(database))
        for database, levels in LEVELS.items()
        for level in levels
    ]


def _marks(database: str) -> list[pytest.MarkDecorator]:
    return [] if database == "sqlite" else [pytest.mark.database]


databases = pytest.mark.parametrize("database", [pytest.param(database, marks=_marks(database)) for database in LEVELS])


@pytest.mark.parametrize(("database", "level"), places())
def test_no_order_contradicts_the_table(database: str, level: str, url_of: Callable[[str], str]) -> None:
    tally = perform(Job(database, level, url_of(database), ROUNDS, LEVELS[database].index(level), kind=THREADS))
    assert tally.failures == []
    assert tally.rounds == ROUNDS
    assert tally.struck


@pytest.mark.parametrize(("database", "level"), places())
def test_no_order_leaves_an_outside_effect_behind(database: str, level: str, url_of: Callable[[str], str]) -> None:
    tally = perform(Job(database, level, url_of(database), ROUNDS, LEVELS[database].index(level), kind=EXTERNAL))
    assert tally.failures == []
    assert tally.rounds == ROUNDS


@databases
def test_no_order_of_tasks_does_asyncio(database: str, url_of: Callable[[str], str]) -> None:
    tally = perform(Job(database, LEVELS[database][-1], url_of(database), ASYNCIO_ROUNDS, seed=2, kind=ASYNCIO))
    assert tally.failures == []
    assert tally.rounds == ASYNCIO_ROUNDS


@databases
def test_no_death_of_a_process_does(database: str, url_of: Callable[[str], str]) -> None:
    tally = perform(Job(database, LEVELS[database][0], url_of(database), DEATHS, seed=3, kind=PROCESSES))
    assert tally.failures == []
    assert sum(tally.struck.values()) == DEATHS


@pytest.mark.parametrize("broken", [pytest.param(each, id=str(each)) for each in WORST if each.table != "UNFINISHED"])
def test_a_broken_cell_is_noticed(broken: Broken, sqlite_bank: Bank) -> None:
    assert rounds_until_noticed(sqlite_bank, broken, 400)


def test_every_pair_and_triple_is_met_with_every_fault() -> None:
    assert len(KINDS) == 6
    assert len(MEETINGS) == 15 + 20
    for database, struck in (("sqlite", 10), ("postgres", 16), ("mariadb", 16)):
        wanted = sum(
            1 + len({kind.phase for kind in meeting}) * (struck - 1) + any(kind.phase == 1 for kind in meeting)
            for meeting in MEETINGS
        )
        assert len(list(cells(database))) == wanted
