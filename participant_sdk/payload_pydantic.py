"""pydantic models and pydantic dataclasses (version 2) as payloads; imported only for a program that has one.

Reading is pydantic's strict JSON mode (dates, UUIDs, Decimals and enums from strings, nothing else converted), and
stricter still:

- A field that the type does not have is refused, unless the model (or pydantic dataclass) says `extra="ignore"` or
  `extra="allow"`, itself or by inheritance: that choice is kept, for that type alone. In a payload where one says so,
  and with pydantic before 2.12, names are compared after validation; a "before" validator may then not rename fields.
- Numbers that become infinite, different names for one key, and digits that a float would lose are refused.
- A model with an `__init__` of its own is not supported: pydantic calls it with everything converted and tolerated.

Aliases are used both ways. What follows from other fields is not sent (computed fields, `init=False`). Serializers of
the model run; a secret, which pydantic writes as asterisks, needs one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final

import pydantic
from pydantic import AliasChoices, AliasPath, TypeAdapter, ValidationError

from participant_sdk.errors import printable
from participant_sdk.json_text import ENVIRONMENT, PROBLEM_LENGTH_MAX, PayloadError, member_path, rejected
from participant_sdk.json_types import Decoder, UnsupportedType
from participant_sdk.payload_libraries import Part
from participant_sdk.payload_parts import beside, check_kept, settle

_VERSION: Final = tuple(int(part) for part in pydantic.VERSION.split(".")[:2])
_CAN_FORBID: Final = _VERSION >= (2, 12)
"""Whether unknown fields can be forbidden for one validation."""
_WARNINGS: Final[Any] = "error" if _VERSION >= (2, 7) else True
"""What becomes of a value that is not of its field's type: it is no payload."""

_HAS_A_WAY_OUT: Final = {"default", "nullable", "union", "chain", "function-before", "function-wrap", "function-plain"}
"""Schemas that may read JSON although one in them cannot."""
_READS_NO_JSON: Final = {"is-instance", "is-subclass", "callable"}
_OBJECTS: Final = {"model", "dataclass", "typed-dict", "definition-ref"}


def decoder(kind: Any) -> Decoder:
    """The strict decoder of a model or pydantic dataclass; raises UnsupportedType."""
    adapter = _adapter(kind)
    core_schema = dict(adapter.core_schema)
    _check_supported(core_schema, getattr(kind, "__name__", str(kind)))
    lenient = not _CAN_FORBID or any(_tolerates(schema) for schema in _schemas(core_schema))
    if lenient and any(_is_set_of_objects(schema) for schema in _schemas(core_schema)):
        raise UnsupportedType(f"{kind.__name__} has a set of objects, whose unknown fields cannot be found: use a list")
    options: dict[str, Any] = {} if lenient else {"extra": "forbid"}

    def decode(value: Any, path: str) -> Any:
        text = json.dumps(value, ensure_ascii=False)
        try:
            found = adapter.validate_json(text, strict=True, **options)
        except ValidationError as error:
            raise _payload_error(error, value, path) from None
        except (RecursionError, *ENVIRONMENT):
            raise
        except Exception as error:  # what a validator raises that pydantic does not take for an answer
            raise rejected(kind, path, error) from None
        check_kept(found, value, path, _dropped if lenient else _dropped_never)
        return found

    return decode


def plain(value: Any, path: str) -> Any:
    """A model as dicts, lists and scalars, by alias; raises TypeError or ValueError for what pydantic cannot write."""
    kind: Any = type(value)
    adapter = _adapter(kind)
    by_alias = None if _VERSION >= (2, 11) and "serialize_by_alias" in _config(kind) else True
    try:
        tree = adapter.dump_python(value, mode="json", by_alias=by_alias, round_trip=True, warnings=_WARNINGS)
    except ValueError as error:
        raise ValueError(f"{path or kind.__name__} cannot be written: {_without_values(str(error))}") from None
    written = list(beside(value, tree, path, writing=True))
    settle(written)
    for part, its_tree, place in written:
        if hasattr(part, "get_secret_value") and part.get_secret_value():
            if isinstance(its_tree, str) and set(its_tree) == {"*"}:
                where = place.path() or "value"
                raise ValueError(f"{where} is a secret, which pydantic writes as asterisks: give it a serializer")
        elif dataclasses.is_dataclass(part) and isinstance(its_tree, dict):
            for field in dataclasses.fields(part):
                if not field.init:
                    its_tree.pop(field.name, None)
    return tree


def parts(value: Any, tree: Any, *, writing: bool) -> Iterator[Part]:
    """The fields of a model or pydantic dataclass, each with its JSON."""
    if isinstance(value, pydantic.RootModel):
        yield value.root, tree, ()
        return
    kind: Any = type(value)
    for field, ways in (_written(kind) if writing else _read(kind)).items():
        for way in ways:
            found, its_tree = _follow(tree, way)
            if found and hasattr(value, field):
                yield getattr(value, field), its_tree, way
                break
    for name, extra in (getattr(value, "__pydantic_extra__", None) or {}).items():
        if isinstance(tree, dict) and name in tree:
            yield extra, tree[name], (name,)


@lru_cache(maxsize=1024)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    if not hasattr(kind, "__pydantic_validator__"):
        raise UnsupportedType(f"{kind!r} is of pydantic {pydantic.VERSION}; version 2 is needed")
    try:
        adapter = TypeAdapter(kind)
        dict(adapter.core_schema)  # raises an error if a name in it is not defined
    except Exception as error:
        text = printable(str(error).partition("\n")[0], PROBLEM_LENGTH_MAX)
        raise UnsupportedType(f"{getattr(kind, '__name__', kind)} cannot be read by pydantic: {text}") from None
    return adapter


def _check_supported(core_schema: Any, name: str) -> None:
    for schema in _schemas(core_schema):
        if schema.get("custom_init"):
            model = schema["cls"].__name__
            raise UnsupportedType(f"{model} has an __init__ of its own, which reads nothing strictly: use a validator")
    for schema in _schemas(core_schema, _HAS_A_WAY_OUT):
        if schema["type"] in _READS_NO_JSON:
            stranger = getattr(schema.get("cls"), "__name__", schema["type"])
            raise UnsupportedType(f"{name} has a field of type {stranger}, which pydantic cannot read from JSON")


def _schemas(schema: Any, leave_out: Iterable[str] = ()) -> Iterator[dict[str, Any]]:
    """Every schema in a core schema that reads JSON, but none of the types to leave out, nor what is inside them."""
    waiting = [schema]
    while waiting:
        found = waiting.pop()
        if isinstance(found, (list, tuple)):
            waiting.extend(found)
        if not isinstance(found, dict):
            continue
        kind = found.get("type")
        if not isinstance(kind, str):  # fields by name, choices by tag
            waiting.extend(found.values())
        elif kind == "json-or-python":
            waiting.append(found["json_schema"])
        elif kind == "lax-or-strict":
            waiting.append(found["strict_schema"])
        elif kind not in leave_out:
            yield found
            ignored = ("metadata", "default", "serialization", "expected")
            waiting.extend(inner for key, inner in found.items() if key not in ignored)


def _tolerates(schema: dict[str, Any]) -> bool:
    config = schema.get("config") or {}
    return not {"ignore", "allow"}.isdisjoint((schema.get("extra_behavior"), config.get("extra_fields_behavior")))


def _is_set_of_objects(schema: dict[str, Any]) -> bool:
    if schema["type"] not in ("set", "frozenset"):
        return False
    return any(inner["type"] in _OBJECTS for inner in _schemas(schema.get("items_schema")))


def _config(kind: Any) -> dict[str, Any]:
    """The configuration of a model, or of a pydantic dataclass, as its author wrote it."""
    return getattr(kind, "model_config", None) or getattr(kind, "__pydantic_config__", None) or {}


def _fields(kind: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(kind, "model_fields", None) or getattr(kind, "__pydantic_fields__", None) or {}
    return found


@lru_cache(maxsize=1024)
def _written(kind: Any) -> dict[str, list[tuple[str | int, ...]]]:
    """By field, the names under which it may be written."""
    return {
        name: [(alias,) for alias in (field.serialization_alias, name) if alias]
        for name, field in _fields(kind).items()
    }


@lru_cache(maxsize=1024)
def _read(kind: Any) -> dict[str, list[tuple[str | int, ...]]]:
    """By field, the ways through the JSON on which it is looked for."""
    config = _config(kind)
    by_name = config.get("validate_by_name") or config.get("populate_by_name")
    found: dict[str, list[tuple[str | int, ...]]] = {}
    for name, field in _fields(kind).items():
        alias = field.validation_alias
        aliases = alias.choices if isinstance(alias, AliasChoices) else [] if alias is None else [alias]
        if config.get("validate_by_alias") is False:
            aliases = []
        found[name] = [tuple(each.path) if isinstance(each, AliasPath) else (each,) for each in aliases]
        if by_name or not found[name]:
            found[name].append((name,))
    return found


def _follow(tree: Any, way: tuple[str | int, ...]) -> tuple[bool, Any]:
    for step in way:
        try:
            tree = tree[step]
        except (KeyError, IndexError, TypeError):
            return False, None
    return True, tree


def _dropped_never(value: Any, tree: Any) -> None:
    """pydantic itself has forbidden unknown fields."""


def _dropped(value: Any, tree: Any) -> str | None:
    """The first name in `tree` that is none of the model's (dataclass's, dict's), if its author tolerates none."""
    kind: Any = type(value)
    if not isinstance(tree, dict) or _config(kind).get("extra") in ("ignore", "allow"):
        return None
    if _fields(kind) and not isinstance(value, pydantic.RootModel):
        known = {way[0] for ways in _read(kind).values() for way in ways}
    elif dataclasses.is_dataclass(value):
        known = {field.name for field in dataclasses.fields(value) if field.init}
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        known = set(value)  # a TypedDict; of another dict nothing is dropped
    elif isinstance(value, pydantic.BaseModel) and not isinstance(value, pydantic.RootModel):
        known = set()
    else:
        return None
    return min(tree.keys() - known, default=None)


def _payload_error(error: ValidationError, tree: Any, path: str) -> PayloadError:
    """The first of pydantic's errors, without the input that it quotes."""
    first, *others = error.errors(include_url=False)
    kind, cause = first["type"], first.get("ctx", {}).get("error")
    place = _path(first["loc"], tree, path, missing=kind.startswith("missing"))
    if kind.startswith("missing"):
        problem = "is missing"
    elif kind in ("extra_forbidden", "unexpected_keyword_argument"):
        problem = "is not a known field"
    elif kind == "json_invalid" and "recursion" in first["msg"]:
        problem = "is nested too deeply"
    else:
        text = printable(str(cause) if isinstance(cause, Exception) else first["msg"], PROBLEM_LENGTH_MAX)
        problem = f"is not a valid name: {text}" if first["loc"][-1:] == ("[key]",) else f"is not valid: {text}"
    return PayloadError(place, f"{problem} (and {len(others)} more)" if others else problem)


def _path(steps: tuple[str | int, ...], tree: Any, path: str, *, missing: bool) -> str:
    """pydantic's location as a path through the JSON, without the names of union members and validators in it."""
    for position, step in enumerate(steps, 1):
        found, inner = _follow(tree, (str(step) if isinstance(tree, dict) else step,))
        if found and isinstance(tree, (dict, list)):
            path, tree = member_path(path, str(step) if isinstance(tree, dict) else step), inner
        elif missing and position == len(steps):
            path = member_path(path, step)
    return path


def _without_values(text: str) -> str:
    """The text of a serialization error; pydantic's warnings quote the value, so only what was expected is kept."""
    if text.startswith("Pydantic serializer warnings"):
        expected = re.search(r"Expected `([^`]*)`", text)
        return f"a field is not of its type, {expected[1] if expected else 'as annotated'}"
    return printable(text, PROBLEM_LENGTH_MAX)
