"""Payloads: what is read is exactly what the annotation says, and what is wrong is named by its path."""

from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Annotated, Any, Literal, NewType
from uuid import UUID

import pytest

from participant_sdk.call import fingerprint
from participant_sdk.json_text import parse_json
from participant_sdk.payload import Payload, PayloadError, UnsupportedType, codec_for, decode_untyped, encode
from tricord.v1 import types_pb2

Cents = NewType("Cents", int)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Line:
    sku: str
    count: int


@dataclass(frozen=True)
class Order:
    number: str
    total: Decimal
    lines: list[Line]
    at: datetime
    day: date
    hour: time
    token: UUID
    color: Color
    weight: float
    paid: bool
    cents: Cents
    kind: Literal["new", "old"]
    note: Annotated[str | None, "free text"] = None
    tags: tuple[str, ...] = ()
    extra: dict[str, int] = field(default_factory=dict)
    blob: bytes = b""


@dataclass(frozen=True)
class Tree:
    name: str
    children: "list[Tree]" = field(default_factory=list)


@dataclass(frozen=True)
class Positive:
    amount: int

    def __post_init__(self) -> None:
        if self.amount <= 0:
            raise ValueError("amount must be positive")


ORDER = Order(
    number="A-1",
    total=Decimal("10.50"),
    lines=[Line("x", 1), Line("ö", 2)],
    at=datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=UTC),
    day=date(2030, 1, 2),
    hour=time(3, 4),
    token=UUID(int=7),
    color=Color.BLUE,
    weight=1.5,
    paid=True,
    cents=Cents(5),
    kind="old",
    note="hi",
    tags=("a", "b"),
    extra={"z": 1, "a": 2},
    blob=b"\x00\xff",
)


def read(kind: Any, text: str) -> Any:
    return codec_for(kind).decode(Payload(text.encode(), "application/json"))


def test_a_dataclass_survives_the_round_trip() -> None:
    payload = encode(ORDER)
    assert payload.content_type == "application/json"
    assert b'"total":"10.50"' in payload.data
    assert payload.decode(Order) == ORDER


def test_equal_values_give_equal_bytes() -> None:
    assert encode({"a": 1, "b": {"c": 2, "d": 3}}) == encode({"b": {"d": 3, "c": 2}, "a": 1})


def test_a_dataclass_may_contain_itself() -> None:
    tree = Tree("root", [Tree("leaf"), Tree("branch", [Tree("twig")])])
    assert encode(tree).decode(Tree) == tree


def test_integers_are_numbers_where_floats_are_wanted() -> None:
    @dataclass
    class Weight:
        kilos: float

    weight = read(Weight, '{"kilos": 3}')
    assert weight.kilos == 3.0
    assert isinstance(weight.kilos, float)


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (Line, "", "payload is not JSON"),
        (Line, "[]", "payload is an array, wanted an object"),
        (Line, "{", "payload is not JSON"),
        (Line, '{"sku":"x"}', "count is missing"),
        (Line, '{"sku":"x","count":1,"cuont":2}', "cuont is not a field of Line"),
        (Line, '{"sku":"x","count":"1"}', "count is a string, wanted an integer"),
        (Line, '{"sku":"x","count":true}', "count is a boolean, wanted an integer"),
        (Line, '{"sku":"x","count":1.0}', "count is a number, wanted an integer"),
        (Line, '{"sku":null,"count":1}', "sku is null, wanted a string"),
        (Line, '{"sku":"x","count":1,"count":2}', "count is given twice"),
        (Line, '{"sku":"x","count":NaN}', "payload holds NaN"),
        (Line, '{"sku":"x","count":' + "1" * 5000 + "}", "payload is not JSON"),
        (Tree, '{"name":"a","children":[{"name":"b"},{"name":5}]}', "children[1].name is a number, wanted a string"),
        (Tree, '{"name":"a","children":{}}', "children is an object, wanted an array"),
        (Positive, '{"amount":0}', "payload is not a valid Positive: amount must be positive"),
        (dict[str, int], '{"a":{"b":1}}', "a is an object, wanted an integer"),
        (dict, "[1]", "payload is an array, wanted an object"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(kind: Any, text: str, problem: str) -> None:
    with pytest.raises(PayloadError) as caught:
        read(kind, text)
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("total", "10,50", "total is '10,50', wanted a decimal number"),
        ("total", "NaN", "total is 'NaN', wanted a decimal number"),
        ("total", 10.5, "total is a number, wanted a decimal number as a string"),
        ("at", "yesterday", "at is 'yesterday', wanted an ISO 8601 date and time"),
        ("token", "7", "token is '7', wanted a UUID"),
        ("color", "green", "color is not one of 'red', 'blue'"),
        ("color", ["red"], "color is not one of 'red', 'blue'"),
        ("kind", "older", "kind is not one of 'new', 'old'"),
        ("blob", "%%", "blob is '%%', wanted base64"),
        ("weight", "1", "weight is a string, wanted a number"),
        ("lines", [{"sku": "x", "count": 1}, {}], "lines[1].sku is missing"),
        ("tags", "ab", "tags is a string, wanted an array"),
        ("note", 1, "note is a number, wanted a string"),
    ],
)
def test_every_kind_of_field_is_checked(name: str, value: Any, problem: str) -> None:
    fields = decode_untyped(encode(ORDER))
    with pytest.raises(PayloadError) as caught:
        encode({**fields, name: value}).decode(Order)
    assert str(caught.value) == problem


def test_a_name_given_twice_is_found_at_once_in_a_large_payload() -> None:
    """In one pass: compared pair by pair, these two megabytes would take many minutes."""
    names = ",".join(f'"k{number}":1' for number in range(200_000))
    with pytest.raises(PayloadError, match="k199999 is given twice"):
        codec_for(dict).decode(Payload(f'{{{names},"k199999":2}}'.encode(), "application/json"))


def test_deep_nesting_is_an_error_and_not_a_crash() -> None:
    for kind in (dict, Tree):
        with pytest.raises(PayloadError):
            read(kind, '{"name":"a","children":' * 100_000)
    deep = '{"name":"a","children":[' * 5_000 + "]}" * 5_000
    with pytest.raises(PayloadError, match="nested too deeply"):
        read(Tree, deep)


@pytest.mark.parametrize("rest", [b"\0", b"x", b", NaN", b"[" * 100_000])
def test_an_infinite_number_with_more_wrong_behind_it_is_refused(rest: bytes) -> None:
    with pytest.raises(PayloadError, match="is a number that is too large"):
        parse_json(b"1E310" + rest)


def test_infinite_numbers_are_refused() -> None:
    @dataclass
    class Weight:
        kilos: float

    for text in ('{"kilos": 1e999}', '{"kilos": 1' + "0" * 400 + "}"):
        with pytest.raises(PayloadError, match="kilos is a number that is too large"):
            read(Weight, text)

    for kind in (dict, dict[str, Any]):
        with pytest.raises(PayloadError, match=r"a\.b\[1\] is a number that is too large"):
            read(kind, '{"a": {"b": [1.5, 1e400]}}')


def test_half_a_character_is_refused() -> None:
    for text in ('{"a": "\\ud800"}', '{"\\udc00": 1}', '{"a": [{"b": "x\\ud800\\u0041"}]}'):
        with pytest.raises(PayloadError, match="lone surrogate"):
            read(dict, text)
    assert read(dict, '{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


@pytest.mark.parametrize("text", ["1_0", " 1 ", "1 ", "\u0661", "", ".", "+", "1e", "e5", "0x1", "Infinity", "1\n"])
def test_a_decimal_is_ascii_digits_and_nothing_else(text: str) -> None:
    with pytest.raises(PayloadError, match=r"total is .*, wanted a decimal number"):
        encode({**decode_untyped(encode(ORDER)), "total": text}).decode(Order)


@pytest.mark.parametrize("text", ["0", "-1.50", "+2", "1E+3", "1e-7", ".5", "5."])
def test_decimals_as_they_are_written(text: str) -> None:
    read_ = encode({**decode_untyped(encode(ORDER)), "total": text}).decode(Order)
    assert read_.total == Decimal(text)


def test_an_integer_stays_one_where_either_number_is_taken() -> None:
    @dataclass
    class Amount:
        value: float | int

    for value in (3, 2**60 + 1, 2.5):
        found = encode(Amount(value)).decode(Amount).value
        assert (found, type(found)) == (value, type(value))


def test_fields_that_follow_from_the_others_are_not_sent() -> None:
    @dataclass
    class Sum:
        a: int
        total: int = field(init=False, default=0)

        def __post_init__(self) -> None:
            self.total = 2 * self.a

    assert encode(Sum(3)).data == b'{"a":3}'
    assert encode(Sum(3)).decode(Sum).total == 6


def test_what_is_only_there_while_an_object_is_made_cannot_be_carried() -> None:
    @dataclass
    class Made:
        a: int
        b: InitVar[int]

    with pytest.raises(UnsupportedType, match=r"Made\.b is an InitVar"):
        codec_for(Made)


@pytest.mark.parametrize("error", [AssertionError("no good"), InvalidOperation("no good"), KeyError("no good")])
def test_however_a_dataclass_says_no_the_payload_is_invalid(error: Exception) -> None:
    @dataclass
    class Never:
        a: int

        def __post_init__(self) -> None:
            raise error

    with pytest.raises(PayloadError, match=r"is not a valid Never: .*no good"):
        read(Never, '{"a":1}')


def test_an_annotation_that_cannot_be_looked_up_is_told() -> None:
    @dataclass
    class Lost:
        a: "Nowhere"  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(UnsupportedType, match=r"annotation of Lost cannot be looked up: .*Nowhere"):
        codec_for(Lost)


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["it"] = [endless]
    with pytest.raises(ValueError, match="contains itself"):
        encode(endless)


def test_the_content_type_must_fit() -> None:
    assert codec_for(Line).decode(Payload(b'{"sku":"x","count":1}', "Application/JSON; charset=utf-8")) == Line("x", 1)
    for content_type in ("", "text/plain", "application/protobuf"):
        with pytest.raises(PayloadError, match="has content type"):
            codec_for(Line).decode(Payload(b'{"sku":"x","count":1}', content_type))


def test_a_protobuf_message_survives_the_round_trip() -> None:
    message = types_pb2.Refusal(reason="r", message="m")
    payload = encode(message)
    assert payload.content_type == "application/protobuf; type=tricord.v1.Refusal"
    assert payload.decode(types_pb2.Refusal) == message


def test_another_message_is_refused() -> None:
    for payload in (
        encode(types_pb2.Payload(data=b"x")),
        Payload(b"\xff\xff", "application/protobuf; type=tricord.v1.Refusal"),
        Payload(b"", "application/json"),
    ):
        with pytest.raises(PayloadError, match=r"has content type|is not a serialized tricord\.v1\.Refusal"):
            payload.decode(types_pb2.Refusal)


def test_bytes_pass_as_they_are() -> None:
    payload = encode(b"\x00\x01")
    assert payload == Payload(b"\x00\x01", "application/octet-stream")
    assert codec_for(bytes).decode(payload) == b"\x00\x01"
    assert codec_for(bytes).decode(Payload(b"{}", "application/json")) == b"{}"


def test_a_payload_passes_as_it_is() -> None:
    payload = Payload(b"\x00{", "image/png")
    assert encode(payload) is payload
    assert codec_for(Payload).decode(payload) is payload


def test_a_result_of_unknown_type_is_json_or_bytes() -> None:
    assert decode_untyped(encode({"a": [1, None]})) == {"a": [1, None]}
    assert decode_untyped(encode(types_pb2.Refusal(reason="r"))) == b"\n\x01r"
    with pytest.raises(PayloadError):
        decode_untyped(Payload(b"{", "application/json"))


@pytest.mark.parametrize("kind", [int, str, list[int], set, object, Any, complex, None])
def test_types_that_cannot_be_a_payload(kind: Any) -> None:
    with pytest.raises(UnsupportedType):
        codec_for(kind)


def test_fields_that_cannot_be_carried_are_found_at_once_and_named() -> None:
    @dataclass
    class Inner:
        numbers: set[int]

    @dataclass
    class Outer:
        inner: Inner

    with pytest.raises(UnsupportedType, match=r"Outer\.inner: Inner\.numbers: set\[int\]"):
        codec_for(Outer)


@pytest.mark.parametrize("value", [5, "text", [1], None, object(), Line])
def test_values_that_cannot_be_a_payload(value: object) -> None:
    with pytest.raises(TypeError):
        encode(value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": float("nan")}, "a is nan"),
        ({"a": {"b": {1}}}, "a.b is of type set"),
        ({"a": [0, object()]}, r"a\[1\] is of type object"),
        ({1: 2}, "a key that is not a string"),
    ],
)
def test_values_that_json_cannot_hold_are_named(value: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        encode(value)


def test_the_fingerprint_covers_action_content_type_and_bytes_each_with_its_length() -> None:
    prints = {
        fingerprint("ab", Payload(b"c", "d")),
        fingerprint("a", Payload(b"c", "bd")),
        fingerprint("a", Payload(b"dc", "b")),
        fingerprint("ab", Payload(b"", "cd")),
        fingerprint("ab", Payload(b"c ", "d")),
    }
    assert len(prints) == 5
    assert (
        fingerprint("debit", Payload(b"{}", "application/json")).hex()
        == "a37ff0827a2f9f93985cc0fbff78b608b2781547680c3fe2891978967f8c3200"
    )
