"""Types of several libraries in one payload, and an SDK that needs none of them."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pydantic
import pytest

from participant_sdk.payload import Payload, UnsupportedType, codec_for, encode
from tests.unit.payload_types import read, refusal

ROOT = Path(__file__).resolve().parents[2]


class Line(pydantic.BaseModel):
    sku: str = pydantic.Field(min_length=1, alias="Sku")
    amounts: set[int] = set()


class Hold(msgspec.Struct, rename="camel"):
    hold_id: int
    amounts: dict[str, Decimal] = {}


@pydantic.dataclasses.dataclass
class Checked:
    amount: Annotated[int, pydantic.Field(gt=0)]


@dataclass
class Order:
    number: str
    lines: list[Line]
    holds: dict[str, Hold] = field(default_factory=dict)
    either: Line | Hold | int = 1
    checked: Checked | None = None
    tree: "Order | None" = None


ORDER = Order(
    number="A-1",
    lines=[Line(Sku="x", amounts={2, 1})],
    holds={"a": Hold(1, {"eur": Decimal("1.50")})},
    either=Hold(2),
    checked=Checked(5),
    tree=Order("A-2", [], either=Line(Sku="y")),
)


def test_a_dataclass_may_hold_models_and_structs() -> None:
    payload = encode(ORDER)
    assert b'"holds":{"a":{"amounts":{"eur":"1.50"},"holdId":1}},"lines":[{"Sku":"x","amounts":[1,2]}]' in payload.data
    assert payload.decode(Order) == ORDER


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('"lines":[{"Sku":"x"},{"Sku":1}]', "lines[1].Sku is not valid: Input should be a valid string"),
        ('"lines":[{"Sku":"x","b":1}]', "lines[0].b is not a known field"),
        ('"lines":[{}]', "lines[0].Sku is missing"),
        ('"lines":[],"holds":{"a":{"holdId":1,"b":2}}', "holds.a.b is not a known field"),
        ('"lines":[],"holds":{"a":{}}', "holds.a.holdId is missing"),
        (
            '"lines":[],"holds":{"a":{"holdId":1,"amounts":{"x":"1","y":[]}}}',
            "holds.a.amounts.y is not valid: Expected",
        ),
        ('"lines":[],"holds":{"a":5}', "holds.a is not valid: Expected `object`, got `int`"),
        ('"lines":[],"either":{"Sku":"x","holdId":1}', "either fits no member of the union"),
        ('"lines":[],"checked":{"amount":0}', "checked.amount is not valid: Input should be greater than 0"),
        (
            '"lines":[],"tree":{"number":"","lines":[],"holds":{"a":{"holdId":1,"amounts":{"x":1234567890123456.789}}}}',
            "tree.holds.a.amounts.x is a number with more digits than can be read: send it as a string",
        ),
    ],
)
def test_the_path_leads_through_both(text: str, problem: str) -> None:
    assert refusal(Order, f'{{"number":"A-1",{text}}}').startswith(problem)


def test_dicts_may_hold_them_too() -> None:
    value = {"a": Hold(1), "b": Hold(2)}
    assert encode(value).decode(dict[str, Hold]) == value  # type: ignore[type-var, unused-ignore]
    assert read(dict[str, list[Line]], '{"a":[{"Sku":"x"}]}') == {"a": [Line(Sku="x")]}
    assert encode({"any": [Line(Sku="x"), Hold(1)]}).data == (
        b'{"any":[{"Sku":"x","amounts":[]},{"amounts":{},"holdId":1}]}'
    )


def test_what_cannot_be_written_is_named_by_its_path() -> None:
    with pytest.raises(TypeError, match=r"a\[0\] cannot be written: Encoding objects of type object"):
        encode({"a": [Hold(object())]})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a\.holds\.b\.amounts\.c is NaN, which JSON cannot hold"):
        encode({"a": Order("", [], {"b": Hold(1, {"c": Decimal("NaN")})})})
    with pytest.raises(ValueError, match=r"a\.b is Infinity, which no reader takes"):
        encode({"a": {"b": Decimal("Infinity")}})


def test_a_field_that_cannot_be_carried_is_found_behind_a_dataclass() -> None:
    class Bad(msgspec.Struct):
        line: Line

    @dataclass
    class Outer:
        bad: list[Bad]

    with pytest.raises(UnsupportedType, match=r"Outer\.bad: Bad\.line is of type Line, which msgspec cannot read"):
        codec_for(Outer)


@pytest.mark.parametrize("kind", [list[Line], Line | Hold, pydantic.BaseModel.model_validate, msgspec, Line(Sku="x")])
def test_what_is_none_of_these_types(kind: Any) -> None:
    with pytest.raises(UnsupportedType, match=r"is not a dataclass, a pydantic model, a msgspec Struct"):
        codec_for(kind)


def test_the_content_type_must_fit() -> None:
    for kind in (Line, Hold):
        assert "has content type" in refusal_of_bytes(kind)


def refusal_of_bytes(kind: Any) -> str:
    with pytest.raises(ValueError, match="content type") as caught:
        codec_for(kind).decode(Payload(b"{}", "application/octet-stream"))
    return str(caught.value)


@pytest.mark.parametrize("error", [OSError("no disk"), MemoryError()])
def test_a_machine_in_trouble_refuses_nothing(error: Exception) -> None:
    @dataclass
    class Unlucky:
        a: int

        def __post_init__(self) -> None:
            raise error

    with pytest.raises(type(error)):
        read(Unlucky, '{"a":1}')


ALONE = """
import sys
blocked = set(sys.argv[1].split())
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
import dataclasses
import participant_sdk
from participant_sdk.payload import codec_for, encode
for name in participant_sdk.__all__:
    getattr(participant_sdk, name)

@dataclasses.dataclass
class Line:
    sku: str

assert encode(Line("x")).decode(Line) == Line("x")
assert encode({"a": [Line("x")]}).decode(dict) == {"a": [{"sku": "x"}]}
try:
    codec_for(int)
except TypeError:
    pass
loaded = {"pydantic", "pydantic_core", "msgspec"} & set(sys.modules)
assert not loaded, loaded
"""

ONE = """
{blocker}
import {library}
from participant_sdk.payload import encode
class Line({library}.{base}):
    sku: str
    tags: set[str] = set()
value = encode(Line(sku="x", tags=set("abcdefgh")))
assert value.decode(Line) == Line(sku="x", tags=set("abcdefgh"))
assert not set(sys.modules) & blocked
print(value.data.decode())
"""


def run(script: str, *arguments: str, seed: str = "random") -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "PYTHONHASHSEED": seed}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("blocked", ["", "pydantic pydantic_core msgspec"])
def test_the_sdk_neither_needs_nor_loads_them(blocked: str) -> None:
    run(ALONE, blocked)


@pytest.mark.parametrize(
    ("library", "base", "other"), [("pydantic", "BaseModel", "msgspec"), ("msgspec", "Struct", "pydantic")]
)
def test_one_works_without_the_other_and_the_same_in_every_process(library: str, base: str, other: str) -> None:
    blocker = ALONE.partition("import dataclasses")[0]
    script = ONE.replace("{blocker}", blocker).replace("{library}", library).replace("{base}", base)
    printed = {run(script, other, seed=seed) for seed in ("1", "2")}
    assert printed == {'{"sku":"x","tags":["a","b","c","d","e","f","g","h"]}\n'}
