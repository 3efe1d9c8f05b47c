"""The points of a request at which a process may die, and what says where it is to: nothing of this runs by itself."""

from __future__ import annotations

from enum import StrEnum, unique
from typing import Final

from participant_sdk.errors import ConfigurationError

HITS_MAX: Final = 1_000_000


@unique
class Point(StrEnum):
    """Where a process may die. Between two of them nothing is written, so that these are all there are."""

    BEFORE_CLAIM = "before_claim"
    """The request is known; nothing has been asked of the store."""
    AFTER_CLAIM = "after_claim"
    """The run has its key. Of a LEASED or PHASED one there is a record, with its lease; of an ATOMIC one, nothing."""
    BEFORE_BUSINESS_COMMIT = "before_business_commit"
    """The work is done, and not committed. A PHASED run has one such commit for each phase, and one at its end."""
    DURING_COMMIT = "during_commit"
    """COMMIT was sent, and nothing was heard of it: it may have been done. For psycopg and PyMySQL."""
    AFTER_BUSINESS_COMMIT = "after_business_commit"
    """It is durable, and nobody knows: no front has it."""
    BEFORE_ANSWER = "before_answer"
    """The run is over, the fronts have its answer; whoever has asked has not."""


class Crashed(BaseException):
    """The process died here, as far as a test is concerned. No handler of Exception takes it for an error."""

    def __init__(self, point: Point) -> None:
        super().__init__(f"died at {point.value}")
        self.point = point


def point_of(point: Point | str, hit: int) -> Point:
    """The point of that name. Raises ConfigurationError for one that there is not, and for a `hit` below 1."""
    if not 1 <= hit <= HITS_MAX:
        raise ConfigurationError(f"hit {hit} is not 1 to {HITS_MAX}")
    try:
        return Point(point)
    except ValueError:
        names = ", ".join(each.value for each in Point)
        raise ConfigurationError(f"there is no crash point {str(point)!r}; there are {names}") from None


def read_point(setting: str) -> tuple[Point, int]:
    """From "after_claim", or "after_claim:2": the point, and at which hit of it. Raises ConfigurationError."""
    name, _, number = setting.partition(":")
    if number and not (number.isascii() and number.isdigit()):
        raise ConfigurationError(f"crash point {setting!r}: after the colon stands a number")
    hit = int(number or 1)
    return point_of(name, hit), hit
