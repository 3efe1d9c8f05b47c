"""What is reserved in the participant's own tables, as its author declares it.

    @bank.holds("debit")
    def holds(db: Connection) -> Iterator[Hold]:
        for row in db.execute(select(hold.c.xid, hold.c.branch_id, hold.c.cents), execution_options={"yield_per": 500}):
            yield Hold(*row)

A fence row does not hold the amount, so only this tells whether what is reserved is what the TRIED branches reserved.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from participant_sdk.actions import Actions
from participant_sdk.annotations import only_argument, signature_of
from participant_sdk.context import XID_FORM, is_xid
from participant_sdk.errors import ConfigurationError, printable

UNIT_LENGTH_MAX: Final = 64
AMOUNT_MAX: Final = Decimal(10) ** 30
PLACES_MAX: Final = 30
BRANCH_ID_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Hold:
    """Something reserved for a branch: `amount` is an int or a Decimal, from 0; `unit` as EUR, or an article's number.

    `xid` and `branch_id` are those of the Call. A branch may have several, also of one unit.
    """

    xid: str
    branch_id: int
    amount: int | Decimal
    unit: str = ""


class BadHold(Exception):
    """What the query gave cannot be compared: why."""


def check_hold(hold: object, number: int) -> tuple[Hold, Decimal]:
    """The hold and its amount; raises BadHold that names the field, and which of the query's holds it is."""
    if not isinstance(hold, Hold):
        raise BadHold(f"hold {number} is {_shown(hold)}, not a Hold")
    if not isinstance(hold.xid, str) or not is_xid(hold.xid):
        raise BadHold(f"hold {number}: xid is {_shown(hold.xid)}, not {XID_FORM}, as call.xid is")
    branch_id = hold.branch_id
    if not isinstance(branch_id, int) or isinstance(branch_id, bool) or not 1 <= branch_id <= BRANCH_ID_MAX:
        raise BadHold(f"hold {number}: branch_id is {_shown(branch_id)}, not a number from 1, as call.branch_id is")
    if not isinstance(hold.unit, str) or len(hold.unit) > UNIT_LENGTH_MAX or not hold.unit.isprintable():
        raise BadHold(f"hold {number}: unit is {_shown(hold.unit)}, not text of up to {UNIT_LENGTH_MAX} characters")
    return hold, _amount(hold.amount, number)


def _amount(amount: object, number: int) -> Decimal:
    if not isinstance(amount, int | Decimal) or isinstance(amount, bool):
        raise BadHold(f"hold {number}: amount is {_shown(amount)}, not an int or a Decimal")
    if isinstance(amount, Decimal) and not amount.is_finite():
        raise BadHold(f"hold {number}: amount is {amount}, which is not finite")
    if not 0 <= amount < AMOUNT_MAX:
        raise BadHold(f"hold {number}: amount is not from 0 to below 1e30")
    exact = Decimal(amount)
    exponent = exact.as_tuple().exponent
    if isinstance(exponent, int) and exponent < -PLACES_MAX:
        raise BadHold(f"hold {number}: amount has more than {PLACES_MAX} decimal places")
    return exact


def _shown(value: object) -> str:
    try:
        text = repr(value) if isinstance(value, str | bytes | int | float) else ""
    except ValueError:  # a number with too many digits to be written
        text = ""
    kind = type(value).__name__
    return f"{printable(text, 80)} ({kind})" if text else f"of type {kind}"


@dataclass(frozen=True, slots=True)
class HoldsQuery:
    """The author's query. `actions`: those whose branches hold something while they are TRIED; None: all do."""

    function: Callable[[Any], Any]
    session_class: Any
    actions: frozenset[str] | None

    def check(self, actions: Actions) -> None:
        """Raises ConfigurationError if it names an action that there is not."""
        unknown = sorted((self.actions or frozenset()) - set(actions))
        if unknown:
            raise ConfigurationError(f"holds(...) names {unknown[0]!r}, which is no action of the participant")

    def each(self, db: Any) -> Generator[object]:
        """What a `def` query gives."""
        given = self.function(db)
        if not isinstance(given, Iterable):
            raise BadHold(f"it returned {_shown(given)}, not Holds: yield them, or return a list")
        yield from given

    async def each_async(self, db: Any) -> AsyncGenerator[object]:
        """What an `async def` query gives."""
        given = self.function(db)
        if not hasattr(given, "__aiter__"):
            given = await given
        if hasattr(given, "__aiter__"):
            async for hold in given:
                yield hold
        elif isinstance(given, Iterable):
            for hold in given:
                yield hold
        else:
            raise BadHold(f"it returned {_shown(given)}, not Holds: yield them, or return a list")


def declare(function: Callable[[Any], Any], actions: tuple[str, ...], *, asynchronous: bool) -> HoldsQuery:
    """The query, checked to be one; raises ConfigurationError."""
    who = "the query of holds()"
    if not callable(function):
        raise ConfigurationError(f"{who} is not a function")
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if is_async != asynchronous:
        wanted, engine = ("async def", "AsyncEngine") if asynchronous else ("def", "Engine")
        raise ConfigurationError(f"{who} must be a plain `{wanted}` function, because the participant has an {engine}")
    try:
        signature_of(function).bind(object())
    except TypeError as error:
        raise ConfigurationError(f"{who} must take one parameter, (db): {error}") from None
    session_class = only_argument(who, function, asynchronous=asynchronous)
    return HoldsQuery(function, session_class, frozenset(actions) if actions else None)
