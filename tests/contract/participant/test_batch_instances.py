"""Batches of two instances of a participant, whose rows cross, and of one that is killed in the middle."""

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from participant_sdk import FenceTables
from participant_sdk.call import IncomingCall, Outcome, fingerprint
from participant_sdk.fence import Phase
from participant_sdk.gathering import Answers
from participant_sdk.payload import encode
from tests import forks
from tests.contract.participant.test_batch import new_xids, sent, unfinished
from tests.contract.participant.test_lost_connections import end_connections
from tests.contract.participant.together import ACCOUNT, Together
from tests.contract.participant.world import (
    CANCEL,
    CONFIRM,
    DONE,
    REFUSED,
    TRY,
    UNKNOWN,
    VIOLATION,
    Debit,
    new_xid,
    opened,
)
from tricord.v1 import participant_pb2, participant_pb2_grpc

ROUNDS = 25
SECONDS = 30.0

where_rows_are_locked = pytest.mark.parametrize(
    "flavour",
    ["postgres-sync", "postgres-async", "mariadb-sync", "mariadb-async", "mariadb-sync-read_committed", "sqlite-sync"],
    indirect=True,
)


def incoming(phase: Phase, xid: str) -> IncomingCall:
    payload = encode(Debit(account=ACCOUNT, mode="hot"))
    digest = fingerprint("debit", payload)
    return IncomingCall(phase, xid, 1, "bank", "debit", payload, 1, time.monotonic() + SECONDS, digest)


async def run(world: Together, calls: Sequence[IncomingCall]) -> Answers:
    """One batch, past the lanes, so that it begins at once."""
    fence, engine_fence = world.participant._fence, world.participant._engine_fence
    assert fence is not None
    assert engine_fence is not None
    if world.is_async:
        answers: Answers = await engine_fence.execute_batch(calls, fence)  # type: ignore[misc]
        return answers
    return await asyncio.to_thread(engine_fence.execute_batch, calls, fence)  # type: ignore[arg-type]


@where_rows_are_locked
async def test_batches_of_two_instances_never_deadlock(flavour: str, participant_url: str) -> None:
    """Rule F1. The same branches at both, in opposite orders, with a hot row that every Try wants."""
    async with opened(Together(flavour, participant_url)) as one, opened(Together(flavour, participant_url)) as other:
        for turn in range(ROUNDS):
            xids = new_xids(6)
            for phases in ((Phase.TRY, Phase.TRY), (Phase.CONFIRM, Phase.CONFIRM) if turn % 2 else (Phase.CANCEL,) * 2):
                batches = [incoming(phases[0], xid) for xid in xids], [incoming(phases[1], xid) for xid in xids[::-1]]
                answers = await asyncio.gather(run(one, batches[0]), run(other, batches[1]))
                for answer in answers:  # an error would have left them to be run one by one
                    assert {reply.outcome for reply in answer.replies.values()} == {Outcome.DONE}, turn
                    assert len(answer.replies) == len(xids), turn
            assert [len(one.effects(xid)) for xid in xids] == [2] * 6
        assert one.query("SELECT n FROM counters WHERE name = 'hot'") == [(ROUNDS * 6,)]
        assert unfinished(one) == []


@where_rows_are_locked
async def test_a_batch_of_trys_and_one_of_their_cancels_never_deadlock(flavour: str, participant_url: str) -> None:
    async with opened(Together(flavour, participant_url)) as one, opened(Together(flavour, participant_url)) as other:
        for turn in range(ROUNDS):
            xids = new_xids(6)
            trying = run(one, [incoming(Phase.TRY, xid) for xid in xids])
            cancelling = run(other, [incoming(Phase.CANCEL, xid) for xid in xids[::-1]])
            tried, cancelled = await asyncio.gather(trying, cancelling)
            assert {reply.outcome for reply in tried.replies.values()} <= {Outcome.DONE, Outcome.REFUSED}, turn
            assert len(tried.replies) == 6, turn
            assert {reply.outcome for reply in cancelled.replies.values()} == {Outcome.DONE}, turn
            for xid in xids:
                assert sorted(one.effects(xid)) in ([], [f"cancel {xid}#1", "try"])
                assert one.status(xid) in (3, 4)


@pytest.mark.parametrize("phase", [TRY, CONFIRM])
@pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async", "mariadb-sync", "sqlite-async"], indirect=True)
async def test_a_batch_that_is_killed_in_the_middle_leaves_nothing(
    flavour: str, participant_url: str, phase: Any
) -> None:
    first, after = Together(flavour, participant_url), Together(flavour, participant_url)
    await asyncio.to_thread(first.create_business_tables)
    modes = ["plain", "plain", "slow", "plain"]
    xids = new_xids(4)
    stopper = new_xid()
    if phase == CONFIRM:
        await after.start()
        for xid, mode in zip([*xids, stopper], [*modes, "slow"], strict=True):
            assert (await after.ask(TRY, xid, mode)).outcome == DONE
    process = started(flavour, participant_url)
    try:
        await asyncio.to_thread(_kill_in_the_middle, process, first, phase, stopper, xids, modes)
        if phase == TRY:
            await after.start()
        again = await after.together(sent(after, phase, xids, *modes, attempt=2, timeout=30.0))
        assert [again[n].outcome for n in range(1, 5)] == [DONE] * 4
        assert after.batches(*xids, what="try" if phase == TRY else "confirm") == [4]
        for xid in xids:
            assert after.effects(xid) == ["try"] + ([f"confirm {xid}#1"] if phase == CONFIRM else [])
        assert unfinished(after) == []
    finally:
        process.kill()
        with process:  # its streams are closed
            pass
        await first.close()
        await after.close()


def started(flavour: str, url: str) -> forks.Running:
    return forks.start(
        ["tests.contract.participant.together_process", flavour, url],
        env=os.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _kill_in_the_middle(
    process: forks.Running, world: Together, phase: Any, stopper: str, xids: list[str], modes: list[str]
) -> None:
    """It runs a call that waits; the others wait for that, and then run together until the third one waits."""
    assert process.stdout is not None
    assert process.stdin is not None
    address = process.stdout.readline().split()[-1]
    with grpc.insecure_channel(address) as channel:
        stub = participant_pb2_grpc.ParticipantServiceStub(channel)
        done = threading.Event()

        def requests() -> Any:
            yield participant_pb2.ExchangeRequest(calls=[world.message(phase, **world.of(stopper, "slow", call_id=99))])
            assert process.stdout is not None
            assert process.stdout.readline().split() == ["waits", stopper]
            last = world.message(TRY, new_xid(), participant="another", call_id=100)
            yield participant_pb2.ExchangeRequest(calls=[*sent(world, phase, xids, *modes, timeout=60.0), last])
            done.wait(SECONDS)

        for response in stub.Exchange(requests()):
            if 100 in [reply.call_id for reply in response.replies]:
                break
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().split() == ["waits", xids[2]]
        process.kill()
        process.wait()
        done.set()


@pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async", "mariadb-sync", "mariadb-async"], indirect=True)
async def test_a_connection_that_is_lost_in_the_middle_ends_in_one_effect_each(
    flavour: str, participant_url: str
) -> None:
    """They run one by one."""
    async with opened(Together(flavour, participant_url)) as world:
        modes = ["plain", "plain", "slow", "plain"]
        xids = new_xids(4)
        gate = world.gate(xids[2])
        asking = asyncio.create_task(world.together(sent(world, TRY, xids, *modes, timeout=30.0)))
        await gate.wait_reached()
        end_connections(world)
        gate.opened.set()
        replies = await asking
        assert [replies[n].outcome for n in range(1, 5)] == [DONE] * 4
        assert [world.effects(xid) for xid in xids] == [["try"]] * 4
        assert world.batches(*xids) == [3, 1, 1, 1, 1]
        assert unfinished(world) == []


@pytest.mark.parametrize("flavour", ["postgres-sync", "sqlite-async", "mariadb-async"], indirect=True)
async def test_one_whose_time_is_up_before_its_turn_drops_out(flavour: str, participant_url: str) -> None:
    """The one before it takes too long; what that one has done stands, however late it is."""
    async with opened(Together(flavour, participant_url)) as world:
        xids = new_xids(3)
        calls = sent(world, TRY, xids, "slow", "plain", "plain")
        gate = world.gate(xids[0])
        calls[0].timeout.FromMilliseconds(3_000)
        calls[1].timeout.FromMilliseconds(3_000)
        calls[2].timeout.FromMilliseconds(60_000)
        ends_at = time.monotonic() + 4
        asking = asyncio.create_task(world.together(calls))
        await gate.wait_reached()
        while time.monotonic() < ends_at:  # noqa: ASYNC110  the time itself is what is waited for
            await asyncio.sleep(0.05)
        gate.opened.set()
        replies = await asking
        assert [replies[n].outcome for n in (1, 2, 3)] == [DONE, UNKNOWN, DONE]
        assert "its time was up" in replies[2].error
        assert [world.effects(xid) for xid in xids] == [["try"], [], ["try"]]
        assert world.status(xids[1]) is None
        assert world.batches(*xids) == [2]
        assert unfinished(world) == []


class Unprepared(Together):
    """As behind a pooler that gives each transaction another connection."""

    def make_engine(self, **options: Any) -> Any:
        return super().make_engine(connect_args={"prepare_threshold": None}, **options)


async def every_end(world: Together, log: str) -> None:
    """All that a batch may have to say to its database."""
    old = new_xid()
    xids = sorted([*new_xids(4), f"{int(old[:12], 16) - 26 * 3_600_000:012x}{old[12:]}"])
    modes = ["plain", "plain", "refuse", "nothing", "plain"]
    for attempt in (1, 2):
        replies = await world.together(sent(world, TRY, xids, *modes, attempt=attempt))
        assert [replies[n].outcome for n in range(1, 6)] == [REFUSED, DONE, REFUSED, DONE, DONE]
    modes[4] = "driver_commit"
    bad = new_xids(6)
    replies = await world.together(sent(world, TRY, bad, *modes, "plain"))
    assert [replies[n].outcome for n in range(1, 7)] == [DONE, DONE, REFUSED, DONE, VIOLATION, DONE]
    for phase, part in ((CONFIRM, xids[3:]), (CANCEL, [xids[1], new_xid()])):
        changed = ["nothing", "plain"] if phase == CONFIRM else ["plain", "plain"]
        for _ in range(2):
            replies = await world.together(sent(world, phase, part, *changed))
            assert [reply.outcome for reply in replies.values()] == [DONE, DONE]
    assert world.query(f"SELECT count(*) FROM {log} WHERE lease_until_ms IS NOT NULL AND finished_at IS NOT NULL") == [
        (0,)
    ]


@pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async"], indirect=True)
async def test_batches_where_the_driver_may_prepare_nothing(flavour: str, participant_url: str) -> None:
    async with opened(Unprepared(flavour, participant_url)) as world:
        await every_end(world, "tcc_fence_log")


@pytest.mark.parametrize("flavour", ["sqlite-sync", "postgres-async", "mariadb-sync"], indirect=True)
async def test_batches_in_tables_of_other_names(flavour: str, participant_url: str) -> None:
    async with opened(Together(flavour, participant_url, tables=FenceTables("order", "from"))) as world:
        await every_end(world, "`order`" if "mariadb" in flavour else '"order"')
