"""Whether work failed only because its local transaction lost a race in the database."""

from __future__ import annotations

from typing import Final

from participant_sdk.errors import TricordError
from participant_sdk.idempotency.errors import StoreUnavailable

_SQLSTATES: Final = frozenset({"40001", "40P01"})
_MARIADB: Final = frozenset({1020, 1213})
"""The row has changed since it was read, a deadlock."""
_SQLITE: Final = frozenset({5, 6})


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
        if _is_race(error) or _is_race(getattr(error, "orig", None)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_race(error: object) -> bool:
    if not isinstance(error, Exception):
        return False
    if getattr(error, "sqlstate", None) in _SQLSTATES:
        return True
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in _SQLITE:
        return True
    driver = type(error).__module__.partition(".")[0]
    return driver in ("pymysql", "asyncmy") and bool(error.args) and error.args[0] in _MARIADB
