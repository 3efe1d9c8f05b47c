"""The coordinator's row: a save counts only over the version that it was made from, and ``save_id`` tells whose it is.

States hold no versions: only what they are good for, which is whether a held value is still the row's.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from coordinator.model import Transaction

ROW_VERSION = 2
OTHERS_SAVE_ID = 7
MY_SAVE_ID = 9


class Age(IntEnum):
    """How a version that a coordinator has in hand stands to the row's."""

    FRESH = 0
    """The row is the one that it was read from, or that this save would replace."""
    STALE = 1
    """The row was saved by somebody else since. That never changes again, for versions only grow."""
    MINE = 2
    """The row is this very save."""


class Saved(NamedTuple):
    """What came of a save."""

    changed: bool
    mine: bool
    """Whether the row that stands is this save, now or since before."""


def swap(row: Transaction | None, save: Transaction) -> Transaction:
    """The row that stands after a save: as the stores' statements do it."""
    if row is None:
        return save
    if row.save_id == save.save_id or row.version != save.version - 1:
        return row
    return save


def numbered(row: Transaction | None, save: Transaction, age: Age) -> tuple[Transaction | None, Transaction]:
    """The row and a save with versions and save_ids that stand to each other like this."""
    version = ROW_VERSION + (age is Age.FRESH) if row is not None else 1
    save_id = MY_SAVE_ID if age is Age.MINE else OTHERS_SAVE_ID
    stands = None if row is None else row._replace(version=ROW_VERSION, save_id=save_id)
    return stands, save._replace(version=version, save_id=MY_SAVE_ID)
