"""The programs of the guide for initiators: a real coordinator, and the other guide's participants."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from participant_sdk import (
    AlreadyDecided,
    AsyncTricordClient,
    ConfigurationError,
    TransactionCancelled,
    TransactionState,
    TricordClient,
    TricordError,
    branch,
    errors,
)
from tests.coordinators import CALL_S, CoordinatorProcess
from tests.integration.guide_programs import ROOT, Guide

ACCOUNTS = "INSERT INTO account (name, balance) VALUES ('alice', 100), ('shop', 0)"
SUMS = "SELECT (SELECT available FROM stock), (SELECT sum(balance) FROM account), (SELECT count(*) FROM seat)"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[str]:
    """The address of a coordinator."""
    with CoordinatorProcess(store=tmp_path / "coordinator.db") as process:
        yield process.endpoint


@pytest.fixture
def town(guide: Guide, coordinator: str) -> Iterator[None]:
    """Five teas, a hundred cents, a theatre; all three serve."""
    modules = {name: guide.load(name) for name in ("stock", "account", "seat")}
    for module in modules.values():
        (module.Base.metadata if hasattr(module, "Base") else module.metadata).create_all(module.engine)
    with modules["stock"].engine.begin() as db:
        db.execute(modules["stock"].stock.insert(), {"sku": "tea", "available": 5})
        db.execute(text(ACCOUNTS))
    participants = modules["stock"].warehouse, modules["account"].bank, modules["seat"].theatre
    with ExitStack() as stack:
        for participant in participants:
            serving = participant.start("127.0.0.1:0", coordinator=coordinator)
            stack.callback(serving.stop, 10.0)
            assert serving.wait_registered(CALL_S)
        yield


def sums(folder: Path) -> tuple[Any, ...]:
    """Free teas, free money, seats that are taken."""
    engine = create_engine(f"sqlite:///{folder / 'shop.db'}")
    with engine.connect() as db:
        row = tuple(db.execute(text(SUMS)).one())
    engine.dispose()
    return row


def test_buying_and_looking_later(guide: Guide, town: None, coordinator: str, tmp_path: Path) -> None:
    buying, later = guide.load("buying"), guide.load("later")
    with TricordClient(coordinator) as client:
        assert later.bought(client, "1") is None
        first = buying.buy(client, "1", 2, 60)
        assert first.startswith("bought in ")
        assert buying.buy(client, "1", 2, 60) == first
        assert buying.buy(client, "2", 1, 50) == "not bought: bank says insufficient_funds"
        assert buying.buy(client, "3", 4, 50) == "not bought: warehouse says out_of_stock"
        assert [later.bought(client, order) for order in "1234"] == [True, False, False, None]
        assert client.get(idempotency_key="order-3").metadata == {"tenant": "tea-shop"}
        with client.transaction(idempotency_key="order-4") as tx:
            assert later.bought(client, "4") is None
            tx.cancel()
    assert sums(tmp_path) == (3, 40, 0)
    with TricordClient("127.0.0.1:1") as nowhere:
        nowhere.close()
        with pytest.raises(ConfigurationError, match="the client is closed"):
            buying.buy(nowhere, "1", 2, 60)


def test_an_evening_is_booked_once(guide: Guide, town: None, coordinator: str, tmp_path: Path) -> None:
    evening = guide.load("evening")
    with TricordClient(coordinator) as client:
        tx = client.transaction(idempotency_key="evening-1", timeout=30)
        contextvars.copy_context().run(tx.__enter__)
        seat = branch("theatre", "book", {"show": "Hamlet", "number": "A1"})
        tx.try_(seat, branch_key="seat-A1")  # and the process dies
        codes = evening.book(client, "1", ["A1", "A2"])
        assert codes == [f"{tx.xid}-1", f"{tx.xid}-2"]
        assert evening.book(client, "1", ["A1", "A2"]) == codes
        with pytest.raises(TransactionCancelled, match="taken"):
            evening.book(client, "2", ["A3", "A2"])
        with pytest.raises(AlreadyDecided):
            evening.book(client, "2", ["A3", "A2"])
        list(client.watch(idempotency_key="evening-2"))
    assert sums(tmp_path) == (5, 80, 2)


async def test_an_evening_on_asyncio(guide: Guide, town: None, coordinator: str, tmp_path: Path) -> None:
    evening = guide.load("evening_async")
    async with AsyncTricordClient(coordinator) as client:
        xid, ticket = await evening.book(client, "B1", 30)
        assert ticket.code == f"{xid}-1"
        assert (await evening.follow(client, xid))[-1] is TransactionState.CONFIRMED
        with pytest.raises(TransactionCancelled, match="insufficient_funds"):
            await evening.book(client, "B2", 90)
    assert sums(tmp_path)[1] == 70


def test_every_error_has_its_line() -> None:
    page = (ROOT / "docs" / "initiators.md").read_text(encoding="utf-8")
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, TricordError)]
    assert len(classes) > 5
    for each in classes:
        assert each is TricordError or f"\n| `{each.__name__}` |" in page, each
