"""Which requests are one by each algorithm, and that what is stored can be compared for ever."""

import hashlib
import json
from collections.abc import Iterator

import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import example, given
from hypothesis import strategies as st

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency import fingerprints
from participant_sdk.idempotency.fingerprints import (
    RAW,
    Algorithm,
    BodyHasher,
    Custom,
    FormBody,
    HashedBody,
    JsonBody,
    MessageBody,
    RawBytes,
    RequestParts,
    keyed_request,
)
from participant_sdk.idempotency.record import Fingerprint
from tricord.v1 import coordinator_pb2 as pb


def digest(algorithm: Algorithm, body: bytes = b"", *, route: tuple[str | bytes, ...] = ("POST", "/orders")) -> bytes:
    return algorithm.digest(RequestParts(route=route, body=body))


def same(algorithm: Algorithm, one: bytes, other: bytes) -> bool:
    return digest(algorithm, one) == digest(algorithm, other)


JSON = JsonBody()

SAME = [
    (b'{"a":1,"b":[2]}', b' {\n"b" : [2], "a":1}'),
    (b'{"a":1}', b'{"a":1.0}'),
    (b'{"a":1}', b'{"a":1e0}'),
    (b'{"a":1e2}', b'{"a":100}'),
    (b'{"a":"\\u0041"}', b'{"a":"A"}'),
    (b'{"a":0.5}', b'{"a":5e-1}'),
    (b'{"a":0}', b'{"a":-0}'),
    ('{"é":1,"\U00010000":2,"\ue000":3}'.encode(), '{"\ue000":3,"\U00010000":2,"é":1}'.encode()),
]

OTHER = [
    (b'{"a":1}', b'{"a":"1"}'),
    (b'{"a":1}', b'{"a":true}'),
    (b'{"a":null}', b"{}"),
    (b"[1,2]", b"[2,1]"),
    ('{"a":"\u00e9"}'.encode(), '{"a":"e\u0301"}'.encode()),
    (b'{"a":9007199254740993}', b'{"a":9007199254740992}'),
    (b'{"a":9007199254740993.0}', b'{"a":9007199254740992.0}'),
    (b'{"a":0.1}', b'{"a":0.1000000000000000055}'),
    (b'{"a":1e-400}', b'{"a":0}'),
    (b'{"a":1e400}', b'{"a":1e401}'),
    (b'{"a":1e9999999999}', b'{"a":0.0}'),
    (b'{"a":1,"a":2}', b'{"a":2}'),
    (b'{"a":NaN}', b'{"a":null}'),
    (b'{"a":"\\ud800"}', b'{"a":"\\ud801"}'),
    (b"", b"null"),
    (b"\xff", b"\xfe"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_json_that_means_the_same_is_the_same_request(one: bytes, other: bytes) -> None:
    assert same(JSON, one, other)
    assert not same(RAW, one, other)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_json_that_differs_or_cannot_be_held_without_loss_is_another_request(one: bytes, other: bytes) -> None:
    assert not same(JSON, one, other)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[" * 101 + b"]" * 101,
        b"1" * 5_000,
        b'{"a":1,"a":1}',
        b"[1e400]",
        b"[NaN]",
        b" 1 1",
    ],
)
def test_a_body_that_is_no_canonical_json_is_compared_byte_for_byte(body: bytes) -> None:
    assert same(JSON, body, bytes(bytearray(body)))
    assert not same(JSON, body, body + b" ")


def test_how_deep_the_stack_is_makes_no_difference() -> None:
    body = b"[" * 99 + b"]" * 99

    def deep(levels: int) -> bytes:
        return digest(JSON, body) if levels == 0 else deep(levels - 1)

    assert deep(300) == digest(JSON, body) == digest(JSON, b" " + body)


def test_a_large_json_body_is_compared_byte_for_byte() -> None:
    small = JsonBody(bytes_max=10, revision=1)
    assert same(small, b'{"a": 1}', b'{"a":1}')
    assert not same(small, b'{"a": 1}   ', b'{"a":1}')


@given(st.binary() | st.recursive(st.none() | st.floats() | st.integers() | st.text(), st.lists).map(json.dumps))
@example(b"1.")
def test_any_body_has_a_fingerprint_by_any_algorithm(body: bytes | str) -> None:
    data = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
    for algorithm in (RAW, JSON, JsonBody(include=("/0",), revision=1), FormBody(), MessageBody(message=Struct)):
        assert len(digest(algorithm, data)) == 32


names = st.text(st.sampled_from("ab/~0é"), max_size=3)
trees = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@given(trees, trees)
def test_other_json_has_another_fingerprint(one: object, other: object) -> None:
    written = json.dumps(one, indent=1, sort_keys=True), json.dumps(other, sort_keys=True, ensure_ascii=False)
    bare = [json.dumps(value, sort_keys=True) for value in (one, other)]
    assert same(JSON, written[0].encode(), written[1].encode()) == (bare[0] == bare[1])


def test_included_pointers_are_all_that_counts() -> None:
    chosen = JsonBody(include=("/amount", "/lines/0/sku", "/a~1b"), revision=1)
    one = b'{"amount":5,"lines":[{"sku":"x","n":1}],"a/b":null,"at":1}'
    assert same(chosen, one, b'{"at":2,"a/b":null,"lines":[{"sku":"x","n":2},{}],"amount":5.0}')
    for other in (
        b'{"amount":6,"lines":[{"sku":"x"}],"a/b":null}',
        b'{"amount":5,"lines":[{"sku":"y"}],"a/b":null}',
        b'{"amount":5,"lines":[],"a/b":null}',
        b'{"amount":5,"lines":[{"sku":"x"}]}',
    ):
        assert not same(chosen, one, other)


def test_excluded_pointers_do_not_count() -> None:
    without = JsonBody(exclude=("/key", "/meta/sent_at", "/list/0", "/list/1", "/none/of/these"), revision=1)
    one = b'{"key":"k1","meta":{"sent_at":1,"who":"me"},"list":[1,2,3]}'
    assert same(without, one, b'{"key":"k2","meta":{"who":"me"},"list":[8,9,3]}')
    assert not same(without, one, b'{"key":"k1","meta":{"sent_at":1,"who":"you"},"list":[1,2,3]}')
    assert not same(without, one, b'{"key":"k1","meta":{"sent_at":1,"who":"me"},"list":[1,2,4]}')


def test_the_route_and_the_named_headers_count() -> None:
    assert digest(RAW, route=("POST", "/a")) != digest(RAW, route=("POST", "/b"))
    assert digest(RAW, route=("POST", "/ab", "c")) != digest(RAW, route=("POST", "/a", "bc"))
    versioned = RawBytes(headers=("API-Version",), revision=1)

    def with_headers(*headers: tuple[bytes, bytes]) -> bytes:
        return versioned.digest(RequestParts(headers=headers))

    one = with_headers((b"API-VERSION", b" 2 "), (b"date", b"today"))
    assert one == with_headers((b"date", b"tomorrow"), (b"api-version", b"2"))
    assert one != with_headers((b"api-version", b"3"))
    assert one != with_headers((b"api-version", b"2"), (b"api-version", b"2"))
    assert with_headers() != with_headers((b"api-version", b""))


def test_a_multipart_body_is_the_same_with_another_boundary() -> None:
    def parts(boundary: bytes, content: bytes) -> RequestParts:
        body = b"--%b\r\n\r\n%b\r\n--%b--" % (boundary, content, boundary)
        return RequestParts(headers=[(b"Content-Type", b"multipart/form-data; boundary=" + boundary)], body=body)

    form = FormBody()
    assert form.digest(parts(b"xyz", b"a")) == form.digest(parts(b"uvwx", b"a"))
    assert form.digest(parts(b"xyz", b"a")) != form.digest(parts(b"uvwx", b"b"))
    assert same(form, b"a=1", b"a=1")
    assert not same(form, b"a=1", b"a=2")


def test_a_message_is_compared_without_the_fields_that_differ() -> None:
    struct = Struct()
    struct.update({"a": 1, "b": 2, "c": 3})
    other = Struct()
    other.update({"c": 3, "b": 2, "a": 1})
    assert same(MessageBody(message=Struct), struct.SerializeToString(), other.SerializeToString())
    request = pb.ExecuteRequest(idempotency_key="k1")
    again = pb.ExecuteRequest(idempotency_key="k2")
    plain, without = (
        MessageBody(message=pb.ExecuteRequest),
        MessageBody(message=pb.ExecuteRequest, exclude=("idempotency_key",), revision=1),
    )
    assert not same(plain, request.SerializeToString(), again.SerializeToString())
    assert same(without, request.SerializeToString(), again.SerializeToString())
    assert not same(plain, b"\xff\xff", b"\xff")


def test_a_body_hashed_as_it_arrives_is_the_same_and_is_read_only_for_what_needs_it() -> None:
    body = b'{"a": 1}'
    reads: list[int] = []

    def read() -> bytes:
        reads.append(1)
        return body

    hasher = BodyHasher()
    for chunk in _chunks(body, 3):
        hasher.add(chunk)
    assert hasher.size == len(body)
    parts = RequestParts(body=hasher.done(read))
    assert parts.body == HashedBody(hashlib.sha256(body).digest(), read)
    assert RAW.digest(parts) == RAW.digest(RequestParts(body=body))
    assert reads == []
    assert JSON.digest(parts) == JSON.digest(RequestParts(body=b'{"a":1}'))
    assert reads == [1]


def test_a_custom_fingerprint_is_what_the_function_says() -> None:
    first = Custom(function=lambda parts: parts.read()[:1], revision=1)
    assert same(first, b"abc", b"axy")
    assert not same(first, b"abc", b"bbc")
    raw = Custom(function=lambda parts: None, revision=1)
    assert not same(raw, b"abc", b"axy")


def test_an_older_version_is_still_compared_and_an_unknown_one_is_not() -> None:
    before = JsonBody(exclude=("/at",), revision=1)
    now = JsonBody(exclude=("/at", "/by"), revision=2, older=(before,))
    one, repeat = RequestParts(body=b'{"at":1,"by":2}'), RequestParts(body=b'{"at":2,"by":2}')
    other = RequestParts(body=b'{"at":2,"by":3}')
    stored = before.current(one)
    assert keyed_request("k", "", repeat, now).matches(stored) is True
    assert keyed_request("k", "", other, now).matches(stored) is False
    assert keyed_request("k", "", other, now).matches(now.current(one)) is True
    assert keyed_request("k", "", one, before).matches(now.current(one)) is None
    assert keyed_request("k", "", one, now).matches(Fingerprint(9_001, b"x" * 32)) is None
    for plain in (RAW, JSON, FormBody()):  # what was used without settings is always known
        assert keyed_request("k", "", one, now).matches(plain.current(one)) is True
    last = JsonBody(exclude=("/at",), revision=3, older=(now,))
    assert keyed_request("k", "", repeat, last).matches(stored) is True


KEPT = {
    1_000: "ede7be73a2b9ca527603b2fa1cc5a316f8a55331eae8489712c6cc9d583a4652",
    2_000: "82f3528ef3012db6fe330d0d929bdbd2961fb0f3f07f2b6af92432302a5c1cf4",
    3_000: "1a51dd3f007ba413ec5823dee9981c539641345c63473b3f0e05746d3bb20388",
    4_000: "e0829b0cbef69cd7fb0dc3da394517e63b7f27e393cf32758009e7a7024e3526",
}


@pytest.mark.parametrize("algorithm", [RAW, JSON, FormBody(), MessageBody(message=Struct)])
def test_what_is_stored_today_can_be_compared_for_ever(algorithm: Algorithm) -> None:
    assert digest(algorithm, b'{"b":[1.50,"\xc3\xa9"],"a":null}').hex() == KEPT[algorithm.version]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: JsonBody(exclude=("/a",)), "revision 0"),
        (lambda: JsonBody(revision=1), "revision 1"),
        (lambda: RawBytes(headers=("a",), revision=1_000), "revision 1000 is not 0 to 999"),
        (lambda: RawBytes(headers="a", revision=1), "headers 'a' is not a tuple"),  # type: ignore[arg-type]
        (lambda: RawBytes(headers=("",), revision=1), "no name of a header"),
        (lambda: JsonBody(exclude=("a",), revision=1), "'a' does not begin with /"),
        (lambda: JsonBody(exclude=("/~2",), revision=1), "neither ~0 nor ~1"),
        (lambda: JsonBody(include=("/~",), revision=1), "neither ~0 nor ~1"),
        (lambda: JsonBody(exclude=("",), revision=1), "leaves nothing"),
        (lambda: JsonBody(exclude=("/a", "/a"), revision=1), "a pointer twice"),
        (lambda: JsonBody(include=("/a",), exclude=("/b",), revision=1), "do not go together"),
        (lambda: JsonBody(bytes_max=0, revision=1), "bytes_max 0"),
        (lambda: MessageBody(message=Struct, exclude=("nope",), revision=1), "has no field 'nope'"),
        (lambda: MessageBody(message=Struct, exclude=("fields.key",), revision=1), "has no field 'fields.key'"),
        (lambda: RawBytes(headers=("a",), revision=1, older=(RawBytes(headers=("b",), revision=1),)), "one kind"),
        (lambda: Custom(function=lambda parts: b""), "revision 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: object, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        make()  # type: ignore[operator]


def test_without_the_library_canonical_json_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "HAS_JSON", False)
    with pytest.raises(ConfigurationError, match="rfc8785"):
        JsonBody()


def _chunks(body: bytes, size: int) -> Iterator[bytes]:
    return (body[at : at + size] for at in range(0, len(body), size))
