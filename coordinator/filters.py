"""Reads a filter of transactions: a subset of AIP-160, such as ``state = TRYING AND age > 5m``.

    expression:  factor { AND factor }
    factor:      term { OR term }               OR binds more tightly than AND, as AIP-160 has it
    term:        [ NOT | - ] simple
    simple:      restriction | ( expression )
    restriction: field operator value

What else AIP-160 has is refused: bare values, factors side by side without AND, ``:``, wildcards, functions. Every
error names the column, from 1, and what was expected there.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from .filters_tree import AGE_MS, And, Field, Node, Not, Or, Term
from .model import Attention, State

CHARS_MAX = 1_000
TERMS_MAX = 50
DEPTH_MAX = 20

_KEYWORDS = ("AND", "OR", "NOT")
_EQUAL = ("=", "!=")
_ORDERED = ("<", "<=", ">", ">=")
_OPERATORS = {field: _ORDERED if field in (Field.AGE, Field.CREATE_TIME) else _EQUAL for field in Field}
_FIELDS = ", ".join("labels.NAME" if field is Field.LABEL else field.value for field in Field)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\s()<>=!:\"']+")
_BARE_VALUE = re.compile(r"[^\s()<>=!\"']+")
"""With colons: a time needs no quotes."""
_OPERATOR = re.compile(r"[<>]=?|!=|=")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ACTION = re.compile(r"[A-Za-z0-9._-]{1,129}")
_LABEL_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,62}")
_LABEL_VALUE_CHARS_MAX = 255
_AGE = re.compile(r"([0-9]{1,9})([smhd])")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,3})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


class FilterError(Exception):
    """A text that is no filter."""

    def __init__(self, column: int, complaint: str) -> None:
        super().__init__(f"column {column}: {complaint}")
        self.column = column
        """From 1; one more than there are characters where the text ends too early."""


def parse(text: str) -> Node | None:
    """The filter that a text is; None where it is blank: all transactions. Raises FilterError."""
    if len(text) > CHARS_MAX:
        raise FilterError(CHARS_MAX + 1, f"the filter has {len(text)} characters; the limit is {CHARS_MAX}")
    reader = _Reader(text)
    if reader.at_end():
        return None
    node = reader.expression(0)
    if not reader.at_end():
        raise reader.expected("AND, OR or the end")
    return node


class _Value(NamedTuple):
    text: str
    at: int
    """Where it begins."""


class _Reader:
    """Goes through a text once, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._terms = 0

    def at_end(self) -> bool:
        """Whether nothing but blanks is left."""
        self._skip()
        return self._at == len(self._text)

    def expected(self, what: str, at: int | None = None) -> FilterError:
        """The error that something else stands there."""
        at = self._at if at is None else at
        found = _WORD.match(self._text, at)
        shown = f"{found[0][:40]!a}" if found else f"{self._text[at]!a}" if at < len(self._text) else "the end"
        return FilterError(at + 1, f"expected {what}, found {shown}")

    def expression(self, depth: int) -> Node:
        """Factors with AND between them."""
        factors = [self._factor(depth)]
        while self._keyword("AND"):
            factors.append(self._factor(depth))
        return factors[0] if len(factors) == 1 else And(tuple(factors))

    def _factor(self, depth: int) -> Node:
        terms = [self._term(depth)]
        while self._keyword("OR"):
            terms.append(self._term(depth))
        return terms[0] if len(terms) == 1 else Or(tuple(terms))

    def _term(self, depth: int) -> Node:
        negated = self._keyword("NOT") or self._sign("-")
        simple = self._simple(depth)
        return Not(simple) if negated else simple

    def _simple(self, depth: int) -> Node:
        self._skip()
        opened = self._at
        if not self._sign("("):
            return self._restriction()
        if depth == DEPTH_MAX:
            raise FilterError(opened + 1, f"more than {DEPTH_MAX} parentheses within each other")
        node = self.expression(depth + 1)
        if not self._sign(")"):
            raise self.expected("AND, OR or )")
        return node

    def _restriction(self) -> Term:
        self._skip()
        start = self._at
        word = _WORD.match(self._text, start)
        if word is None or word[0] in _KEYWORDS:
            raise self.expected("a field, NOT, - or (")
        if self._terms == TERMS_MAX:
            raise FilterError(start + 1, f"more than {TERMS_MAX} comparisons")
        self._terms += 1
        name, _, label = word[0].partition(".")
        if name == "labels":
            if not _LABEL_NAME.fullmatch(label):
                form = "a letter a-z and up to 62 more characters of a-z 0-9 _ . -"
                raise self.expected(f"labels.NAME, a name being {form}", start)
            field = Field.LABEL
        else:
            try:
                field, label = Field(word[0]), ""
            except ValueError:
                raise self.expected(f"one of {_FIELDS}", start) from None
        self._at = word.end()
        operator = self._operator(_OPERATORS[field])
        value = self._value()
        return Term(field, operator, self._meaning(field, value), label)

    def _operator(self, allowed: tuple[str, ...]) -> str:
        self._skip()
        found = _OPERATOR.match(self._text, self._at)
        if found is None or found[0] not in allowed:
            raise self.expected(f"one of {' '.join(allowed)}")
        self._at = found.end()
        return found[0]

    def _value(self) -> _Value:
        self._skip()
        start = self._at
        if self._text[start : start + 1] in ('"', "'"):
            return _Value(self._string(), start)
        found = _BARE_VALUE.match(self._text, start)
        if found is None or found[0] in _KEYWORDS:
            raise self.expected("a value")
        self._at = found.end()
        return _Value(found[0], start)

    def _string(self) -> str:
        quote, self._at = self._text[self._at], self._at + 1
        characters: list[str] = []
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "\\":
                if self._text[self._at + 1 : self._at + 2] not in ("\\", '"', "'"):
                    raise FilterError(self._at + 1, "expected \\\\, \\\" or \\' where a \\ stands in a text")
                self._at += 1
                character = self._text[self._at]
            elif character == quote:
                self._at += 1
                return "".join(characters)
            characters.append(character)
            self._at += 1
        raise self.expected(f"the closing {quote}")

    def _meaning(self, field: Field, value: _Value) -> str | int:
        """What a value stands for; a text if it is one."""
        text = value.text
        match field:
            case Field.STATE:
                if text in State.__members__:
                    return State[text]
                what = f"one of {', '.join(State.__members__)}"
            case Field.ATTENTION:
                if text in Attention.__members__:
                    return Attention[text]
                what = f"one of {', '.join(Attention.__members__)}"
            case Field.AGE:
                if age := _AGE.fullmatch(text):
                    return int(age[1]) * AGE_MS[age[2]]
                what = "an age such as 30s, 5m, 2h or 1d"
            case Field.CREATE_TIME:
                if (time_ms := _time_ms(text)) is not None:
                    return time_ms
                what = 'a time such as "2026-01-01T00:00:00Z"'
            case Field.LABEL:
                if 0 < len(text) <= _LABEL_VALUE_CHARS_MAX and text.isprintable():
                    return text
                what = f"1 to {_LABEL_VALUE_CHARS_MAX} printable characters"
            case Field.PARTICIPANT:
                if _NAME.fullmatch(text):
                    return text
                what = "a name: 1 to 64 of A-Z a-z 0-9 . _ -"
            case Field.ACTION:
                if _ACTION.fullmatch(text):
                    return text
                what = "an action, or participant.action"
        raise self.expected(what, value.at)

    def _keyword(self, keyword: str) -> bool:
        """Go past it if it is there."""
        self._skip()
        word = _WORD.match(self._text, self._at)
        if word is None or word[0] != keyword:
            return False
        self._at = word.end()
        return True

    def _sign(self, sign: str) -> bool:
        """Go past it if it is there."""
        self._skip()
        if not self._text.startswith(sign, self._at):
            return False
        self._at += 1
        return True

    def _skip(self) -> None:
        blank = _SPACE.match(self._text, self._at)
        assert blank is not None
        self._at = blank.end()


def _time_ms(text: str) -> int | None:
    """Milliseconds since 1970 of a time as RFC 3339 writes it; None if it is none."""
    if not _TIME.fullmatch(text):
        return None
    try:
        time = datetime.fromisoformat(text.upper())
        return (time - _EPOCH) // timedelta(milliseconds=1)
    except (ValueError, OverflowError):
        return None
