"""What an error says about the work that has raised it."""

from __future__ import annotations

from participant_sdk.databases.driver_errors import errors_of, unwrapped
from participant_sdk.errors import TricordError
from participant_sdk.idempotency.errors import StoreUnavailable


class LostRace(StoreUnavailable):
    """It was not committed, since its local transaction lost a race; the same request may run again at once."""


def lost_a_race(error: BaseException | None) -> bool:
    """Whether `error`, or what it was wrapped around, is a serialization failure or a deadlock of any database."""
    if isinstance(error, LostRace):
        return True
    if isinstance(error, TricordError):
        return False  # what has become of the run is known, or is to be found out
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        driver_error = unwrapped(error)
        errors = errors_of(driver_error)
        if errors is not None and errors.is_race(driver_error):
            return True
        error = error.__cause__ or error.__context__
    return False


def told(error: BaseException) -> str:
    """The kind of an error; its text may hold the user's data."""
    return type(unwrapped(error)).__name__
