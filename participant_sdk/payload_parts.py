"""A value's parts beside the JSON that stands for them, and what is checked there in both directions.

pydantic and msgspec read and write by their own rules, and some of those lose something without a word: two names that
become one key, digits, an infinite number that becomes null, the order of a set. Whatever they made of a value is
therefore walked once, next to its JSON. Where the user's own code reshapes a value, the two do not match: such parts
are left alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal, InvalidOperation
from functools import reduce
from typing import Any, Final

from participant_sdk.json_text import PayloadError, member_path
from participant_sdk.payload_libraries import Part, library_of

_MAY_BE_INEXACT: Final = re.compile(rb"[0-9][0-9.]{15}|[eE]-[0-9]{3}")
"""Fewer digits, and a larger power of ten, survive the way through a float."""


_SCALARS: Final = frozenset({str, int, float, bool, type(None), Decimal})


class Place:
    """Where a part stands in the JSON; spelled out only for an error."""

    __slots__ = ("_outer", "_steps")

    def __init__(self, outer: Place | str, steps: tuple[str | int, ...]) -> None:
        self._outer = outer
        self._steps = steps

    def path(self, *further: str | int) -> str:
        """The path that errors name."""
        outer: Place | str = self
        steps = [*further]
        while isinstance(outer, Place):
            steps[:0] = outer._steps
            outer = outer._outer
        return reduce(member_path, steps, outer)


def beside(value: Any, tree: Any, path: str, *, writing: bool) -> Iterator[tuple[Any, Any, Place]]:
    """`value` and all its parts, outer ones first, each with its JSON in `tree` and its place.

    The items of a set are among them only when `writing`: once read, they have lost the order of their JSON.
    """
    waiting = [(value, tree, Place(path, ()))]
    while waiting:
        value, tree, place = waiting.pop()
        yield value, tree, place
        if type(value) not in _SCALARS:
            waiting.extend((part, its, Place(place, steps)) for part, its, steps in _parts(value, tree, writing))


def _parts(value: Any, tree: Any, writing: bool) -> Iterable[Part]:
    if (library := library_of(type(value))) is not None:
        return library.parts(value, tree, writing=writing)
    if isinstance(tree, dict):
        if isinstance(value, dict) and len(value) == len(tree):
            pairs = zip(value.values(), tree.items(), strict=True)
            return [(part, its_tree, (name,)) for part, (name, its_tree) in pairs]
        if dataclasses.is_dataclass(value):
            names = (field.name for field in dataclasses.fields(value))
            return [(getattr(value, name), tree[name], (name,)) for name in names if name in tree]
    elif isinstance(tree, (list, tuple)):
        ordered = (list, tuple, deque, set, frozenset) if writing else (list, tuple, deque)
        if isinstance(value, ordered) and len(value) == len(tree):
            pairs = zip(value, tree, strict=True)
            return [(part, its_tree, (position,)) for position, (part, its_tree) in enumerate(pairs)]
    return ()


def settle(written: Iterable[tuple[Any, Any, Place]]) -> None:
    """Puts the sets of a value just written (`beside` its JSON) in an order; raises ValueError for what was lost."""
    sets: list[list[Any]] = []
    for part, its_tree, place in written:
        if isinstance(part, (float, Decimal)) and not math.isfinite(part):
            raise ValueError(f"{place.path() or 'value'} is {part}, which JSON cannot hold")
        if isinstance(part, dict) and isinstance(its_tree, dict) and _may_collide(part) and len(its_tree) < len(part):
            raise ValueError(f"{place.path() or 'value'} has keys that become the same name in JSON")
        if isinstance(part, (set, frozenset)) and isinstance(its_tree, list):
            sets.append(its_tree)
    for items in reversed(sets):  # inner ones first: their order decides the outer ones'
        items.sort(key=lambda item: json.dumps(item, ensure_ascii=False, sort_keys=True))


def check_kept(value: Any, tree: Any, path: str, dropped: Callable[[Any, Any], str | int | None]) -> None:
    """Raises PayloadError if `value`, just read from `tree`, lacks something that is there, or is not finite.

    `dropped` names a member of a part's JSON that has no place in the part.
    """
    for part, its_tree, place in beside(value, tree, path, writing=False):
        if isinstance(part, float) and not math.isfinite(part):
            raise PayloadError(place.path(), "is a number that is too large")
        if isinstance(part, Decimal) and not part.is_finite():
            raise PayloadError(place.path(), f"is {str(part)!r}, wanted a decimal number")
        if isinstance(its_tree, (dict, list)) and (step := dropped(part, its_tree)) is not None:
            raise PayloadError(place.path(step), "is not a known field")
        if isinstance(part, dict) and isinstance(its_tree, dict) and _may_collide(part) and len(part) < len(its_tree):
            raise PayloadError(place.path(), "has different names for the same key")


def _may_collide(found: dict[Any, Any]) -> bool:
    """Only keys that are not text can have two names."""
    return not all(isinstance(key, str) for key in found)


def check_exact(value: Any, data: bytes) -> None:
    """Raises PayloadError if a Decimal in `value` came from a JSON number and lost digits on its way through a float.

    A number with that many digits is rare, so the JSON text is read again only when it may hold one.
    """
    if not _MAY_BE_INEXACT.search(data):
        return
    exact = json.loads(data, parse_float=_decimal)
    for part, its_tree, place in beside(value, exact, "", writing=False):
        lost = isinstance(part, Decimal) and isinstance(its_tree, Decimal) and part != its_tree
        if isinstance(part, (set, frozenset)) and isinstance(its_tree, list):
            found = {item for item in part if isinstance(item, Decimal)}
            lost = bool(found) and any(isinstance(item, Decimal) and item not in found for item in its_tree)
        if lost:
            raise PayloadError(place.path(), "is a number with more digits than can be read: send it as a string")


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent beyond all bounds
        return Decimal("NaN")
