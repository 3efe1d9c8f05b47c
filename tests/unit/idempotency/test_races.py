"""Which errors mean that work lost a race in the database, so that it may run again."""

import asyncmy.errors
import psycopg
import pymysql
import pytest
from sqlalchemy.exc import OperationalError

from participant_sdk.idempotency.errors import LeaseLost, StoreUnavailable
from participant_sdk.idempotency.races import lost_a_race


def wrapped(error: Exception) -> Exception:
    """As SQLAlchemy raises it."""
    return OperationalError("INSERT", {}, error)


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


RACES: list[Exception] = [psycopg.errors.SerializationFailure(), psycopg.errors.DeadlockDetected()]
RACES += [pymysql.err.OperationalError(number, "lost") for number in (1020, 1213)]
RACES += [asyncmy.errors.OperationalError(1213, "lost")]


@pytest.mark.parametrize("race", RACES, ids=lambda race: type(race).__name__)
def test_a_race_is_seen_through_what_is_wrapped_around_it(race: Exception) -> None:
    assert lost_a_race(race)
    assert lost_a_race(wrapped(race))
    assert lost_a_race(caused(ValueError("the user's own"), wrapped(race)))


def test_other_errors_are_none() -> None:
    others: list[BaseException] = [
        ValueError(1213),
        psycopg.errors.UniqueViolation(),
        psycopg.OperationalError("gone"),
        pymysql.err.OperationalError(2013, "gone"),
        pymysql.err.OperationalError(),
        wrapped(psycopg.errors.UniqueViolation()),
    ]
    for error in others:
        assert not lost_a_race(error)
    assert not lost_a_race(None)


def test_what_is_said_of_the_run_itself_is_none() -> None:
    race = psycopg.errors.SerializationFailure()
    for error in (LeaseLost("taken over"), StoreUnavailable("not known yet")):
        assert not lost_a_race(caused(error, race))


def test_causes_in_a_circle_come_to_an_end() -> None:
    one, other = ValueError(), KeyError()
    caused(one, other)
    caused(other, one)
    assert not lost_a_race(one)
