"""What the errors of the drivers mean: a race that was lost, so that work may run again, or an answer that was."""

import sqlite3

import asyncmy.errors
import psycopg
import pymysql
import pytest
from sqlalchemy.exc import InvalidRequestError, OperationalError

from participant_sdk.databases.driver_errors import MARIADB, POSTGRESQL, SQLITE, errors_of, leaves_doubt
from participant_sdk.idempotency.errors import LeaseLost, StoreUnavailable
from participant_sdk.idempotency.faults import lost_a_race


def of_file(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError()
    error.sqlite_errorcode = code
    return error


def wrapped(error: Exception) -> Exception:
    """As SQLAlchemy raises it."""
    return OperationalError("INSERT", {}, error)


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


RACES: list[Exception] = [psycopg.errors.SerializationFailure(), psycopg.errors.DeadlockDetected()]
RACES += [pymysql.err.OperationalError(number, "lost") for number in (1020, 1213)]
RACES += [asyncmy.errors.OperationalError(1213, "lost")]
RACES += [of_file(code) for code in (5, 6, 517)]


@pytest.mark.parametrize(
    ("error", "transient", "doubted"),
    [
        (psycopg.errors.SerializationFailure(), True, False),
        (psycopg.errors.LockNotAvailable(), True, False),
        (psycopg.errors.UniqueViolation(), False, False),
        (psycopg.errors.AdminShutdown(), True, True),
        (psycopg.errors.ConnectionException(), True, True),
        (psycopg.OperationalError("the connection is lost"), True, True),
        (psycopg.ProgrammingError("no answer of the server's"), False, True),
        (pymysql.err.OperationalError(1205, "lock"), True, False),
        (pymysql.err.IntegrityError(1062, "twice"), False, False),
        (pymysql.err.OperationalError(2013, "gone"), True, True),
        (asyncmy.errors.InterfaceError(0, ""), True, True),
        (of_file(517), True, False),
        (of_file(10), False, True),
        (of_file(266), False, True),
        (sqlite3.IntegrityError(), False, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_what_an_error_of_a_driver_means(error: Exception, transient: bool, doubted: bool) -> None:
    for each in (error, wrapped(error)):
        assert [kind.is_transient(each) for kind in (POSTGRESQL, MARIADB, SQLITE)].count(True) == transient
        assert leaves_doubt(each) is doubted
    assert (errors := errors_of(error)) is not None
    assert errors.is_transient(error) is transient


def test_what_no_driver_has_raised_means_nothing_but_doubt() -> None:
    for error in (ValueError(1213), RuntimeError(5)):
        assert errors_of(error) is None
        assert not MARIADB.is_transient(error)
    assert leaves_doubt(ConnectionResetError())
    assert not leaves_doubt(InvalidRequestError("before anything was sent"))


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
