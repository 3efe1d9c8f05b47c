"""Strict JSON for annotated Python types.

A decoder is built once per type and then only applied. What is not exactly as annotated is an error that names the
path (`lines[2].amount`): unknown field, missing field, wrong type, NaN, a name given twice. Decimal, UUID, dates
and times travel as strings, enums by value, bytes as base64. A pydantic model or msgspec Struct, wherever it stands
in a dataclass, list, dict or union, is read and written by its own library.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Union
from uuid import UUID

from participant_sdk.errors import printable
from participant_sdk.json_text import ENVIRONMENT, NAME_LENGTH_MAX, PayloadError, member_path, rejected
from participant_sdk.payload_libraries import library_of

Decoder = Callable[[Any, str], Any]
_Building = dict[type, dict[str, tuple[type | None, Decoder]]]


class UnsupportedType(TypeError):
    """An annotation that the SDK cannot carry."""


def jsonable(value: Any, path: str) -> Any:
    """`value` as what `json.dumps` takes; raises TypeError or ValueError naming the path of what it cannot take."""
    kind: Any = type(value)
    if kind in _AS_IT_IS:
        return value
    if (names := _fields_of(kind)) is not None:
        found = {}
        for name in names:
            item = getattr(value, name)
            found[name] = item if type(item) in _AS_IT_IS else jsonable(item, f"{path}.{name}" if path else name)
        return found
    if isinstance(value, Enum):
        return jsonable(value.value, path)
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path or 'value'} is {value}, which JSON cannot hold")
        return value
    if (library := library_of(type(value))) is not None:
        return jsonable(library.plain(value, path), path)
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise TypeError(f"{path or 'value'} has a key that is not a string")
        return {name: jsonable(item, member_path(path, name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item, member_path(path, position)) for position, item in enumerate(value)]
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"{path or 'value'} is {value}, which no reader takes")
        return str(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{path or 'value'} is of type {type(value).__name__}, which the SDK cannot carry as JSON")


_AS_IT_IS: Final = frozenset({str, int, bool, type(None)})


@lru_cache(maxsize=1024)
def _fields_of(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass that are written (the others follow from these); None for every other type."""
    if not dataclasses.is_dataclass(kind) or issubclass(kind, Enum) or library_of(kind) is not None:
        return None
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


@lru_cache(maxsize=1024)
def decoder_for(kind: Any) -> Decoder:
    """The decoder of an annotated type; raises UnsupportedType naming what in it cannot be carried."""
    return _build(kind, {})


def _build(kind: Any, building: _Building) -> Decoder:
    """`building` holds the dataclasses whose decoders are under way, so that one may contain itself."""
    kind = _plain(kind)
    if kind is Any:
        return lambda value, path: value
    if kind in _SCALARS:
        return _SCALARS[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        members = [_plain(member) for member in arguments if member is not type(None)]
        members.sort(key=lambda member: member is float)  # which takes integers, too, and would make them inexact
        decoders = [_build(member, building) for member in members]
        return _union(decoders, nullable=type(None) in arguments)
    if origin is typing.Literal:
        return _literal(arguments)
    if kind is list or origin is list:
        return _sequence(_build(arguments[0] if arguments else Any, building), list)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence(_build(arguments[0], building), tuple)
    if kind is dict or origin is dict:
        if arguments and arguments[0] is not str:
            raise UnsupportedType(f"{kind!r}: JSON names are strings")
        return _mapping(_build(arguments[1] if arguments else Any, building))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind)
    if (library := library_of(kind)) is not None:
        return library.decoder(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass(kind, building)
    raise UnsupportedType(f"{kind!r} cannot be read from JSON")


def _plain(kind: Any) -> Any:
    """`kind` without the wrappers that say nothing about its JSON."""
    while True:
        if isinstance(kind, typing.NewType):
            kind = kind.__supertype__
        elif typing.get_origin(kind) in (typing.Annotated, typing.Final):
            kind = typing.get_args(kind)[0]
        else:
            return kind


def _wrong(path: str, wanted: str, value: Any) -> PayloadError:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return PayloadError(path, f"is {names.get(type(value), 'a number')}, wanted {wanted}")


def _scalar(kind: type, wanted: str) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        if type(value) is not kind:  # bool is an int to isinstance, and 1 is not true
            raise _wrong(path, wanted, value)
        return value

    return decode


def _float(value: Any, path: str) -> float:
    if type(value) not in (int, float):
        raise _wrong(path, "a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise PayloadError(path, "is a number that is too large")
    return number


def _text(parse: Callable[[str], Any], wanted: str) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        if type(value) is not str:
            raise _wrong(path, f"{wanted} as a string", value)
        try:
            return parse(value)
        except (ValueError, InvalidOperation):
            raise PayloadError(path, f"is {printable(value, NAME_LENGTH_MAX)!r}, wanted {wanted}") from None

    return decode


_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
"""Decimal itself also takes blanks, underscores, and the digits of every script."""


def _finite_decimal(text: str) -> Decimal:
    if not _DECIMAL.fullmatch(text):
        raise ValueError(text)
    return Decimal(text)


def _base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_SCALARS: dict[Any, Decoder] = {
    str: _scalar(str, "a string"),
    int: _scalar(int, "an integer"),
    bool: _scalar(bool, "a boolean"),
    type(None): _scalar(type(None), "null"),
    None: _scalar(type(None), "null"),
    float: _float,
    Decimal: _text(_finite_decimal, "a decimal number"),
    UUID: _text(UUID, "a UUID"),
    datetime: _text(datetime.fromisoformat, "an ISO 8601 date and time"),
    date: _text(date.fromisoformat, "an ISO 8601 date"),
    time: _text(time.fromisoformat, "an ISO 8601 time"),
    bytes: _text(_base64, "base64"),
}


_TAKEN_AS_THEY_ARE: dict[Decoder, type] = {_SCALARS[kind]: kind for kind in (str, int, bool)}


def _union(decoders: list[Decoder], *, nullable: bool) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        if value is None and nullable:
            return None
        problem = PayloadError(path, "fits no member of the union")
        for decoder in decoders:
            try:
                return decoder(value, path)
            except PayloadError as error:
                problem = error if len(decoders) == 1 else problem
        raise problem

    return decode


def _literal(allowed: tuple[Any, ...]) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        for item in allowed:
            if type(item) is type(value) and item == value:
                return item
        raise PayloadError(path, f"is not one of {', '.join(map(repr, allowed))}")

    return decode


def _sequence(item: Decoder, build: Callable[[list[Any]], Any]) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        if type(value) is not list:
            raise _wrong(path, "an array", value)
        return build([item(entry, member_path(path, position)) for position, entry in enumerate(value)])

    return decode


def _mapping(item: Decoder) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        if type(value) is not dict:
            raise _wrong(path, "an object", value)
        return {name: item(entry, member_path(path, name)) for name, entry in value.items()}

    return decode


def _enum(kind: type[Enum]) -> Decoder:
    by_value = {(type(jsonable(member.value, "")), jsonable(member.value, "")): member for member in kind}

    def decode(value: Any, path: str) -> Any:
        member = by_value.get((type(value), value)) if isinstance(value, (str, int, float, bool)) else None
        if member is None:
            raise PayloadError(path, f"is not one of {', '.join(repr(known) for _, known in by_value)}")
        return member

    return decode


def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except Exception as error:
        text = f"an annotation of {kind.__name__} cannot be looked up: {error}"
        raise UnsupportedType(f"{text}; the types of its fields must be globals of its module") from None


def _dataclass(kind: type, building: _Building) -> Decoder:
    fields = [field for field in dataclasses.fields(kind) if field.init]
    required = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    known = kind in building
    decoders = building.setdefault(kind, {})
    if not known:
        hints = _hints(kind)
        for name, hint in hints.items():
            if isinstance(hint, dataclasses.InitVar):
                raise UnsupportedType(f"{kind.__name__}.{name} is an InitVar, whose value is gone when it is encoded")
        for field in fields:
            try:
                decoder = _build(hints[field.name], building)
                decoders[field.name] = _TAKEN_AS_THEY_ARE.get(decoder), decoder
            except UnsupportedType as error:
                raise UnsupportedType(f"{kind.__name__}.{field.name}: {error}") from None

    def decode(value: Any, path: str) -> Any:
        if type(value) is not dict:
            raise _wrong(path, "an object", value)
        if unknown := value.keys() - decoders.keys():
            raise PayloadError(member_path(path, min(unknown)), f"is not a field of {kind.__name__}")
        for name in required:
            if name not in value:
                raise PayloadError(member_path(path, name), "is missing")
        # A field's name needs no member_path, which makes names printable.
        found = {}
        for name, entry in value.items():
            exact, decoder = decoders[name]
            found[name] = entry if type(entry) is exact else decoder(entry, f"{path}.{name}" if path else name)
        try:
            return kind(**found)
        except ENVIRONMENT:
            raise
        except Exception as error:  # what __post_init__ checks
            raise rejected(kind, path, error) from None

    return decode
