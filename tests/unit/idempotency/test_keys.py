"""What is a key and what is not, and that no two keys are stored as one."""

import contextlib
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import KeyMalformed
from participant_sdk.idempotency.keys import KeyRules, joined, key_hash, key_hint, parse_key, parse_key_lines

V4 = "8e03978e-40d5-43e8-bc93-6894a57f9324"
V7 = "018f4d3c-6a1b-7c2d-9e3f-0123456789ab"

KEYS = [
    ("abc", "abc"),
    ('"abc"', "abc"),
    ("  abc\t", "abc"),
    (' "abc" ', "abc"),
    ('"a b"', "a b"),
    ('" a "', " a "),
    ('"a,b;c"', "a,b;c"),
    (r'"a\"b"', 'a"b'),
    (r'"a\\b"', r"a\b"),
    (r'"\\\""', '\\"'),
    ("123", "123"),
    ("order:7/a+b==", "order:7/a+b=="),
    ("?1", "?1"),
    (V4, V4),
    (f'"{V4.upper()}"', V4.upper()),
    ("'abc'", "'abc'"),
    ("x" * 255, "x" * 255),
    ('"' + "x" * 255 + '"', "x" * 255),
    ('"' + r"\"" * 255 + '"', '"' * 255),
]

MALFORMED = [
    ("", "0 characters long; at least 1"),
    ('""', "0 characters long; at least 1"),
    ("   ", "0 characters long"),
    ('"', "no closing quote"),
    ('"abc', "no closing quote"),
    (r'"abc\"', "no closing quote"),
    ('abc"', "a quote"),
    ('a"b', "a quote"),
    ("a b", "a space"),
    ("a\\b", "a backslash"),
    ("a,b", "is a list"),
    ("a, b", "is a list"),
    ('"a","b"', "is a list"),
    ('"a", "b"', "is a list"),
    ('"a" "b"', "behind the closing quote"),
    ('"a"b', "behind the closing quote"),
    ('"a" ;x=1', "behind the closing quote"),
    ('"a";x=1', "has parameters; none are taken"),
    ("a;x=1", "has parameters"),
    (r'"a\b"', "bad escape at position 2"),
    (r'"\n"', "bad escape at position 1"),
    ('"a\\', "bad escape at position 2"),
    ('"a\tb"', "not printable ASCII at position 2"),
    ("a\tb", "not printable ASCII at position 1"),
    ('"a\r\nb"', "not printable ASCII"),
    ("a\nSet-Cookie:b", "not printable ASCII"),
    ("a\0b", "not printable ASCII"),
    ("a\x7fb", "not printable ASCII"),
    ("clé", "not printable ASCII at position 2"),
    ('"clé"', "not printable ASCII at position 3"),
    ("\ud800", "not printable ASCII"),
    ("\u3000a", "not printable ASCII"),
    ("x" * 256, "is 256 bytes long; at most 255"),
    ('"' + "x" * 256 + '"', "is 256 bytes long; at most 255"),
    ('"' + "x" * 100_000, "bytes long; at most 255"),
]


@pytest.mark.parametrize(("value", "key"), KEYS)
def test_a_key_bare_and_in_quotes_is_one_key(value: str, key: str) -> None:
    assert parse_key(value) == key
    assert parse_key(value.encode()) == key


@pytest.mark.parametrize(("value", "problem"), MALFORMED)
def test_what_is_no_key_is_refused_by_name(value: str, problem: str) -> None:
    with pytest.raises(KeyMalformed) as caught:
        parse_key(value)
    assert str(caught.value).startswith("Idempotency-Key ")
    assert problem in str(caught.value)


def test_bytes_of_utf_8_are_not_ascii() -> None:
    with pytest.raises(KeyMalformed, match="at position 2"):
        parse_key("clé".encode())


@pytest.mark.parametrize(
    "value",
    ['"a";x', '"a";x=1', '"a";x=-1.5', '"a"; x="y;\\"z"', '"a";*x=tok/en:1', '"a";x=:aGk=:;y=?0', '"a";x=@1;y=%"%c3"'],
)
def test_parameters_are_dropped_where_they_are_taken(value: str) -> None:
    assert parse_key(value, KeyRules(parameters=True)) == "a"
    with pytest.raises(KeyMalformed, match="has parameters; none are taken"):
        parse_key(value)


@pytest.mark.parametrize("value", ['"a";', '"a";X=1', '"a";x=', '"a";x=1.', '"a";x="', '"a";x=%"%C3"', '"a";x=?2'])
def test_malformed_parameters_are_never_taken(value: str) -> None:
    with pytest.raises(KeyMalformed, match="parameters that are malformed"):
        parse_key(value, KeyRules(parameters=True))


def test_several_header_lines_are_no_key() -> None:
    assert parse_key_lines([]) is None
    assert parse_key_lines([b'"a"']) == "a"
    with pytest.raises(KeyMalformed, match="is given 2 times; 1 is taken"):
        parse_key_lines(["a", "a"])


def test_the_rules_name_the_field_and_the_limit() -> None:
    rules = KeyRules(field="idempotency-key", bytes_max=8, chars_min=4, pattern="[a-z]+")
    assert parse_key("abcd", rules) == "abcd"
    for value, problem in (("abc", "at least 4"), ("abcdefghi", "at most 8"), ("abcd1", r"the pattern \[a-z\]\+")):
        with pytest.raises(KeyMalformed, match=f"^idempotency-key .*{problem}"):
            parse_key(value, rules)


def test_a_uuid_is_of_a_version_that_is_taken_and_one_key_in_either_case() -> None:
    both = KeyRules(uuid=(4, 7))
    assert parse_key(V4.upper(), both) == parse_key(f'"{V4}"', both) == V4
    assert parse_key(V7, both) == V7
    only = KeyRules(uuid=(7,))
    with pytest.raises(KeyMalformed, match=r"is not a UUID of version 7$"):
        parse_key(V4, only)
    bad = (V4[:-1], V4 + "0", V4.replace("-", ""), f"{{{V4}}}", V4.replace("-bc93", "-7c93"), V4.replace("8", "g"))
    for value in bad:
        with pytest.raises(KeyMalformed, match="version 4 or 7"):
            parse_key(value, both)


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({"bytes_max": 0}, "bytes_max 0"),
        ({"bytes_max": 5_000}, "bytes_max 5000"),
        ({"chars_min": 0}, "chars_min 0"),
        ({"chars_min": 9, "bytes_max": 8}, "chars_min 9"),
        ({"pattern": "("}, "no regular expression"),
        ({"uuid": (4, 9)}, "version that is not 1 to 8"),
        ({"uuid": (4,), "bytes_max": 35}, "no UUID"),
        ({"field": ""}, "field ''"),
        ({"field": "a\nb"}, "field"),
    ],
)
def test_rules_that_cannot_work_are_refused(rules: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        KeyRules(**rules)  # type: ignore[arg-type]


@given(st.text() | st.binary())
@example('"' + "\\" * 9)
@example('"a";' + ";" * 99)
def test_any_header_is_a_key_or_malformed_nothing_else(value: str | bytes) -> None:
    for rules in (KeyRules(), KeyRules(parameters=True, uuid=(4,)), KeyRules(chars_min=9, pattern="a*")):
        with contextlib.suppress(KeyMalformed):
            key = parse_key(value, rules)
            assert key.isascii()
            assert key.isprintable()
            assert rules.chars_min <= len(key) <= rules.bytes_max


@pytest.mark.parametrize("value", ["{} ", '"{}', "{}é", '"{}"x', "{},a", "{}" * 99, '"{}\\', '"{}";a'])
def test_no_error_says_the_key(value: str) -> None:
    with pytest.raises(KeyMalformed) as caught:
        parse_key(value.replace("{}", "sesame") + "\0", KeyRules(pattern="[0-9]+"))
    assert "sesame" not in str(caught.value)


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255))
def test_every_printable_key_can_be_sent_in_quotes(key: str) -> None:
    assert parse_key('"' + key.replace("\\", r"\\").replace('"', r"\"") + '"') == key


words = st.tuples(*[st.text(st.characters() | st.sampled_from("ab\0\ud800"), max_size=4)] * 4)


@given(words, words)
@example(("", "ab", "", ""), ("", "a", "b", ""))
@example(("\U00010000", "", "", ""), ("\ud800\udc00", "", "", ""))
def test_other_parts_give_another_hash(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert (joined(*one) == joined(*other)) == (one == other)
    hashes = key_hash(*one), key_hash(*other)
    assert (hashes[0] == hashes[1]) == (one == other)
    assert len(hashes[0]) == 32


def test_the_hash_of_a_key_is_kept_for_ever() -> None:
    assert key_hash("default", "acme", "payments.create", V4).hex() == (
        "4bd0b02933a0f443d3aabf2f645f83eae0a78d461923d23090f3bd16eb6d31dd"
    )


def test_a_hint_is_never_more_than_half_of_the_key() -> None:
    assert key_hint(V4, 6) == V4[:6]
    assert key_hint(V4, 99) == V4[:16]
    assert key_hint("abc", 16) == "a"
    assert key_hint("a", 16) == key_hint(V4, 0) == ""
    for key in ("abcdefgh"[:length] for length in range(9)):
        assert all(len(a) <= len(b) for a, b in pairwise(key_hint(key, chars) for chars in range(17)))
