"""Bodies in a form that is one for all that mean the same: canonical JSON (RFC 8785), multipart, protobuf.

Each gives None for what it cannot take without loss; that is then compared byte for byte. Whether it can is said by the
bytes alone, never by how deep the program's stack is at that moment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final

from participant_sdk.idempotency.keys import joined
from participant_sdk.idempotency.pointers import MISSING, find, strip, tokens_of
from participant_sdk.json_text import PayloadError, parse_json

try:
    import rfc8785
except ImportError:
    HAS_JSON = False
else:
    HAS_JSON = True

if TYPE_CHECKING:
    from google.protobuf.message import Message

DEPTH_MAX: Final = 100
"""Levels of nesting in JSON; far fewer than any reader can take."""
_FRACTION: Final = re.compile(rb"[0-9][.eE]")
_BOUNDARY: Final = re.compile(rb';\s*boundary="?([0-9A-Za-z\'()+_,./:=? -]{1,70})"?', re.IGNORECASE)


def canonical_json(body: bytes, include: Iterable[str], exclude: Iterable[str]) -> bytes | None:
    """The body as canonical JSON, or only what stands at `include`, or without what stands at `exclude`."""
    try:
        value = parse_json(body)
        if _too_deep(value):
            return None
        if _FRACTION.search(body):
            json.loads(body, parse_float=_exact)
        wanted = [(pointer, find(value, tokens_of(pointer))) for pointer in include]
        if wanted:
            return joined(*(part for pointer, found in wanted for part in (pointer, _one(found))))
        for pointer in exclude:
            strip(value, tokens_of(pointer))
        return rfc8785.dumps(value)
    except (PayloadError, rfc8785.CanonicalizationError, _Inexact):
        return None


def boundary_of(content_types: Iterable[bytes]) -> bytes | None:
    """The boundary in a multipart content type, None if there is none."""
    for content_type in content_types:
        found = _BOUNDARY.search(content_type)
        if content_type.lower().startswith(b"multipart/") and found is not None:
            return found[1]
    return None


def multipart(body: bytes, boundary: bytes) -> bytes:
    """A multipart body without its boundary, which a client makes anew for each attempt."""
    return joined(*body.split(b"--" + boundary))


def message_bytes(body: bytes, kind: type[Message], exclude: Iterable[str]) -> bytes | None:
    """A serialized message, serialized again in one order, without the fields of these names (`a.b`: b of a)."""
    from google.protobuf.message import DecodeError

    try:
        message = kind.FromString(body)
    except DecodeError:
        return None
    for path in exclude:
        owner: Any = message
        *outer, last = path.split(".")
        for name in outer:
            owner = getattr(owner, name) if owner is not None and owner.HasField(name) else None
        if owner is not None:
            owner.ClearField(last)
    return message.SerializeToString(deterministic=True)


def message_has(kind: type[Message], path: str) -> bool:
    """Whether messages of that kind have a field of that name, through messages that are not repeated."""
    *outer, last = path.split(".")
    descriptor = kind.DESCRIPTOR
    for name in outer:
        field = descriptor.fields_by_name.get(name)
        if field is None or field.message_type is None or field.is_repeated:
            return False
        descriptor = field.message_type
    return last in descriptor.fields_by_name


def _one(value: Any) -> bytes:
    return b"-" if value is MISSING else b"+" + rfc8785.dumps(value)


class _Inexact(Exception):
    """A number has more digits than a double."""


def _exact(text: str) -> float:
    number = float(text)
    try:
        same = Decimal(text) == Decimal(repr(number))
    except InvalidOperation:  # an exponent beyond all bounds
        same = False
    if not same:
        raise _Inexact
    return number


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [
            item
            for one in level
            if isinstance(one, (dict, list))
            for item in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True
