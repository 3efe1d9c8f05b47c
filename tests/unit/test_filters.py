"""The language of filters: what is read, what is refused and where, and that printing loses nothing."""

import re
import string

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coordinator.filters import CHARS_MAX, DEPTH_MAX, TERMS_MAX, FilterError, parse
from coordinator.filters_tree import And, Field, Node, Not, Or, Term, looks_into_branches, matches, printed
from coordinator.model import Attention, BranchSpec, Spec, State, Step, Transaction
from tests.filter_trees import terms, trees

TRYING = Term(Field.STATE, "=", State.TRYING)
BANK = Term(Field.PARTICIPANT, "=", "bank")
OLD = Term(Field.AGE, ">", 300_000)

READ: dict[str, Node | None] = {
    "": None,
    " \t\n": None,
    "state = TRYING": TRYING,
    "  state=TRYING ": TRYING,
    "state != 'CONFIRMED'": Term(Field.STATE, "!=", State.CONFIRMED),
    "attention = VIOLATION": Term(Field.ATTENTION, "=", Attention.VIOLATION),
    "attention != NONE": Term(Field.ATTENTION, "!=", Attention.NONE),
    "participant = bank": BANK,
    'participant = "bank"': BANK,
    "action = bank.debit": Term(Field.ACTION, "=", "bank.debit"),
    'labels.order = "42"': Term(Field.LABEL, "=", "42", "order"),
    "labels.order = 42": Term(Field.LABEL, "=", "42", "order"),
    "labels.a.b-c_d != 'it\\'s \"x\" \\\\'": Term(Field.LABEL, "!=", 'it\'s "x" \\', "a.b-c_d"),
    'labels.words = "a AND (b)"': Term(Field.LABEL, "=", "a AND (b)", "words"),
    "age > 5m": OLD,
    "age<2h": Term(Field.AGE, "<", 7_200_000),
    "age >= 30s": Term(Field.AGE, ">=", 30_000),
    "age <= 1d": Term(Field.AGE, "<=", 86_400_000),
    'create_time < "1970-01-01T00:00:01.5Z"': Term(Field.CREATE_TIME, "<", 1_500),
    "create_time >= 1970-01-01T01:00:00+01:00": Term(Field.CREATE_TIME, ">=", 0),
    "state = TRYING AND age > 5m AND participant = bank": And((TRYING, OLD, BANK)),
    "state = TRYING OR age > 5m OR participant = bank": Or((TRYING, OLD, BANK)),
    "state = TRYING AND age > 5m OR participant = bank": And((TRYING, Or((OLD, BANK)))),
    "state = TRYING OR age > 5m AND participant = bank": And((Or((TRYING, OLD)), BANK)),
    "(state = TRYING AND age > 5m) OR participant = bank": Or((And((TRYING, OLD)), BANK)),
    "((state = TRYING))": TRYING,
    "NOT state = TRYING": Not(TRYING),
    "-state = TRYING": Not(TRYING),
    "- (state = TRYING OR age > 5m)": Not(Or((TRYING, OLD))),
    "NOT(state = TRYING) AND age > 5m": And((Not(TRYING), OLD)),
    "NOT (NOT state = TRYING)": Not(Not(TRYING)),
}

REFUSED: dict[str, tuple[int, str]] = {
    "states = TRYING": (
        1,
        "expected one of state, attention, participant, action, labels.NAME, age, create_time, found 'states'",
    ),
    "state": (6, "expected one of = !=, found the end"),
    "state > TRYING": (7, "expected one of = !=, found '>'"),
    "state : TRYING": (7, "expected one of = !=, found ':'"),
    "age = 5m": (5, "expected one of < <= > >=, found '='"),
    "state =": (8, "expected a value, found the end"),
    "state = AND": (9, "expected a value, found 'AND'"),
    "state = DONE": (9, "expected one of TRYING, CONFIRMING, CONFIRMED, CANCELLING, CANCELLED, found 'DONE'"),
    "state = trying": (9, "expected one of TRYING,"),
    "attention = HIGH": (13, "expected one of NONE, RETRYING, VIOLATION, STUCK, found 'HIGH'"),
    "age > 5": (7, "expected an age such as 30s, 5m, 2h or 1d, found '5'"),
    "age > -5m": (7, "expected an age"),
    "age > ٣m": (7, "expected an age"),
    "create_time < 2026-01-01": (15, "expected a time such as"),
    "create_time < 2026-13-01T00:00:00Z": (15, "expected a time such as"),
    "create_time < 2026-01-01T00:00:00": (15, "expected a time such as"),
    "participant = 'a b'": (15, "expected a name: 1 to 64 of A-Z a-z 0-9 . _ -"),
    "labels = 1": (1, "expected labels.NAME, a name being a letter a-z"),
    "labels.Order = 1": (1, "expected labels.NAME"),
    "labels.order = ''": (16, "expected 1 to 255 printable characters"),
    "labels.order = '\0'": (16, "expected 1 to 255 printable characters"),
    "labels.order = 'open": (21, "expected the closing ', found the end"),
    r"labels.order = 'a\n'": (18, r"expected \\, \" or \' where a \ stands in a text"),
    "state = TRYING age > 5m": (16, "expected AND, OR or the end, found 'age'"),
    "state = TRYING and age > 5m": (16, "expected AND, OR or the end, found 'and'"),
    "state = TRYING AND": (19, "expected a field, NOT, - or (, found the end"),
    "AND state = TRYING": (1, "expected a field, NOT, - or (, found 'AND'"),
    "NOT NOT state = TRYING": (5, "expected a field, NOT, - or (, found 'NOT'"),
    "(state = TRYING": (16, "expected AND, OR or ), found the end"),
    "state = TRYING)": (15, "expected AND, OR or the end, found ')'"),
    "()": (2, "expected a field"),
    "\0": (1, "expected one of state"),
    "(" * (DEPTH_MAX + 1): (DEPTH_MAX + 1, "more than 20 parentheses within each other"),
    " OR ".join(["age > 5m"] * (TERMS_MAX + 1)): (TERMS_MAX * 12 + 1, "more than 50 comparisons"),
    " " * (CHARS_MAX + 1): (CHARS_MAX + 1, "the filter has 1001 characters; the limit is 1000"),
}

NAMES = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=10)
LABEL_NAMES = st.from_regex(r"[a-z][a-z0-9_.-]{0,10}", fullmatch=True)
VALUES = st.text(min_size=1, max_size=12).filter(str.isprintable)
TREES = trees(terms(names=NAMES, values=VALUES, labels=LABEL_NAMES, ages_s=999_999_999))


@pytest.mark.parametrize("text", READ)
def test_what_is_read(text: str) -> None:
    assert parse(text) == READ[text]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_and_where(text: str) -> None:
    column, complaint = REFUSED[text]
    with pytest.raises(FilterError) as caught:
        parse(text)
    assert (caught.value.column, str(caught.value)[: len(f"column {column}: {complaint}")]) == (
        column,
        f"column {column}: {complaint}",
    )


def test_limits_are_reached_and_not_more() -> None:
    deep = "(" * DEPTH_MAX + "age > 5m" + ")" * DEPTH_MAX
    assert parse(deep) == OLD
    assert parse(" OR ".join(["age > 5m"] * TERMS_MAX)) == Or((OLD,) * TERMS_MAX)
    assert parse("age > 5m".ljust(CHARS_MAX)) == OLD


WORDS = """state labels.a age action AND OR NOT - ( ) = != < TRYING 5m "x" ' \\"""
FRAGMENTS = st.sampled_from(re.findall(r"\S+", WORDS))


def refusal(text: str) -> FilterError | None:
    """Why it is no filter; None if it is one."""
    try:
        parse(text)
    except FilterError as error:
        return error
    return None


@given(st.one_of(st.text(max_size=1_010), st.lists(FRAGMENTS, max_size=40).map(" ".join)))
def test_any_text_is_read_or_refused_at_a_column_of_it(text: str) -> None:
    error = refusal(text)
    if error is not None:
        assert 1 <= error.column <= len(text) + 1
        assert len(str(error)) < 400
    elif (node := parse(text)) is not None:
        assert parse(printed(node)) == node


@given(TREES)
def test_a_printed_tree_is_read_as_the_same(node: Node) -> None:
    text = printed(node)
    assume(len(text) <= CHARS_MAX)
    assert parse(text) == node


def test_the_longest_age_is_printed_so_that_it_is_read() -> None:
    for text in ("age > 999999999d", "age > 999999999h", "age > 0d"):
        node = parse(text)
        assert node is not None
        assert printed(node) == text


def tx_of(*branches: BranchSpec, **labels: str) -> Transaction:
    """A transaction that began at 1,000 s."""
    spec = Spec(bytes(16), b"", 1_000_000, 30_000, branches, labels=tuple(labels.items()))
    return Transaction(spec, State.TRYING, (Step(),) * len(branches))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("action = debit", True),
        ("action = bank.debit", True),
        ("action = shop.debit", False),
        ("action != debit", False),
        ("action != credit", True),
        ("NOT action = debit", False),
        ("participant = bank AND action = ship", True),
        ("participant != bank", False),
        ("participant != other", True),
        ("labels.order = 42", True),
        ("labels.order != 42", False),
        ("labels.none = 42", False),
        ("labels.none != 42", True),
        ("age > 5m", False),
        ("age >= 5m", True),
        ("age < 5m", False),
        ("age <= 5m", True),
        ("create_time < 1970-01-01T00:16:40.001Z", True),
        ("create_time < 1970-01-01T00:16:40Z", False),
        ("state = TRYING AND attention = NONE", True),
        ("state = CONFIRMED OR attention != NONE", False),
    ],
)
def test_what_matches(text: str, found: bool) -> None:
    node = parse(text)
    assert node is not None
    tx = tx_of(BranchSpec("bank", "debit"), BranchSpec("shop", "ship"), order="42")
    assert matches(node, tx, 1_300_000) is found
    assert looks_into_branches(node) is ("action" in text)
