"""How an HTTP door says no: every error of the store as a status, headers and a problem document (RFC 9457). Pure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any, Final, TypeGuard
from urllib.parse import quote

from participant_sdk.errors import ConfigurationError, TricordError
from participant_sdk.idempotency.errors import (
    AnswerNotStored,
    FirstSentMalformed,
    IdempotencyError,
    IdempotencyKeyReused,
    InProgress,
    IntentTooOld,
    KeyMalformed,
    KeyMissing,
    LeaseLost,
    NotComparable,
    RequestTooLarge,
    RunUnknown,
    ScopeMissing,
    StoreUnavailable,
    TooManyKeys,
)
from participant_sdk.idempotency.http_headers import Headers, header_name
from participant_sdk.idempotency.kinds import OPTIONAL_TEXT, check_kinds

TYPE_BASE: Final = "urn:tricord:problem:"
"""A `type` is this and the reason in lower case with hyphens, such as urn:tricord:problem:idempotency-key-reused."""

REPLAYED: Final = "Idempotency-Replayed"
REPLAYED_BY_STRIPE: Final = "Idempotent-Replayed"
RETRY_AFTER_MS: Final = 1_000
"""Where an error does not say itself when to come back."""


@unique
class Codes(Enum):
    """In which habit refusals are told."""

    IETF = "ietf"
    """400 for a missing key, 409 while it runs, 422 for another request: as problem+json."""
    STRIPE = "stripe"
    """400 for another request, 409 while it runs, each with Stripe's body: {"error": {"type": …, "code": …}}."""
    LOCKED = "423"
    """As IETF, but 423 (Locked) while it runs."""


class AnswerEncoded(IdempotencyError):
    """The stored answer is in a Content-Encoding that this request's Accept-Encoding does not take."""

    reason = "IDEMPOTENCY_ANSWER_ENCODED"


class StreamRefused(IdempotencyError):
    """The handler has answered with a stream, where its operation takes none. Nothing of its work stays."""

    reason = "IDEMPOTENCY_STREAM_REFUSED"


class RequestLengthMissing(IdempotencyError):
    """The request's body is in chunks, and its end cannot be told here (WSGI, without `wsgi.input_terminated`)."""

    reason = "IDEMPOTENCY_REQUEST_LENGTH_MISSING"

    def __init__(self) -> None:
        super().__init__("the request comes in chunks, which this server does not take apart; send a Content-Length")


class RequestTruncated(IdempotencyError):
    """The body is not what its Content-Length says. Nothing runs."""

    reason = "IDEMPOTENCY_REQUEST_TRUNCATED"


class KeyUnknown(IdempotencyError):
    """There is no record of that key for this caller."""

    reason = "IDEMPOTENCY_KEY_UNKNOWN"

    def __init__(self) -> None:
        super().__init__("there is no record of this key")


_STATUS: Final[dict[type[TricordError], tuple[int, str]]] = {
    KeyMissing: (400, "The idempotency key is missing"),
    KeyMalformed: (400, "The idempotency key is malformed"),
    FirstSentMalformed: (400, "The time at which it was first sent is malformed"),
    ScopeMissing: (403, "It cannot be told whose request it is"),
    IntentTooOld: (412, "It was first sent too long ago"),
    RequestLengthMissing: (411, "The length of the request is not said"),
    RequestTruncated: (400, "The request is not whole"),
    TooManyKeys: (429, "Too many new keys"),
    RequestTooLarge: (413, "The request is too large"),
    IdempotencyKeyReused: (422, "The idempotency key belongs to another request"),
    InProgress: (409, "The same request is being processed"),
    AnswerNotStored: (409, "It was done, and its answer is not stored"),
    RunUnknown: (409, "Whether it was done is not known"),
    LeaseLost: (409, "Another run of the same request has taken over"),
    NotComparable: (503, "The request cannot be compared by this version of the program"),
    StoreUnavailable: (503, "The request cannot be protected from running twice just now"),
    AnswerEncoded: (406, "The stored answer is in an encoding that is not accepted"),
    KeyUnknown: (404, "There is no record of this key"),
    StreamRefused: (500, "The answer is a stream, which this operation cannot give"),
}
_OTHER_STATUS: Final[dict[tuple[Codes, type[TricordError]], int]] = {
    (Codes.STRIPE, IdempotencyKeyReused): 400,
    (Codes.LOCKED, InProgress): 423,
}
_STRIPE_CODES: Final[dict[type[TricordError], str]] = {
    InProgress: "idempotency_key_in_use",
    IdempotencyKeyReused: "idempotency_key_reused",
    KeyMissing: "idempotency_key_missing",
    KeyMalformed: "idempotency_key_invalid",
}


def is_answered(error: BaseException) -> TypeGuard[TricordError]:
    """Whether an error is an answer; any other is the application's, for whatever handles errors around the door."""
    return isinstance(error, tuple(_STATUS))


@dataclass(frozen=True, slots=True)
class Problem:
    """An answer that says no."""

    status: int
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """How a door answers. Raises ConfigurationError for what cannot be sent.

    `replayed_header`: the marker of a repeat's answer, with the value "true". `scope_status`: 401 or 403, where the
    tenant cannot be told. `gone`: 410 instead of 409 where the answer is not stored. `age`: repeats carry `Age`.
    `status_path`: where the status look-up is mounted, for the link in such refusals. `type_base`: what problem types
    begin with, such as the address of a page that explains them.
    """

    codes: Codes = Codes.IETF
    replayed_header: str | None = None
    scope_status: int = 403
    gone: bool = False
    age: bool = False
    status_path: str | None = None
    type_base: str = TYPE_BASE

    def __post_init__(self) -> None:
        check_kinds(
            "answering", self, codes=Codes, replayed_header=OPTIONAL_TEXT, gone=bool, age=bool,
            status_path=OPTIONAL_TEXT, type_base=str,
        )  # fmt: skip
        header_name(self.marker, "replayed_header")
        if self.scope_status not in (401, 403):
            raise ConfigurationError(f"scope_status {self.scope_status} is neither 401 nor 403")
        path = self.status_path
        if path is not None and (not path.startswith("/") or not path.isascii() or not path.isprintable()):
            raise ConfigurationError(f"status_path {path!r} is not a path that starts with /")
        if not self.type_base.isascii() or not self.type_base.isprintable() or " " in self.type_base:
            raise ConfigurationError(f"type_base {self.type_base!r} is not the beginning of a URI")

    @property
    def marker(self) -> str:
        """The name of the header that marks a repeat's answer."""
        if self.replayed_header is not None:
            return self.replayed_header
        return REPLAYED_BY_STRIPE if self.codes is Codes.STRIPE else REPLAYED

    def status_url(self, key: str, operation: str) -> str | None:
        """Where the status of a key's record is told; None where no look-up is mounted."""
        if self.status_path is None:
            return None
        return f"{self.status_path.rstrip('/')}/{quote(key, safe='')}?operation={quote(operation, safe='')}"

    def problem(self, error: TricordError, status_url: str | None = None) -> Problem:
        """The answer for an error of the store; `status_url` is linked where asking again would tell nothing new."""
        status, title = self._status(error)
        headers = list(_retry_after(error))
        if status_url is not None and isinstance(error, AnswerNotStored | RunUnknown | InProgress | IntentTooOld):
            headers.append((b"link", f'<{status_url}>; rel="status"'.encode()))
        else:
            status_url = None
        if self.codes is Codes.STRIPE:
            content, kind = self._stripe(error), b"application/json"
        else:
            content, kind = self._rfc9457(error, status, title, status_url), b"application/problem+json"
        body = json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
        return Problem(status, ((b"content-type", kind), (b"cache-control", b"no-store"), *headers), body)

    def _status(self, error: TricordError) -> tuple[int, str]:
        for kind, (status, title) in _STATUS.items():
            if isinstance(error, kind):
                if kind is ScopeMissing:
                    status = self.scope_status
                elif kind is AnswerNotStored and self.gone:
                    status = 410
                return _OTHER_STATUS.get((self.codes, kind), status), title
        return 500, "The request could not be processed"

    def _rfc9457(self, error: TricordError, status: int, title: str, status_url: str | None) -> dict[str, Any]:
        content: dict[str, Any] = {
            "type": self.type_base + error.reason.lower().replace("_", "-"),
            "title": title,
            "status": status,
            "detail": str(error) or title,
            "reason": error.reason,
            "retryable": error.retryable,
        }
        if status_url is not None:
            content["status_url"] = status_url
        return content

    def _stripe(self, error: TricordError) -> dict[str, Any]:
        code = next((code for kind, code in _STRIPE_CODES.items() if isinstance(error, kind)), error.reason.lower())
        return {"error": {"type": "idempotency_error", "code": code, "message": str(error)}}


def _retry_after(error: TricordError) -> Headers:
    """In whole seconds, at least one; for whatever may be asked again."""
    if not error.retryable:
        return ()
    seconds = max(1, math.ceil(getattr(error, "retry_after_ms", RETRY_AFTER_MS) / 1_000))
    return ((b"retry-after", b"%d" % seconds),)
