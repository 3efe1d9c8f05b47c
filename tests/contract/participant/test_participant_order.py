"""Calls that arrive together: repeats join, other phases wait their turn, phase 2 passes slow Trys."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from sqlalchemy import event

from participant_sdk import serve
from participant_sdk.desk import WAITING_FOR_ONE_MAX
from tests.contract.participant.world import (
    CANCEL,
    CONFIRM,
    DONE,
    REFUSED,
    TRY,
    UNKNOWN,
    VIOLATION,
    World,
    new_xid,
)
from tricord.v1 import participant_pb2

where_several_may_write = pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async"], indirect=True)


async def test_repeats_join_the_call_that_runs(world: World) -> None:
    """Protocol C5: more repeats than workers or connections, and another branch still gets through.

    Only the last few wait for the reply: by then nobody listens for the earlier ones.
    """
    gate = world.gate("slow")
    xid = new_xid()
    first = asyncio.create_task(world.call(TRY, xid, account="slow"))
    await gate.wait_reached()
    connections: list[Any] = []
    event.listen(getattr(world.engine, "sync_engine", world.engine).pool, "checkout", lambda *_: connections.append(1))
    repeats = [world.message(TRY, xid, account="slow", call_id=n, attempt=n) for n in range(2, 42)]
    last = world.message(TRY, xid, participant="another", call_id=99)  # its answer tells that all have arrived
    replies = []
    async for response in world.stub.Exchange(_one_batch(participant_pb2.ExchangeRequest(calls=[*repeats, last]))):
        replies += response.replies
        if not gate.opened.is_set() and 99 in (each.call_id for each in replies):
            assert connections == []
            if not world.is_sqlite:  # there the slow handler holds the only write lock
                assert (await world.call(TRY, new_xid())).outcome == DONE
                connections.clear()
            gate.opened.set()
    replaced = [await first, *replies[: 40 - WAITING_FOR_ONE_MAX]]
    replies = replies[40 - WAITING_FOR_ONE_MAX :]
    assert {(each.outcome, each.error) for each in replaced} == {
        (UNKNOWN, "a later repeat of the call waits in its place")
    }
    assert [each.call_id for each in replies] == [99, *range(42 - WAITING_FOR_ONE_MAX, 42)]
    assert {(each.outcome, each.result.data) for each in replies[1:]} == {(DONE, f'{{"hold":"{xid}#1"}}'.encode())}
    assert (gate.count, connections) == (1, [])
    assert world.effects(xid) == ["try"]


async def test_a_cancel_waits_for_the_slow_try_that_it_meets(world: World) -> None:
    gate = world.gate("slow")
    xid = new_xid()
    trying = asyncio.create_task(world.call(TRY, xid, account="slow"))
    await gate.wait_reached()
    cancelling = asyncio.create_task(world.call(CANCEL, xid, account="slow"))
    gate.opened.set()
    assert (await trying).outcome == DONE
    assert (await cancelling).outcome == DONE
    assert world.effects(xid) == ["try", f"cancel {xid}#1"]
    assert world.status(xid) == 3


async def test_a_cancel_on_another_instance_meets_the_slow_try_on_the_row(world: World) -> None:
    """Two processes know nothing of each other's queues: only the primary key brings the two calls together."""
    other = World(world.flavour, world.url)
    await other.start()
    try:
        assert other.serving.fence_id == world.serving.fence_id
        gate = world.gate("slow")
        xid = new_xid()
        trying = asyncio.create_task(world.call(TRY, xid, account="slow"))
        await gate.wait_reached()
        early = await other.call(CANCEL, xid, account="slow", timeout=0.5)
        assert early.outcome == UNKNOWN  # it waited for the row, in vain
        cancelling = asyncio.create_task(other.call(CANCEL, xid, account="slow"))
        gate.opened.set()
        assert (await trying).outcome == DONE
        # It may have joined the early one, whose time can be up: then it is repeated, as a coordinator would.
        if (await cancelling).outcome == UNKNOWN:
            assert (await other.call(CANCEL, xid, account="slow")).outcome == DONE
        assert world.effects(xid) == ["try", f"cancel {xid}#1"]
    finally:
        await other.close()


async def test_trys_and_cancels_at_once_never_leave_a_reservation(world: World) -> None:
    other = World(world.flavour, world.url)
    await other.start()
    try:
        xids = [new_xid() for _ in range(25)]
        calls = []
        for xid in xids:
            calls += [world.call(TRY, xid), other.call(CANCEL, xid), other.call(TRY, xid, attempt=2)]
        replies = await asyncio.gather(*calls)
        assert {reply.outcome for reply in replies} <= {DONE, REFUSED, UNKNOWN}
        for xid in xids:
            assert (await world.call(CANCEL, xid)).outcome == DONE
            assert world.effects(xid) in ([], ["try", f"cancel {xid}#1"])
            assert (await other.call(CONFIRM, xid)).outcome == VIOLATION
    finally:
        await other.close()


async def test_batches_are_answered_call_by_call(world: World) -> None:
    first = [world.message(TRY, new_xid(), call_id=n) for n in range(1, 31)]
    second = [world.message(CANCEL, new_xid(), call_id=n) for n in range(31, 61)]
    replies = await world.exchange(first, second)
    assert sorted(replies) == list(range(1, 61))
    assert {reply.outcome for reply in replies.values()} == {DONE}
    assert {reply.fence_id for reply in replies.values()} == {world.serving.fence_id}


@where_several_may_write
async def test_a_slow_call_delays_nobody_in_its_batch(world: World) -> None:
    gate = world.gate("slow")
    slow = world.message(TRY, new_xid(), account="slow", call_id=1)
    quick = [world.message(TRY, new_xid(), call_id=n) for n in range(2, 6)]
    stream = world.stub.Exchange(_one_batch(participant_pb2.ExchangeRequest(calls=[slow, *quick])))
    seen: set[int] = set()
    async for response in stream:
        seen |= {reply.call_id for reply in response.replies}
        if seen == {2, 3, 4, 5}:
            gate.opened.set()
    assert seen == {1, 2, 3, 4, 5}


@where_several_may_write
async def test_phase_2_passes_slow_trys(world: World) -> None:
    """Protocol E2: every Try worker is held by a slow handler, and still what is decided ends."""
    xids = [new_xid() for _ in range(6)]
    for xid in xids:
        await world.call(TRY, xid)
    gate = world.gate("slow")
    slow = [world.message(TRY, new_xid(), account="slow", call_id=n, timeout=30) for n in range(1, 21)]
    trying = asyncio.create_task(world.exchange(slow))
    await gate.wait_reached()
    phases = [CONFIRM, CANCEL] * 3
    replies = await asyncio.gather(*(world.call(phase, xid) for phase, xid in zip(phases, xids, strict=True)))
    assert [reply.outcome for reply in replies] == [DONE] * 6
    assert gate.count <= 8
    gate.opened.set()
    assert {reply.outcome for reply in (await trying).values()} == {DONE}


@pytest.mark.parametrize("flavour", ["postgres-sync"], indirect=True)
async def test_phase_2_passes_slow_unary_trys(flavour: str, participant_url: str) -> None:
    """There each waiting call holds a thread of the gRPC server; some are kept for phase 2."""
    world = World(flavour, participant_url)
    await world.start()
    try:
        xid = new_xid()
        await world.call(TRY, xid)
        gate = world.gate("slow")
        trying = [asyncio.create_task(world.call(TRY, new_xid(), account="slow", timeout=30)) for _ in range(100)]
        await gate.wait_reached()
        overloaded, _ = await asyncio.wait(trying, return_when=asyncio.FIRST_COMPLETED)
        assert all("too many unary Trys" in call.result().error for call in overloaded)
        assert (await world.call(CONFIRM, xid)).outcome == DONE
        gate.opened.set()
        outcomes = [reply.outcome for reply in await asyncio.gather(*trying)]
        assert outcomes.count(DONE) >= 16
    finally:
        await world.close()


async def test_a_try_whose_time_is_up_does_not_start(world: World) -> None:
    xid = new_xid()
    reply = (await world.exchange([world.message(TRY, xid, timeout=0)]))[7]
    assert (reply.outcome, world.status(xid)) == (UNKNOWN, None)
    assert "time was up" in reply.error
    assert (await world.exchange([world.message(CANCEL, xid, timeout=0)]))[7].outcome == DONE


async def test_a_broken_stream_does_not_stop_its_calls(world: World) -> None:
    gate = world.gate("slow")
    xid = new_xid()
    stream = world.stub.Exchange(
        _one_batch(participant_pb2.ExchangeRequest(calls=[world.message(TRY, xid, account="slow")]))
    )
    reading = asyncio.create_task(stream.read())
    await gate.wait_reached()
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    gate.opened.set()
    assert (await world.call(TRY, xid, account="slow")).outcome == DONE
    assert world.effects(xid) == ["try"]
    assert gate.count == 1


async def test_a_caller_that_gives_up_does_not_stop_its_call(world: World) -> None:
    gate = world.gate("slow")
    xid = new_xid()
    request = participant_pb2.TryRequest(call=world.message(TRY, xid, account="slow"))
    call = world.stub.Try(request, timeout=5)
    await gate.wait_reached()
    call.cancel()
    gate.opened.set()
    assert (await world.call(TRY, xid, account="slow")).outcome == DONE
    assert (world.effects(xid), gate.count) == (["try"], 1)


async def test_a_stopping_participant_lets_its_calls_end(world: World) -> None:
    gate = world.gate("slow")
    xid = new_xid()
    stream = world.stub.Exchange(
        _one_batch(participant_pb2.ExchangeRequest(calls=[world.message(TRY, xid, account="slow")]), half_close=False)
    )
    reading = asyncio.create_task(stream.read())
    await gate.wait_reached()
    stopping = asyncio.create_task(world.stop(grace=10))
    while (refused := await world.call(TRY, new_xid())).outcome == DONE:
        pass  # not stopping yet
    assert (refused.outcome, refused.error) == (UNKNOWN, "the participant is stopping")
    gate.opened.set()
    response = await reading
    assert [reply.outcome for reply in response.replies] == [DONE]
    assert await stream.read() is grpc.aio.EOF
    assert await stopping
    assert world.effects(xid) == ["try"]


async def test_a_participant_that_cannot_wait_any_longer_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LAST_REPLIES_SECONDS", 0.2)
    gate = world.gate("slow")
    calling = asyncio.create_task(world.call(TRY, new_xid(), account="slow"))
    await gate.wait_reached()
    assert not await world.stop(grace=0.05)
    gate.opened.set()
    if world.is_async:
        assert (await calling).outcome == UNKNOWN  # a task can be cancelled, a thread cannot
    else:
        with pytest.raises(grpc.aio.AioRpcError):
            await calling


async def test_a_participant_that_gives_up_ends_what_waits_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "LAST_REPLIES_SECONDS", 0.2)
    gate = world.gate("slow")
    xid = new_xid()
    message = world.message(TRY, xid, account="slow", call_id=1)
    cancel = world.message(CANCEL, xid, account="slow", call_id=2)
    stream = world.stub.Exchange(_one_batch(participant_pb2.ExchangeRequest(calls=[message, cancel]), half_close=False))
    reading = asyncio.create_task(stream.read())
    await gate.wait_reached()
    assert not await world.stop(grace=0.05)
    gate.opened.set()
    if world.is_async:
        replies = list((await reading).replies)
        while len(replies) < 2:
            replies += (await stream.read()).replies
        assert [(reply.call_id, reply.outcome) for reply in replies] == [(1, UNKNOWN), (2, UNKNOWN)]
        assert world.status(xid) is None
    else:
        with pytest.raises(grpc.aio.AioRpcError):
            await reading


@pytest.mark.parametrize("flavour", ["sqlite-sync", "sqlite-async"], indirect=True)
async def test_phase_2_goes_before_trys_where_only_one_may_write(world: World) -> None:
    """A Confirm waits for the Try that writes now, and not for those that wait, too."""
    xid = new_xid()
    await world.call(TRY, xid)
    gate = world.gate("slow")
    trying = asyncio.create_task(world.call(TRY, new_xid(), account="slow"))
    await gate.wait_reached()
    trys = [world.message(TRY, new_xid(), call_id=n) for n in range(1, 8)]
    confirm = world.message(CONFIRM, xid, call_id=99)
    last = world.message(TRY, xid, participant="another", call_id=100)  # its answer tells that all have arrived
    stream = world.stub.Exchange(_one_batch(participant_pb2.ExchangeRequest(calls=[*trys, confirm, last])))
    order: list[int] = []
    async for response in stream:
        order += [reply.call_id for reply in response.replies]
        if not gate.opened.is_set():
            await _all_wait_for_the_turn(world, 8)
            gate.opened.set()
    assert (await trying).outcome == DONE
    assert order[:2] == [100, 99]
    assert len(order) == 9


async def _all_wait_for_the_turn(world: World, count: int) -> None:
    turn: Any = world.participant._engine_fence.turn  # type: ignore[union-attr]
    while len(turn._trys) + len(turn._phase2) < count:  # noqa: ASYNC110 - waiting is not seen from outside
        await asyncio.sleep(0.01)


async def test_too_many_calls_are_told_so(flavour: str, participant_url: str) -> None:
    world = World(flavour, participant_url, waiting_max=5)
    await world.start()
    try:
        gate = world.gate("slow")
        messages = [world.message(TRY, new_xid(), account="slow", call_id=n) for n in range(1, 21)]
        stream = world.stub.Exchange(_one_batch(participant_pb2.ExchangeRequest(calls=messages)))
        replies = []
        async for response in stream:
            replies += response.replies
            if len(replies) == 15:
                assert {reply.outcome for reply in replies} == {UNKNOWN}
                assert all("overloaded" in reply.error for reply in replies)
                assert (await world.exchange([world.message(CANCEL, new_xid(), timeout=0.1)]))[7].outcome in (
                    DONE,
                    UNKNOWN,  # SQLite: the slow handler holds the only write lock
                )
                gate.opened.set()
        assert len(replies) == 20
        assert {reply.outcome for reply in replies[15:]} == {DONE}
    finally:
        await world.close()


async def _one_batch(
    request: participant_pb2.ExchangeRequest, half_close: bool = True
) -> AsyncIterator[participant_pb2.ExchangeRequest]:
    yield request
    if not half_close:
        await asyncio.Event().wait()
