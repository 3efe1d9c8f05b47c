"""Lines of JSON into events. What is no event ends the reading, with its line's number and the name of its field."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Final

from .events import (
    ATTENTIONS,
    ENDINGS,
    FORMAT,
    KINDS,
    PHASES,
    RECORDS,
    STATES,
    STATUSES,
    WHATS,
    Asked,
    Change,
    Effect,
    Event,
    Purged,
    Told,
)

LINE_BYTES_MAX: Final = 1024 * 1024
TEXT_MAX: Final = 4096
WHOLE_MAX: Final = 2**63 - 1
SHOWN_MAX: Final = 60


class HistoryError(ValueError):
    """A line is no event of a history."""

    def __init__(self, line: int, problem: str, field: str = "") -> None:
        where = f", field {field}" if field else ""
        super().__init__(f"line {line}{where}: {problem}")
        self.line = line
        self.field = field


class _Wrong(ValueError):
    """A value is not what its field holds."""

    def __init__(self, problem: str, at: str = "") -> None:
        super().__init__(problem)
        self.at = at
        """Where in the field: ``[3].unit``."""


def events(file: BinaryIO) -> Iterator[tuple[int, Event]]:
    """The events of a file, each with the number of its line.

    Raises HistoryError at the first line that is none.
    """
    number = 0
    while line := file.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise HistoryError(number, f"is longer than {LINE_BYTES_MAX} bytes")
        yield number, event_of(line, number)


def event_of(line: bytes, number: int) -> Event:
    """The event on a line. Raises HistoryError."""
    try:
        fields = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise HistoryError(number, f"is not UTF-8: byte {error.start + 1}") from None
    except _Wrong as error:
        raise HistoryError(number, str(error), error.at) from None
    except (ValueError, RecursionError) as error:
        raise HistoryError(number, _no_json(line, error)) from None
    if type(fields) is not dict:
        raise HistoryError(number, f"must be a JSON object, and is {_shown(fields)}")
    name = fields.pop("event", None)
    if name is None:
        raise HistoryError(number, "is missing", "event")
    kind = KINDS.get(name) if type(name) is str else None
    if kind is None:
        raise HistoryError(number, f"is none of {', '.join(KINDS)}: {_shown(name)}", "event")
    for field, value in fields.items():
        if field not in kind._fields:
            raise HistoryError(number, f"is not known; {name} has {', '.join(kind._fields)}", field)
        try:
            fields[field] = _FIELDS[field](value)
        except _Wrong as wrong:
            raise HistoryError(number, str(wrong), field + wrong.at) from None
    try:
        event: Event = kind(**fields)
    except TypeError:
        missing = next(each for each in kind._fields if each not in fields and each not in kind._field_defaults)
        raise HistoryError(number, f"is missing; {name} must have it", missing) from None
    _check_together(event, number)
    return event


def _check_together(event: Event, number: int) -> None:
    """What one field alone does not show."""
    if isinstance(event, Asked | Told) and not (event.key or event.xid):
        raise HistoryError(number, "is missing: there must be a key or an xid", "key")
    if isinstance(event, Told):
        if (event.state != "") + (event.error != "") + (event.rejected != "") != 1:
            raise HistoryError(number, "there must be one of state, error and rejected", "state")
        if event.state and not event.xid:
            raise HistoryError(number, "is missing: who is told a state is told of which transaction", "xid")
    elif isinstance(event, Effect):
        if event.changes and event.what != "confirm":
            raise HistoryError(number, "only what is a confirm has changes", "changes")
    elif isinstance(event, Purged) and (event.branch_id > 0) != (event.participant != ""):
        raise HistoryError(number, "stands beside branch_id, or neither does", "participant")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        twice = next(name for n, (name, _) in enumerate(pairs) if name in dict(pairs[:n]))
        raise _Wrong("stands there twice", twice[:SHOWN_MAX])
    return fields


def _no_constant(name: str) -> None:
    raise _Wrong(f"{name} is no number of JSON")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)


def _no_json(line: bytes, error: Exception) -> str:
    if not line.strip():
        return "is empty"
    if not line.endswith(b"\n"):
        return "is cut off: it is the last one, has no line end, and is not a whole JSON object"
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON: {error.msg}, column {error.colno}"
    return "is not JSON: too deep, or a number too long"


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def _whole(least: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= WHOLE_MAX:
            raise _Wrong(f"must be a whole number from {least} to {WHOLE_MAX}, and is {_shown(value)}")
        return value

    return check


def _format(value: Any) -> int:
    if type(value) is not int or value != FORMAT:
        raise _Wrong(f"must be {FORMAT}, the one format that there is, and is {_shown(value)}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or not 1 <= len(value) <= TEXT_MAX:
        raise _Wrong(f"must be text of 1 to {TEXT_MAX} characters, and is {_shown(value)}")
    return sys.intern(value)


def _one_of(*words: str) -> Callable[[Any], str]:
    known: Mapping[str, str] = {word: word for word in words}

    def check(value: Any) -> str:
        word = known.get(value) if type(value) is str else None
        if word is None:
            raise _Wrong(f"must be one of {', '.join(words)}, and is {_shown(value)}")
        return word

    return check


def _list(check: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def checked(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _Wrong(f"must be a list, and is {_shown(value)}")
        found = []
        for n, each in enumerate(value):
            try:
                found.append(check(each))
            except _Wrong as wrong:
                raise _Wrong(str(wrong), f"[{n}]{wrong.at}") from None
        return tuple(found)

    return checked


def _change(value: Any) -> Change:
    if type(value) is not dict:
        raise _Wrong(f"must be an object, and is {_shown(value)}")
    for name in Change._fields:
        if name not in value:
            raise _Wrong("is missing", f".{name}")
    for name, each in value.items():
        if name not in Change._fields:
            raise _Wrong(f"is not known; a change has {', '.join(Change._fields)}", f".{name}")
        try:
            _FIELDS[name](each)
        except _Wrong as wrong:
            raise _Wrong(str(wrong), f".{name}") from None
    return Change(**value)


def _results(value: Any) -> dict[str, str]:
    if type(value) is not dict:
        raise _Wrong(f"must be an object, and is {_shown(value)}")
    for name, each in value.items():
        if not (name.isascii() and name.isdigit() and name[0] != "0"):
            raise _Wrong("is no branch_id", f".{name[:SHOWN_MAX]}")
        if type(each) is not str or len(each) > TEXT_MAX:
            raise _Wrong(f"must be text of up to {TEXT_MAX} characters, and is {_shown(each)}", f".{name}")
    return dict(value)


_FIELDS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "at": _whole(0),
    "format": _format,
    "order": _one_of("times", "lines"),
    "skew_ms": _whole(0),
    "complete": _list(_one_of(*RECORDS)),
    "key": _text,
    "xid": _text,
    "fingerprint": _text,
    "participants": _list(_text),
    "participant": _text,
    "branch_id": _whole(1),
    "state": _one_of(*STATES),
    "error": _text,
    "rejected": _text,
    "results": _results,
    "version": _whole(1),
    "coordinator": _text,
    "phase": _one_of(*PHASES),
    "what": _one_of(*WHATS),
    "place": _whole(1),
    "changes": _list(_change),
    "ending": _one_of(*ENDINGS),
    "actor": _text,
    "attention": _one_of(*ATTENTIONS),
    "status": _one_of(*STATUSES),
    "when": _one_of("before", "after"),
    "unit": _text,
    "account": _text,
    "amount": _whole(-WHOLE_MAX),
    "reserved": _whole(-WHOLE_MAX),
}
"""What a field holds, in whichever event it stands."""
