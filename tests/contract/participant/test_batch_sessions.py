"""ORM sessions in batches: each member has one of its own, on the connection that they share."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from participant_sdk import Call, Refused
from participant_sdk.call import IncomingCall, Outcome, fingerprint
from participant_sdk.fence import Phase
from participant_sdk.gathering import Answers
from participant_sdk.payload import encode
from tests.contract.participant.shop import Order, Shop, add, flush_seat, open_shop, swallow
from tests.contract.participant.test_batch import new_xids
from tests.contract.participant.world import TRY, Debit, World

SECONDS = 30.0


@pytest.fixture
async def shop(flavour: str, participant_url: str) -> AsyncIterator[Shop]:
    async with open_shop(World(flavour, participant_url), batch=True, batch_key="account") as shop:
        shop.work = by_mode
        yield shop


def by_mode(session: Session, call: Call[Debit]) -> Any:
    match call.payload.mode:
        case "refuse":
            add(session, call)
            raise Refused("no")
        case "taken":
            try:
                flush_seat(session, call)
            except IntegrityError as error:
                raise Refused("taken") from error
        case "swallow":
            return swallow(session, call)
        case "commit":
            add(session, call)
            session.commit()
        case "nested":
            with session.begin_nested():
                add(session, call)
        case _:
            add(session, call)
    return None


async def run(shop: Shop, phase: Phase, xids: Sequence[str], *modes: str) -> Answers:
    calls = []
    for xid, mode in zip(xids, modes, strict=True):
        payload = encode(Debit(mode=mode))
        digest = fingerprint("order", payload)
        calls.append(IncomingCall(phase, xid, 1, "bank", "order", payload, 1, time.monotonic() + SECONDS, digest))
    fence, engine_fence = shop.world.participant._fence, shop.world.participant._engine_fence
    assert fence is not None
    assert engine_fence is not None
    if shop.world.is_async:
        answers: Answers = await engine_fence.execute_batch(calls, fence)  # type: ignore[misc]
        return answers
    return await asyncio.to_thread(engine_fence.execute_batch, calls, fence)  # type: ignore[arg-type]


def outcomes(answers: Answers, xids: Sequence[str]) -> list[Outcome]:
    return [answers.replies[xid, 1].outcome for xid in xids]


async def test_each_member_has_a_session_of_its_own(shop: Shop) -> None:
    """What one has not flushed is flushed before the next begins."""
    xids = new_xids(4)
    answers = await run(shop, Phase.TRY, xids, "plain", "refuse", "nested", "plain")
    done, refused = Outcome.DONE, Outcome.REFUSED
    assert outcomes(answers, xids) == [done, refused, done, done]
    assert [shop.orders(xid) for xid in xids] == [1, 0, 1, 1]
    assert len({id(session) for session in shop.lent}) == 4
    tried = [xids[0], xids[2], xids[3]]
    answers = await run(shop, Phase.CONFIRM, tried, "plain", "nested", "plain")
    assert outcomes(answers, tried) == [done] * 3
    assert [shop.orders(xid) for xid in tried] == [2, 2, 2]


async def test_a_refusal_after_a_flush_that_failed_fails_alone(shop: Shop) -> None:
    xids = new_xids(4)
    answers = await run(shop, Phase.TRY, xids, "plain", "taken", "plain", "taken")
    assert outcomes(answers, xids) == [Outcome.DONE, Outcome.REFUSED, Outcome.DONE, Outcome.REFUSED]
    assert [shop.orders(xid) for xid in xids] == [1, 0, 1, 0]
    assert shop.world.query("SELECT count(*) FROM seats WHERE xid <> ''") == [(0,)]


@pytest.mark.parametrize("mode", ["swallow", "commit"])
async def test_an_error_leaves_nothing_of_its_batch(shop: Shop, mode: str) -> None:
    xids = new_xids(3)
    answers = await run(shop, Phase.TRY, xids, "plain", mode, "plain")
    assert (dict(answers.replies), answers.culprit) == ({}, (xids[1], 1))
    assert [shop.orders(xid) for xid in xids] == [0] * 3
    assert [shop.world.status(xid) for xid in xids] == [None] * 3
    again = await run(shop, Phase.TRY, [xids[0], xids[2]], "plain", "plain")
    assert outcomes(again, [xids[0], xids[2]]) == [Outcome.DONE] * 2


async def test_an_order_is_found_by_the_next_member(shop: Shop) -> None:
    """They share a local transaction."""
    seen: list[int] = []

    def count(session: Session, call: Call[Debit]) -> None:
        seen.append(session.query(Order).count())
        add(session, call)

    shop.work = count
    xids = new_xids(3)
    await run(shop, Phase.TRY, xids, "plain", "plain", "plain")
    assert seen == [0, 1, 2]
    assert (await shop.call(TRY, new_xids(1)[0])).outcome == 1
