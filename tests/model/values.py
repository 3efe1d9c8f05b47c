"""Transactions without what does not matter to the protocol, and what the product's pure functions make of them.

A *value* is a transaction whose version, save_id, times, counters and texts are taken away, so that there are few of
them. Each has a number; number 0 stands for "nothing is stored". What happens to a value is asked of the real
functions once and remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from coordinator import machine, orders
from coordinator.model import BranchSpec, Call, Outcome, Phase, Policy, Reply, Spec, State, Transaction
from participant_sdk import fence
from tests.model import store

POLICY = Policy()
TIMEOUT_MS = 10_000
EARLY_MS = 1
"""A moment at which nothing has run out."""
LATE_MS = TIMEOUT_MS + 1
"""A moment after the deadline; both may be any coordinator's present at any time."""
NOTHING = 0
"""The value of a row that is not there."""


class Rules(NamedTuple):
    """The functions that are explored. Tests put broken ones in their place."""

    apply: Callable[[Transaction, Sequence[Reply], int, Policy], Transaction] = machine.apply
    due: Callable[[Transaction, int, Policy], tuple[Call, ...]] = machine.due
    obey: Callable[
        [Transaction, Sequence[orders.Order], int, Policy], tuple[Transaction, list[orders.Denied | None]]
    ] = orders.carry_out
    decide: Callable[[fence.Phase, fence.Status | None, bool], fence.Verdict] = fence.decide
    swap: Callable[[Transaction | None, Transaction], Transaction] = store.swap
    unsaved_decision_is_sent: bool = False
    """Broken: Confirm and Cancel leave from a value whose save has not returned."""
    read_back_by_version: bool = False
    """Broken: after a COMMIT of unknown outcome any row of that version is taken for one's own."""


PRODUCT = Rules()


class Event(NamedTuple):
    """Something that a coordinator meets: the time, replies, or an order; none of them changes it twice."""

    name: str
    now_ms: int
    replies: tuple[Reply, ...] = ()
    order: orders.Order | None = None


LATE = Event("finds that the deadline has passed", LATE_MS)


def reply_event(replies: Sequence[tuple[int, Phase, Outcome]]) -> Event:
    """What arrives at a coordinator, before the deadline."""
    text = " and ".join(f"{outcome.name} of {phase.name} {branch + 1}" for branch, phase, outcome in replies)
    return Event(f"hears {text}", EARLY_MS, tuple(Reply(*reply) for reply in replies))


def order_event(order: orders.Order, text: str) -> Event:
    """What somebody asks of a coordinator, before the deadline."""
    return Event(f"is asked to {text}", EARLY_MS, (), order)


def spec(branches: int, *, interactive: bool = False, ordered: bool = False) -> Spec:
    """A transaction of so many branches, each at a participant of its own."""
    begun = () if interactive else tuple(BranchSpec(f"p{n}", "a") for n in range(1, branches + 1))
    return Spec(bytes(16), b"", 0, TIMEOUT_MS, begun, interactive=interactive, ordered=ordered)


class Values:
    """All values met so far, by number, and what was found out about them."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._all: list[Transaction | None] = [None]
        self._numbers: dict[Transaction, int] = {}
        self._after: dict[tuple[int, Event], int] = {}
        self._calls: dict[int, tuple[tuple[int, Phase], ...]] = {}

    def begin(self, spec: Spec) -> int:
        """The value that a transaction begins with."""
        return self.number(machine.begin(spec, EARLY_MS, POLICY))

    def number(self, tx: Transaction) -> int:
        """The number of this transaction's value."""
        value = plain(tx)
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self._all)
            self._all.append(value)
        return number

    def tx(self, value: int) -> Transaction:
        """The transaction of a value that is not ``NOTHING``."""
        tx = self._all[value]
        assert tx is not None
        return tx

    def after(self, value: int, event: Event) -> int:
        """What an event makes of a value; the same value if nothing."""
        key = (value, event)
        found = self._after.get(key)
        if found is None:
            before = self.tx(value)
            if event.order is None:
                tx = self._rules.apply(before, event.replies, event.now_ms, POLICY)
            else:
                tx, _ = self._rules.obey(before, [event.order], event.now_ms, POLICY)
            found = self._after[key] = self.number(tx)
        return found

    def calls(self, value: int) -> tuple[tuple[int, Phase], ...]:
        """The calls that a value owes, by branch index: all attempts are due, since their time is left out."""
        found = self._calls.get(value)
        if found is None:
            due = self._rules.due(self.tx(value), EARLY_MS, POLICY)
            found = self._calls[value] = tuple((call.branch, call.phase) for call in due)
        return found

    def state(self, value: int) -> State | None:
        """The state of a value's transaction; None if there is none."""
        tx = self._all[value]
        return None if tx is None else tx.state

    def text(self, value: int) -> str:
        """A value for people."""
        tx = self._all[value]
        if tx is None:
            return "nothing"
        parts = [tx.state.name, *(f"{n}:{step.status.name.lower()}" for n, step in enumerate(tx.steps, 1))]
        parts += [f"{r.branch_id} resolved as {'confirmed' if r.confirmed else 'cancelled'}" for r in tx.resolved]
        if tx.attention:
            parts.append(f"attention {tx.attention.name}")
        return " ".join(parts)


def plain(tx: Transaction) -> Transaction:
    """The transaction without versions, times, counters and texts."""
    return tx._replace(
        steps=tuple(s._replace(attempts=0, next_ms=0, error="", refusal=None, result=None) for s in tx.steps),
        version=1,
        save_id=0,
        wake_ms=None,
        updated_ms=0,
        decided_ms=0,
        past=(),
        cancel_reason="",
        renewed_ms=0,
        resolved=tuple(r._replace(actor="", reason="", time_ms=0) for r in tx.resolved),
    )
