"""What an HTTP operation says: where its key comes from, whose it is, what is compared and what is kept.

All of it is checked when it is made; requests meet no wrong setting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum, unique
from types import NoneType
from typing import Final

from participant_sdk.asgi import Scope
from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import KeyMissing, StoreUnavailable
from participant_sdk.idempotency.fingerprints import RAW, Fingerprinter, JsonBody
from participant_sdk.idempotency.first_sent import FirstSent
from participant_sdk.idempotency.http_headers import allow_list, header_name, values
from participant_sdk.idempotency.http_sources import (
    IN_HEADER,
    ONE_TENANT,
    BodyKey,
    CallableKey,
    HeaderKey,
    KeySource,
    Tenant,
    tenant_at_once,
    tenant_of,
)
from participant_sdk.idempotency.http_statuses import DEFAULT_STATUSES, Statuses
from participant_sdk.idempotency.keys import DEFAULT_RULES, KeyRules, parse_key_lines
from participant_sdk.idempotency.kinds import check_kinds
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.pointers import MISSING, find, tokens_of
from participant_sdk.idempotency.quotas import KeyQuota
from participant_sdk.idempotency.record import Answer

__all__ = [
    "ONE_TENANT",
    "BodyKey",
    "CallableKey",
    "HeaderKey",
    "HttpOperation",
    "KeySource",
    "Streaming",
    "Tenant",
    "path_regex",
]

BODY_BYTES_MAX: Final = 1 << 20
SPOOL_BYTES_MAX: Final = 64 << 20

_METHOD: Final = re.compile(r"[A-Z]{1,20}")
_PARAMETER: Final = re.compile(r"\{([a-zA-Z_][a-zA-Z0-9_]*)(?::([a-z]+))?\}")


@unique
class Streaming(Enum):
    """What happens when a handler answers with a stream: a body in several parts without a Content-Length."""

    SPOOL = "spool"
    """It is taken whole and stored, and then sent. Past `spool_bytes_max` it goes on as TOMBSTONE."""
    TOMBSTONE = "tombstone"
    """Before its first byte it is stored that the work was done; the stream is not, so it is given once only."""
    REJECT = "reject"
    """The work is rolled back, and the answer is a 500."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOperation:
    """One method and path that is safe to repeat. Raises ConfigurationError for settings that cannot work.

    `path`: as the router has it, `{id}` for a part without slash, `{rest:path}` for any rest. `tenant`: whose request
    it is, from what authenticated it (also `async def`); nothing, or an error: the request is refused. `key_required`:
    else requests without a key are passed on untouched. `fingerprint`: what makes two requests the same, beside method,
    path and query. `headers`: the only response headers that are kept; else all but those that belong to one answer.
    `identity`: the handler is not told which encodings the client takes, so that what is stored can be said to anyone.
    `first_sent`: requests that say when they were first sent are refused when their record may be gone. `quota`: how
    many new keys a tenant may bring. `fail_open`: while the store cannot be reached, requests run unprotected.
    `redact` changes an answer before it is stored, `restore` before it is said again; both fail closed. `current` gives
    what is said to a repeat in place of the stored answer, such as what the resource is by now; it must change nothing.
    """

    operation: Operation
    path: str
    tenant: Tenant
    method: str = "POST"
    key: KeySource = IN_HEADER
    key_required: bool = True
    key_rules: KeyRules | None = None
    fingerprint: Fingerprinter | None = None
    statuses: Statuses = DEFAULT_STATUSES
    headers: tuple[str, ...] | None = None
    streaming: Streaming = Streaming.SPOOL
    body_bytes_max: int = BODY_BYTES_MAX
    spool_bytes_max: int = SPOOL_BYTES_MAX
    identity: bool = True
    first_sent: FirstSent | None = None
    quota: KeyQuota | None = None
    fail_open: bool = False
    redact: Callable[[Answer], Answer] | None = None
    restore: Callable[[Answer], Answer] | None = None
    current: Callable[[Scope, Answer], Answer | Awaitable[Answer]] | None = None
    path_regex: re.Pattern[str] = field(init=False, repr=False, compare=False)
    kept_headers: frozenset[bytes] | None = field(init=False, repr=False, compare=False)
    key_header: bytes | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.operation, Operation):
            raise ConfigurationError(f"operation {self.operation!r} is no Operation")
        what = self.operation.name
        self._check_kinds(what)
        if not _METHOD.fullmatch(self.method):
            raise ConfigurationError(f"{what}: method {self.method!r} is not a method in capital letters")
        if self.tenant is not ONE_TENANT and not callable(self.tenant):
            raise ConfigurationError(f"{what}: tenant is neither a function of the scope nor ONE_TENANT")
        for name, size in (("body_bytes_max", self.body_bytes_max), ("spool_bytes_max", self.spool_bytes_max)):
            if not 0 <= size <= 1 << 34:
                raise ConfigurationError(f"{what}: {name} {size} is not 0 to {1 << 34}")
        if self.restore is not None and self.redact is None:
            raise ConfigurationError(f"{what}: restore is there without redact")
        kept = None if self.headers is None else allow_list(self.headers, f"{what}: headers")
        object.__setattr__(self, "kept_headers", kept)
        object.__setattr__(self, "path_regex", path_regex(self.path, what))
        self._check_key()
        if self.first_sent is not None:
            self.first_sent.check_operation(self.operation)

    def _check_kinds(self, what: str) -> None:
        check_kinds(
            what, self, method=str, path=str, key_required=bool, identity=bool, fail_open=bool,
            body_bytes_max=int, spool_bytes_max=int, statuses=Statuses, streaming=Streaming,
            key_rules=(KeyRules, NoneType), first_sent=(FirstSent, NoneType), quota=(KeyQuota, NoneType),
            headers=(tuple, list, set, frozenset, NoneType),
        )  # fmt: skip
        if self.fingerprint is not None and not callable(getattr(self.fingerprint, "current", None)):
            raise ConfigurationError(f"{what}: fingerprint {self.fingerprint!r} is no Fingerprinter")
        for name in ("redact", "restore", "current"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ConfigurationError(f"{what}: {name} cannot be called")

    def _check_key(self) -> None:
        header: bytes | None = None
        fingerprint: Fingerprinter = RAW
        rules = DEFAULT_RULES
        match self.key:
            case HeaderKey(name):
                header = header_name(name, f"{self.operation.name}: key")
                rules = KeyRules(field=name)
            case BodyKey(pointer):
                if not tokens_of(pointer):
                    raise ConfigurationError(f"{self.operation.name}: the key's pointer names the whole body")
                rules = KeyRules(field=f"body{pointer}")
                if self.fingerprint is None:
                    fingerprint = JsonBody(exclude=(pointer,), revision=1)
            case CallableKey(function):
                if not callable(function):
                    raise ConfigurationError(f"{self.operation.name}: the key's function cannot be called")
                rules = KeyRules(field="key")
            case _:
                raise ConfigurationError(f"{self.operation.name}: key is no HeaderKey, BodyKey or CallableKey")
        object.__setattr__(self, "key_header", header)
        object.__setattr__(self, "fingerprint", self.fingerprint or fingerprint)
        object.__setattr__(self, "key_rules", self.key_rules or rules)

    @property
    def fingerprinter(self) -> Fingerprinter:
        """`fingerprint`, or its default."""
        return self.fingerprint or RAW

    @property
    def rules(self) -> KeyRules:
        """`key_rules`, or their default."""
        return self.key_rules or DEFAULT_RULES

    def early_key(self, scope: Scope) -> str | None:
        """The key, from what is there before the body; None if there is none. Raises KeyMalformed."""
        if self.key_header is not None:
            return parse_key_lines(values(scope["headers"], self.key_header), self.rules)
        if isinstance(self.key, CallableKey):
            key = self.key.function(scope)
            return None if key is None else self.checked(key)
        return None

    def late_key(self, body: bytes) -> str | None:
        """The key, from the body; None if there is none. Raises KeyMalformed."""
        assert isinstance(self.key, BodyKey)
        try:
            content = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError):
            content = {}  # whatever it is, it has no such member; its handler says what is wrong with it
        found = find(content, tokens_of(self.key.pointer))
        return None if found is None or found is MISSING else self.checked(found)

    def checked(self, key: object) -> str:
        """A key that is no header. Raises KeyMalformed."""
        if not isinstance(key, str):
            raise self.rules.malformed(f"is of type {type(key).__name__}; text is taken")
        return self.rules.check(key)

    def missing(self) -> KeyMissing:
        """The error for a request without a key where one is required."""
        return KeyMissing(f"{self.rules.field} is required here, and is not there")

    def may_run_unprotected(self, error: Exception) -> bool:
        """Whether the request runs although the store says no: it may, and nothing of it is there, or begun."""
        return self.fail_open and isinstance(error, StoreUnavailable) and error.down

    async def tenant_of(self, scope: Scope) -> str:
        """Whose request it is. Raises ScopeMissing for whatever is not a name of 1 to 200 bytes, errors included."""
        return await tenant_of(self.tenant, scope, self.operation.name)

    def tenant_at_once(self, scope: Scope) -> str:
        """As `tenant_of`, where nothing can be awaited."""
        return tenant_at_once(self.tenant, scope, self.operation.name)


def path_regex(path: str, what: str) -> re.Pattern[str]:
    """The paths that a router's template stands for. Raises ConfigurationError, which begins with `what`."""
    if not path.startswith("/") or "?" in path or "#" in path:
        raise ConfigurationError(f"{what}: path {path!r} is not a path that starts with /")
    pattern, end = "", 0
    for found in _PARAMETER.finditer(path):
        pattern += re.escape(path[end : found.start()]) + (".*" if found[2] == "path" else "[^/]+")
        end = found.end()
    rest = path[end:]
    if "{" in rest or "}" in rest or "\\{" in pattern or "\\}" in pattern:
        raise ConfigurationError(f"{what}: path {path!r} has a brace that is no {{parameter}}")
    return re.compile(pattern + re.escape(rest), re.DOTALL)
