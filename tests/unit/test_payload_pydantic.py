"""pydantic models as payloads: pydantic's strict JSON mode, and what the SDK adds to it."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, TypeVar
from uuid import UUID

import msgspec
import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel
from pydantic.dataclasses import dataclass as pydantic_dataclass

from participant_sdk.payload import UnsupportedType, codec_for, encode
from tests.unit.payload_types import Color, Money, Pair, Weight, read, refusal

T = TypeVar("T")


class Line(BaseModel):
    sku: str
    amount: Annotated[int, Field(gt=0)] = 1


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Order(BaseModel):
    number: str
    total: Decimal
    lines: list[Line] = []
    at: datetime = datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    day: date = date(2030, 1, 2)
    hour: time = time(3, 4)
    wait: timedelta = timedelta(seconds=90)
    token: UUID = UUID(int=7)
    color: Color = Color.BLUE
    weight: float = 1.5
    note: str | None = None
    either: int | str = 1
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None
    pair: Pair | None = None
    by_number: dict[int, Line] = {}
    tags: set[str] = set()
    recent: deque[int] = deque()
    money: Money | None = None
    parcel: Weight | None = None
    anything: Any = None


class Tree(BaseModel):
    children: list[Tree] = []


class Envelope(BaseModel, Generic[T]):
    body: T


class Checked(BaseModel):
    amount: int

    @pydantic.field_validator("amount")
    @classmethod
    def check(cls, amount: int) -> int:
        if amount == 13:
            raise ValueError("13 brings no luck")
        assert amount != 14, "14 is asserted"
        return 1 // (amount - 15) if amount == 15 else amount


ORDER = Order(
    number="A-1",
    total=Decimal("10.50"),
    lines=[Line(sku="x"), Line(sku="ö", amount=2)],
    note="hi",
    either="2",
    pet=Dog(name="Rex"),
    pair=Pair(1, "r"),
    by_number={2: Line(sku="b"), 1: Line(sku="a")},
    tags={"b", "a"},
    recent=deque([2, 1]),
    money={"cents": 5},
    parcel=Weight(1500),
    anything={"a": [1, None, 2.5]},
)


def test_a_model_survives_the_round_trip() -> None:
    payload = encode(ORDER)
    assert payload.content_type == "application/json"
    assert b'"total":"10.50"' in payload.data
    assert payload.decode(Order) == ORDER
    assert encode(payload.decode(Order)) == payload


def test_generic_recursive_and_root_models() -> None:
    assert encode(Envelope[int](body=1)).decode(Envelope[int]) == Envelope[int](body=1)
    assert refusal(Envelope[int], '{"body":"1"}') == "body is not valid: Input should be a valid integer"
    tree = Tree(children=[Tree(), Tree(children=[Tree()])])
    assert encode(tree).decode(Tree) == tree
    root = RootModel[list[Line]]([Line(sku="x")])
    assert encode(root).decode(RootModel[list[Line]]) == root
    assert refusal(RootModel[list[Line]], '[{"sku":"x"},{"sku":1}]') == (
        "[1].sku is not valid: Input should be a valid string"
    )


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("number", 5, "number is not valid: Input should be a valid string"),
        ("total", "1,5", "total is not valid: Input should be a valid decimal"),
        ("total", "NaN", "total is not valid: Input should be a finite number"),
        ("lines", [{"sku": "x"}, {}], "lines[1].sku is missing"),
        ("lines", [{"sku": "x", "amount": "2"}], "lines[0].amount is not valid: Input should be a valid integer"),
        ("lines", [{"sku": "x", "amount": 0}], "lines[0].amount is not valid: Input should be greater than 0"),
        ("lines", [{"sku": "x", "amuont": 2}], "lines[0].amuont is not a known field"),
        ("lines", {}, "lines is not valid: Input should be a valid array"),
        ("at", 5, "at is not valid: Input should be a valid datetime"),
        ("token", "7", "token is not valid: Input should be a valid UUID"),
        ("color", "green", "color is not valid: Input should be 'red' or 'blue'"),
        ("weight", "1", "weight is not valid: Input should be a valid number"),
        ("weight", 10**400, "weight is a number that is too large"),
        ("note", 1, "note is not valid: Input should be a valid string"),
        ("either", [], "either is not valid: Input should be a valid integer (and 1 more)"),
        ("pet", {"kind": "cow"}, "pet is not valid: Input tag 'cow' found using 'kind' does not match"),
        ("pet", {"kind": "cat"}, "pet.lives is missing"),
        ("pet", {"kind": "cat", "lives": 7, "cat": 1}, "pet.cat is not a known field"),
        ("pair", [1], "pair[1] is missing"),
        ("by_number", {"1": {}}, "by_number.1.sku is missing"),
        ("by_number", {"one": {"sku": "x"}}, "by_number.one is not a valid name: Input should be a valid integer"),
        ("by_number", {"1": {"sku": "x"}, "01": {"sku": "y"}}, "by_number has different names for the same key"),
        ("tags", "ab", "tags is not valid: Input should be a valid array"),
        ("tags", ["a", 1], "tags[1] is not valid: Input should be a valid string"),
        ("money", {"cents": 1, "euros": 1}, "money.euros is not a known field"),
        ("money", {}, "money.cents is missing"),
        ("parcel", {"grams": 1, "kilos": 2.0}, "parcel.kilos is not a known field"),
        ("parcel", {}, "parcel.grams is missing"),
        ("nmuber", "A-2", "nmuber is not a known field"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(field: str, value: Any, problem: str) -> None:
    text = json.dumps({"number": "A-1", "total": "1", field: value})
    assert refusal(Order, text).startswith(problem)


def test_errors_are_short_and_quote_no_input() -> None:
    secret = "4111 1111 1111 1111 " * 20
    for text in (json.dumps({"sku": {secret: secret}, "amount": secret}), json.dumps({secret: secret})):
        problem = refusal(Line, text)
        assert problem.count("4111") <= 20  # of a name, that is; never of a value
        assert len(problem) < 300
        assert "http" not in problem
    assert "1 more" in refusal(Line, json.dumps({"sku": 1, "amount": "x"}))
    assert "4111" not in refusal(Line, json.dumps({"sku": 1, "amount": secret}))
    path = "children[0]." * 90 + "x"
    deep = '{"children":[' * 90 + '{"x":1}' + "]}" * 90
    assert len(path) > 1000 > 400 > len(refusal(Tree, deep))
    assert refusal(Tree, deep).endswith("children[0].x is not a known field")


@pytest.mark.parametrize("text", ["", "[]", "null", "5", "{", '{"sku":"x","sku":"y"}', '{"sku":"x","amount":NaN}'])
def test_what_is_no_object_is_refused(text: str) -> None:
    assert refusal(Line, text).startswith(("payload is", "payload holds", "sku is given twice"))


def test_a_validator_refuses_with_its_own_words() -> None:
    assert refusal(Checked, '{"amount":13}') == "amount is not valid: 13 brings no luck"
    assert refusal(Checked, '{"amount":14}').startswith("amount is not valid: 14 is asserted")


def test_whatever_else_a_validator_raises_makes_the_payload_invalid() -> None:
    assert refusal(Checked, '{"amount":15}').startswith("payload is not a valid Checked: integer division")


@pytest.mark.parametrize("error", [OSError("no disk"), MemoryError()])
def test_a_machine_in_trouble_refuses_nothing(error: Exception) -> None:
    class Unlucky(BaseModel):
        a: int

        @pydantic.field_validator("a")
        @classmethod
        def check(cls, a: int) -> int:
            raise error

    with pytest.raises(type(error)):
        read(Unlucky, '{"a":1}')


@pydantic_dataclass
class Transfer:
    amount: Annotated[int, Field(gt=0, alias="Amount")]
    lines: list[Line] = dataclasses.field(default_factory=list)
    doubled: int = dataclasses.field(init=False, default=0)


def test_a_pydantic_dataclass_is_read_by_pydantic() -> None:
    value = Transfer(Amount=1, lines=[Line(sku="x")])  # type: ignore[call-arg]
    assert encode(value).data == b'{"Amount":1,"lines":[{"amount":1,"sku":"x"}]}'
    assert encode(value).decode(Transfer) == value
    assert refusal(Transfer, '{"Amount":"1"}') == "Amount is not valid: Input should be a valid integer"
    assert refusal(Transfer, '{"Amount":1,"lines":[{"sku":"x","a":1}]}') == "lines[0].a is not a known field"


class Amounts(BaseModel):
    one: Decimal = Decimal(0)
    some: set[Decimal] = set()
    by_number: dict[int, list[Decimal]] = {}
    inexact: float = 0.0


@pytest.mark.parametrize(
    "number",
    ["12345678901234567.89", "0.1234567890123456789", "1e-400", "1e-99999999999999999999", "9007199254740993.0"],
)
def test_a_decimal_loses_no_digits(number: str) -> None:
    """pydantic reads a JSON number as a float first, and a long one has then become another."""
    for text, path in (
        (f'{{"one":{number}}}', "one"),
        (f'{{"some":[1,{number}]}}', "some"),
        (f'{{"by_number":{{"1":[1,{number}]}}}}', "by_number.1[1]"),
    ):
        assert refusal(Amounts, text) == f"{path} is a number with more digits than can be read: send it as a string"
    assert read(Amounts, f'{{"inexact":{number}}}').inexact == float(number)


@pytest.mark.parametrize("number", ["10.10", "123456789012345.25", "123456789012345678901234567890", "1e-300", "0.0"])
def test_a_decimal_that_loses_none_may_be_a_number(number: str) -> None:
    found = read(Amounts, f'{{"one":{number},"some":[{number}],"by_number":{{"1":[{number}]}},"inexact":1.5}}')
    assert [found.one, *found.some, *found.by_number[1]] == [Decimal(number)] * 3


def test_pathological_nesting_is_a_payload_error() -> None:
    for depth in (150, 900, 5_000, 100_000):
        text = '{"children":[' * depth + "]}" * depth
        assert refusal(Tree, text).endswith("is nested too deeply")


def test_an_error_of_the_recursion_limit_itself() -> None:
    class Endless(BaseModel):
        a: int

        @pydantic.field_validator("a")
        @classmethod
        def check(cls, a: int) -> int:
            return cls.check(a)

    assert refusal(Endless, '{"a":1}') == "payload is nested too deeply"


class Held(msgspec.Struct):
    a: int


class Stranger:
    pass


def test_types_that_pydantic_cannot_read_are_found_at_once() -> None:
    class WithStruct(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        held: list[Held]

    class Optional(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        a: int
        stranger: Annotated[Stranger | None, Field(exclude=True)] = None
        default: Annotated[Stranger, Field(exclude=True)] = Stranger()

    class Init(BaseModel):
        a: int

        def __init__(self, **values: Any) -> None:
            super().__init__(**values)

    with pytest.raises(UnsupportedType, match="WithStruct has a field of type Held, which pydantic cannot read"):
        codec_for(WithStruct)
    assert encode(Optional(a=1)).decode(Optional).a == 1
    with pytest.raises(UnsupportedType, match="Init has an __init__ of its own"):
        codec_for(Envelope[Init])


def test_an_annotation_that_cannot_be_looked_up_is_told() -> None:
    class Lost(BaseModel):
        a: Nowhere  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(UnsupportedType, match="Lost cannot be read by pydantic: "):
        codec_for(Lost)


def test_models_that_are_built_late() -> None:
    class Late(BaseModel):
        model_config = ConfigDict(defer_build=True)
        line: Line

    assert refusal(Late, '{"line":{"sku":"x","b":1}}') == "line.b is not a known field"
