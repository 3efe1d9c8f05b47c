"""A COMMIT that is cut: it has left this process, and what the database says to it is never heard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.driver_connections import DriverConnection
from participant_sdk.idempotency.lines import Line

_HEARS: Final = {"psycopg": "wait", "pymysql": "_read_ok_packet"}
"""What each driver hears the database's answer to a COMMIT by: a method of its connections."""


def cut(line: Line, die: Callable[[], None]) -> None:
    """Have `die` called when the next COMMIT on this line has been sent.

    Raises ConfigurationError for a driver whose COMMIT is one call that nothing can come between.
    """
    if isinstance(line.connection, DriverConnection):
        driver_connection: Any = line.connection.driver_connection
    else:
        driver_connection = line.synchronous.connection.driver_connection
    driver = type(driver_connection).__module__.partition(".")[0]
    hears = _HEARS.get(driver)
    if hears is None:
        raise ConfigurationError(f"the COMMIT of {driver} cannot be cut; take another point, or psycopg or PyMySQL")

    def never(*arguments: Any, **named: Any) -> Any:
        delattr(driver_connection, hears)
        die()

    setattr(driver_connection, hears, never)
