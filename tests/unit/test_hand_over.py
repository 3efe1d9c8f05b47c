"""The thread that carries out flushes: one after another, told to the loop, and to nobody where it has gone."""

import asyncio
import threading

import pytest

from coordinator.store.hand_over import HandOver


async def test_work_is_done_in_order_on_one_thread_and_errors_are_the_callers() -> None:
    hand_over = HandOver("test")
    came: list[tuple[int, str]] = []

    def work(number: int) -> int:
        came.append((number, threading.current_thread().name))
        if number == 1:
            raise ValueError("number 1")
        return number * 2

    told = await asyncio.gather(
        *(hand_over.run(lambda number=number: work(number)) for number in range(4)),  # type: ignore[misc]
        return_exceptions=True,
    )
    assert (told[0], str(told[1]), told[2:]) == (0, "number 1", [4, 6])
    assert came == [(number, "test") for number in range(4)]
    hand_over.stop()


async def test_what_nobody_waits_for_any_more_is_done_all_the_same() -> None:
    hand_over = HandOver("test")
    may_end, ended = threading.Event(), threading.Event()
    first = hand_over.run(may_end.wait)
    second = hand_over.run(ended.set)
    first.cancel()
    may_end.set()
    await second
    assert ended.is_set()
    hand_over.stop()


def test_a_loop_that_is_closed_is_told_nothing() -> None:
    hand_over = HandOver("test")
    may_end, ended = threading.Event(), threading.Event()

    async def abandon() -> None:
        hand_over.run(may_end.wait)
        hand_over.run(ended.set)

    asyncio.run(abandon())
    may_end.set()
    hand_over.stop()
    assert ended.is_set()


@pytest.mark.parametrize("used", [False, True])
async def test_it_stops_used_or_not(used: bool) -> None:
    hand_over = HandOver("test")
    if used:
        await hand_over.run(lambda: None)
    hand_over.stop()
