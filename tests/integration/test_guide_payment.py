"""The guide's payment provider: whatever happens between authorise and its answer, nothing stays authorised."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from sqlalchemy import select

from tests.contract.participant.world import CANCEL, CONFIRM, DONE, REFUSED, TRY, UNKNOWN, new_xid
from tests.integration.guide_programs import Caller, Guide

PAY: Final = {"card": "4242", "cents": 500}


@dataclass
class Provider:
    """Somebody else's service: what it was asked, and what it holds."""

    asked: list[str] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    slow: asyncio.Event | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    fail_after: bool = False
    """The next authorisation is made, but its answer is lost."""

    async def authorise(self, key: str, card: str, cents: int) -> bool:
        self.asked.append("authorise")
        self.arrived.set()
        if self.slow is not None:
            await self.slow.wait()
        if self.held.setdefault(key, "authorised" if card != "0000" else "declined") != "authorised":
            return False
        if self.fail_after:
            self.fail_after = False
            raise ConnectionError("the answer was lost")
        return True

    async def capture(self, key: str) -> None:
        self.asked.append("capture")
        assert self.held[key] in ("authorised", "captured")
        self.held[key] = "captured"

    async def void(self, key: str) -> None:
        self.asked.append("void")
        assert self.held.get(key) != "captured"
        self.held[key] = "voided"


class Till:
    """The participant on a fresh database, its provider, and a caller."""

    def __init__(self, module: Any, engine: Any, provider: Provider, caller: Caller) -> None:
        self._module = module
        self._engine = engine
        self.provider = provider
        self._caller = caller

    async def does(self, phase: Any, xid: str, payload: Any = PAY, *, seconds: float = 20.0) -> Any:
        """Call it; the outcome."""
        return (await self._caller.call(phase, xid, payload, seconds=seconds)).outcome

    async def rows(self) -> dict[str, str]:
        """The statuses of the payments in the database, by key."""
        payment = self._module.Payment
        async with self._engine.connect() as db:
            rows = await db.execute(select(payment.key, payment.status))
            return {row.key: row.status for row in rows}


@pytest.fixture
async def till(guide_on: Guide, guide_urls: tuple[str, str]) -> AsyncIterator[Till]:
    """The guide's payments, served."""
    module, engine, provider = guide_on.load("payment"), guide_on.load("database").open_async_engine(), Provider()
    async with engine.begin() as db:
        await db.run_sync(module.Base.metadata.create_all)
    serving = await module.payments_of(engine, provider).start_async("127.0.0.1:0")
    caller = Caller(serving.address, "payments", "pay")
    yield Till(module, engine, provider, caller)
    await caller.close()
    assert await serving.stop(10.0)
    await engine.dispose()


async def test_it_is_captured_once(till: Till) -> None:
    xid = new_xid()
    for phase in (TRY, TRY, CONFIRM, CONFIRM):
        assert await till.does(phase, xid) == DONE
    assert till.provider.asked == ["authorise", "capture"]
    assert till.provider.held == await till.rows() == {f"{xid}-1": "captured"}


async def test_a_declined_card_leaves_nothing(till: Till) -> None:
    xid, declined = new_xid(), {**PAY, "card": "0000"}
    for phase, outcome in ((TRY, REFUSED), (TRY, REFUSED), (CANCEL, DONE)):
        assert await till.does(phase, xid, declined) == outcome
    assert till.provider.asked == ["authorise"]
    assert await till.rows() == {}


async def test_a_lost_answer_is_asked_for_again_under_the_same_key(till: Till) -> None:
    xid, till.provider.fail_after = new_xid(), True
    assert await till.does(TRY, xid) == UNKNOWN
    assert await till.rows() == {}
    for phase in (TRY, CONFIRM):
        assert await till.does(phase, xid) == DONE
    assert till.provider.asked == ["authorise", "authorise", "capture"]
    assert till.provider.held == await till.rows() == {f"{xid}-1": "captured"}


async def test_a_lost_answer_is_voided_and_a_late_try_asks_no_more(till: Till) -> None:
    xid, till.provider.fail_after = new_xid(), True
    for phase, outcome in ((TRY, UNKNOWN), (CANCEL, DONE), (CANCEL, DONE), (TRY, REFUSED)):
        assert await till.does(phase, xid) == outcome
    assert till.provider.asked == ["authorise", "void"]
    assert till.provider.held == {f"{xid}-1": "voided"}
    assert await till.rows() == {}


async def test_cancel_waits_for_a_slow_try(till: Till) -> None:
    xid, till.provider.slow = new_xid(), asyncio.Event()
    trying = asyncio.create_task(till.does(TRY, xid))
    await till.provider.arrived.wait()
    assert await till.does(CANCEL, xid, seconds=0.5) == UNKNOWN
    assert till.provider.asked == ["authorise"]
    till.provider.slow.set()
    assert await trying == DONE
    assert await till.does(CANCEL, xid) == DONE
    assert till.provider.asked == ["authorise", "void"]
    assert till.provider.held == await till.rows() == {f"{xid}-1": "voided"}
