"""What makes a gRPC method safe to repeat: an `Operation`, and how it is told from calls; checked when it is made."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, unique
from types import NoneType
from typing import Any, Final

import grpc

from participant_sdk.context_headers import TRIED_HEADER
from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.fingerprints import RAW, Fingerprinter
from participant_sdk.idempotency.first_sent import FirstSent
from participant_sdk.idempotency.grpc_status import DETAILS_KEY
from participant_sdk.idempotency.keys import KeyRules
from participant_sdk.idempotency.kinds import check_kinds
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.quotas import KeyQuota, Quotas
from participant_sdk.idempotency.record import Answer

KEY_METADATA: Final = "idempotency-key"
REQUEST_BYTES_MAX: Final = 1 << 30

NEVER_STORED: Final = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
"""Codes that say nothing for good: a repeat may end differently, so none of them is ever an answer."""

_METHOD: Final = re.compile(r"/[A-Za-z_][A-Za-z0-9_.]*/[A-Za-z_][A-Za-z0-9_]*")
_METADATA: Final = re.compile(r"[0-9a-z_.-]+")
_FIELD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


@unique
class ServerStreaming(Enum):
    """What a keyed call of a method may do that streams its responses."""

    REJECT = "reject"
    """It is refused at its start, and runs without a key only (which `required` must then allow)."""
    TOMBSTONE = "tombstone"
    """Responses go out as they are made, the status after the COMMIT; a repeat is told that it was done."""
    SPOOL = "spool"
    """Responses are kept until the COMMIT, then sent, and sent again to a repeat."""


@dataclass(frozen=True, kw_only=True)
class GrpcOperation:
    """A gRPC method that is safe to repeat. Raises ConfigurationError for settings that cannot work.

    `tenant`: whose request it is, from its authenticated context; a result of None or "" refuses the call. None in its
    place: the program has one tenant. `key_field`: the request's field that holds the key (of a client's stream: its
    first message's), in place of the metadata `key_metadata`. Without a key a call is refused, or, if not `required`,
    runs as if there were no interceptor.

    `fingerprint`: what makes two messages the same request; of metadata, those that it names count, and always the
    xid, so that an answer never serves another global transaction. `stored_codes`: what besides OK is an answer for
    good; the work is then rolled back. `kept_metadata`: initial and trailing metadata that is part of the answer.
    `first_sent`: calls that say when they were first sent are refused when their record may be gone. `quota`: how many
    new keys a tenant may bring.
    `request_bytes_max`: what a call may send, all messages of a client's stream together.

    `redact` changes an answer before it is stored, `restore` before it is said again, such as to encrypt it; both fail
    closed. `current(context, answer)` gives what is said to a repeat in place of the stored answer (see `grpc_answer`),
    such as what the resource is by now; it must change nothing, and may be `async def` for a coroutine's method.
    """

    operation: Operation
    method: str
    tenant: Callable[[Any], str | None] | None
    key_metadata: str = KEY_METADATA
    key_field: str = ""
    key_rules: KeyRules = field(default_factory=KeyRules)
    required: bool = True
    fingerprint: Fingerprinter = RAW
    stored_codes: Collection[grpc.StatusCode] = ()
    kept_metadata: Collection[str] = (TRIED_HEADER,)
    request_bytes_max: int = 4 << 20
    server_streaming: ServerStreaming = ServerStreaming.REJECT
    first_sent: FirstSent | None = None
    quota: KeyQuota | None = None
    redact: Callable[[Answer], Answer] | None = None
    restore: Callable[[Answer], Answer] | None = None
    current: Callable[[Any, Answer], Answer | Awaitable[Answer]] | None = None

    def __post_init__(self) -> None:
        check_kinds("gRPC operation", self, method=str)
        check_kinds(
            self.method, self, operation=Operation, key_metadata=str, key_field=str, key_rules=KeyRules, required=bool,
            stored_codes=Collection, kept_metadata=Collection, request_bytes_max=int, server_streaming=ServerStreaming,
            first_sent=(FirstSent, NoneType), quota=(KeyQuota, NoneType),
        )  # fmt: skip
        if self.tenant is not None and not callable(self.tenant):
            raise ConfigurationError(f"{self.method}: tenant is neither a function of the context nor None")
        if not callable(getattr(self.fingerprint, "current", None)):
            raise ConfigurationError(f"{self.method}: fingerprint {self.fingerprint!r} is no Fingerprinter")
        if not _METHOD.fullmatch(self.method):
            raise ConfigurationError(f"method {self.method!r} is not of the form /package.Service/Method")
        self._check_names("kept_metadata", self.kept_metadata)
        self._check_names("key_metadata", [self.key_metadata])
        if self.key_metadata.endswith("-bin"):
            raise ConfigurationError(f"{self.method}: key_metadata {self.key_metadata!r} holds bytes; a key is text")
        if self.key_field and not _FIELD.fullmatch(self.key_field):
            raise ConfigurationError(f"{self.method}: key_field {self.key_field!r} is not a path of field names")
        if not 1 <= self.request_bytes_max <= REQUEST_BYTES_MAX:
            raise ConfigurationError(
                f"{self.method}: request_bytes_max {self.request_bytes_max} is not 1 to {REQUEST_BYTES_MAX}"
            )
        if self.stored_codes and self.server_streaming is ServerStreaming.TOMBSTONE:
            raise ConfigurationError(f"{self.method}: with TOMBSTONE no answer is stored; stored_codes must be empty")
        if self.restore is not None and self.redact is None:
            raise ConfigurationError(f"{self.method}: restore is there without redact")
        for name in ("redact", "restore", "current"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ConfigurationError(f"{self.method}: {name} cannot be called")
        self._check_codes()
        if self.first_sent is not None:
            self._check_names("first_sent", [self.first_sent.name.lower()])
            self.first_sent.check_operation(self.operation)
        where = f"field {self.key_field}" if self.key_field else f"metadata {self.key_metadata}"
        object.__setattr__(self, "key_rules", replace(self.key_rules, field=where))
        object.__setattr__(self, "stored_codes", frozenset(self.stored_codes))
        object.__setattr__(self, "kept_metadata", frozenset(self.kept_metadata))

    def _check_names(self, which: str, names: Collection[str]) -> None:
        if isinstance(names, str):
            raise ConfigurationError(f"{self.method}: {which} is a text; a collection of names is needed")
        for name in names:
            if not isinstance(name, str) or not _METADATA.fullmatch(name) or name.startswith("grpc-"):
                raise ConfigurationError(
                    f"{self.method}: {which} {name!r} is not a name of metadata in lower case, or is one of gRPC's own"
                    + (" (which is always kept)" if name == DETAILS_KEY else "")
                )

    def _check_codes(self) -> None:
        for code in self.stored_codes:
            if not isinstance(code, grpc.StatusCode):
                raise ConfigurationError(f"{self.method}: stored_codes holds {code!r}, which is no grpc.StatusCode")
            if code in NEVER_STORED:
                raise ConfigurationError(
                    f"{self.method}: stored_codes holds {code.name}, after which a repeat may end differently"
                )


def by_method(operations: Iterable[GrpcOperation]) -> Mapping[str, GrpcOperation]:
    """Them by their methods. Raises ConfigurationError if a method is there twice, or a name for two operations."""
    found: dict[str, GrpcOperation] = {}
    names: dict[str, Operation] = {}
    for each in operations:
        if each.method in found:
            raise ConfigurationError(f"method {each.method} has two operations")
        if names.setdefault(each.operation.name, each.operation) != each.operation:
            raise ConfigurationError(f"two operations have the name {each.operation.name}")
        found[each.method] = each
    return found


def quotas_of(operations: Iterable[GrpcOperation]) -> Quotas:
    """Of one server; methods of one operation share their tenants' keys."""
    return Quotas((each.operation.name, each.quota) for each in operations)
