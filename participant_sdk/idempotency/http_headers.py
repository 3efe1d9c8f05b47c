"""Headers of stored answers: which are kept, which are said again, and how a request's are read. Pure.

Names are bytes in lower case and values bytes, as in ASGI; a name may be there several times and keeps its order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from participant_sdk.errors import ConfigurationError

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]

SAID: Final = b"x-idempotency"
"""In which a handler says `final` or `retryable`; it does not leave the door."""

DENIED: Final = frozenset(
    {
        # Of one session or one caller.
        b"set-cookie", b"set-cookie2", b"www-authenticate", b"authentication-info", b"authorization", b"cookie",
        # Of one moment or one server.
        b"date", b"server", b"age", b"expires", b"via", b"alt-svc", b"warning", b"retry-after", b"server-timing",
        b"x-process-time", b"x-response-time", b"x-runtime", b"x-served-by",
        # Of one connection (RFC 9110, 7.6.1), and what the door makes anew.
        b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length",
        # Of one request on its way.
        b"x-request-id", b"request-id", b"x-correlation-id", b"correlation-id", b"traceparent", b"tracestate",
        b"traceresponse", b"baggage", b"b3", b"x-amzn-trace-id", b"x-amzn-requestid", b"x-cloud-trace-context",
        b"tricord-tried", SAID,
    }
)  # fmt: skip
DENIED_PREFIXES: Final = (
    b"proxy-", b"access-control-", b"x-ratelimit", b"x-rate-limit", b"ratelimit", b"x-b3-", b"uber-trace-",
    b"idempotency-", b"idempotent-",
)  # fmt: skip

_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")


def denied(name: bytes) -> bool:
    """Whether a header of this name (in any case) is never said again."""
    name = name.lower()
    return name in DENIED or name.startswith(DENIED_PREFIXES)


def header_name(name: str, field: str) -> bytes:
    """A configured header name as it stands in ASGI. Raises ConfigurationError, which names `field`."""
    try:
        found = name.lower().encode("ascii")
    except (UnicodeEncodeError, AttributeError):
        found = b""
    if not _TOKEN.fullmatch(found):
        raise ConfigurationError(f"{field}: {name!r} is not the name of a header")
    return found


def allow_list(names: Sequence[str], field: str) -> frozenset[bytes]:
    """The names of headers that alone are kept. Raises ConfigurationError for one that never is."""
    found = frozenset(header_name(name, field) for name in names)
    for name in sorted(found):
        if denied(name):
            raise ConfigurationError(f"{field}: {name.decode()} belongs to one answer only and is never said again")
    return found


def kept(headers: Iterable[tuple[bytes, bytes]], allowed: frozenset[bytes] | None) -> Headers:
    """What is stored of an answer's headers. `allowed` None: all that are not denied.

    What the headers `Connection` name is of one connection as well.
    """
    listed = [(name.lower(), value) for name, value in headers]
    named = {token for name, value in listed if name == b"connection" for token in tokens(value)}
    return tuple(
        (name, value)
        for name, value in listed
        if not denied(name) and name not in named and (allowed is None or name in allowed)
    )


def values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """The values of a header, in their order."""
    return [value for found, value in headers if found.lower() == name]


def without_said(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """What leaves the door of a handler's headers."""
    return [(name, value) for name, value in headers if name.lower() != SAID]


def tokens(value: bytes) -> list[bytes]:
    """The parts of a list header, in lower case, without parameters."""
    return [part.partition(b";")[0].strip().lower() for part in value.split(b",") if part.strip()]


def said(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """What the handler has said in `X-Idempotency`; None for nothing, or for a word that is not known."""
    for value in values(headers, SAID):
        word = value.strip().lower()
        if word in (b"final", b"retryable"):
            return word.decode()
    return None


def takes_encoding(request: Iterable[tuple[bytes, bytes]], answer: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a client reads the encoding in which an answer was stored (RFC 9110, 12.5.3)."""
    wanted = [token for value in values(answer, b"content-encoding") for token in tokens(value) if token != b"identity"]
    if not wanted:
        return True
    accepted = values(request, b"accept-encoding")
    if not accepted:
        return False  # it may be anything, but many clients that say nothing read nothing
    weights = dict(weight for value in accepted for weight in _weights(value))
    return all(weights.get(token, weights.get(b"*", 0.0)) > 0 for token in wanted)


def _weights(value: bytes) -> Iterable[tuple[bytes, float]]:
    for part in value.split(b","):
        token, _, parameters = part.partition(b";")
        weight = 1.0
        for parameter in parameters.split(b";"):
            name, _, number = parameter.partition(b"=")
            if name.strip().lower() == b"q":
                try:
                    weight = float(number)
                except ValueError:
                    weight = 0.0
        yield token.strip().lower(), weight


def bodiless(method: str, status: int) -> bool:
    """Whether an answer has no body on the wire, whatever its headers say of one."""
    return method == "HEAD" or status in (204, 304) or 100 <= status < 200


def length_header(method: str, status: int, headers: Iterable[tuple[bytes, bytes]], body: int) -> Headers:
    """The right Content-Length of an answer. Of HEAD it is what its handler said; 204 and 304 have none."""
    if method == "HEAD":
        return tuple((b"content-length", value) for value in values(headers, b"content-length")[:1])
    return () if bodiless(method, status) else ((b"content-length", b"%d" % body),)
