"""Unknown fields in pydantic models: refused, except by a model whose author chose otherwise."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import pydantic
import pytest
from pydantic import AliasPath, BaseModel, ConfigDict, Field, RootModel

from participant_sdk import payload_pydantic
from participant_sdk.payload import PayloadError, UnsupportedType, codec_for, encode
from participant_sdk.payload_parts import check_kept
from tests.unit.payload_types import Money, Weight, read, refusal

T = TypeVar("T")


class Line(BaseModel):
    sku: str


class Envelope(BaseModel, Generic[T]):
    body: T


class Aliased(BaseModel):
    amount: int = Field(alias="Amount")


class Ignoring(BaseModel):
    model_config = ConfigDict(extra="ignore")
    line: Line | None = None


class Allowing(BaseModel):
    model_config = ConfigDict(extra="allow")
    line: Line | None = None


class Mixed(BaseModel):
    a: int
    ignoring: Ignoring = Ignoring()
    allowing: Allowing = Allowing()
    plain: Envelope[int] | None = None
    parcel: Weight | None = None
    money: Money | None = None
    aliased: Aliased | None = None
    by_name: dict[str, Line] = {}
    lines: tuple[Line, ...] = ()
    root: RootModel[list[Line]] = RootModel[list[Line]]([])


def test_an_explicit_choice_to_tolerate_unknown_fields_is_kept() -> None:
    assert read(Ignoring, '{"b":1}') == Ignoring()
    value = read(Allowing, '{"b":{"c":1}}')
    assert value.model_extra == {"b": {"c": 1}}
    assert encode(value).decode(Allowing) == value
    assert read(Mixed, '{"a":1,"ignoring":{"b":1},"allowing":{"c":2}}').allowing.model_extra == {"c": 2}


MIXED_REFUSALS = [
    ('"b":1', "b is not a known field"),
    ('"ignoring":{"b":1,"line":{"sku":"x","b":1}}', "ignoring.line.b is not a known field"),
    ('"allowing":{"line":{"sku":"x","b":1}}', "allowing.line.b is not a known field"),
    ('"plain":{"body":1,"bdoy":2}', "plain.bdoy is not a known field"),
    ('"parcel":{"grams":1,"b":1}', "parcel.b is not a known field"),
    ('"parcel":{"grams":1,"kilos":1.0}', "parcel.kilos is not a known field"),
    ('"money":{"cents":1,"b":1}', "money.b is not a known field"),
    ('"aliased":{"Amount":1,"amount":1}', "aliased.amount is not a known field"),
    ('"by_name":{"x":{"sku":"x"},"y":{"sku":"y","b":1}}', "by_name.y.b is not a known field"),
    ('"lines":[{"sku":"x"},{"sku":"y","b":1}]', "lines[1].b is not a known field"),
    ('"root":[{"sku":"x"},{"sku":"y","b":1}]', "root[1].b is not a known field"),
]


@pytest.mark.parametrize(("fields", "problem"), MIXED_REFUSALS)
def test_it_is_kept_for_that_model_alone(fields: str, problem: str) -> None:
    assert refusal(Mixed, f'{{"a":1,{fields}}}') == problem


@pytest.mark.parametrize("choice", ["ignore", "allow"])
def test_a_choice_is_inherited(choice: Literal["ignore", "allow"]) -> None:
    class House(BaseModel):
        model_config = ConfigDict(extra=choice)

    class Room(House):
        a: int

    assert read(Room, '{"a":1,"b":2}').a == 1


def test_a_pydantic_dataclass_has_the_same_choice() -> None:
    @pydantic.dataclasses.dataclass(config=ConfigDict(extra="ignore"))
    class Tolerant:
        line: Line

    assert read(Tolerant, '{"line":{"sku":"x"},"b":1}').line.sku == "x"
    assert refusal(Tolerant, '{"line":{"sku":"x","b":1}}') == "line.b is not a known field"


def test_names_are_known_by_every_way_to_them() -> None:
    class Both(BaseModel):
        model_config = ConfigDict(populate_by_name=True)
        amount: int = Field(alias="Amount")
        deep: int = Field(1, validation_alias=AliasPath("a", "b"))
        free: Ignoring = Ignoring()

    assert read(Both, '{"amount":1}') == read(Both, '{"Amount":1,"free":{"x":1}}')
    assert read(Both, '{"amount":1,"a":{"b":2}}').deep == 2

    class ByAlias(BaseModel):
        deep: int = Field(1, validation_alias=AliasPath("a", "b"))
        free: Ignoring = Ignoring()

    assert read(ByAlias, '{"a":{"b":2}}').deep == 2
    assert refusal(ByAlias, '{"deep":2}') == "deep is not a known field"


def test_a_set_of_objects_beside_a_tolerant_model_cannot_be_checked() -> None:
    class Frozen(BaseModel):
        model_config = ConfigDict(frozen=True)
        a: int

    class Strict(BaseModel):
        them: set[Frozen]

    class Tolerant(Strict):
        model_config = ConfigDict(extra="ignore")

    assert read(Strict, '{"them":[{"a":1},{"a":2}]}').them == {Frozen(a=1), Frozen(a=2)}
    assert refusal(Strict, '{"them":[{"a":1,"b":1}]}') == "them[0].b is not a known field"
    with pytest.raises(UnsupportedType, match=r"Tolerant has a set of objects.*use a list"):
        codec_for(Tolerant)


def test_fields_named_like_words_of_a_schema() -> None:
    class Words(BaseModel):
        type: int
        metadata: Line
        default: Ignoring

    assert refusal(Words, '{"type":1,"metadata":{"sku":"x","b":1},"default":{"c":1}}') == (
        "metadata.b is not a known field"
    )


def test_defaults_are_no_schemas() -> None:
    endless: dict[str, Any] = {"type": "model", "custom_init": True, "cls": int, "extra_behavior": "ignore"}
    endless["endless"] = endless

    class Defaults(BaseModel):
        a: dict[str, Any] = endless

    assert refusal(Defaults, '{"b":1}') == "b is not a known field"


def test_with_pydantic_before_2_12_names_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_pydantic, "_CAN_FORBID", False)
    decode = payload_pydantic.decoder(Envelope[dict[str, list[Line]]])
    tree: dict[str, Any] = {"body": {"x": [{"sku": "x"}, {"sku": "y"}]}}
    assert decode(tree, "").body == {"x": [Line(sku="x"), Line(sku="y")]}
    tree["body"]["x"][1]["b"] = 1
    with pytest.raises(PayloadError, match=r"^here\.body\.x\[1\]\.b is not a known field$"):
        decode(tree, "here")


def test_values_that_a_validator_reshapes_are_left_alone() -> None:
    check_kept([1], {"a": 1}, "", lambda value, tree: None)

    class Reshaped(BaseModel):
        line: Line
        total: int = 0

        @pydantic.model_validator(mode="before")
        @classmethod
        def rename(cls, found: Any) -> Any:
            return {"line": {"sku": found["old"]}, "total": found.get("sum", 0)}

        @pydantic.field_validator("line", mode="after")
        @classmethod
        def change(cls, line: Line) -> Any:
            return line.sku

    assert read(Reshaped, '{"old":"x"}').line == "x"
