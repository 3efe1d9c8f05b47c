"""Which headers of an answer are kept (case 42), and how the lengths and encodings of repeats come right."""

import pytest

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.http_headers import (
    Headers,
    allow_list,
    bodiless,
    denied,
    kept,
    length_header,
    said,
    takes_encoding,
)

_OF_ONE_ANSWER = """
    set-cookie set-cookie2 www-authenticate authentication-info authorization proxy-authenticate proxy-authorization
    proxy-authentication-info date server age expires retry-after via connection keep-alive te trailer
    transfer-encoding upgrade content-length x-request-id request-id x-correlation-id traceparent tracestate baggage b3
    x-b3-traceid x-amzn-trace-id ratelimit ratelimit-limit ratelimit-policy x-ratelimit-remaining x-rate-limit-reset
    access-control-allow-origin access-control-allow-credentials access-control-expose-headers server-timing
    idempotency-replayed idempotent-replayed idempotency-status idempotency-key-expires x-idempotency tricord-tried
"""
_OF_EVERY_ANSWER = "content-type location etag link content-language vary cache-control x-order last-modified"


@pytest.mark.parametrize("name", _OF_ONE_ANSWER.split())
def test_case_42_what_belongs_to_one_answer_is_not_kept(name: str) -> None:
    for spelt in (name, name.title(), name.upper()):
        assert denied(spelt.encode())
        assert kept([(spelt.encode(), b"x"), (b"ETag", b"1")], None) == ((b"etag", b"1"),)
        with pytest.raises(ConfigurationError, match=name):
            allow_list([spelt], "orders: headers")


@pytest.mark.parametrize("name", _OF_EVERY_ANSWER.split())
def test_the_rest_is_kept(name: str) -> None:
    assert kept([(name.upper().encode(), b"x")], None) == ((name.encode(), b"x"),)


def test_several_values_keep_their_order() -> None:
    headers = [(b"Link", b"<a>"), (b"x-other", b"1"), (b"link", b"<b>"), (b"Set-Cookie", b"s")]
    assert kept(headers, None) == ((b"link", b"<a>"), (b"x-other", b"1"), (b"link", b"<b>"))
    assert kept(headers, allow_list(["LINK"], "headers")) == ((b"link", b"<a>"), (b"link", b"<b>"))
    assert kept(headers, frozenset()) == ()


def test_what_connection_names_is_of_one_connection() -> None:
    headers = [(b"connection", b"close, X-Hop"), (b"x-hop", b"1"), (b"x-far", b"2"), (b"Connection", b"x-other")]
    assert kept([*headers, (b"X-Other", b"3")], None) == ((b"x-far", b"2"),)


@pytest.mark.parametrize("name", ["", "two words", "a:b", "ünder", "a\r\nb", "a\0"])
def test_what_is_no_header_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="orders: headers"):
        allow_list([name], "orders: headers")


@pytest.mark.parametrize(
    ("value", "meant"),
    [(b"final", "final"), (b" Final ", "final"), (b"RETRYABLE", "retryable"), (b"maybe", None), (b"", None)],
)
def test_what_the_handler_says(value: bytes, meant: str | None) -> None:
    assert said([(b"X-Idempotency", value)]) == meant
    assert said([]) is None


GZIP: Headers = ((b"content-encoding", b"gzip"),)


@pytest.mark.parametrize(
    ("answer", "accept", "takes"),
    [
        ((), None, True),
        (((b"content-encoding", b"identity"),), None, True),
        (GZIP, None, False),
        (GZIP, b"gzip", True),
        (GZIP, b"GZIP;q=0.5", True),
        (GZIP, b"br, gzip", True),
        (GZIP, b"br", False),
        (GZIP, b"gzip;q=0", False),
        (GZIP, b"gzip; q=0.000, *", False),
        (GZIP, b"*", True),
        (GZIP, b"*;q=0", False),
        (GZIP, b"gzip;q=much", False),
        (GZIP, b"", False),
        (((b"content-encoding", b"gzip, br"),), b"gzip", False),
        (((b"content-encoding", b"gzip, br"),), b"gzip, br", True),
    ],
)
def test_an_encoding_is_given_to_whom_reads_it(answer: Headers, accept: bytes | None, takes: bool) -> None:
    request = [] if accept is None else [(b"Accept-Encoding", accept)]
    assert takes_encoding(request, answer) is takes


@pytest.mark.parametrize(
    ("method", "status", "said_length", "length"),
    [
        ("POST", 200, b"9", b"3"),
        ("POST", 200, None, b"3"),
        ("POST", 204, b"9", None),
        ("GET", 304, b"9", None),
        ("HEAD", 200, b"9", b"9"),
        ("HEAD", 200, None, None),
    ],
)
def test_the_length_is_right(method: str, status: int, said_length: bytes | None, length: bytes | None) -> None:
    headers = [] if said_length is None else [(b"Content-Length", said_length)]
    expected = () if length is None else ((b"content-length", length),)
    assert length_header(method, status, headers, 3) == expected
    assert bodiless(method, status) == (method == "HEAD" or status in (204, 304))
