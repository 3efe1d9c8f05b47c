"""Payloads and results: bytes with a content type, and the Python types that stand for them.

The type comes from the annotation (`Call[Debit]`, `-> Held`): a dataclass, a pydantic model (version 2), a msgspec
Struct or a dict (all JSON), a protobuf message, or bytes. Decoding is strict, because a field that is silently dropped
or defaulted is money moved wrongly; an error names the path of the bad field. Encoding goes by the value's own type.
Equal values give equal bytes: the fingerprint of a repeat must not change.

pydantic and msgspec are imported only by a program whose types come from them. What each does beyond its own strict
mode is said in `payload_pydantic` and `payload_msgspec`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, TypeVar, cast, get_origin

from google.protobuf.message import DecodeError, Message

from participant_sdk.json_text import PayloadError, parse_json
from participant_sdk.json_types import Decoder, UnsupportedType, decoder_for, jsonable
from participant_sdk.payload_libraries import library_of
from participant_sdk.payload_parts import check_exact

__all__ = ["Codec", "Payload", "PayloadError", "UnsupportedType", "codec_for", "decode_untyped", "encode"]

T = TypeVar("T")

JSON: Final = "application/json"
PROTOBUF: Final = "application/protobuf"
BYTES: Final = "application/octet-stream"

_write: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True).encode


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes with a content type, as the coordinator carries and never reads them. No content type means bytes."""

    data: bytes = b""
    content_type: str = ""

    def decode(self, kind: type[T]) -> T:
        """The value in these bytes, read as `kind`: any type that may be annotated as a payload.

        Raises PayloadError if they do not hold one, UnsupportedType if `kind` is none of those.
        """
        return cast(T, codec_for(kind).decode(self))


@dataclass(frozen=True, slots=True)
class Codec:
    """How payloads of one annotated type are read."""

    kind: Any
    decode: Callable[[Payload], Any]


def codec_for(kind: Any) -> Codec:
    """The codec of an annotated payload or result type; raises UnsupportedType for one that cannot be carried."""
    if kind is bytes:
        return Codec(kind, lambda payload: payload.data)
    if kind is Payload:
        return Codec(kind, lambda payload: payload)
    if isinstance(kind, type) and issubclass(kind, Message):
        return Codec(kind, lambda payload: _decode_message(kind, payload))
    if kind is dict or get_origin(kind) is dict or dataclasses.is_dataclass(kind) or library_of(kind) is not None:
        decode = decoder_for(dict[str, Any] if kind is dict else kind)
        return Codec(kind, partial(_decode_json, decode))
    raise UnsupportedType(
        f"{kind!r} is not a dataclass, a pydantic model, a msgspec Struct, a protobuf message class, dict or bytes"
    )


def encode(value: object) -> Payload:
    """The payload of a value of one of the types above; raises TypeError or ValueError for any other value."""
    if isinstance(value, Payload):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Payload(bytes(value), BYTES)
    if isinstance(value, Message):
        content_type = f"{PROTOBUF}; type={value.DESCRIPTOR.full_name}"
        return Payload(value.SerializeToString(deterministic=True), content_type)
    kind: Any = type(value)
    if isinstance(value, dict) or _has_fields(kind):
        return Payload(json_bytes(value), JSON)
    raise TypeError(
        f"{type(value).__name__} is not a dataclass, pydantic model, msgspec Struct, protobuf message, dict or bytes"
    )


def json_bytes(value: object) -> bytes:
    """The JSON text of any value that JSON can hold; raises TypeError or ValueError for any other."""
    try:
        return _write(jsonable(value, "")).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply, or contains itself") from None


def read_json(decode: Decoder, data: bytes) -> Any:
    """The value in JSON text, by a decoder of `json_types`; raises PayloadError."""
    try:
        value = decode(parse_json(data), "")
        check_exact(value, data)
        return value
    except RecursionError:
        raise PayloadError("", "is nested too deeply") from None


def decode_untyped(payload: Payload) -> Any:
    """A result whose type is not known: JSON as plain Python values, everything else as bytes."""
    return parse_json(payload.data) if _media_type(payload)[0] == JSON else payload.data


@lru_cache(maxsize=1024)
def _has_fields(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or library_of(kind) is not None


def _decode_json(decode: Decoder, payload: Payload) -> Any:
    if payload.content_type != JSON and _media_type(payload)[0] != JSON:
        raise PayloadError("", f"has content type {payload.content_type!r}, wanted {JSON!r}")
    return read_json(decode, payload.data)


def _decode_message(kind: type[Message], payload: Payload) -> Message:
    media_type, parameters = _media_type(payload)
    name = kind.DESCRIPTOR.full_name
    if media_type != PROTOBUF or parameters.get("type", name) != name:
        raise PayloadError("", f"has content type {payload.content_type!r}, wanted '{PROTOBUF}; type={name}'")
    try:
        return kind.FromString(payload.data)
    except DecodeError:
        raise PayloadError("", f"is not a serialized {name}") from None


def _media_type(payload: Payload) -> tuple[str, dict[str, str]]:
    media_type, *parameters = payload.content_type.split(";")
    pairs = (parameter.partition("=") for parameter in parameters)
    return media_type.strip().lower(), {key.strip().lower(): value.strip() for key, _, value in pairs}
