"""How far a request has come to the database, when that fails: whether anything of it can be there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from participant_sdk.databases.driver_errors import leaves_doubt

if TYPE_CHECKING:
    from participant_sdk.databases.database import Script

R = TypeVar("R")


@dataclass(slots=True)
class Reach:
    """Of a request. `busy`: another run of it was met. `claimed`: a claim was begun, on a connection that was there."""

    busy: bool = False
    claimed: bool = False

    def claiming(self, script: Script[R]) -> Script[R]:
        """The script of a claim, which is begun when there is a connection."""
        self.claimed = True
        return (yield from script)

    def is_down(self, error: Exception) -> bool:
        """Whether the database is away, and nothing of the request can be in it.

        One that says no, such as for its many connections, is not away; nor is it if a pool is used up.
        """
        return not self.busy and not self.claimed and leaves_doubt(error)
