"""A function's results and errors as stored answers, and back: equal, and of the same type.

JSON for what JSON can hold (also dataclasses, pydantic models and msgspec Structs, strictly as annotated), bytes and
protobuf messages as they are. Nothing is stored that could not be read again: what is written is read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import Message

from participant_sdk.annotations import Unreadable, type_name
from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import AnswerNotStored
from participant_sdk.idempotency.record import Answer, Codec
from participant_sdk.json_text import parse_json
from participant_sdk.json_types import UnsupportedType, decoder_for
from participant_sdk.payload import Payload, codec_for, encode, json_bytes, read_json

_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_TYPE: Final = b"type"


@dataclass(frozen=True, slots=True)
class ValueCodec:
    """How values are stored: `write` gives bytes, `read` an equal value of the same type from them.

    `write` raises TypeError or ValueError for a value that it cannot take, `read` ValueError for bytes.
    """

    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


def codec_of(who: str, kind: Any) -> ValueCodec:
    """The codec of an annotated type; None and Any: of what is plain JSON. Raises ConfigurationError."""
    if kind is None or kind is Any:
        return PLAIN
    if isinstance(kind, Unreadable):
        raise ConfigurationError(f"{who}: the annotation {str(kind)!r} cannot be looked up; give a codec")
    try:
        if kind is bytes or (isinstance(kind, type) and issubclass(kind, Message)):
            return _payload_codec(kind)
        decode = decoder_for(dict[str, Any] if kind is dict else kind)
    except UnsupportedType as error:
        raise ConfigurationError(f"{who}: {error}; give a codec") from None
    return ValueCodec(json_bytes, lambda data: read_json(decode, data))


def msgpack_codec(kind: Any) -> ValueCodec:
    """MessagePack in place of JSON, for what msgspec knows: smaller, and bytes as they are. Raises ConfigurationError.

    A field that a Struct or dataclass does not have is not read, and one that is missing gets its default.
    """
    try:
        import msgspec  # by whoever wants it: nothing else of the SDK needs it
    except ImportError:
        raise ConfigurationError("msgpack_codec needs the package msgspec, which is not installed") from None
    try:
        decoder = msgspec.msgpack.Decoder(kind)
    except TypeError as error:
        raise ConfigurationError(f"{type_name(kind)} cannot be stored as MessagePack: {error}") from None
    encoder = msgspec.msgpack.Encoder()

    def read(data: bytes) -> Any:
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"it is no MessagePack of {type_name(kind)}: {error}") from None

    def write(value: Any) -> bytes:
        try:
            return encoder.encode(value)
        except (RecursionError, OverflowError) as error:
            raise ValueError(f"it cannot be written: {error}") from None

    return ValueCodec(write, read)


def error_codec(kind: type[Exception]) -> ValueCodec:
    """The codec of an exception: its fields if it is a dataclass, else its arguments, which have to be plain JSON."""
    if hasattr(kind, "__dataclass_fields__"):
        return codec_of(type_name(kind), kind)

    def read(data: bytes) -> Exception:
        return kind(*parse_json(data))

    def write(error: Exception) -> bytes:
        data = _write_plain(list(error.args))
        if read(data).args != error.args:
            raise TypeError(f"{type_name(kind)} is made from other arguments than its `args`: give a codec")
        return data

    return ValueCodec(write, read)


class Answers:
    """What one function's outcomes are stored as. `final_errors`: the exceptions that are stored, by exact type.

    Raises ConfigurationError for two of them with one name, by which they are stored.
    """

    def __init__(
        self, who: str, result: ValueCodec, final_errors: Mapping[type[Exception], ValueCodec | None] | Iterable[Any]
    ) -> None:
        self._who = who
        self._result = result
        given = final_errors if isinstance(final_errors, Mapping) else dict.fromkeys(final_errors)
        self._errors: dict[type[Exception], ValueCodec] = {}
        for kind, codec in given.items():
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise ConfigurationError(f"{who}: final_errors holds {kind!r}, which is not an exception class")
            self._errors[kind] = codec or error_codec(kind)
        self._kinds = {kind.__qualname__: kind for kind in self._errors}
        if len(self._kinds) < len(self._errors):
            raise ConfigurationError(f"{who}: final_errors holds two classes of one name")

    def of_value(self, value: Any) -> Answer:
        """What stands for a result. Raises TypeError or ValueError for one that cannot be given again."""
        return Answer(Codec.VALUE, body=checked_bytes(f"the result of {self._who}", self._result, value))

    def of_error(self, error: BaseException) -> Answer | None:
        """What stands for an error that is stored, None for any other. Raises as `of_value`."""
        kind: Any = type(error)
        if (codec := self._errors.get(kind)) is None:
            return None
        body = checked_bytes(f"the error of {self._who}", codec, error)
        return Answer(Codec.ERROR, headers=((_TYPE, kind.__qualname__.encode()),), body=body)

    def replay(self, answer: Answer) -> Any:
        """The result again; or raises the error again. Raises AnswerNotStored for what this program cannot read."""
        try:
            if answer.codec is Codec.VALUE:
                return self._result.read(answer.body)
            if answer.codec is Codec.ERROR:
                name = dict(answer.headers).get(_TYPE, b"").decode()
                error = self._errors[self._kinds[name]].read(answer.body)
            else:
                raise ValueError(f"it is an answer of {answer.codec.name}")
        except KeyError:
            raise AnswerNotStored(
                f"{self._who} has ended with an error that final_errors does not name any more"
            ) from None
        except (ValueError, TypeError) as wrong:
            raise AnswerNotStored(f"{self._who} was done, and its answer cannot be read any more: {wrong}") from wrong
        raise error


def checked_bytes(what: str, codec: ValueCodec, value: Any) -> bytes:
    """What `codec` writes, if it reads it again as a value of that type. Raises TypeError."""
    try:
        data = codec.write(value)
        again = codec.read(data)
    except (TypeError, ValueError) as wrong:
        raise TypeError(f"{what} cannot be given again: {wrong}") from wrong
    if type(again) is not type(value):
        raise TypeError(
            f"{what} is a {type_name(type(value))} and would be given again as a {type_name(type(again))}: "
            "return what it is annotated with, or give a codec"
        )
    return data


def _payload_codec(kind: Any) -> ValueCodec:
    payload_codec = codec_for(kind)
    content_type = "" if kind is bytes else encode(kind()).content_type

    def write(value: Any) -> bytes:
        if not isinstance(value, kind):
            raise TypeError(f"it is a {type_name(type(value))}, not {type_name(kind)}")
        return encode(value).data

    return ValueCodec(write, lambda data: payload_codec.decode(Payload(data, content_type)))


def _write_plain(value: Any) -> bytes:
    try:
        _check_plain(value)
    except RecursionError:
        raise ValueError("it is nested too deeply, or contains itself") from None
    return json_bytes(value)


def _check_plain(value: Any) -> None:
    kind = type(value)
    if kind is list:
        for item in value:
            _check_plain(item)
    elif kind is dict:
        for name, item in value.items():
            if type(name) is not str:
                raise TypeError("it has a key that is not a string")
            _check_plain(item)
    elif kind not in _PLAIN:
        raise TypeError(f"a {type_name(kind)} comes back as what it was only where it is annotated")


PLAIN: Final = ValueCodec(_write_plain, parse_json)
