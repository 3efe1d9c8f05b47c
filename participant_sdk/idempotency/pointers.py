"""JSON pointers (RFC 6901): `/lines/0/amount` names one place in a JSON value."""

from __future__ import annotations

import re
from typing import Any, Final

from participant_sdk.errors import ConfigurationError

_ESCAPED: Final = re.compile(r"~(.?)")
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()
"""What `find` gives where a value has no such place: None is a value."""


def tokens_of(pointer: str) -> tuple[str, ...]:
    """The names and positions that a pointer goes through; () is the whole. Raises ConfigurationError."""
    if not pointer:
        return ()
    if not pointer.startswith("/"):
        raise ConfigurationError(f"JSON pointer {pointer!r} does not begin with /")
    if any(found[1] not in ("0", "1") or not found[1] for found in _ESCAPED.finditer(pointer)):
        raise ConfigurationError(f"JSON pointer {pointer!r} has a ~ that is neither ~0 nor ~1")
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in pointer[1:].split("/"))


def find(value: Any, tokens: tuple[str, ...]) -> Any:
    """What stands at that place of `value`; MISSING if there is no such place."""
    for token in tokens:
        if isinstance(value, dict):
            value = value.get(token, MISSING)
        elif isinstance(value, list) and _INDEX.fullmatch(token) and int(token) < len(value):
            value = value[int(token)]
        else:
            return MISSING
    return value


def strip(value: Any, tokens: tuple[str, ...]) -> None:
    """Take that place out of `value`, if it is there: a member is removed, an item becomes null."""
    parent, last = find(value, tokens[:-1]), tokens[-1]
    if isinstance(parent, dict):
        parent.pop(last, None)
    elif find(parent, (last,)) is not MISSING:
        parent[int(last)] = None
