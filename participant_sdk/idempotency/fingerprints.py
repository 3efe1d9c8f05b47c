"""What a request was, in 32 bytes: equal for a repeat, different for another request under the same key.

    RawBytes    the body as it came; for clients that repeat the same bytes. `RAW` is the default of every door
    JsonBody    the body as canonical JSON (RFC 8785), or some of its members: another spacing or order is the same
    FormBody    a multipart body, whatever boundary it has this time
    MessageBody a protobuf message, without the fields that differ in every attempt
    Custom      what a function of your own says

A fingerprint is stored with its version: the algorithm's number and the settings' `revision`. A record is compared by
the version that it was written with, so each algorithm here stays as it is for ever, and settings that change get
another revision, with the earlier ones in `older` for as long as their records live. A version that is not known is
never guessed: the request is refused, and does not run.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.canonical import (
    HAS_JSON,
    boundary_of,
    canonical_json,
    message_bytes,
    message_has,
    multipart,
)
from participant_sdk.idempotency.keys import joined
from participant_sdk.idempotency.pointers import tokens_of
from participant_sdk.idempotency.record import Fingerprint
from participant_sdk.idempotency.request import KeyedRequest
from participant_sdk.idempotency.request_parts import BodyHasher, HashedBody, RequestParts

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = [
    "RAW",
    "Algorithm",
    "BodyHasher",
    "Custom",
    "Fingerprinter",
    "FormBody",
    "HashedBody",
    "JsonBody",
    "MessageBody",
    "RawBytes",
    "RequestParts",
    "keyed_request",
]

REVISION_MAX: Final = 999
JSON_BYTES_MAX: Final = 1 << 20


class Fingerprinter(Protocol):
    """What says whether two requests are the same."""

    def current(self, parts: RequestParts) -> Fingerprint:
        """The fingerprint to store."""

    def again(self, parts: RequestParts, version: int) -> bytes | None:
        """The digest of that version; None if this program does not know it."""


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """One algorithm with its settings. Raises ConfigurationError for settings that cannot work.

    `headers`: names of header fields that are part of the request's meaning, such as an API version. `revision`: 0
    where nothing is set; a number from 1 to 999 for each other choice of settings. `older`: the choices before this
    one, also other algorithms, whose records may still be there.
    """

    kind: ClassVar[int]

    headers: tuple[str, ...] = ()
    revision: int = 0
    older: tuple[Algorithm, ...] = ()

    def __post_init__(self) -> None:
        what = type(self).__name__
        _check_names(what, "headers", self.headers)
        if not all(name and name.isascii() for name in self.headers):
            raise ConfigurationError(f"{what}: headers {self.headers!r} holds what is no name of a header")
        object.__setattr__(self, "headers", tuple(sorted({name.lower() for name in self.headers})))
        if not 0 <= self.revision <= REVISION_MAX:
            raise ConfigurationError(f"{what}: revision {self.revision} is not 0 to {REVISION_MAX}")
        if (self.revision > 0) != self._has_settings():
            raise ConfigurationError(f"{what}: revision {self.revision}: 0 is without settings, from 1 on it is with")
        versions = [known.version for known in self._known()]
        if len(set(versions)) < len(versions):
            raise ConfigurationError(f"{what}: two of it and `older` have one kind and revision: {versions}")

    @property
    def version(self) -> int:
        """What is stored beside each digest."""
        return 1_000 * self.kind + self.revision

    def current(self, parts: RequestParts) -> Fingerprint:
        """See Fingerprinter."""
        return Fingerprint(self.version, self.digest(parts))

    def again(self, parts: RequestParts, version: int) -> bytes | None:
        """See Fingerprinter. What has no settings is known without being named in `older`."""
        for known in (*self._known(), *_PLAIN):
            if known.version == version:
                return known.digest(parts)
        return None

    def digest(self, parts: RequestParts) -> bytes:
        """The 32 bytes. Any body has some: what the algorithm cannot read is taken byte for byte, and marked so."""
        found = [joined(name, *parts.header(name)) for name in self.headers]
        body = self._body(parts)
        how, content = (b"raw", parts.sha256) if body is None else (b"read", hashlib.sha256(body).digest())
        whole = joined(b"tricord fingerprint", str(self.kind), joined(*parts.route), joined(*found), how, content)
        return hashlib.sha256(whole).digest()

    def _known(self) -> Iterable[Algorithm]:
        yield self
        for earlier in self.older:
            yield from earlier._known()

    def _has_settings(self) -> bool:
        return bool(self.headers)

    @abstractmethod
    def _body(self, parts: RequestParts) -> bytes | None:
        """The body in a form that is one for all that mean the same; None: it has none but its own bytes."""


@dataclass(frozen=True, kw_only=True)
class RawBytes(Algorithm):
    """The body byte for byte; hashed as it arrives, and never held for it."""

    kind: ClassVar[int] = 1

    def _body(self, parts: RequestParts) -> bytes | None:
        return None


@dataclass(frozen=True, kw_only=True)
class JsonBody(Algorithm):
    """The body as canonical JSON: spaces, the order of members and `1.0` for `1` make no difference.

    `include`: JSON pointers (RFC 6901) to what alone counts; `exclude`: to what does not, such as the key itself or a
    time of sending. Text is compared as it is: no Unicode normalization. What canonical JSON cannot hold without loss
    (integers beyond 2**53, a number with more digits than a double, a name given twice, ...) is compared byte for byte,
    and so is a body of more than `bytes_max`. Needs the library rfc8785.
    """

    kind: ClassVar[int] = 2

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    bytes_max: int = JSON_BYTES_MAX

    def __post_init__(self) -> None:
        if not HAS_JSON:
            raise ConfigurationError("JsonBody needs the library rfc8785: install tricord[idempotency]")
        for name, pointers in (("include", self.include), ("exclude", self.exclude)):
            _check_names("JsonBody", name, pointers)
            if len({tokens_of(pointer) for pointer in pointers}) < len(pointers):
                raise ConfigurationError(f"JsonBody: {name} {pointers!r} holds a pointer twice")
        if self.include and self.exclude:
            raise ConfigurationError("JsonBody: include and exclude do not go together")
        if "" in self.exclude:
            raise ConfigurationError("JsonBody: exclude '' leaves nothing to compare")
        if not 1 <= self.bytes_max <= 1 << 30:
            raise ConfigurationError(f"JsonBody: bytes_max {self.bytes_max} is not 1 to {1 << 30}")
        super().__post_init__()

    def _has_settings(self) -> bool:
        return bool(self.headers or self.include or self.exclude) or self.bytes_max != JSON_BYTES_MAX

    def _body(self, parts: RequestParts) -> bytes | None:
        body = parts.read()
        if len(body) > self.bytes_max:
            return None
        return canonical_json(body, self.include, self.exclude)


@dataclass(frozen=True, kw_only=True)
class FormBody(Algorithm):
    """A multipart body whatever boundary it has this time; any other body byte for byte."""

    kind: ClassVar[int] = 3

    def _body(self, parts: RequestParts) -> bytes | None:
        boundary = boundary_of(parts.header("content-type"))
        return None if boundary is None else multipart(parts.read(), boundary)


@dataclass(frozen=True, kw_only=True)
class MessageBody(Algorithm):
    """A serialized protobuf message of class `message`, in one order of its maps, without the fields of `exclude`.

    `exclude`: names, through messages as `meta.sent_at`. Another version of the protobuf library may write another
    order: take another `revision` if that happens while records live.
    """

    kind: ClassVar[int] = 4

    message: type[Message] = field(compare=False)
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_names("MessageBody", "exclude", self.exclude)
        for name in self.exclude:
            if not message_has(self.message, name):
                raise ConfigurationError(f"MessageBody: {self.message.DESCRIPTOR.full_name} has no field {name!r}")
        super().__post_init__()

    def _has_settings(self) -> bool:
        return bool(self.headers or self.exclude)

    def _body(self, parts: RequestParts) -> bytes | None:
        return message_bytes(parts.read(), self.message, self.exclude)


@dataclass(frozen=True, kw_only=True)
class Custom(Algorithm):
    """What `function` gives for a request: bytes or text that are equal for a repeat; None: the body's own bytes."""

    kind: ClassVar[int] = 5

    function: Callable[[RequestParts], bytes | str | None] = field(compare=False)

    def _has_settings(self) -> bool:
        return True

    def _body(self, parts: RequestParts) -> bytes | None:
        found = self.function(parts)
        return found.encode("utf-8", "surrogatepass") if isinstance(found, str) else found


def _check_names(what: str, name: str, value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigurationError(f"{what}: {name} {value!r} is not a tuple of texts")


RAW: Final = RawBytes()
_PLAIN: Final[tuple[Algorithm, ...]] = (RAW, FormBody(), *([JsonBody()] if HAS_JSON else []))


def keyed_request(key: str, tenant: str, parts: RequestParts, fingerprinter: Fingerprinter = RAW) -> KeyedRequest:
    """A request with its key and its fingerprint, as `begin` takes it."""
    return KeyedRequest(key, fingerprinter.current(parts), partial(fingerprinter.again, parts), tenant)
