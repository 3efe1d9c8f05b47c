"""What a planted bug is: where the field has had it, what it changes in the product, and who must notice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Edit(NamedTuple):
    """In a file of the product an old text, which occurs there exactly once, becomes a new one."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Seeds:
    """A simulator notices, by one of its invariants.

    ``town``: all of it (``tests.simulator.simulation``); ``branch``: one participant and all that is done to it
    (``tests.simulator.branch_scene``), with the rules of ``branch_watch``.

    That a program meets what it does not expect (invariant 13) counts only where it is ``unexpected``: a bug that
    merely crashes would be noticed by anybody.
    """

    simulator: str
    unexpected: bool = False


@dataclass(frozen=True)
class Suite:
    """A conformance suite notices: these files' tests, on the databases that ``chosen`` (pytest's -k) leaves."""

    files: tuple[str, ...]
    chosen: str = ""


TOWN = Seeds("town")
BRANCH = Seeds("branch")


@dataclass(frozen=True)
class Bug:
    """A bug of the field."""

    name: str
    seen: str
    """In which project users had it, or which rule of the design it breaks."""
    edits: tuple[Edit, ...]
    catcher: Seeds | Suite = TOWN
