"""What the phases of a run have left, in their order: what a later attempt skips, and with which outputs.

Pure. It is stored with each phase, in the local transaction of that phase's work.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any, Final

from participant_sdk.errors import ConfigurationError
from participant_sdk.json_text import PayloadError, parse_json

LOG_BYTES_MAX: Final = 1 << 20
NAME: Final = re.compile(r"[\x21-\x7e]{1,100}")
_VERSION: Final = 1


@unique
class Sort(Enum):
    """What an entry stands for. The values are stored."""

    PHASE = "phase"
    """A local transaction that was committed."""
    FOREIGN = "foreign"
    """A call to somebody else that has answered."""
    PENDING = "pending"
    """A call to somebody else that cannot be repeated, and may have been made."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One phase. `output`: as its codec has written it."""

    name: str
    sort: Sort
    output: bytes = b""


class PhaseLog:
    """The phases of one run. Raises ConfigurationError for `data` that this program cannot read."""

    def __init__(self, operation: str, data: bytes | None) -> None:
        self._operation = operation
        self._entries = [] if data is None else _entries(operation, data)
        self._next = 0

    def meet(self, name: str, sort: Sort) -> Entry | None:
        """What an earlier attempt has stored of the phase that comes now; None: it has not come so far.

        Raises ConfigurationError for a name that it cannot have, and for one that comes in another order than before.
        """
        if not NAME.fullmatch(name):
            raise ConfigurationError(
                f"{self._operation}: the phase name {name!r} is not 1 to 100 printable ASCII characters without spaces"
            )
        if any(entry.name == name for entry in self._entries[: self._next]):
            raise ConfigurationError(f"{self._operation}: the phase {name!r} comes a second time in one run")
        if self._next == len(self._entries):
            return None
        entry = self._entries[self._next]
        found = Sort.FOREIGN if entry.sort is Sort.PENDING else entry.sort
        if (entry.name, found) != (name, sort):
            raise ConfigurationError(
                f"{self._operation}: the {sort.value} {name!r} comes where an earlier attempt had the {found.value} "
                f"{entry.name!r}: phases keep their names and their order while runs of them are not over"
            )
        if entry.sort is not Sort.PENDING:
            self._next += 1
        return entry

    def with_entry(self, entry: Entry) -> bytes:
        """What is to be stored if the phase that was met ends so, before `reached`. Raises ValueError: too much."""
        entries = [*self._entries[: self._next], entry]
        rows = [[each.name, each.sort.value, base64.b64encode(each.output).decode()] for each in entries]
        data = json.dumps({"version": _VERSION, "phases": rows}, separators=(",", ":")).encode()
        if len(data) > LOG_BYTES_MAX:
            raise ValueError(
                f"{self._operation}: the outputs of its phases would take {len(data)} bytes with that of "
                f"{entry.name!r}, {LOG_BYTES_MAX} are allowed: give out a key to what is large"
            )
        return data

    def reached(self, entry: Entry) -> None:
        """It is stored."""
        self._entries[self._next :] = [entry]
        if entry.sort is not Sort.PENDING:
            self._next += 1


def _entries(operation: str, data: bytes) -> list[Entry]:
    try:
        found: Any = parse_json(data)
        if found["version"] != _VERSION:
            raise ValueError(f"they are of version {found['version']}")
        return [_entry(*row) for row in found["phases"]]
    except (PayloadError, ValueError, TypeError, KeyError, binascii.Error) as error:
        raise ConfigurationError(f"{operation}: what its phases have left cannot be read: {error}") from error


def _entry(name: str, sort: str, output: str) -> Entry:
    if not NAME.fullmatch(name):
        raise ValueError("one has a name that is none")
    return Entry(name, Sort(sort), base64.b64decode(output, validate=True))
