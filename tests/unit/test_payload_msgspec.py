"""msgspec Structs as payloads: msgspec's strict mode, and what the SDK adds to it."""

import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, TypeVar
from uuid import UUID

import msgspec
import pydantic
import pytest
from msgspec import UNSET, Meta, Struct, UnsetType

from participant_sdk.payload import PayloadError, UnsupportedType, codec_for, encode
from tests.unit.payload_types import Color, Money, Pair, Weight, read, refusal

T = TypeVar("T")


class Line(Struct):
    sku: str
    amount: Annotated[int, Meta(gt=0)] = 1


class Cat(Struct, tag=True):
    lives: int


class Dog(Struct, tag="dog"):
    name: str


class Row(Struct, array_like=True, tag="row"):
    key: int
    names: set[str] = set()


class Order(Struct, rename="camel", kw_only=True):
    number: str
    total: Decimal
    lines: list[Line] = []
    made_at: datetime = datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    day: date = date(2030, 1, 2)
    hour: time = time(3, 4)
    wait: timedelta = timedelta(seconds=90)
    token: UUID = UUID(int=7)
    color: Color = Color.BLUE
    kind: Literal["new", "old"] = "new"
    weight: float = 1.5
    blob: bytes = b"\x00\xff"
    note: str | None = None
    left_out: int | UnsetType = UNSET
    either: int | str = 1
    pet: Cat | Dog | None = None
    pair: Pair | None = None
    by_number: dict[int, Line] = {}
    by_token: dict[UUID, int] = {}
    by_name: dict[str, dict[str, list[Line]]] = {}
    tags: set[str] = set()
    money: Money | None = None
    parcel: Weight | None = None
    row: Row | None = None
    anything: Any = None


class Tree(Struct):
    children: "list[Tree]" = []


class Envelope(Struct, Generic[T]):
    body: T


class Checked(Struct):
    amount: int

    def __post_init__(self) -> None:
        if self.amount == 13:
            raise ValueError("13 brings no luck - at `home`")
        if self.amount == 14:
            raise KeyError("fourteen")


ORDER = Order(
    number="A-1",
    total=Decimal("10.50"),
    lines=[Line("x"), Line("ö", 2)],
    note="hi",
    either="2",
    pet=Dog("Rex"),
    pair=Pair(1, "r"),
    by_number={2: Line("b"), 1: Line("a")},
    by_token={UUID(int=1): 1},
    by_name={"a": {"b": [Line("c")]}},
    tags={"b", "a"},
    money={"cents": 5},
    parcel=Weight(1500),
    row=Row(1, {"b", "a"}),
    anything={"a": [1, None, 2.5]},
)


def test_a_struct_survives_the_round_trip() -> None:
    payload = encode(ORDER)
    assert payload.content_type == "application/json"
    assert b'"total":"10.50"' in payload.data
    assert b'"madeAt":"2030-01-02T03:04:05.000678Z"' in payload.data
    assert b"leftOut" not in payload.data
    assert payload.decode(Order) == ORDER
    assert encode(payload.decode(Order)) == payload


def test_generic_recursive_and_array_like_structs() -> None:
    assert encode(Envelope(1)).decode(Envelope[int]) == Envelope(1)
    assert refusal(Envelope[int], '{"body":"1"}') == "body is not valid: Expected `int`, got `str`"
    tree = Tree([Tree(), Tree([Tree()])])
    assert encode(tree).decode(Tree) == tree
    assert encode(Row(1, {"b", "a"})).data == b'["row",1,["a","b"]]'
    assert encode(Row(1)).decode(Row) == Row(1)
    assert refusal(Row, '["row",1,[],5]') == "[3] is not a known field"
    assert refusal(Row, '["row","1"]') == "[1] is not valid: Expected `int`, got `str`"


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("number", 5, "number is not valid: Expected `str`, got `int`"),
        ("total", "1,5", "total is not valid: Invalid decimal string"),
        ("total", "NaN", "total is 'NaN', wanted a decimal number"),
        ("lines", [{"sku": "x"}, {}], "lines[1].sku is missing"),
        ("lines", [{"sku": "x", "amount": "2"}], "lines[0].amount is not valid: Expected `int`, got `str`"),
        ("lines", [{"sku": "x", "amount": True}], "lines[0].amount is not valid: Expected `int`, got `bool`"),
        ("lines", [{"sku": "x", "amount": 1.0}], "lines[0].amount is not valid: Expected `int`, got `float`"),
        ("lines", [{"sku": "x", "amount": 0}], "lines[0].amount is not valid: Expected `int` >= 1"),
        ("lines", [{"sku": "x", "amuont": 2}], "lines[0].amuont is not a known field"),
        ("lines", {}, "lines is not valid: Expected `array`, got `object`"),
        ("madeAt", 5, "madeAt is not valid: Expected `datetime`, got `int`"),
        ("made_at", "2030-01-02T03:04:05Z", "made_at is not a known field"),
        ("token", "7", "token is not valid: Invalid UUID"),
        ("color", "green", "color is not valid: Invalid enum value 'green'"),
        ("kind", "older", "kind is not valid: Invalid enum value 'older'"),
        ("weight", "1", "weight is not valid: Expected `float`, got `str`"),
        ("weight", 10**400, "weight is not valid: Number out of range"),
        ("blob", "%%", "blob is not valid: Invalid base64 encoded string"),
        ("note", 1, "note is not valid: Expected `str | null`, got `int`"),
        ("pet", {"type": "cow"}, "pet.type is not valid: Invalid value 'cow'"),
        ("pet", {"type": "Cat"}, "pet.lives is missing"),
        ("pet", {"type": "Cat", "lives": 7, "tail": 1}, "pet.tail is not a known field"),
        ("pair", [1], "pair is not valid: Expected `array` of length 2"),
        ("byNumber", {"2": {"sku": "x"}, "1": {}, "3": {"sku": "x"}}, "byNumber.1.sku is missing"),
        ("byNumber", {"1": {"sku": "x"}, "one": {"sku": "x"}}, "byNumber.one is not a valid name: Expected `int`"),
        ("byToken", {f"{UUID(int=10)}": 1, f"{UUID(int=10)}".upper(): 2}, "byToken has different names for the same"),
        ("byName", {"a": {}, "b": {"c": [], "d": [{"sku": "x"}, {"sku": 1}]}}, "byName.b.d[1].sku is not valid: Exp"),
        ("byName", {"a": {}, "b": {"c": [], "d": [{"sku": "x", "e": 1}]}}, "byName.b.d[0].e is not a known field"),
        ("tags", "ab", "tags is not valid: Expected `array`, got `str`"),
        ("tags", ["a", 1], "tags[1] is not valid: Expected `str`, got `int`"),
        ("money", {"cents": 1, "euros": 1}, "money.euros is not a known field"),
        ("money", {}, "money.cents is missing"),
        ("parcel", {"grams": 1, "kilos": 1.0, "tons": 1}, "parcel.tons is not a known field"),
        ("row", ["row", 1, [], 5], "row[3] is not a known field"),
        ("nmuber", "A-2", "nmuber is not a known field"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(field: str, value: Any, problem: str) -> None:
    text = json.dumps({"number": "A-1", "total": "1", field: value})
    assert refusal(Order, text).startswith(problem)


class Forbidding(Struct, forbid_unknown_fields=True):
    a: int = 1


def test_a_struct_that_forbids_unknown_fields_itself() -> None:
    assert refusal(Forbidding, '{"b":1}') == "b is not a known field"
    assert refusal(Envelope[list[Forbidding]], '{"body":[{},{"b":1}]}') == "body[1].b is not a known field"


def test_a_bad_entry_of_a_large_dict_is_found_and_the_payload_left_as_it_was() -> None:
    entries: dict[str, Any] = {f"k{number}": number for number in range(5_000)}
    entries["k3210"] = "x"
    entries["k4321"] = "x"
    tree = {"body": entries}
    assert refusal(Envelope[dict[str, int]], json.dumps(tree)).startswith("body.k3210 is not valid: Expected `int`")

    @dataclasses.dataclass
    class Either:
        one: Envelope[dict[str, int]] | Envelope[dict[str, Any]]

    assert list(read(Either, json.dumps({"one": tree})).one.body.items()) == list(entries.items())


def test_a_bad_entry_that_does_not_fail_alone_stays_unnamed() -> None:
    kind = Envelope[Annotated[dict[str, int], Meta(min_length=2)]]
    assert refusal(kind, '{"body":{"a":1,"b":"x"}}') == "body[...] is not valid: Expected `int`, got `str`"


def test_errors_are_short() -> None:
    secret = "4111 1111 1111 1111 " * 20
    for text in (json.dumps({"sku": {secret: secret}, "amount": secret}), json.dumps({"sku": "x", secret: secret})):
        problem = refusal(Line, text)
        assert problem.count("4111") <= 20  # of a name, that is; never of a value
        assert len(problem) < 300
    assert "4111" not in refusal(Line, json.dumps({"sku": "x", "amount": secret}))
    assert len(refusal(Envelope[Color], json.dumps({"body": secret}))) < 250


@pytest.mark.parametrize("text", ["", "[]", "null", "5", "{", '{"sku":"x","sku":"y"}', '{"sku":"x","amount":NaN}'])
def test_what_is_no_object_is_refused(text: str) -> None:
    assert refusal(Line, text).startswith(("payload is", "payload holds", "sku is given twice"))


def test_however_a_struct_says_no_the_payload_is_invalid() -> None:
    kind = Envelope[list[Checked]]
    assert refusal(kind, '{"body":[{"amount":13}]}') == "body[0] is not valid: 13 brings no luck - at `home`"
    assert refusal(kind, '{"body":[{"amount":14}]}') == "payload is not a valid Envelope: 'fourteen'"


@pytest.mark.parametrize("error", [OSError("no disk"), MemoryError()])
def test_a_machine_in_trouble_refuses_nothing(error: Exception) -> None:
    class Unlucky(Struct):
        a: int

        def __post_init__(self) -> None:
            raise error

    with pytest.raises(type(error)):
        read(Unlucky, '{"a":1}')


def test_equal_values_give_equal_bytes() -> None:
    class Sets(Struct, omit_defaults=True):
        names: frozenset[str]
        nested: set[frozenset[str]]
        anything: Any
        by_name: dict[str, int]
        left_out: int = 1

    def value(order: Callable[[list[str]], list[str]]) -> Sets:
        names = order([str(number) for number in range(200)])
        return Sets(
            names=frozenset(names),
            nested={frozenset(order(["0", "1", "2"])), frozenset(), frozenset(order(["8", "9"]))},
            anything=[{"x": set(names)}],
            by_name=dict.fromkeys(names, 1),
        )

    one, other = value(lambda names: names), value(lambda names: names[::-1])
    assert encode(one) == encode(other)
    plain = json.loads(encode(one).data)
    assert plain["names"] == sorted(plain["names"]) == plain["anything"][0]["x"]
    assert plain["nested"] == [["0", "1", "2"], ["8", "9"], []]
    assert "left_out" not in plain
    assert encode(one).decode(Sets).nested == one.nested


@pytest.mark.parametrize("value", [float("nan"), float("inf"), Decimal("Infinity"), Decimal("NaN")])
def test_what_json_cannot_hold_is_not_sent(value: Any) -> None:
    for holder, path in ((Envelope(value), "body"), (Envelope({"a": [{value}]}), r"body\.a\[0\]\[0\]")):
        with pytest.raises(ValueError, match=rf"{path} is (nan|inf|NaN|Infinity), which JSON cannot hold"):
            encode(holder)


def test_keys_that_become_one_name_are_not_sent() -> None:
    with pytest.raises(ValueError, match="body has keys that become the same name"):
        encode(Envelope({1: 1, "1": 2}))


def test_what_cannot_be_written_is_a_type_or_value_error() -> None:
    endless = Tree()
    endless.children = [endless]
    for value in (endless, Envelope(object()), Envelope(msgspec.Raw(b"1")), Envelope("\ud800")):
        with pytest.raises((TypeError, ValueError), match=r"cannot be written: |nested too deeply|surrogates"):
            encode(value)


@pytest.mark.parametrize("number", ["12345678901234567.89", "1e-400", "1e-99999999999999999999", "9007199254740993.0"])
def test_a_decimal_loses_no_digits(number: str) -> None:
    for text, kind, path in (
        (f'{{"body":{number}}}', Envelope[Decimal], "body"),
        (f'{{"body":[1,{number}]}}', Envelope[set[Decimal]], "body"),
        (f'{{"body":{{"1":[1,{number}]}}}}', Envelope[dict[int, list[Decimal]]], "body.1[1]"),
    ):
        assert refusal(kind, text) == f"{path} is a number with more digits than can be read: send it as a string"
    assert read(Envelope[float], f'{{"body":{number}}}').body == float(number)


@pytest.mark.parametrize("number", ["10.10", "123456789012345.25", "123456789012345678901234567890"])
def test_a_decimal_that_loses_none_may_be_a_number(number: str) -> None:
    assert read(Envelope[list[Decimal]], f'{{"body":[{number},"{number}"]}}').body == [Decimal(number)] * 2


def test_pathological_nesting_is_a_payload_error() -> None:
    for depth in (900, 5_000, 100_000):
        text = '{"children":[' * depth + "]}" * depth
        assert refusal(Tree, text) == "payload is nested too deeply"

    class Endless(Struct):
        a: int

        def __post_init__(self) -> None:
            self.__post_init__()

    assert refusal(Endless, '{"a":1}') == "payload is nested too deeply"


class Model(pydantic.BaseModel):
    a: int


class Stranger:
    pass


class Frozen(Struct, frozen=True):
    a: int


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Model, "{}.body is of type Model, which msgspec cannot read from JSON"),
        (dict[str, list[Model | None]], "{}.body is of type Model, which msgspec cannot read from JSON"),
        (Envelope[Stranger], r"{}.body.body is of type Stranger, which msgspec cannot read from JSON"),
        (msgspec.Raw, "{}.body is of type RawType"),
        (set[Frozen], "{}.body is a set of objects"),
        (frozenset[tuple[int, Frozen]], "{}.body is a set of objects"),
        (Cat | Frozen, "{} cannot be read by msgspec: If a type union contains multiple Struct"),
    ],
)
def test_types_that_msgspec_cannot_read_are_found_at_once(kind: Any, problem: str) -> None:
    with pytest.raises(UnsupportedType) as caught:
        codec_for(Envelope[kind])
    assert str(caught.value).startswith(problem.format("Envelope"))


def test_an_annotation_that_cannot_be_looked_up_is_told() -> None:
    class Lost(Struct):
        a: "Nowhere"  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(UnsupportedType, match=r"Lost cannot be read by msgspec: .*Nowhere"):
        codec_for(Lost)


def test_names_that_look_like_msgspecs_own_paths() -> None:
    class Odd(Struct):
        a: int = msgspec.field(name="a.b[0]` in `$")

    for text in ('{"a.b[0]` in `$":"x"}', "{}"):
        with pytest.raises(PayloadError):
            read(Odd, text)
    assert read(Odd, '{"a.b[0]` in `$":1}').a == 1
