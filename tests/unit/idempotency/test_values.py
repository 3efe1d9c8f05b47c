"""A result or an error comes back equal and of its type, or is refused before it is stored."""

import dataclasses
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import AnswerNotStored
from participant_sdk.idempotency.record import Answer, Codec
from participant_sdk.idempotency.values import Answers, ValueCodec, codec_of, msgpack_codec


@dataclass(frozen=True)
class Receipt:
    number: int
    total: Decimal
    notes: list[str] = dataclasses.field(default_factory=list)


class Model(pydantic.BaseModel):
    total: Decimal


class Plain(msgspec.Struct):
    total: int


class NoMoney(Exception):
    pass


class NoMoneyAtAll(NoMoney):
    pass


@dataclass
class Limit(Exception):
    left: Decimal


class Odd(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


STRUCT = Struct()
STRUCT.update({"a": 1, "b": [None, ""]})

EXACT: list[tuple[Any, Any]] = [
    (None, None),
    (None, 0),
    (None, False),
    (None, ""),
    (None, {}),
    (None, []),
    (None, 0.0),
    (None, 2**70),
    (Any, {"a": [1, 1.5, None, "é"]}),
    (type(None), None),
    (bytes, b""),
    (bytes, b"\0\xff"),
    (bytes | None, None),
    (bytes | None, b"\0"),
    (str, "\0"),
    (int, 0),
    (bool, False),
    (float, -0.5),
    (dict, {}),
    (dict[str, int], {"a": 0}),
    (list[Receipt], [Receipt(1, Decimal("0.10"))]),
    (Receipt | None, None),
    (Receipt, Receipt(0, Decimal("0.00"), [""])),
    (tuple[int, ...], (1, 2)),
    (UUID, UUID(int=0)),
    (Decimal, Decimal("1.00")),
    (Model, Model(total=Decimal("0.10"))),
    (Plain, Plain(0)),
    (Struct, STRUCT),
]


@pytest.mark.parametrize(("kind", "value"), EXACT)
def test_a_result_comes_back_equal_and_of_its_type(kind: Any, value: Any) -> None:
    answers = Answers("f", codec_of("f", kind), ())
    answer = answers.of_value(value)
    assert answer.codec is Codec.VALUE
    again = answers.replay(answer)
    assert again == value
    assert type(again) is type(value)
    assert repr(again) == repr(value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (None, (1, 2)),
        (None, {"a": (1,)}),
        (None, {1: 2}),
        (None, Receipt(1, Decimal(1))),
        (None, b"x"),
        (None, float("nan")),
        (None, {1, 2}),
        (None, object()),
        (int, True),
        (int, "1"),
        (list[int], (1, 2)),
        (dict[str, int], {"a": "x"}),
        (Receipt, {"number": 1}),
        (Receipt, None),
        (Receipt, Receipt("1", Decimal(1))),  # type: ignore[arg-type]
        (bytes, "text"),
        (Struct, b""),
        (float, 1),
    ],
)
def test_what_would_not_come_back_is_refused_before_it_is_stored(kind: Any, value: Any) -> None:
    with pytest.raises(TypeError, match="the result of f "):
        Answers("f", codec_of("f", kind), ()).of_value(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="contains itself"):
        Answers("f", codec_of("f", None), ()).of_value(value)


def test_a_type_that_cannot_be_carried_is_refused_at_start() -> None:
    for kind in (object, set[int], Struct | None, complex):
        with pytest.raises(ConfigurationError, match=r"^f: .*give a codec"):
            codec_of("f", kind)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")), st.lists))
def test_any_plain_value_comes_back(value: Any) -> None:
    answers = Answers("f", codec_of("f", None), ())
    assert answers.replay(answers.of_value(value)) == value


@dataclass
class Parcel:
    label: bytes
    weights: dict[str, float]


def test_msgpack_gives_an_equal_result_and_reads_nothing_else() -> None:
    answers = Answers("send", msgpack_codec(Parcel), ())
    parcel = Parcel(b"\x00\xff", {"kg": 1.5})
    stored = answers.of_value(parcel)
    assert answers.replay(stored) == parcel
    assert len(stored.body) < len(Answers("send", codec_of("send", Parcel), ()).of_value(parcel).body)
    with pytest.raises(TypeError, match="would be given again"):
        Answers("send", msgpack_codec(list[int]), ()).of_value((1, 2))
    deep: list[Any] = []
    deep.append(deep)
    for value in (2**70, deep, object()):
        with pytest.raises(TypeError, match="cannot be given again"):
            Answers("send", msgpack_codec(Any), ()).of_value(value)
    for body in (b"", b"\xc1", stored.body[:-1], b'{"label": ""}'):
        with pytest.raises(AnswerNotStored, match="cannot be read any more"):
            answers.replay(Answer(Codec.VALUE, body=body))
    with pytest.raises(ConfigurationError, match="cannot be stored as MessagePack"):
        msgpack_codec(int | bytes | bytearray | memoryview)


@given(st.binary())
def test_bytes_of_another_program_are_no_answer_and_no_crash(data: bytes) -> None:
    answers = Answers("f", codec_of("f", Receipt), (NoMoney,))
    for answer in (Answer(Codec.VALUE, body=data), Answer(Codec.ERROR, headers=((b"type", b"NoMoney"),), body=data)):
        with pytest.raises((AnswerNotStored, NoMoney)):
            answers.replay(answer)


@pytest.mark.parametrize(
    "error", [NoMoney(), NoMoney("not enough", 5, None), NoMoneyAtAll("x"), Limit(Decimal("0.10"))]
)
def test_a_final_error_is_raised_again_as_the_same_type(error: Exception) -> None:
    answers = Answers("f", codec_of("f", None), {NoMoney: None, NoMoneyAtAll: None, Limit: None})
    answer = answers.of_error(error)
    assert answer is not None
    assert answer.codec is Codec.ERROR
    with pytest.raises(type(error)) as caught:
        answers.replay(answer)
    assert type(caught.value) is type(error)
    assert caught.value is not error
    assert caught.value.args == error.args or vars(caught.value) == vars(error)


def test_errors_are_stored_by_exact_type_only() -> None:
    answers = Answers("f", codec_of("f", None), (NoMoney,))
    for error in (NoMoneyAtAll("x"), ValueError("x"), KeyboardInterrupt()):
        assert answers.of_error(error) is None


def test_an_error_that_cannot_be_made_again_is_refused_before_it_is_stored() -> None:
    for error in (Odd(5), NoMoney(object())):
        answers = Answers("f", codec_of("f", None), (NoMoney, Odd))
        with pytest.raises(TypeError, match="the error of f "):
            answers.of_error(error)


def test_an_error_has_a_codec_of_its_own() -> None:
    codec = ValueCodec(lambda error: error.args[0][5:].encode(), lambda data: Odd(int(data)))
    answers = Answers("f", codec_of("f", None), {Odd: codec})
    answer = answers.of_error(Odd(7))
    assert answer is not None
    with pytest.raises(Odd, match="code 7"):
        answers.replay(answer)


def test_an_error_that_is_not_named_any_more_is_told() -> None:
    answer = Answers("f", codec_of("f", None), (NoMoney,)).of_error(NoMoney("x"))
    assert answer is not None
    with pytest.raises(AnswerNotStored, match="final_errors does not name any more"):
        Answers("f", codec_of("f", None), ()).replay(answer)
    with pytest.raises(AnswerNotStored, match="an answer of HTTP"):
        Answers("f", codec_of("f", None), ()).replay(Answer(Codec.HTTP, status=200))


def test_final_errors_that_cannot_work_are_refused() -> None:
    other = type("NoMoney", (Exception,), {"__qualname__": NoMoney.__qualname__})
    for given_errors in ((NoMoney, other), (5,), (KeyboardInterrupt,)):
        with pytest.raises(ConfigurationError, match="f: final_errors"):
            Answers("f", codec_of("f", None), given_errors)
