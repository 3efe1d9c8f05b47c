"""What holds for every payload: what is written is read again, and what is not one is a PayloadError, nothing else."""

import contextlib
import dataclasses
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from participant_sdk.payload import Payload, PayloadError, codec_for, encode


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    name: Annotated[str, pydantic.Field(alias="Name")]


class Model(pydantic.BaseModel):
    number: str
    total: Decimal
    count: Annotated[int, pydantic.Field(ge=0, alias="Count")]
    weight: float | None
    at: datetime
    day: date
    token: UUID
    color: Color
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")] | None
    by_number: dict[int, list[str]]
    tags: frozenset[str]
    either: int | bool | str
    children: "list[Model]" = []


class StructCat(msgspec.Struct, tag="cat", frozen=True):
    lives: int


class StructDog(msgspec.Struct, tag="dog", frozen=True):
    name: str


class Struct(msgspec.Struct, rename="camel"):
    number: str
    total: Decimal
    count_all: Annotated[int, msgspec.Meta(ge=0)]
    weight: float | None
    at: datetime
    day: date
    token: UUID
    color: Color
    pet: StructCat | StructDog | None
    by_number: dict[int, list[str]]
    tags: frozenset[str]
    either: int | bool | str
    children: "list[Struct]" = []


@dataclasses.dataclass
class Both:
    model: Model | None
    structs: dict[str, Struct]


class Loose(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    model: Model | None = None
    number: int = 1


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
decimals = st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**20), max_value=10**20)
common: dict[str, st.SearchStrategy[Any]] = {
    "number": text,
    "total": decimals,
    "weight": st.none() | st.floats(allow_nan=False, allow_infinity=False),
    "at": st.datetimes(timezones=st.just(UTC)) | st.datetimes(),
    "day": st.dates(),
    "token": st.uuids(),
    "color": st.sampled_from(Color),
    "by_number": st.dictionaries(st.integers(-(2**70), 2**70), st.lists(text, max_size=2), max_size=3),
    "tags": st.frozensets(text, max_size=4),
    "either": st.integers(-(2**70), 2**70) | st.booleans() | text,
}
counts = st.integers(0, 2**70)
cats, dogs = st.integers(0, 9), text
models = st.recursive(
    st.builds(Model, Count=counts, pet=st.none() | st.builds(Cat, lives=cats) | st.builds(Dog, Name=dogs), **common),
    lambda inner: st.builds(
        lambda model, children: model.model_copy(update={"children": children}), inner, st.lists(inner, max_size=2)
    ),
    max_leaves=4,
)
structs = st.recursive(
    st.builds(
        Struct, count_all=counts, pet=st.none() | st.builds(StructCat, cats) | st.builds(StructDog, dogs), **common
    ),
    lambda inner: st.builds(
        lambda struct, children: msgspec.structs.replace(struct, children=children), inner, st.lists(inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(deadline=None, max_examples=150)
@given(st.one_of(models, structs, st.builds(Both, st.none() | models, st.dictionaries(text, structs, max_size=2))))
def test_what_is_written_is_read_again_and_written_the_same(value: Any) -> None:
    payload = encode(value)
    found = payload.decode(type(value))
    assert found == value
    assert encode(found) == payload


trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | text
    | st.sampled_from(["cat", "1", "red", "2030-01-02"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            text | st.sampled_from(["kind", "type", "pet", "tags", "children", "model", "structs"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)
KINDS: list[Any] = [Model, Struct, Both, Loose, dict[str, Struct], pydantic.RootModel[list[Model]]]


def read_or_refuse(data: bytes) -> None:
    for kind in KINDS:
        with contextlib.suppress(PayloadError):
            encode(codec_for(kind).decode(Payload(data, "application/json")))


@settings(deadline=None, max_examples=300)
@given(trees)
@example([])
@example({"structs": {}, "model": None})
def test_any_json_is_read_or_refused(tree: Any) -> None:
    read_or_refuse(json.dumps(tree).encode())


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=40) | st.text('[]{}",:0123456789.eE+-\\u', max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    read_or_refuse(data)


@settings(deadline=None, max_examples=200)
@given(st.one_of(models, structs), st.data())
def test_a_payload_with_one_part_exchanged_is_read_or_refused(value: Any, data: st.DataObject) -> None:
    tree = json.loads(encode(value).data)
    node = tree
    while True:
        steps = list(node) if isinstance(node, dict) else list(range(len(node)))
        step = data.draw(st.sampled_from(steps))
        if not isinstance(node[step], (dict, list)) or not node[step] or data.draw(st.booleans()):
            break
        node = node[step]
    action = data.draw(st.sampled_from(["exchange", "remove", "add"]))
    if action == "exchange":
        node[step] = data.draw(trees)
    elif action == "remove":
        del node[step]
    elif isinstance(node, dict):
        node["not a field"] = data.draw(trees)
    try:
        payload = Payload(json.dumps(tree).encode(), "application/json")
        found = codec_for(type(value)).decode(payload)
    except PayloadError:
        return
    assert encode(found).decode(type(value)) == found


@settings(deadline=None, max_examples=100)
@given(st.one_of(models, structs))
def test_no_unknown_field_is_accepted_anywhere(value: Any) -> None:
    tree = json.loads(encode(value).data)
    objects = [tree]
    for found in objects:
        objects.extend(found.get("children", []))
        if found.get("pet"):
            objects.append(found["pet"])
    for found in objects:
        found["unknown"] = 1
        with pytest.raises(PayloadError, match=r"unknown is not a known field$"):
            codec_for(type(value)).decode(Payload(json.dumps(tree).encode(), "application/json"))
        del found["unknown"]
