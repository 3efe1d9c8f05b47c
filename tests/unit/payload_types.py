"""Plain types for the fields of payloads, and how a payload's text is read or refused."""

import dataclasses
from enum import Enum
from typing import Any, NamedTuple

import pytest
from typing_extensions import TypedDict

from participant_sdk.payload import Payload, PayloadError, codec_for


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Pair(NamedTuple):
    left: int
    right: str


class Money(TypedDict):
    cents: int


@dataclasses.dataclass
class Weight:
    grams: int
    kilos: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.kilos = self.grams / 1000


def read(kind: Any, text: str) -> Any:
    return codec_for(kind).decode(Payload(text.encode(), "application/json"))


def refusal(kind: Any, text: str) -> str:
    """The error's text for JSON text that `kind` must not accept."""
    with pytest.raises(PayloadError) as caught:
        read(kind, text)
    return str(caught.value)
