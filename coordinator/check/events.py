"""What a history holds, one event on a line. Each is a named tuple; ``to_json_line`` writes it, ``reading`` reads it.

A field has the same meaning and type in every event (``reading`` holds them). A field with a default may be left out.
Times (``at``) are milliseconds since 1970. docs/histories.md says when to write which.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

FORMAT: Final = 1
STATES: Final = ("TRYING", "CONFIRMING", "CONFIRMED", "CANCELLING", "CANCELLED")
STATUSES: Final = ("TRIED", "COMMITTED", "ROLLBACKED", "SUSPENDED")
WHATS: Final = ("try", "refused", "confirm", "cancel", "suspended")
PHASES: Final = ("TRY", "CONFIRM", "CANCEL", "SETTLE")
ENDINGS: Final = ("confirmed", "cancelled")
ATTENTIONS: Final = ("NONE", "RETRYING", "VIOLATION", "STUCK")


class Change(NamedTuple):
    """What a Confirm adds to one account, or takes from it (then it is below 0)."""

    unit: str
    account: str
    amount: int


class History(NamedTuple):
    """The first line, if there is one: how the lines are meant."""

    at: int
    format: int = FORMAT
    order: str = "times"
    """What tells which of two things came first: ``times``, or the order of the ``lines``."""
    skew_ms: int = 0
    """By how much the clocks that ``at`` was taken from may differ."""
    complete: Sequence[str] = ()
    """The kinds of event that the history has all of: what is missing there has not happened."""


class Asked(NamedTuple):
    """An initiator is about to ask for a transaction, under a key or about an xid."""

    at: int
    key: str = ""
    xid: str = ""
    fingerprint: str = ""
    """Of the request: equal requests have equal ones."""
    participants: Sequence[str] = ()
    """One name for each branch."""


class Told(NamedTuple):
    """What an initiator was answered: one of ``state``, ``error`` and ``rejected``."""

    at: int
    key: str = ""
    xid: str = ""
    fingerprint: str = ""
    state: str = ""
    error: str = ""
    """It was told nothing for certain."""
    rejected: str = ""
    """Its request was turned down, and nothing of it runs."""
    results: Mapping[str, str] = {}
    """By branch_id: what its Try has answered, as text."""


class Saved(NamedTuple):
    """A coordinator has saved a transaction: from now on this is durable."""

    at: int
    xid: str
    state: str
    version: int = 0
    coordinator: str = ""


class Called(NamedTuple):
    """A call has reached a participant."""

    at: int
    xid: str
    branch_id: int
    participant: str
    phase: str


class Effect(NamedTuple):
    """A participant has committed something in its own database."""

    at: int
    xid: str
    branch_id: int
    participant: str
    what: str
    place: int = 0
    """From 1: which commit of this participant's database it was, if that is known."""
    changes: Sequence[Change] = ()
    """Of a Confirm."""


class Resolved(NamedTuple):
    """An operator has said that a branch was ended by hand."""

    at: int
    xid: str
    branch_id: int
    ending: str
    actor: str = ""


class Purged(NamedTuple):
    """A participant has deleted its fence row; or, with branch_id 0, the coordinator its record."""

    at: int
    xid: str
    branch_id: int = 0
    participant: str = ""


class Row(NamedTuple):
    """A coordinator's record, as it was found at rest."""

    at: int
    xid: str
    state: str
    key: str = ""
    attention: str = "NONE"
    participants: Sequence[str] = ()
    """One name for each branch that is on record."""


class Fence(NamedTuple):
    """A participant's fence row, as it was found at rest."""

    at: int
    xid: str
    branch_id: int
    participant: str
    status: str


class Balance(NamedTuple):
    """What an account holds at rest, before everything or after it."""

    at: int
    when: str
    unit: str
    account: str
    amount: int
    """What is free; ``reserved`` is not in it."""
    reserved: int = 0


class Closed(NamedTuple):
    """Nothing more comes about this transaction: it can be judged and forgotten."""

    at: int
    xid: str


class End(NamedTuple):
    """The last line: everything had the time to come to its end."""

    at: int


Event: TypeAlias = (
    History | Asked | Told | Saved | Called | Effect | Resolved | Purged | Row | Fence | Balance | Closed | End
)
KINDS: Final[Mapping[str, type[Event]]] = {
    kind.__name__.lower(): kind
    for kind in (
        History, Asked, Told, Saved, Called, Effect, Resolved, Purged, Row, Fence, Balance, Closed, End,
    )
}  # fmt: skip
"""By the name that stands in ``event``."""
RECORDS: Final = tuple(name for name in KINDS if name not in ("history", "closed", "end"))
"""What ``History.complete`` may name."""


def to_json_line(event: Event) -> str:
    """The event's line, with its line end; what has its default is left out."""
    kind = type(event)
    fields: dict[str, object] = {"event": kind.__name__.lower()}
    defaults = kind._field_defaults
    for name, value in zip(kind._fields, event, strict=True):
        if name not in defaults or value != defaults[name]:
            fields[name] = value
    if isinstance(event, Effect) and event.changes:
        fields["changes"] = [change._asdict() for change in event.changes]
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")) + "\n"
