"""Which calls run together, and what becomes of those that cannot."""

import asyncio
import threading
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Any

import pytest

from participant_sdk.call import IncomingCall, Outcome, Reply
from participant_sdk.fence import Phase
from participant_sdk.gathering import APART_MAX, MEMBERS_MAX, Answers, Gathering, no_key
from participant_sdk.lanes import TaskLanes, ThreadLanes
from tests.unit.test_lanes import DONE, call

SECONDS = 20.0


def by_phase(incoming: IncomingCall) -> Hashable | None:
    """All calls of one phase run together, but for those of "alone"."""
    return None if incoming.xid == "alone" else incoming.phase


def test_what_comes_while_a_line_runs_is_its_next_batch() -> None:
    gathering: Gathering[int] = Gathering(no_key)
    line = gathering.join("a", 0)
    assert line is not None
    assert line.take() == [0]
    for number in range(1, MEMBERS_MAX + 3):
        assert gathering.join("a", number) is None
    assert gathering.join("b", 7) is not None
    assert gathering.ended(line)
    assert line.take() == list(range(1, MEMBERS_MAX + 1))
    assert gathering.ended(line)
    assert line.take() == [MEMBERS_MAX + 1, MEMBERS_MAX + 2]
    assert not gathering.ended(line)
    assert gathering.join("a", 8) is not None


def test_who_made_a_batch_fail_goes_alone_and_is_forgotten_in_the_end() -> None:
    gathering: Gathering[int] = Gathering(by_phase)
    assert gathering.key_of(call(xid="a")) is Phase.TRY
    gathering.learn(Answers(culprit=("a", 1)))
    gathering.learn(Answers())
    assert gathering.key_of(call(xid="a")) is None
    assert gathering.key_of(call(Phase.CANCEL, xid="a")) is None
    assert gathering.key_of(call(xid="b")) is Phase.TRY
    for number in range(APART_MAX):
        gathering.learn(Answers(culprit=(f"x{number}", 1)))
    assert gathering.key_of(call(xid="a")) is Phase.TRY


class Held:
    """Runs calls; the one of "first" waits. What ran together is in `batches`."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.batches: SimpleQueue[list[str]] = SimpleQueue()
        self.answer: Callable[[list[IncomingCall]], Answers] = lambda calls: Answers({each.key: DONE for each in calls})

    def execute(self, incoming: IncomingCall) -> Reply:
        if incoming.xid == "first":
            self.began.set()
            assert self.go_on.wait(SECONDS)
        self.batches.put([incoming.xid])
        return DONE

    def execute_batch(self, calls: list[IncomingCall]) -> Answers:
        self.batches.put([each.xid for each in calls])
        return self.answer(calls)

    async def execute_async(self, incoming: IncomingCall) -> Reply:
        return await asyncio.to_thread(self.execute, incoming)

    async def execute_batch_async(self, calls: list[IncomingCall]) -> Answers:
        return self.execute_batch(calls)

    def ran(self, count: int) -> list[list[str]]:
        return [self.batches.get(timeout=SECONDS) for _ in range(count)]


def run_in_threads(held: Held, xids: list[str], ran: int) -> tuple[list[list[str]], list[Reply]]:
    """Submit them while "first" runs; what ran, in its order, and the replies in the order of the calls."""
    lanes = ThreadLanes(held.execute, 2, 1, 100, held.execute_batch, by_phase)
    replies: dict[str, Reply] = {}
    lanes.submit(call(xid="first"), lambda reply: None)
    assert held.began.wait(SECONDS)
    for xid in xids:
        lanes.submit(call(xid=xid), lambda reply, xid=xid: replies.update({xid: reply}))  # type: ignore[misc]
    held.go_on.set()
    seen = held.ran(ran)
    assert lanes.drain(SECONDS)
    return seen, [replies[xid] for xid in xids]


async def run_in_tasks(held: Held, xids: list[str], ran: int) -> tuple[list[list[str]], list[Reply]]:
    lanes = TaskLanes(held.execute_async, 2, 1, 100, held.execute_batch_async, by_phase)
    replies: dict[str, Reply] = {}
    lanes.submit(call(xid="first"), lambda reply: None)
    assert await asyncio.to_thread(held.began.wait, SECONDS)
    for xid in xids:
        lanes.submit(call(xid=xid), lambda reply, xid=xid: replies.update({xid: reply}))  # type: ignore[misc]
    held.go_on.set()
    seen = await asyncio.to_thread(held.ran, ran)
    assert await lanes.drain(SECONDS)
    return seen, [replies[xid] for xid in xids]


@pytest.fixture(params=["threads", "tasks"])
def lanes(request: pytest.FixtureRequest) -> Any:
    async def run(held: Held, xids: list[str], ran: int) -> tuple[list[list[str]], list[Reply]]:
        if request.param == "tasks":
            return await run_in_tasks(held, xids, ran)
        return await asyncio.to_thread(run_in_threads, held, xids, ran)

    return run


async def test_lanes_run_what_waits_together_as_one(lanes: Any) -> None:
    seen, replies = await lanes(Held(), ["a", "b", "c"], 2)
    assert seen == [["first"], ["a", "b", "c"]]
    assert replies == [DONE] * 3


async def test_a_call_without_a_key_waits_for_nobody(lanes: Any) -> None:
    held = Held()
    seen, _ = await lanes(held, ["a", "alone", "b"], 3)
    assert ["alone"] in seen
    assert ["a", "b"] in seen


async def test_what_a_batch_does_not_answer_runs_by_itself(lanes: Any) -> None:
    held = Held()
    unknown = Reply.unknown("no")
    held.answer = lambda calls: Answers({("b", 1): unknown}, culprit=("a", 1))
    seen, replies = await lanes(held, ["a", "b", "c"], 4)
    assert seen[:2] == [["first"], ["a", "b", "c"]]
    assert sorted(seen[2:]) == [["a"], ["c"]]
    assert [reply.outcome for reply in replies] == [Outcome.DONE, Outcome.UNKNOWN, Outcome.DONE]


async def test_a_batch_that_raises_runs_one_by_one(lanes: Any) -> None:
    held = Held()

    def fail(calls: list[IncomingCall]) -> Answers:
        raise RuntimeError("not meant to happen")

    held.answer = fail
    seen, replies = await lanes(held, ["a", "b"], 4)
    assert seen[:2] == [["first"], ["a", "b"]]
    assert sorted(seen[2:]) == [["a"], ["b"]]
    assert replies == [DONE] * 2


async def test_whoever_waits_for_a_batch_is_told_when_the_lanes_are_abandoned() -> None:
    begun = asyncio.Event()

    async def hang(incoming: IncomingCall) -> Reply:
        begun.set()
        await asyncio.Event().wait()
        return DONE

    async def never(calls: list[IncomingCall]) -> Answers:
        return Answers()

    lanes = TaskLanes(hang, 1, 1, 100, never, by_phase)
    told: list[Reply] = []
    for xid in ("first", "a", "b"):
        lanes.submit(call(xid=xid), told.append)
    await begun.wait()
    assert not await lanes.drain(0.0)
    assert [reply.outcome for reply in told] == [Outcome.UNKNOWN] * 3
    assert lanes._desk.idle
