"""What a call of an idempotent function says: its key, whose it is, what it asks for, and what it is to be lent.

What is wrong with the function itself is found when it is decorated.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from google.protobuf.message import Message

from participant_sdk.annotations import looked_up, signature_of
from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import KeyMissing, ScopeMissing
from participant_sdk.idempotency.keys import KeyRules, joined
from participant_sdk.idempotency.lending import NOTHING, Lent, lent_kind
from participant_sdk.idempotency.operation import TENANT_BYTES_MAX
from participant_sdk.idempotency.record import Fingerprint
from participant_sdk.idempotency.request import KeyedRequest
from participant_sdk.payload import encode, json_bytes

KIND: Final = 6
"""The number of this fingerprint algorithm; the others are in `fingerprints`."""
REVISION_MAX: Final = 999

Reader = str | Callable[..., Any]
"""The name of a parameter, or a function of the same arguments."""


@dataclass(frozen=True, slots=True)
class FieldRules:
    """Which values make two calls the same call. `names` None: all that are given.

    `revision`: 0 to 999; another one whenever `names` change, with the earlier choices in `older` by their revision.
    """

    names: tuple[str, ...] | None = None
    revision: int = 0
    older: Mapping[int, tuple[str, ...] | None] | None = None

    def __post_init__(self) -> None:
        older = self.older or {}
        for revision in (self.revision, *older):
            if not 0 <= revision <= REVISION_MAX:
                raise ConfigurationError(f"revision {revision} is not 0 to {REVISION_MAX}")
        if self.revision in older:
            raise ConfigurationError(f"revision {self.revision} is in `older`, too: fields that change need another")
        for names in (self.names, *older.values()):
            if isinstance(names, str) or (names is not None and len(set(names)) < len(names)):
                raise ConfigurationError(f"fields {names!r} is not a tuple of different names")

    def all_names(self) -> set[str]:
        """All that are named."""
        return {name for names in (self.names, *(self.older or {}).values()) for name in names or ()}


def keyed_values(
    who: str,
    key: object,
    tenant: object,
    values: Mapping[str, Any],
    fields: FieldRules,
    rules: KeyRules,
    apart: Collection[str] = (),
) -> KeyedRequest:
    """The request that a call stands for. `apart`: values that count only where they are named.

    Raises KeyMissing, KeyMalformed, ScopeMissing, and TypeError for a value that cannot be compared.
    """
    choices = {1_000 * KIND + revision: names for revision, names in (fields.older or {}).items()}
    version = 1_000 * KIND + fields.revision
    choices[version] = fields.names

    def digest(wanted: int) -> bytes | None:
        if wanted not in choices:
            return None
        names = choices[wanted]
        if names is None:
            return _digest(who, {name: value for name, value in values.items() if name not in apart})
        return _digest(who, {name: values.get(name) for name in names})

    found = digest(version) or b""
    return KeyedRequest(_key(key, rules), Fingerprint(version, found), digest, _tenant(who, tenant))


class Signature:
    """The parameters of an idempotent function. Raises ConfigurationError.

    `lent`: those that the caller does not give, by name: see `lending`.
    """

    def __init__(
        self, who: str, function: Callable[..., Any], key: Reader, tenant: Reader | None, fields: FieldRules
    ) -> None:
        self.asynchronous = inspect.iscoroutinefunction(function)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(f"{who} is a generator: what it yields cannot be given again")
        self._who = who
        whole = signature_of(function)
        annotations = looked_up(function, (*whole.parameters, "return"))
        self.result = annotations.pop("return")
        self.lent = {
            name: kind
            for name, annotation in annotations.items()
            if (kind := lent_kind(f"{who}: {name} is", who, annotation, asynchronous=self.asynchronous)) is not NOTHING
        }
        self.public = whole.replace(parameters=[p for p in whole.parameters.values() if p.name not in self.lent])
        self._whole = whole
        self._key, self._tenant = key, tenant
        named = {reader for reader in (key, tenant) if isinstance(reader, str)}
        for name in (*named, *fields.all_names()):
            if name not in self.public.parameters:
                raise ConfigurationError(f"{who} has no parameter {name!r}")
        self._fields = fields
        self._apart = named

    def request(self, rules: KeyRules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KeyedRequest:
        """What a call with these arguments stands for. Raises as `keyed_values`."""
        bound = self.public.bind(*args, **kwargs)
        bound.apply_defaults()
        key, tenant = (
            bound.arguments[reader] if isinstance(reader, str) else reader(*args, **kwargs) if reader else ""
            for reader in (self._key, self._tenant)
        )
        if self._tenant is not None and tenant in (None, ""):
            raise ScopeMissing(f"{self._who}: whose request it is, is not told")
        return keyed_values(self._who, key, tenant, bound.arguments, self._fields, rules, self._apart)

    def take_lent(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Out of the arguments, what is lent and which the caller has given all the same; and where to work then."""
        given = {name: kwargs.pop(name) for name in self.lent if name in kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1 or any(self.lent[name] is Lent.RUN for name in given):
            raise TypeError(f"{self._who}: {', '.join(given)}: one session or connection can be given, and no run")
        return given, next(iter(given.values()), None)

    def complete(self, args: tuple[Any, ...], kwargs: dict[str, Any], lent: dict[str, Any]) -> inspect.BoundArguments:
        """All arguments, with what is lent where the function wants it."""
        given = self.public.bind(*args, **kwargs).arguments
        whole = inspect.BoundArguments(self._whole, {})
        for name in self._whole.parameters:
            if name in lent or name in given:
                whole.arguments[name] = lent[name] if name in lent else given[name]
        return whole


def _key(key: object, rules: KeyRules) -> str:
    if key is None or key == "":
        raise KeyMissing(f"{rules.field} is not given")
    if isinstance(key, UUID) or (isinstance(key, int) and not isinstance(key, bool)):
        key = str(key)
    if not isinstance(key, str):
        raise rules.malformed(f"is of type {type(key).__name__}; a str, a UUID or an int is taken")
    return rules.check(key)


def _tenant(who: str, tenant: object) -> str:
    text = str(tenant) if isinstance(tenant, (UUID, int)) else tenant
    if not isinstance(text, str) or not text.isprintable() or len(text.encode()) > TENANT_BYTES_MAX:
        raise ScopeMissing(f"{who}: the tenant is not printable text of at most {TENANT_BYTES_MAX} bytes")
    return text


def _digest(who: str, values: Mapping[str, Any]) -> bytes:
    parts: list[str | bytes] = [b"tricord fingerprint", str(KIND)]
    for name in sorted(values):
        value = values[name]
        try:
            if isinstance(value, (bytes, bytearray, memoryview, Message)):
                payload = encode(value)
                parts += [name, payload.content_type, payload.data]
            else:
                parts += [name, "", json_bytes(value)]
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{who}: {name!r} cannot be compared with a repeat's: {error}; name what counts in `fields`"
            ) from error
    return hashlib.sha256(joined(*parts)).digest()
