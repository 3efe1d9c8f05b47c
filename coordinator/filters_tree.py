"""What a filter of transactions is, once it has been read: a tree of terms; printed again, and held against values.

Pure: ``filters`` reads one from its text, ``store.filtering`` makes SQL of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from .model import Attention, State, Transaction


class Field(Enum):
    """What a term is about."""

    STATE = "state"
    ATTENTION = "attention"
    PARTICIPANT = "participant"
    """One that has a branch."""
    ACTION = "action"
    """Of a branch: "debit", or "bank.debit"."""
    LABEL = "labels"
    AGE = "age"
    CREATE_TIME = "create_time"


class Term(NamedTuple):
    """One comparison. ``!=`` is true of whatever ``=`` is not, also where there is no such label."""

    field: Field
    operator: str
    value: str | int
    """A State, an Attention, a text; milliseconds of an age, or since 1970."""
    label: str = ""
    """Its name, where the field is LABEL."""


@dataclass(frozen=True, slots=True)
class Not:
    """What is not."""

    child: Node


@dataclass(frozen=True, slots=True)
class And:
    """All of two or more."""

    children: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """Any of two or more."""

    children: tuple[Node, ...]


Node: TypeAlias = Term | Not | And | Or

AGE_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000}
"""The units of ages, longest first."""
COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def printed(node: Node) -> str:
    """The filter as text, in one form only: reading it gives the same tree."""
    match node:
        case Term():
            name = f"{node.field.value}.{node.label}" if node.label else node.field.value
            return f"{name} {node.operator} {_value_text(node)}"
        case Not():
            return f"NOT {_bracketed(node.child)}"
        case And():
            return " AND ".join(map(_bracketed, node.children))
        case Or():
            return " OR ".join(map(_bracketed, node.children))


def _bracketed(node: Node) -> str:
    return printed(node) if isinstance(node, Term) else f"({printed(node)})"


def _value_text(term: Term) -> str:
    match term.field:
        case Field.STATE:
            return State(int(term.value)).name
        case Field.ATTENTION:
            return Attention(int(term.value)).name
        case Field.AGE:
            unit = next(unit for unit, ms in AGE_MS.items() if int(term.value) % ms == 0)
            return f"{int(term.value) // AGE_MS[unit]}{unit}"
        case Field.CREATE_TIME:
            time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=int(term.value))
            return f'"{time.isoformat(timespec="milliseconds").replace("+00:00", "Z")}"'
        case _:
            return quoted(str(term.value))


def quoted(text: str) -> str:
    """A text as a filter's value."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def looks_into_branches(node: Node) -> bool:
    """Whether it asks for what only a row's body tells, so that each must be read."""
    match node:
        case Term():
            return node.field is Field.ACTION
        case Not():
            return looks_into_branches(node.child)
        case And() | Or():
            return any(map(looks_into_branches, node.children))


def matches(node: Node, tx: Transaction, now_ms: int) -> bool:
    """Whether a transaction is one of those."""
    match node:
        case Term():
            return _holds(node, tx, now_ms)
        case Not():
            return not matches(node.child, tx, now_ms)
        case And():
            return all(matches(child, tx, now_ms) for child in node.children)
        case Or():
            return any(matches(child, tx, now_ms) for child in node.children)


def _holds(term: Term, tx: Transaction, now_ms: int) -> bool:
    spec = tx.spec
    found: object
    match term.field:
        case Field.STATE:
            found = tx.state
        case Field.ATTENTION:
            found = tx.attention
        case Field.LABEL:
            found = dict(spec.labels).get(term.label)
        case Field.AGE:
            found = now_ms - spec.created_ms
        case Field.CREATE_TIME:
            found = spec.created_ms
        case Field.PARTICIPANT:
            found = term.value if any(branch.participant == term.value for branch in spec.branches) else ""
        case Field.ACTION:
            names = {name for b in spec.branches for name in (b.action, f"{b.participant}.{b.action}")}
            found = term.value if term.value in names else ""
    return bool(COMPARE[term.operator](found, term.value))
