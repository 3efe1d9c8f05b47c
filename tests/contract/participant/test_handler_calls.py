"""What a handler is told about its call, where else that is known, and what happens when it takes too long."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event

from participant_sdk import Call, Participant, Refused
from participant_sdk.context import ContextThreadPoolExecutor, current_branch_id, current_xid
from tests.contract.participant.world import (
    CANCEL,
    CONFIRM,
    DONE,
    REFUSED,
    TRY,
    UNKNOWN,
    WAIT_SECONDS,
    Debit,
    Held,
    World,
    new_xid,
)

pytestmark = pytest.mark.parametrize("flavour", ["sqlite-sync", "postgres-async", "mariadb-sync"], indirect=True)


def here() -> tuple[str | None, int | None]:
    return current_xid(), current_branch_id()


class Looker:
    """A participant whose handlers note what they see. `more` is done in Try, and may raise."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.calls: list[tuple[str, Call[Debit], tuple[str | None, int | None]]] = []
        self.more: Callable[[Call[Debit]], Any] = lambda call: None

    def note(self, phase: str, call: Call[Debit]) -> None:
        self.calls.append((phase, call, here()))

    def define(self, participant: Participant) -> None:
        if self.world.is_async:

            async def try_async(call: Call[Debit], db: Any) -> Held:
                self.note("try", call)
                done = self.more(call)
                if asyncio.iscoroutine(done):
                    await done
                return Held("it")

            async def confirm_async(call: Call[Debit], db: Any) -> None:
                self.note("confirm", call)

            async def cancel_async(call: Call[Debit], db: Any) -> None:
                self.note("cancel", call)

            look_async = participant.action("look")(try_async)
            look_async.confirm(confirm_async)
            look_async.cancel(cancel_async)
        else:

            def try_(call: Call[Debit], db: Any) -> Held:
                self.note("try", call)
                self.more(call)
                return Held("it")

            look = participant.action("look")(try_)
            look.confirm(lambda call, db: self.note("confirm", call))
            look.cancel(lambda call, db: self.note("cancel", call))

    async def call(self, phase: Any, xid: str, **changes: Any) -> Any:
        metadata = changes.pop("metadata", {})
        message = self.world.message(phase, xid, action="look", **changes)
        message.metadata.update(metadata)
        return (await self.world.exchange([message]))[message.call_id]


@pytest.fixture
async def looker(flavour: str, participant_url: str) -> AsyncIterator[Looker]:
    world = World(flavour, participant_url)
    looker = Looker(world)
    looker.define(world.participant)
    try:
        await world.start()
        yield looker
    finally:
        await world.close()


async def test_each_phase_is_told_all_about_its_call(looker: Looker) -> None:
    for phase, name in ((CONFIRM, "confirm"), (CANCEL, "cancel")):
        xid = new_xid()
        looker.calls.clear()
        metadata = {"tenant": "acme", "traceparent": "00-ab-cd-01"}
        await looker.call(TRY, xid, branch_id=7, metadata=metadata, attempt=3, timeout=9)
        await looker.call(phase, xid, branch_id=7, metadata=metadata, attempt=12, timeout=4)
        for (seen, call, context), attempt, result, timeout in zip(
            looker.calls, (3, 12), (None, Held("it")), (9, 4), strict=True
        ):
            assert seen in ("try", name)
            assert (call.xid, call.branch_id, call.attempt, call.result) == (xid, 7, attempt, result)
            assert (call.participant, call.action, call.payload) == ("bank", "look", Debit())
            assert dict(call.metadata) == metadata
            assert timeout - 3 < call.expires_at - asyncio.get_running_loop().time() <= timeout
            assert 0 < call.deadline <= timeout
            assert context == (xid, 7)


async def test_nothing_of_a_transaction_is_left_behind(looker: Looker) -> None:
    """Case 15: not on the worker's thread, nor in its task, however the handler ended."""
    left: list[Any] = []
    pool = getattr(looker.world.engine, "sync_engine", looker.world.engine).pool
    event.listen(pool, "checkin", lambda *_: left.append(here()))  # by whoever runs the handler, when it has ended
    event.listen(pool, "checkout", lambda *_: left.append(here()))

    def end_by(error: BaseException) -> Callable[[Call[Debit]], None]:
        def end(call: Call[Debit]) -> None:
            raise error

        return end

    ends: list[tuple[Callable[[Call[Debit]], Any], Any]] = [
        (lambda call: None, DONE),
        (end_by(ValueError("no")), UNKNOWN),
        (end_by(Refused("no")), REFUSED),
        (end_by(SystemExit(1)), UNKNOWN),
    ]
    for more, outcome in ends:
        looker.more = more
        xids = [new_xid() for _ in range(12)]  # more than workers
        for reply in await asyncio.gather(*(looker.call(TRY, xid) for xid in xids)):
            assert reply.outcome == outcome
        assert {(call.xid, 1) for _, call, _ in looker.calls} == {context for *_, context in looker.calls}
    assert len(left) >= 48
    assert set(left) == {(None, None)}
    assert here() == (None, None)


async def test_what_a_handler_starts_belongs_to_its_transaction(looker: Looker) -> None:
    """Tasks and their threads by themselves, also when they outlive it; a pool's threads if they are told."""
    seen: dict[str, Any] = {}
    goes_on, ended = threading.Event(), threading.Event()
    tasks: list[asyncio.Task[None]] = []

    async def child() -> None:
        seen["task"] = here()
        seen["thread of a task"] = await asyncio.to_thread(here)
        await asyncio.to_thread(goes_on.wait, WAIT_SECONDS)
        seen["task that outlives it"] = here()
        ended.set()

    def start(call: Call[Debit]) -> None:
        if looker.world.is_async:
            tasks.append(asyncio.get_running_loop().create_task(child()))
        with ContextThreadPoolExecutor() as told, ThreadPoolExecutor() as untold:
            seen["told thread"], seen["untold thread"] = told.submit(here).result(), untold.submit(here).result()

    looker.more = start
    xid = new_xid()
    assert (await looker.call(TRY, xid, branch_id=2)).outcome == DONE
    goes_on.set()
    if tasks:
        await asyncio.to_thread(ended.wait, WAIT_SECONDS)
    mine = (xid, 2)
    wanted = {"told thread": mine, "untold thread": (None, None)}
    if tasks:
        wanted |= {"task": mine, "thread of a task": mine, "task that outlives it": mine}
    assert seen == wanted
    assert here() == (None, None)


async def test_a_handler_that_outlives_its_call_is_told_of_once_and_stands(
    looker: Looker, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for its reply any more; the repeat gets it from the fence."""

    def outlive(call: Call[Debit]) -> None:
        while call.deadline:
            time.sleep(call.deadline)

    def refuse(call: Call[Debit]) -> None:
        outlive(call)
        raise Refused("too_slow")

    aside: Any = asyncio.to_thread
    for late, outcome in ((outlive, DONE), (refuse, REFUSED)):
        looker.more = partial(aside, late) if looker.world.is_async else late
        looker.calls.clear()
        caplog.clear()
        xid = new_xid()
        first = await looker.world.call(TRY, xid, action="look", timeout=0.4)
        assert (first.outcome, first.error) == (UNKNOWN, "the call is still running")
        # It may join the first if that still runs; either way it does not run another time.
        reply = await looker.call(TRY, xid, attempt=2)
        assert (reply.outcome, reply.result.data) == (outcome, b'{"hold":"it"}' if outcome == DONE else b"")
        assert len(looker.calls) == 1
        (told,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert told.levelno == logging.WARNING
        pattern = rf"Try bank/look {xid}#1: action 'look' ended \d+\.\d s after the coordinator stopped waiting for it"
        assert re.fullmatch(pattern, told.getMessage())


async def test_a_handler_in_time_is_not_told_of(looker: Looker, caplog: pytest.LogCaptureFixture) -> None:
    xid = new_xid()
    for phase in (TRY, CONFIRM):
        assert (await looker.world.call(phase, xid)).outcome == DONE
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
