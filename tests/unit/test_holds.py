"""Declaring `holds()`, and the sums: exact, whatever their size."""

from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.orm import Session

from participant_sdk import Call, ConfigurationError, Hold, Participant
from participant_sdk.holds_tally import Tally, Tried, TriedBranches, plain

XID = f"{1_800_000_000_000:012x}70008000000000000000"
OLDER = f"{1_700_000_000_000:012x}70008000000000000000"


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[Participant]:
    engine: Engine = create_engine(f"sqlite:///{tmp_path / 'bank.db'}")
    bank = Participant("bank", engine)

    @bank.action("debit")
    def debit(call: Call[dict[str, Any]], db: Connection) -> None: ...

    debit.confirm(lambda call, db: None)
    debit.cancel(lambda call, db: None)
    yield bank
    engine.dispose()


def none(db: Connection) -> Iterator[Hold]:
    yield from ()


def with_session(db: Session) -> list[Hold]:
    return []


def untyped(db):  # type: ignore[no-untyped-def]
    return []


async def on_asyncio(db: AsyncConnection) -> AsyncIterator[Hold]:
    yield Hold(XID, 1, 1)


def takes_nothing() -> list[Hold]:
    return []


def takes_a_call(call: Any, db: Connection) -> list[Hold]:
    return []


def wrongly_typed(db: Engine) -> list[Hold]:
    return []


@pytest.mark.parametrize("query", [none, with_session, untyped])
def test_a_query_stays_the_function_that_it_is(bank: Participant, query: Any) -> None:
    assert bank.holds("debit")(query) is query
    bank.check()


@pytest.mark.parametrize(
    ("query", "told"),
    [
        (on_asyncio, "holds.. must be a plain `def` function, because the participant has an Engine"),
        (takes_nothing, "holds.. must take one parameter, .db."),
        (takes_a_call, "holds.. must take one parameter, .db."),
        (wrongly_typed, "holds.. has a parameter annotated Engine: with an Engine it is lent a Connection or Session"),
        (1, "holds.. is not a function"),
    ],
)
def test_what_is_no_query_is_refused(bank: Participant, query: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        bank.holds()(query)


def test_a_second_query_and_a_bare_decorator_are_refused(bank: Participant) -> None:
    with pytest.raises(ConfigurationError, match=r"write @….holds\(\) with the names of actions, or without any"):
        bank.holds(none)  # type: ignore[arg-type]
    bank.holds()(none)
    with pytest.raises(ConfigurationError, match="participant 'bank' has two queries of holds"):
        bank.holds()(none)


def test_an_action_that_there_is_not_is_told_at_the_start(bank: Participant) -> None:
    bank.check()
    bank.holds("debit", "debut")(none)
    with pytest.raises(ConfigurationError, match="names 'debut', which is no action of the participant"):
        bank.prepare()


async def test_with_an_async_engine_it_is_async(tmp_path: Path) -> None:
    engine: AsyncEngine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'bank.db'}")
    bank = Participant("bank", engine)
    with pytest.raises(ConfigurationError, match="must be a plain `async def` function"):
        bank.holds()(none)
    assert bank.holds()(on_asyncio) is on_asyncio
    await engine.dispose()


def tally(until: str | None = None, actions: frozenset[str] | None = None, mismatches_max: int = 50) -> Tally:
    tried = {(XID, 1): Tried("debit", True), (XID, 2): Tried("credit", True), (XID, 3): Tried("pay", False)}
    return Tally(TriedBranches(tried, until), actions, mismatches_max)


def test_sums_are_exact() -> None:
    sums = tally()
    for amount in (10**30 - 1, Decimal("1e-30"), Decimal("0.10"), Decimal(10), Decimal("1E+2"), True + 1):
        sums.take(Hold(XID, 1, amount))
    sums.take(Hold(XID, 4, Decimal("0.5"), "kg"))
    assert plain(sums.sums[""].reserved) == plain(sums.sums[""].tried) == f"1{'0' * 27}111.1{'0' * 28}1"
    assert (plain(sums.sums["kg"].reserved), plain(sums.sums["kg"].tried)) == ("0.5", "0")


def test_which_branches_must_hold_something() -> None:
    assert [key for key, _ in tally().missing()] == [(XID, 1), (XID, 2)]
    assert [key for key, _ in tally(actions=frozenset({"debit", "pay"})).missing()] == [(XID, 1)]
    holding = tally()
    for branch_id in (1, 1, 3):
        holding.take(Hold(XID, branch_id, 0))
    assert [key for key, _ in holding.missing()] == [(XID, 2)]
    assert (holding.tried, holding.unfinished, holding.leaked) == (2, 1, 0)


def test_what_is_beyond_the_branches_that_are_known_is_not_judged() -> None:
    partly = tally(until=OLDER, mismatches_max=1)
    for xid in (XID, OLDER, OLDER):
        partly.take(Hold(xid, 9, 5))
    assert (partly.holds, partly.not_compared, partly.leaked, len(partly.leaks)) == (2, 1, 2, 1)
    assert plain(partly.sums[""].reserved) == "10"


@pytest.mark.parametrize(("amount", "text"), [("1E+3", "1000"), ("1.50", "1.5"), ("0E-8", "0"), ("100", "100")])
def test_amounts_are_told_plainly(amount: str, text: str) -> None:
    assert plain(Decimal(amount)) == text
