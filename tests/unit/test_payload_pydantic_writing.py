"""pydantic models written as payloads: by alias, the same bytes each time, and nothing lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Generic, TypeVar

import pydantic
import pytest
from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, Json, SecretStr

from participant_sdk.payload import encode
from tests.unit.payload_types import Weight, read, refusal

T = TypeVar("T")


class Line(BaseModel):
    sku: str
    amount: int = 1


class Tree(BaseModel):
    children: list[Tree] = []


class Envelope(BaseModel, Generic[T]):
    body: T


class Aliased(BaseModel):
    model_config = ConfigDict(alias_generator=lambda name: name.title(), serialize_by_alias=True)

    amount: int
    other: int = Field(2, alias="else")
    nested: int = Field(3, validation_alias=AliasChoices(AliasPath("in", "it", 0), "out"), serialization_alias="out")


def test_aliases_are_honoured_both_ways() -> None:
    value = Aliased.model_validate({"Amount": 1, "else": 5, "out": 6})
    assert encode(value).data == b'{"Amount":1,"else":5,"out":6}'
    assert encode(value).decode(Aliased) == value
    assert read(Aliased, '{"Amount":1,"in":{"it":[7]}}').nested == 7
    assert refusal(Aliased, '{"amount":1}') == "Amount is missing (and 1 more)"
    assert (
        refusal(Aliased, '{"Amount":1,"in":{"it":["x"]}}') == "in.it[0] is not valid: Input should be a valid integer"
    )


def test_what_follows_from_other_fields_is_not_sent() -> None:
    class Sum(BaseModel):
        a: int
        parcel: Weight
        inner: Json[list[int]]

        @pydantic.computed_field
        def double(self) -> int:
            return 2 * self.a

    value = Sum.model_validate({"a": 3, "parcel": Weight(5), "inner": "[1]"})
    assert encode(value).data == b'{"a":3,"inner":"[1]","parcel":{"grams":5}}'
    assert encode(value).decode(Sum) == value


def test_a_choice_of_names_is_kept() -> None:
    class ByName(BaseModel):
        model_config = ConfigDict(serialize_by_alias=False, validate_by_name=True)
        amount: int = Field(alias="Amount")

    value = ByName.model_validate({"amount": 1})
    assert encode(value).data == b'{"amount":1}'
    assert encode(value).decode(ByName) == value


def test_equal_values_give_equal_bytes() -> None:
    class Sets(BaseModel):
        names: frozenset[str]
        nested: set[frozenset[str]]
        anything: Any
        by_name: dict[str, int]

    def value(order: Callable[[list[str]], list[str]]) -> Sets:
        names = order([str(number) for number in range(200)])
        return Sets(
            names=frozenset(names),
            nested={frozenset(names[:3]), frozenset(names[-3:]), frozenset()},
            anything=[{"x": set(names)}],
            by_name=dict.fromkeys(names, 1),
        )

    one, other = value(lambda names: names), value(lambda names: names[3:] + names[:3])
    other.nested = {*reversed(list(one.nested))}
    assert encode(one) == encode(other)
    plain = json.loads(encode(one).data)
    assert plain["names"] == sorted(plain["names"]) == plain["anything"][0]["x"]
    assert plain["nested"] == [["0", "1", "2"], ["197", "198", "199"], []]
    assert encode(one).decode(Sets).nested == one.nested


def test_inner_sets_are_put_in_order_before_outer_ones() -> None:
    for inner in (frozenset([0, 8]), frozenset([8, 0])):  # equal, and iterated in different orders
        value = Envelope[set[frozenset[int]]](body={inner, frozenset([1])})
        assert encode(value).data == b'{"body":[[0,8],[1]]}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), Decimal("Infinity"), Decimal("NaN")])
def test_what_json_cannot_hold_is_not_sent(value: Any) -> None:
    class Holder(BaseModel):
        weight: Annotated[float, Field(allow_inf_nan=True)] = 1.0
        anything: Any = None

    for holder in (Holder.model_construct(weight=value), Holder(anything={"a": [value]})):
        with pytest.raises(ValueError, match=r"weight is|anything\.a\[0\] is|is not of its type"):
            encode(holder)


def test_values_of_other_types_than_annotated_are_not_sent() -> None:
    line = Line(sku="x")
    line.amount = "a secret"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="Line cannot be written: a field is not of its type, int") as caught:
        encode(line)
    assert "secret" not in str(caught.value)


def test_a_secret_is_not_sent_as_asterisks() -> None:
    class Card(BaseModel):
        number: SecretStr

    class Open(Card):
        @pydantic.field_serializer("number")
        def write(self, number: SecretStr) -> str:
            return number.get_secret_value()

    with pytest.raises(ValueError, match="number is a secret"):
        encode(Card(number=SecretStr("4111")))
    assert encode(Open(number=SecretStr("4111"))).decode(Open).number.get_secret_value() == "4111"


def test_keys_that_become_one_name_are_not_sent() -> None:
    with pytest.raises(ValueError, match="body has keys that become the same name"):
        encode(Envelope[dict[int | str, int]](body={1: 1, "1": 2}))


def test_what_cannot_be_written_is_a_value_error() -> None:
    endless = Tree()
    endless.children = [endless]
    unknown = Envelope[Any](body=object())
    for value in (endless, unknown, Envelope[bytes](body=b"\xff")):
        with pytest.raises(ValueError, match=r"cannot be written: |nested too deeply"):
            encode(value)
