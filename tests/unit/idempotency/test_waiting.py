"""Who of those that wait for one key looks next, and what the others are given."""

import asyncio
import time
from collections.abc import Callable

import pytest

from participant_sdk.idempotency.record import Answer, Codec, Fingerprint, Record, State
from participant_sdk.idempotency.waiting import Await, TaskWaiting, Turn, Waiter

KEY = b"k" * 32
FOREVER = float("inf")


def record(state: State) -> Record:
    return Record(KEY, "", "op", "", state, Fingerprint(1, b"f" * 32), 1, 1, 0, answer=Answer(Codec.VALUE))


class Hall:
    """A room to wait in."""

    def __init__(self, poll_s: float = 60.0, waiters_max: int = 9, per_key: int = 9) -> None:
        self.waiting = TaskWaiting(poll_s, waiters_max, per_key)

    def enter(self, until: float = FOREVER, key: bytes = KEY) -> Waiter:
        waiter = self.waiting.enter(key, until, may_be_told=False)
        assert waiter is not None
        return waiter


def test_one_looks_and_all_are_given_what_has_ended() -> None:
    hall = Hall()
    first, second, third = (hall.enter() for _ in range(3))
    assert first.turn() is Turn.LOOK
    assert isinstance(second.turn(), float)
    ended = record(State.SUCCEEDED)
    first.looked(ended, None)
    assert second.turn() is ended
    assert third.turn() is ended
    assert isinstance(second.turn(), float)  # it is told once


def test_what_goes_on_is_looked_at_again_later_and_ever_more_rarely() -> None:
    hall = Hall(poll_s=60.0)
    waiter = hall.enter()
    pauses = []
    for _ in range(12):
        assert waiter.turn() is Turn.LOOK
        waiter.looked(record(State.PROCESSING), 1_000.0)
        pause = waiter.turn()
        assert isinstance(pause, float)
        pauses.append(pause)
        hall.waiting.all_look()
    assert 29 < pauses[0] <= 60
    assert 60 * 4 <= pauses[-1] <= 60 * 8


def test_the_end_of_the_lease_is_not_waited_past() -> None:
    hall = Hall(poll_s=60.0)
    waiter = hall.enter()
    assert waiter.turn() is Turn.LOOK
    waiter.looked(record(State.PROCESSING), 0.5)
    pause = waiter.turn()
    assert isinstance(pause, float)
    assert pause <= 0.6


WAKES: list[Callable[[Hall], None]] = [
    lambda hall: hall.waiting.ended(KEY, None),
    lambda hall: hall.waiting.notified(KEY),
    lambda hall: hall.waiting.all_look(),
]


@pytest.mark.parametrize("wake", WAKES)
def test_what_ends_while_somebody_looks_is_looked_at_again(wake: Callable[[Hall], None]) -> None:
    hall = Hall()
    waiter = hall.enter()
    assert waiter.turn() is Turn.LOOK
    wake(hall)
    waiter.looked(record(State.PROCESSING), None)
    assert waiter.turn() is Turn.LOOK


def test_who_leaves_in_the_middle_of_a_look_leaves_it_to_the_next() -> None:
    hall = Hall()
    first, second = hall.enter(), hall.enter()
    assert first.turn() is Turn.LOOK
    first.leave()
    assert second.turn() is Turn.LOOK


def test_time_is_up_also_while_another_looks() -> None:
    hall = Hall()
    first, second = hall.enter(), hall.enter(until=time.monotonic() - 1)
    assert first.turn() is Turn.LOOK
    assert second.turn() is Turn.OVER


def test_one_who_comes_later_is_not_given_what_was_before() -> None:
    hall = Hall()
    first = hall.enter()
    assert first.turn() is Turn.LOOK
    first.looked(record(State.SUCCEEDED), None)
    assert isinstance(hall.enter().turn(), float)


def test_the_numbers_are_bounded() -> None:
    hall = Hall(waiters_max=3, per_key=2)
    waiters = [hall.enter(), hall.enter()]
    assert hall.waiting.enter(KEY, FOREVER, may_be_told=False) is None
    other = hall.enter(key=b"o" * 32)
    assert hall.waiting.enter(b"x" * 32, FOREVER, may_be_told=False) is None
    for waiter in (*waiters, other):
        waiter.leave()
    assert not hall.waiting
    hall.enter()


async def test_a_sleeper_is_woken() -> None:
    hall = Hall()
    first, second = hall.enter(), hall.enter()
    assert first.turn() is Turn.LOOK

    async def sleeps() -> Record | Turn:
        return await Await(second).perform_async(None)  # type: ignore[arg-type]

    task = asyncio.create_task(sleeps())
    await asyncio.sleep(0)
    ended = record(State.FAILED_FINAL)
    hall.waiting.ended(KEY, ended)
    assert await asyncio.wait_for(task, 30) is ended
