"""The front in this process, and how fronts are asked one after the other."""

import random
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.fronts import (
    RECORD_BYTES,
    AnyFront,
    AsyncFront,
    Front,
    MemoryFront,
    bytes_of,
    check_erasing,
    check_fronts,
    fit,
)
from participant_sdk.idempotency.record import Record, State
from participant_sdk.idempotency.testing import front_suite
from participant_sdk.idempotency.testing.front_suite import ANSWER, FrontSuite, record_of


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


class Remote:
    """A front that has to be waited for."""

    async def get(self, key_hash: bytes) -> Record | None:
        return None

    async def put(self, record: Record) -> None:
        pass


class TestMemoryFront(FrontSuite):
    @asynccontextmanager
    async def opened(self) -> AsyncIterator[AnyFront]:
        yield MemoryFront()


class Awaited:
    """A front in memory that has to be waited for."""

    def __init__(self) -> None:
        self.front = MemoryFront()

    async def get(self, key_hash: bytes) -> Record | None:
        return self.front.get(key_hash)

    async def put(self, record: Record) -> None:
        self.front.put(record)


class TestAwaitedFront(FrontSuite):
    @asynccontextmanager
    async def opened(self) -> AsyncIterator[AnyFront]:
        yield Awaited()


class Faulty(Awaited):
    """A front with one fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.held: dict[bytes, Record] = {}

    async def get(self, key_hash: bytes) -> Record | None:
        match self.fault:
            case "one answer for all":
                return next(iter(self.held.values()), None)
            case "forgets headers":
                found = await super().get(key_hash)
                answer = None if found is None or found.answer is None else replace(found.answer, headers=())
                return found and replace(found, answer=answer)
            case "holds everything" | "keeps the first":
                return self.held.get(key_hash)
            case "awaits a number":
                return 7  # type: ignore[return-value]
        return None

    async def put(self, record: Record) -> None:
        if self.fault == "keeps the first":
            self.held.setdefault(record.key_hash, record)
        else:
            self.held[record.key_hash] = record
        await super().put(record)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("holds nothing", "what_is_put_is_found_as_it_was"),
        ("forgets headers", "what_is_put_is_found_as_it_was"),
        ("awaits a number", "what_is_put_is_found_as_it_was"),
        ("one answer for all", "each_key_has_its_own"),
        ("holds nothing", "every_kind_of_end_is_held"),
        ("holds everything", "what_is_not_final_is_not_held"),
        ("holds everything", "what_has_expired_is_not_found"),
        ("holds everything", "an_older_fence_never_replaces_a_newer_one"),
        ("keeps the first", "an_older_fence_never_replaces_a_newer_one"),
        ("one answer for all", "many_at_once_get_what_is_theirs"),
    ],
)
def test_the_suite_notices(fault: str, test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class OfFaulty(FrontSuite):
        @asynccontextmanager
        async def opened(self) -> AsyncIterator[AnyFront]:
            yield Faulty(fault)

    monkeypatch.setattr(front_suite, "WAIT_S", 0.5)
    with pytest.raises(AssertionError):
        getattr(OfFaulty(), f"test_{test}")()


def test_what_is_put_is_found_with_the_times_of_now() -> None:
    clock = Clock()
    front = MemoryFront(clock=clock)
    front.put(record_of())
    clock.seconds += 10
    assert front.get(record_of().key_hash) == record_of(age_ms=15_000, expires_left_ms=50_000)
    assert front.get(record_of(2).key_hash) is None
    assert (front.counts.hits, front.counts.misses, front.counts.stored) == (1, 1, 1)


def test_what_has_expired_is_not_found() -> None:
    clock = Clock()
    front = MemoryFront(clock=clock)
    front.put(record_of(expires_left_ms=2_000))
    clock.seconds += 1.999
    assert front.get(record_of().key_hash) is not None
    clock.seconds += 0.001
    assert front.get(record_of().key_hash) is None
    assert (front.counts.entries, front.counts.bytes_held) == (0, 0)


def test_nothing_is_held_longer_than_the_front_may() -> None:
    clock = Clock()
    front = MemoryFront(age_max_s=30, clock=clock)
    front.put(record_of())
    clock.seconds += 29
    assert front.get(record_of().key_hash) is not None
    clock.seconds += 1
    assert front.get(record_of().key_hash) is None


def test_it_keeps_the_last_used_in_so_many_bytes() -> None:
    size = bytes_of(record_of())
    front = MemoryFront(bytes_max=3 * size)
    for key in (1, 2, 3):
        front.put(record_of(key))
    front.get(record_of(1).key_hash)
    front.put(record_of(4))
    held = [key for key in (1, 2, 3, 4) if front.get(record_of(key).key_hash) is not None]
    assert held == [1, 3, 4]
    assert front.counts.bytes_held == 3 * size


def test_a_large_answer_counts_and_one_that_is_too_large_is_left_out() -> None:
    large = type(ANSWER)(ANSWER.codec, body=bytes(10_000))
    front = MemoryFront(bytes_max=12_000)
    front.put(record_of(1))
    front.put(record_of(2, answer=large))
    assert front.get(record_of(1).key_hash) is None
    assert front.get(record_of(2).key_hash) is not None
    front.put(record_of(3, answer=type(ANSWER)(ANSWER.codec, body=bytes(20_000))))
    assert front.get(record_of(2).key_hash) is not None
    assert front.get(record_of(3).key_hash) is None


def test_it_holds_so_many_entries() -> None:
    front = MemoryFront(entries_max=2)
    for key in (1, 2, 3):
        front.put(record_of(key))
    assert front.counts.entries == 2
    assert front.get(record_of(1).key_hash) is None


def test_what_is_erased_does_not_come_back() -> None:
    front = MemoryFront()
    front.put(record_of())
    front.forget({record_of().key_hash: record_of().fence})
    assert front.get(record_of().key_hash) is None
    front.put(record_of())
    assert front.get(record_of().key_hash) is None, "by who has read it before"
    assert front.counts.bytes_held == RECORD_BYTES
    front.put(record_of(fence=record_of().fence + 1))
    assert front.get(record_of().key_hash) is not None, "another run of the key is another record"


def test_what_cannot_forget_is_refused() -> None:
    class AsyncErasing(Remote):
        async def forget(self, fences: Mapping[bytes, int]) -> None:
            pass

    check_erasing([MemoryFront()], asyncio=False)
    check_erasing([MemoryFront(), AsyncErasing()], asyncio=True)
    with pytest.raises(ConfigurationError, match=r"fronts\[0\] .* has no forget"):
        check_erasing([Remote()], asyncio=True)  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="is for AsyncInspection"):
        check_erasing([AsyncErasing()], asyncio=False)


def test_flush_forgets_everything() -> None:
    front = MemoryFront()
    front.put(record_of())
    front.flush()
    assert front.get(record_of().key_hash) is None
    assert front.counts.bytes_held == 0


@pytest.mark.parametrize("setting", ["bytes_max", "entries_max", "age_max_s"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_limit_that_is_none_is_refused(setting: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{setting} .* is not above 0"):
        MemoryFront(**{setting: value})


def test_many_threads_leave_the_sum_right() -> None:
    size = bytes_of(record_of())
    front = MemoryFront(bytes_max=20 * size)

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for fence in range(2_000):
            key = dice.randrange(60)
            if dice.random() < 0.5:
                front.put(record_of(key, fence=fence))
            else:
                found = front.get(record_of(key).key_hash)
                assert found is None or found.key_hash == record_of(key).key_hash

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert front.counts.bytes_held == front.counts.entries * size <= 20 * size


@pytest.mark.parametrize(
    "record",
    [record_of(2), record_of(state=State.UNKNOWN), record_of(expires_left_ms=0), record_of(expires_left_ms=None), None],
)
def test_what_a_front_must_not_give_is_a_miss(record: Record | None) -> None:
    assert fit(record, record_of().key_hash) is None
    assert fit(record_of(), record_of().key_hash) == record_of()


def test_what_is_no_front_is_refused() -> None:
    check_fronts([MemoryFront()], asyncio=False)
    check_fronts([MemoryFront(), Remote()], asyncio=True)
    with pytest.raises(ConfigurationError, match=r"fronts\[1\] Remote is for AsyncIdempotency"):
        check_fronts([MemoryFront(), Remote()], asyncio=False)
    with pytest.raises(ConfigurationError, match=r"fronts\[0\] 7 has no get and put"):
        check_fronts([7], asyncio=True)  # type: ignore[list-item]


def test_the_protocols_are_met() -> None:
    front: Front = MemoryFront()
    remote: AsyncFront = Remote()
    assert isinstance(front, Front)
    assert isinstance(remote, AsyncFront)
