"""The idempotency key: how it is read from what a client sent, and the 32 bytes by which it is stored.

A header holds a String of structured fields (RFC 9651), `"8e03978e"`, or the same key bare, `8e03978e`: one key. What
is neither is refused, because two readers that guess differently would run one request twice. No error repeats the key:
it is as good as a password where answers are looked up by it.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import KeyMalformed

BYTES_MAX: Final = 4_096
_LENGTH: Final = struct.Struct(">Q")
HINT_CHARS_MAX: Final = 16

_STRING: Final = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
_ESCAPED: Final = re.compile(r"\\(.)")
_PARAMETERS: Final = re.compile(
    r"""(?:;\x20*[a-z*][a-z0-9_.*-]*(?:=(?:
        -?[0-9]{1,15} | -?[0-9]{1,12}\.[0-9]{1,3} | @-?[0-9]{1,15} | \?[01]
        | "(?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*" | %"(?:[\x20\x21\x23\x24\x26-\x7e]|%[0-9a-f]{2})*"
        | [A-Za-z*][A-Za-z0-9!#$%&'*+.^_`|~:/-]* | :[A-Za-z0-9+/]*={0,2}:
    ))?)*""",
    re.VERBOSE,
)
_NOT_PRINTABLE: Final = re.compile(r"[^\x20-\x7e]")
_NOT_BARE: Final = re.compile(r'[ ",;\\]')
_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-([1-8])[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRules:
    """What a key has to be. Raises ConfigurationError for rules that cannot work.

    `field`: where the key comes from, for the errors. `bytes_max` counts the key without its quotes. `pattern`: a
    regular expression that it matches as a whole. `uuid`: the versions of UUID that it may be, such as (4, 7); it is
    then taken in lower case, so that one UUID is one key. `parameters`: whether a String may be followed by parameters
    (`"key";v=1`), which are then dropped.
    """

    field: str = "Idempotency-Key"
    bytes_max: int = 255
    chars_min: int = 1
    pattern: str | None = None
    uuid: tuple[int, ...] = ()
    parameters: bool = False

    def __post_init__(self) -> None:
        if not self.field or not self.field.isprintable():
            raise ConfigurationError(f"key rules: field {self.field!r} is not printable text")
        if not 1 <= self.bytes_max <= BYTES_MAX:
            raise ConfigurationError(f"{self.field}: bytes_max {self.bytes_max} is not 1 to {BYTES_MAX}")
        if not 1 <= self.chars_min <= self.bytes_max:
            raise ConfigurationError(
                f"{self.field}: chars_min {self.chars_min} is not 1 to bytes_max ({self.bytes_max})"
            )
        if not all(1 <= version <= 8 for version in self.uuid):
            raise ConfigurationError(f"{self.field}: uuid {self.uuid!r} holds a version that is not 1 to 8")
        if self.uuid and not self.chars_min <= 36 <= self.bytes_max:
            raise ConfigurationError(f"{self.field}: no UUID, of 36 characters, is within chars_min and bytes_max")
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ConfigurationError(
                    f"{self.field}: pattern {self.pattern!r} is no regular expression: {error}"
                ) from None

    def check(self, key: str) -> str:
        """A key that comes as it is, such as from a body: the key, if it is one by these rules. Raises KeyMalformed."""
        if found := _NOT_PRINTABLE.search(key):
            raise self.malformed(f"has a character that is not printable ASCII at position {found.start()}")
        if len(key) > self.bytes_max:
            raise self.malformed(f"is {len(key)} bytes long; at most {self.bytes_max} are taken")
        if len(key) < self.chars_min:
            raise self.malformed(f"is {len(key)} characters long; at least {self.chars_min} are wanted")
        if self.uuid:
            found = _UUID.fullmatch(key)
            if found is None or int(found[1]) not in self.uuid:
                raise self.malformed(f"is not a UUID of version {' or '.join(map(str, self.uuid))}")
            key = key.lower()
        if self.pattern is not None and re.fullmatch(self.pattern, key) is None:
            raise self.malformed(f"does not match the pattern {self.pattern}")
        return key

    def malformed(self, problem: str) -> KeyMalformed:
        """The error that says what is wrong with a key, and where it was."""
        return KeyMalformed(f"{self.field} {problem}")


DEFAULT_RULES: Final = KeyRules()


def parse_key(header_value: str | bytes, rules: KeyRules = DEFAULT_RULES) -> str:
    """The key in a header's value: a String of structured fields, or the key bare. Raises KeyMalformed."""
    text = header_value.decode("latin-1") if isinstance(header_value, bytes) else header_value
    text = text.strip(" \t")
    if not text.startswith('"'):
        if found := _NOT_BARE.search(text):
            raise rules.malformed(_not_bare(text, found.start()))
        return rules.check(text)
    if len(text) > 3 * BYTES_MAX:  # so that nobody makes us read through more
        raise rules.malformed(f"is {len(text)} bytes long; at most {rules.bytes_max} are taken")
    string = _STRING.match(text)
    if string is None:
        raise rules.malformed(_not_string(text))
    rest = text[string.end() :]
    if rest and not (rules.parameters and _PARAMETERS.fullmatch(rest)):
        raise rules.malformed(_not_alone(rest, rules.parameters))
    return rules.check(_ESCAPED.sub(r"\1", string[1]))


def parse_key_lines(lines: Iterable[str | bytes], rules: KeyRules = DEFAULT_RULES) -> str | None:
    """The key in all header lines of its name; None if there is none. Raises KeyMalformed, also for several lines."""
    values = tuple(lines)
    if not values:
        return None
    if len(values) > 1:
        raise rules.malformed(f"is given {len(values)} times; 1 is taken")
    return parse_key(values[0], rules)


def key_hash(namespace: str, tenant: str, operation: str, key: str) -> bytes:
    """The 32 bytes by which a record is found. `operation`: "" where one key is one request in the whole namespace."""
    return hashlib.sha256(_scope(namespace, tenant, operation) + joined(key)).digest()


def key_hint(key: str, chars: int) -> str:
    """The first characters of a key, for people: at most `chars`, and never more than half of it."""
    return key[: min(chars, HINT_CHARS_MAX, len(key) // 2)]


def joined(*parts: str | bytes) -> bytes:
    """The parts as one input of a hash, each after its length: no other parts of that number give the same bytes."""
    encoded = [part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join([_LENGTH.pack(len(part)) + part for part in encoded])


@lru_cache(maxsize=1024)
def _scope(namespace: str, tenant: str, operation: str) -> bytes:
    return joined(b"tricord idempotency key 1", namespace, tenant, operation)


def _not_bare(text: str, at: int) -> str:
    match text[at]:
        case ",":
            return "is a list; 1 key is taken"
        case ";":
            return 'has parameters; they are taken only behind a key in "quotes", if at all'
        case _:
            return f'has a space, a quote or a backslash at position {at}; such a key is sent in "quotes"'


def _not_string(text: str) -> str:
    at = 1
    while at < len(text):
        if text[at] == "\\":
            if text[at + 1 : at + 2] not in ('"', "\\"):
                return f'has a bad escape at position {at}; only \\" and \\\\ are taken'
            at += 1
        elif not " " <= text[at] <= "~":
            return f"has a character that is not printable ASCII at position {at}"
        at += 1
    return "has no closing quote"


def _not_alone(rest: str, parameters: bool) -> str:
    if rest.lstrip(" \t").startswith(","):
        return "is a list; 1 key is taken"
    if rest.startswith(";"):
        return "has parameters that are malformed" if parameters else "has parameters; none are taken"
    return "has something behind the closing quote"
