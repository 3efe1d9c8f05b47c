"""Participants that the configuration names: known from the start, without a registration.

    [participants.bank]
    addresses = ["10.0.0.5:7801", "10.0.0.6:7801"]
    actions = ["debit", "credit"]

As an environment variable or a flag it is the same as JSON.
"""

from __future__ import annotations

import json
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from .errors import InvalidRequest
from .wire import ADDRESS_CHARS_MAX, check_name
from .wire_registry import ACTIONS_MAX, is_address

ADDRESSES_MAX = 64
PARTICIPANTS_MAX = 1_000


def _name(text: str) -> str:
    try:
        check_name("name", text)
    except InvalidRequest as error:
        raise ValueError(error.violations[0].description) from error
    return text


def _address(text: str) -> str:
    if not is_address(text):
        raise ValueError(f"must be host:port with at most {ADDRESS_CHARS_MAX} characters")
    return text


def _each_once(texts: tuple[str, ...]) -> tuple[str, ...]:
    twice = sorted({text for text in texts if texts.count(text) > 1})
    if twice:
        raise ValueError(f"names {', '.join(twice)} twice")
    return texts


def _read(value: object) -> object:
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=_no_key_twice)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"must be JSON: {error}") from error
    if isinstance(value, dict):
        _each_once(tuple(str(name).strip() for name in value))  # blanks around a name do not count
    return value


def _no_key_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    _each_once(tuple(key for key, _ in pairs))
    return dict(pairs)


_Name: TypeAlias = Annotated[str, AfterValidator(_name)]
_Address: TypeAlias = Annotated[str, AfterValidator(_address)]


class StaticParticipant(BaseModel):
    """A participant's instances, all of which can do the same."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)

    addresses: Annotated[tuple[_Address, ...], AfterValidator(_each_once)] = Field(
        min_length=1, max_length=ADDRESSES_MAX, description="host:port of each instance"
    )
    actions: Annotated[tuple[_Name, ...], AfterValidator(_each_once)] = Field(
        min_length=1, max_length=ACTIONS_MAX, description="what each instance can do"
    )


StaticParticipants: TypeAlias = Annotated[
    dict[_Name, StaticParticipant], BeforeValidator(_read), Field(max_length=PARTICIPANTS_MAX)
]
"""The setting: participants by name."""
