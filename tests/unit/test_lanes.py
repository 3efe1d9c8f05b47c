"""The desk: which call starts, which joins, which waits, and which is turned away."""

import threading
import time
from dataclasses import replace
from queue import SimpleQueue

from participant_sdk.call import IncomingCall, Outcome, Reply, fingerprint
from participant_sdk.desk import WAITING_FOR_ONE_MAX, Desk, OnReply, Replaced, Work
from participant_sdk.fence import Phase
from participant_sdk.lanes import ThreadLanes
from participant_sdk.payload import Payload

DONE = Reply(Outcome.DONE)


def call(
    phase: Phase = Phase.TRY, xid: str = "a", branch_id: int = 1, data: bytes = b"", seconds: float = 5
) -> IncomingCall:
    payload = Payload(data)
    return IncomingCall(
        phase=phase,
        xid=xid,
        branch_id=branch_id,
        participant="bank",
        action="debit",
        payload=payload,
        attempt=1,
        expires_at=time.monotonic() + seconds,
        fingerprint=fingerprint("debit", payload),
    )


def listener(heard: list[str], name: str) -> OnReply:
    return lambda reply: heard.append(name)


def start(desk: Desk, incoming: IncomingCall, on_reply: OnReply) -> Work:
    work = desk.admit(incoming, on_reply)
    assert isinstance(work, Work)
    return work


def test_a_first_call_starts_and_ends() -> None:
    desk = Desk(10)
    heard: list[str] = []
    work = start(desk, call(), listener(heard, "one"))
    assert not desk.idle
    waiting, following = desk.finish(work)
    assert (len(waiting), following) == (1, None)
    assert desk.idle


def test_a_repeat_joins_and_another_phase_waits() -> None:
    desk = Desk(10)
    heard: list[str] = []
    first = start(desk, call(), listener(heard, "try"))
    assert desk.admit(call(Phase.CANCEL), listener(heard, "cancel")) is None
    assert desk.admit(call(), listener(heard, "try again")) is None
    assert desk.admit(call(Phase.CANCEL), listener(heard, "cancel again")) is None
    waiting, following = desk.finish(first)
    for on_reply in waiting:
        on_reply(DONE)
    assert heard == ["try", "try again"]
    assert following is not None
    assert following.call.phase is Phase.CANCEL
    waiting, following = desk.finish(following)
    assert (len(waiting), following) == (2, None)
    assert desk.idle


def test_another_payload_is_another_call() -> None:
    desk = Desk(10)
    start(desk, call(), listener([], ""))
    assert desk.admit(call(data=b"other"), listener([], "")) is None
    (queue,) = desk._branches.values()
    assert len(queue) == 2


def test_other_branches_and_xids_start_at_once() -> None:
    desk = Desk(10)
    start(desk, call(), listener([], ""))
    start(desk, call(branch_id=2), listener([], ""))
    start(desk, call(xid="b"), listener([], ""))


def test_a_repeat_gives_waiting_work_more_time() -> None:
    desk = Desk(10)
    first = start(desk, call(Phase.CANCEL), listener([], ""))
    early = call(seconds=1)
    desk.admit(early, listener([], ""))
    desk.admit(replace(early, expires_at=early.expires_at + 100), listener([], ""))
    _, following = desk.finish(first)
    assert following is not None
    assert following.call.expires_at == early.expires_at + 100


def test_only_a_few_repeats_wait_for_one_reply() -> None:
    """The oldest gives way, as its caller has given up: else the repeats of a hung call are all that is admitted."""
    desk = Desk(2 * WAITING_FOR_ONE_MAX)
    heard: list[str] = []
    first = start(desk, call(), listener(heard, "try"))
    for number in range(100):
        admitted = desk.admit(call(Phase.CANCEL), listener(heard, f"cancel {number}"))
        if number < WAITING_FOR_ONE_MAX:
            assert admitted is None
        else:
            assert isinstance(admitted, Replaced)
            assert admitted.reply.outcome is Outcome.UNKNOWN
            admitted.on_reply(admitted.reply)
            assert heard.pop() == f"cancel {number - WAITING_FOR_ONE_MAX}"
    others = [start(desk, call(Phase.CONFIRM, xid=f"{n}"), listener([], "")) for n in range(WAITING_FOR_ONE_MAX)]
    assert isinstance(desk.admit(call(Phase.CONFIRM, xid="x"), listener([], "")), Reply)
    _, following = desk.finish(first)
    assert following is not None
    waiting, _ = desk.finish(following)
    for on_reply in waiting:
        on_reply(DONE)
    assert heard == [f"cancel {number}" for number in range(100 - WAITING_FOR_ONE_MAX, 100)]
    for work in others:
        desk.finish(work)
    assert (desk.idle, desk._waiting) == (True, {True: 0, False: 0})


def test_repeats_of_a_cancel_behind_a_hung_try_leave_room_for_others() -> None:
    hanging = threading.Event()

    def execute(incoming: IncomingCall) -> Reply:
        if incoming.phase is Phase.TRY:
            assert hanging.wait(20)
        return DONE

    lanes = ThreadLanes(execute, 1, 1, 10)
    replies: SimpleQueue[Reply] = SimpleQueue()
    told: list[Reply] = []
    lanes.submit(call(), told.append)
    for _ in range(100):
        lanes.submit(call(Phase.CANCEL), told.append)
    assert len(told) == 100 - WAITING_FOR_ONE_MAX
    lanes.submit(call(Phase.CONFIRM, xid="b"), replies.put)
    assert replies.get(timeout=20) == DONE
    hanging.set()
    assert lanes.drain(20)
    assert told[-WAITING_FOR_ONE_MAX - 1 :] == [DONE] * (WAITING_FOR_ONE_MAX + 1)


def test_each_lane_has_its_own_limit() -> None:
    desk = Desk(2)
    work = start(desk, call(xid="1"), listener([], ""))
    start(desk, call(xid="2"), listener([], ""))
    turned_away = desk.admit(call(xid="3"), listener([], ""))
    assert isinstance(turned_away, Reply)
    assert "overloaded" in turned_away.error
    start(desk, call(Phase.CONFIRM, xid="4"), listener([], ""))
    start(desk, call(Phase.CANCEL, xid="5"), listener([], ""))
    assert isinstance(desk.admit(call(Phase.CANCEL, xid="6"), listener([], "")), Reply)
    desk.finish(work)
    start(desk, call(xid="3"), listener([], ""))


def test_a_closed_desk_admits_nothing_and_ends_what_it_has() -> None:
    desk = Desk(2)
    work = start(desk, call(), listener([], ""))
    desk.close()
    answer = desk.admit(call(xid="b"), listener([], ""))
    assert isinstance(answer, Reply)
    assert answer.outcome is Outcome.UNKNOWN
    desk.finish(work)
    assert desk.idle
