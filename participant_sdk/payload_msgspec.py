"""msgspec Structs as payloads; imported only for a program that has one.

Reading is msgspec's strict mode, and stricter still: a field that the Struct (or a dataclass or TypedDict in it) does
not have is refused, whatever `forbid_unknown_fields` says. Its default tolerates them, and a Struct cannot tell
whether that was anyone's choice. Numbers that become infinite, different names for one key, and digits that a float
would lose are refused as well.

Renames, tags, `array_like`, `omit_defaults` and UNSET are msgspec's own, both ways.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from msgspec import inspect

from participant_sdk.errors import printable
from participant_sdk.json_text import ENVIRONMENT, PROBLEM_LENGTH_MAX, PayloadError, member_path, rejected
from participant_sdk.json_types import Decoder, UnsupportedType
from participant_sdk.payload_libraries import Part
from participant_sdk.payload_parts import beside, check_kept, settle

_PLACE: Final = re.compile(r"(?P<text>.*) - at `(?P<name>key` in `)?\$(?P<path>[^`]*)`", re.DOTALL)
_STEP: Final = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<position>[0-9]+)\]|(?P<any>\[\.\.\.\])")
_FIELD: Final = re.compile(r"Object (?P<what>missing required|contains unknown) field `(?P<name>.*)`", re.DOTALL)
_FIELD_PROBLEMS: Final = {"missing required": "is missing", "contains unknown": "is not a known field"}


def decoder(kind: Any) -> Decoder:
    """The strict decoder of a Struct; raises UnsupportedType."""
    name = getattr(kind, "__name__", str(kind))
    try:
        info = inspect.type_info(kind)
    except Exception as error:  # a name that cannot be looked up, a union that msgspec cannot tell apart
        text = printable(str(error), PROBLEM_LENGTH_MAX)
        raise UnsupportedType(f"{name} cannot be read by msgspec: {text}") from None
    _check_supported(info, name)

    def convert(value: Any) -> Any:
        return msgspec.convert(value, kind, strict=True, str_keys=True)

    def decode(value: Any, path: str) -> Any:
        try:
            found = convert(value)
        except msgspec.ValidationError as error:
            raise _payload_error(str(error), value, path, convert) from None
        except (RecursionError, *ENVIRONMENT):
            raise
        except Exception as error:  # what __post_init__ raises that msgspec does not take for an answer
            raise rejected(kind, path, error) from None
        check_kept(found, value, path, _dropped)
        return found

    return decode


def plain(value: Any, path: str) -> Any:
    """A Struct as dicts, lists and scalars; raises TypeError or ValueError for what msgspec cannot write."""
    try:
        tree = msgspec.to_builtins(value, str_keys=True)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        text = f"{path or type(value).__name__} cannot be written: {printable(str(error), PROBLEM_LENGTH_MAX)}"
        raise (TypeError if isinstance(error, TypeError) else ValueError)(text) from None
    settle(beside(value, tree, path, writing=True))
    return tree


def parts(value: Any, tree: Any, *, writing: bool) -> Iterator[Part]:
    """The fields of a Struct, each with its JSON; the names are the same both ways."""
    kind = type(value)
    config = kind.__struct_config__
    names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    if not config.array_like:
        found = tree if isinstance(tree, dict) else {}
        yield from ((getattr(value, field), found[name], (name,)) for field, name in names if name in found)
    elif isinstance(tree, (list, tuple)):
        first = 0 if config.tag is None else 1
        for position, (field, _) in enumerate(names, first):
            if position < len(tree):
                yield getattr(value, field), tree[position], (position,)


def _check_supported(info: inspect.Type, name: str) -> None:
    """Raises UnsupportedType naming the field of a type that is not carried."""
    waiting: list[tuple[Any, str]] = [(info, name)]
    seen: set[Any] = set()
    while waiting:
        found, where = waiting.pop()
        if isinstance(found, (inspect.CustomType, inspect.RawType, inspect.ExtType)):
            kind = getattr(found, "cls", None) or type(found)
            raise UnsupportedType(f"{where} is of type {kind.__name__}, which msgspec cannot read from JSON")
        if isinstance(found, inspect.DataclassType) and not dataclasses.is_dataclass(found.cls):
            raise UnsupportedType(f"{where} is of type {found.cls.__name__}, which is no dataclass")
        if isinstance(found, (inspect.SetType, inspect.FrozenSetType)) and _holds_objects(found.item_type):
            raise UnsupportedType(f"{where} is a set of objects, whose unknown fields cannot be found: use a list")
        if hasattr(found, "cls"):
            if found.cls in seen:
                continue
            seen.add(found.cls)
        waiting.extend((inner, f"{where}.{step}" if step else where) for step, inner in _inner_types(found))


def _inner_types(info: Any) -> Iterator[tuple[str, Any]]:
    yield from ((field.name, field.type) for field in getattr(info, "fields", ()))
    yield from (("", inner) for many in ("types", "item_types") for inner in getattr(info, many, ()))
    for one in ("type", "item_type", "key_type", "value_type"):
        if isinstance(inner := getattr(info, one, None), inspect.Type):
            yield "", inner


def _holds_objects(info: Any) -> bool:
    return hasattr(info, "fields") or any(_holds_objects(inner) for _, inner in _inner_types(info))


def _dropped(value: Any, tree: Any) -> str | int | None:
    """The first name or position in `tree` that has no field in `value`; msgspec leaves it out without a word."""
    kind = type(value)
    if isinstance(value, msgspec.Struct):
        config = kind.__struct_config__
        tags = [] if config.tag is None else [config.tag_field]
        if isinstance(tree, list):
            known_count = len(kind.__struct_fields__) + len(tags)
            return known_count if config.array_like and len(tree) > known_count else None
        known = {*kind.__struct_encode_fields__, *tags}
    elif dataclasses.is_dataclass(value):
        known = {field.name for field in dataclasses.fields(value)}
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        known = set(value)  # a TypedDict; of another dict nothing is dropped
    else:
        return None
    return min(tree.keys() - known, default=None) if isinstance(tree, dict) else None


def _payload_error(message: str, tree: Any, path: str, convert: Callable[[Any], Any]) -> PayloadError:
    """msgspec's one error, with its `$.lines[2].amount` as our path."""
    text, steps, of_name = message, "", False
    if found := _PLACE.fullmatch(message):
        text, steps, of_name = found["text"], found["path"], found["name"] is not None
        steps += "[...]" if of_name else ""

    def fails_so() -> bool:
        try:
            convert(tree)
        except Exception as error:
            return str(error) == message
        return False

    path = _path(steps, tree, path, fails_so)
    if (field := _FIELD.fullmatch(text)) and not of_name:
        return PayloadError(member_path(path, field["name"]), _FIELD_PROBLEMS[field["what"]])
    text = printable(text, PROBLEM_LENGTH_MAX)
    return PayloadError(path, f"is not a valid name: {text}" if of_name else f"is not valid: {text}")


def _path(steps: str, tree: Any, path: str, fails_so: Callable[[], bool]) -> str:
    """msgspec's path as ours; of a dict's member it only says `[...]`, and which one that is, is then looked for."""
    for step in _STEP.finditer(steps):
        name = step["name"]
        if step["any"]:
            name = _failing_name(tree, fails_so) if isinstance(tree, dict) else None
        if step["position"]:
            position = int(step["position"])
            path = member_path(path, position)
            tree = tree[position] if isinstance(tree, list) and position < len(tree) else None
        else:
            path = f"{path}[...]" if name is None else member_path(path, name)
            tree = tree.get(name) if isinstance(tree, dict) else None
    return path


def _failing_name(members: dict[str, Any], fails_so: Callable[[], bool]) -> str | None:
    """The first name whose member alone makes the reading fail so, found by halving; None if that cannot be told."""
    everything = dict(members)
    names = list(members)
    try:
        while len(names) > 1:
            half = names[: len(names) // 2]
            members.clear()
            members.update((name, everything[name]) for name in half)
            names = half if fails_so() else names[len(half) :]
        members.clear()
        members.update((name, everything[name]) for name in names)
        return names[0] if names and fails_so() else None
    finally:
        members.clear()
        members.update(everything)
