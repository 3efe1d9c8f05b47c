"""Takes a history event by event, and gives the verdict.

A transaction is judged when the history says that nothing more comes about it (``closed``), else at the end; so much
memory it takes. What is at rest is known for a closed transaction, and for all when the history has an ``end``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from . import answers, branches, decisions
from .answers import Key
from .balances import Balances
from .events import Asked, Balance, Closed, Effect, End, Event, History, Row, Told
from .evidence import Evidence, Fact
from .invariants import INVARIANTS, Findings, Violation
from .reading import HistoryError


class Judged(NamedTuple):
    """What came of one invariant."""

    number: int
    words: str
    judged: int
    """How many transactions, branches, keys, units and accounts were judged."""
    violations: int
    not_judged: str
    """Why nothing was; else empty."""


class Verdict(NamedTuple):
    """What came of a history."""

    events: int
    transactions: int
    ended: bool
    """Whether it declares an end."""
    invariants: list[Judged]

    @property
    def violations(self) -> int:
        """How many there are."""
        return sum(each.violations for each in self.invariants)


def judge(events: Iterable[tuple[int, Event]], tell: Callable[[Violation], None]) -> Verdict:
    """Judge a history; violations are handed to ``tell`` as they are found.

    Raises HistoryError if the events do not make a history.
    """
    judging = _Judging(tell)
    for line, event in events:
        judging.take(line, event)
    return judging.finish()


class _Judging:
    def __init__(self, tell: Callable[[Violation], None]) -> None:
        self._history = History(0)
        self._findings = Findings(tell)
        self._open: dict[str, list[Fact]] = {}
        self._keys: dict[str, Key] = {}
        self._closed: dict[str, int] = {}
        """By xid: in which line. All that is kept of them."""
        self._balances = Balances()
        self._events = 0
        self._end: int | None = None

    def take(self, line: int, event: Event) -> None:
        """Take the next event."""
        if self._end is not None:
            raise HistoryError(line, f"stands behind the end, which is in line {self._end}")
        self._events += 1
        if isinstance(event, History):
            if self._events > 1:
                raise HistoryError(line, "history must be the first event", "event")
            self._history = event
        elif isinstance(event, End):
            self._end = line
        elif isinstance(event, Closed):
            self._close(line, event.xid)
        else:
            self._keep(Fact(line, event))

    def _keep(self, fact: Fact) -> None:
        event = fact.event
        if isinstance(event, Balance):
            self._balances.add(fact)
            return
        if isinstance(event, Effect) and event.changes:
            self._balances.change(event.changes)
        if isinstance(event, Asked | Told | Row) and event.key:
            key = self._keys.setdefault(event.key, Key())
            (key.asked if isinstance(event, Asked) else key.told if isinstance(event, Told) else key.rows).append(fact)
        if event.xid:
            if event.xid in self._closed:
                raise HistoryError(fact.line, f"was closed in line {self._closed[event.xid]}", "xid")
            facts = self._open.get(event.xid)
            if facts is None:
                facts = self._open[event.xid] = []
            facts.append(fact)

    def _close(self, line: int, xid: str) -> None:
        if xid in self._closed:
            raise HistoryError(line, f"was closed in line {self._closed[xid]} already", "xid")
        facts = self._open.pop(xid, [])
        self._closed[xid] = line
        self._judge(xid, facts, at_rest=True)
        for name in _keys(facts):
            key = self._keys[name]
            if key.xids.keys() <= self._closed.keys():
                answers.judge_key(name, self._keys.pop(name), self._history, self._findings, ended=True)

    def _judge(self, xid: str, facts: list[Fact], *, at_rest: bool) -> None:
        asked = [fact for name in _keys(facts) for fact in self._keys[name].asked if not fact.event.xid]
        tx = Evidence(xid, facts, self._history, at_rest=at_rest, asked=asked)
        decisions.judge(tx, self._findings)
        branches.judge(tx, self._findings)
        answers.judge(tx, self._findings)

    def finish(self) -> Verdict:
        """Judge what is left."""
        if not self._events:
            raise HistoryError(1, "there is no event in it")
        ended = self._end is not None
        transactions = len(self._open) + len(self._closed)
        for xid, facts in self._open.items():
            self._judge(xid, facts, at_rest=ended)
        for name, key in self._keys.items():
            answers.judge_key(name, key, self._history, self._findings, ended=ended)
        self._balances.judge(self._findings, all_changes=ended and "effect" in self._history.complete)
        return Verdict(self._events, transactions, ended, [self._judged(number) for number in INVARIANTS])

    def _judged(self, number: int) -> Judged:
        words, needs = INVARIANTS[number]
        judged, violated = self._findings.judged[number], self._findings.violated[number]
        missing = "" if judged or violated else f"needs {needs}" if needs else "a history does not show it"
        return Judged(number, words, judged, violated, missing)


def _keys(facts: Iterable[Fact]) -> list[str]:
    """Under which keys a transaction was asked for, each once."""
    named = (fact.event.key for fact in facts if isinstance(fact.event, Asked | Told | Row))
    return list(dict.fromkeys(key for key in named if key))
