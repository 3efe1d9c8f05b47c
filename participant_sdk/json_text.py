"""Strict JSON text, and the error that names the bad field.

Stricter than `json.loads`, because two readers of one text must see the same thing: no NaN, no number that becomes
infinite, no name given twice, no half character.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Final

from participant_sdk.errors import printable

NAME_LENGTH_MAX: Final = 100
PATH_LENGTH_MAX: Final = 300
PROBLEM_LENGTH_MAX: Final = 200
ENVIRONMENT: Final = (MemoryError, OSError)
"""Errors of the machine: raised while a payload is checked they say nothing about it, so none is refused for one."""


class PayloadError(ValueError):
    """Bytes that do not hold what the annotation says; `path` names the bad field, "" is the whole."""

    def __init__(self, path: str, problem: str) -> None:
        if len(path) > PATH_LENGTH_MAX:  # a stored refusal is short, and what is wrong must not fall off its end
            path = f"{path[: PATH_LENGTH_MAX // 2]}…{path[1 - PATH_LENGTH_MAX // 2 :]}"
        super().__init__(f"{path or 'payload'} {problem}")
        self.path = path
        self.problem = problem


def member_path(path: str, step: str | int) -> str:
    """The path of a member (a name) or an item (a position) of what is at `path`: `lines[2].amount`."""
    if isinstance(step, int):
        return f"{path}[{step}]"
    plain = step.isascii() and step.isidentifier() and len(step) <= NAME_LENGTH_MAX
    name = step if plain else printable(step, NAME_LENGTH_MAX)
    return f"{path}.{name}" if path else name


def rejected(kind: Any, path: str, error: Exception) -> PayloadError:
    """The PayloadError for whatever the user's own check of a `kind` raised.

    However it says no, the payload is invalid: a check that fails on it once fails each time, and running the call
    again would only hide that until the deadline.
    """
    text = printable(str(error), PROBLEM_LENGTH_MAX) or type(error).__name__
    return PayloadError(path, f"is not a valid {getattr(kind, '__name__', kind)}: {text}")


def parse_json(data: bytes) -> Any:
    """The value in UTF-8 JSON text; raises PayloadError."""
    try:
        text = data.decode().strip(" \t\n\r")
        value, end = _reader.raw_decode(text)
        if end != len(text):
            _reader.decode(text)  # says what is there
        if b"\\u" in data:  # only an escape can stand for half a character
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except _Infinite:
        raise PayloadError(_infinite_path(data), "is a number that is too large") from None
    except PayloadError:
        raise
    except RecursionError:
        raise PayloadError("", "is nested too deeply") from None
    except UnicodeEncodeError:
        raise PayloadError("", "holds a lone surrogate, which is not text") from None
    except ValueError as error:  # not UTF-8, not JSON, or an integer with too many digits
        raise PayloadError("", f"is not JSON: {printable(str(error), PROBLEM_LENGTH_MAX)}") from None


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise PayloadError(printable(twice, NAME_LENGTH_MAX), "is given twice")
    return found


def _no_constant(name: str) -> Any:
    raise PayloadError("", f"holds {name}, which is not JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Infinite
    return number


_reader: Final = json.JSONDecoder(
    object_pairs_hook=_no_name_twice, parse_constant=_no_constant, parse_float=_finite_float
)


class _Infinite(Exception):
    """There is a number that becomes infinite; where is looked for only then."""


def _infinite_path(data: bytes) -> str:
    try:
        return next(_infinite_paths(json.loads(data), ""), "")
    except (ValueError, RecursionError):  # more is wrong with it, further on
        return ""


def _infinite_paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _infinite_paths(item, member_path(path, name))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _infinite_paths(item, member_path(path, position))
