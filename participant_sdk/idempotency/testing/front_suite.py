"""What every front has to pass: ours do, and yours can be shown to. Plain tests of a class, for pytest or unittest.

    class TestOurFront(FrontSuite):
        @asynccontextmanager
        async def opened(self) -> AsyncIterator[AnyFront]:
            yield OurFront(...)

Each test opens a front that holds nothing, in an event loop of its own, for a Front as for an AsyncFront.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from inspect import isawaitable, iscoroutinefunction
from typing import Any, Final, TypeAlias

from participant_sdk.idempotency.fronts import AnyFront, Front
from participant_sdk.idempotency.record import Answer, Codec, Fingerprint, Record, State

LIFE_MS: Final = 60_000
AGE_MS: Final = 5_000
SHORT_MS: Final = 200
WAIT_S: Final = 60.0
FENCES: Final = (2, 255, 2**40 - 1, 2**62)
"""Some that are told apart only as whole numbers of 64 bits."""
HEADERS: Final = ((b"content-type", b"application/json"), (b"x-shop", b"one"), (b"x-shop", b"two"), (b"x-empty", b""))
ANSWER: Final = Answer(Codec.HTTP, 201, HEADERS, b'{"order": 42}\x00\xff')


def record_of(key: int = 1, **changes: Any) -> Record:
    """A record that has ended, under a key of that number; `changes` are its other fields."""
    record = Record(
        key_hash=key.to_bytes(32),
        tenant="\u00f6mer",
        operation="orders.create",
        key_hint="3f2a",
        state=State.SUCCEEDED,
        fingerprint=Fingerprint(1, bytes(range(32))),
        fence=1_800_000_000_000_000,
        attempt=1,
        age_ms=AGE_MS,
        expires_left_ms=LIFE_MS,
        answer=ANSWER,
    )
    return replace(record, **changes)


class Asked:
    """A front of either kind, asked in the same words."""

    def __init__(self, front: AnyFront) -> None:
        self.front = front

    async def get(self, key: int = 1) -> Record | None:
        """What it gives for the record of that key."""
        found: Any = self.front.get(record_of(key).key_hash)
        if isawaitable(found):
            found = await found
        assert found is None or isinstance(found, Record), f"get gave {found!r}, which is no Record"
        return found

    async def put(self, record: Record) -> None:
        """Have it hold a record."""
        told: Any = self.front.put(record)
        if isawaitable(told):
            told = await told
        assert told is None, f"put gave {told!r}"

    async def found(self, key: int = 1) -> Record:
        """What it holds under that key, which it has to."""
        found = await self.get(key)
        assert found is not None, f"it does not hold the record {key}, which was put"
        return found


Check: TypeAlias = Callable[[Any, Asked], Coroutine[Any, Any, None]]


def _alone(check: Check) -> Callable[[Any], None]:
    """A test without arguments, in an event loop that is its own, whatever else runs tests here."""

    @functools.wraps(check)
    def test(self: FrontSuite) -> None:
        async def run() -> None:
            async with self.opened() as front:
                await check(self, Asked(front))

        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(run())

    del test.__wrapped__  # pytest would take its arguments for fixtures
    return test


class FrontSuite:
    """Subclass it in a module of tests, under a name that begins with Test, and say what `opened` gives."""

    def opened(self) -> AbstractAsyncContextManager[AnyFront]:
        """A front that holds nothing, for one test; closed after it."""
        raise NotImplementedError(f"{type(self).__name__} does not say what front it is about: define `opened`")

    @_alone
    async def test_what_is_put_is_found_as_it_was(self, front: Asked) -> None:
        """Byte for byte, with every header in its place."""
        assert await front.get() is None, "it holds something from the start"
        assert isinstance(front.front, Front), "it has no get and put"
        await front.put(record_of())
        found = await front.found()
        assert found.expires_left_ms is not None
        assert 0 < found.expires_left_ms <= LIFE_MS, "its times are those of now"
        assert found.age_ms >= AGE_MS, "its times are those of now"
        assert found == record_of(age_ms=found.age_ms, expires_left_ms=found.expires_left_ms)

    @_alone
    async def test_each_key_has_its_own(self, front: Asked) -> None:
        """A front that mixed them up would give one customer's answer to another."""
        await front.put(record_of(1, tenant="one"))
        await front.put(record_of(2, tenant="two"))
        assert [(await front.found(key)).tenant for key in (1, 2)] == ["one", "two"]
        assert [(await front.found(key)).key_hash for key in (1, 2)] == [record_of(key).key_hash for key in (1, 2)]
        assert await front.get(3) is None

    @_alone
    async def test_every_kind_of_end_is_held(self, front: Asked) -> None:
        """Also one without an answer, and answers of every size and kind."""
        ends = [
            record_of(1, state=State.TOMBSTONE, answer=None, reason="the answer has 2000000 bytes"),
            record_of(2, state=State.FAILED_FINAL, answer=Answer(Codec.ERROR, body=b"no")),
            record_of(3, answer=Answer(Codec.GRPC)),
            record_of(4, answer=Answer(Codec.VALUE, body=bytes(range(256)) * 40)),
            record_of(5, tenant="", key_hint="", attempt=7, fingerprint=Fingerprint(32_767, bytes(32))),
        ]
        for record in ends:
            await front.put(record)
        for key, record in enumerate(ends, 1):
            found = await front.found(key)
            assert found == replace(record, age_ms=found.age_ms, expires_left_ms=found.expires_left_ms)

    @_alone
    async def test_what_is_not_final_is_not_held(self, front: Asked) -> None:
        """A run in progress may end another way, and what has expired may run again."""
        states = (State.PROCESSING, State.UNKNOWN, State.FAILED_RETRYABLE)
        for record in (*(record_of(state=state) for state in states), *_over()):
            await front.put(record)
            assert await front.get() is None, f"it gives {record.state.name} with {record.expires_left_ms} ms left"

    @_alone
    async def test_what_has_expired_is_not_found(self, front: Asked) -> None:
        """Not one moment later, by whichever clock the front has."""
        await front.put(record_of(1, expires_left_ms=SHORT_MS))
        await front.put(record_of(2))
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + WAIT_S
        while (found := await front.get(1)) is not None:
            assert 0 < (found.expires_left_ms or 0) <= SHORT_MS
            assert loop.time() < ends_at, f"after {WAIT_S:g} s it still gives what was to live for {SHORT_MS} ms"
            await asyncio.sleep(SHORT_MS / 10_000)
        assert await front.get(2) is not None

    @_alone
    async def test_an_older_fence_never_replaces_a_newer_one(self, front: Asked) -> None:
        """The answer of a run that was read long ago may be put after that of a later run under its key."""
        for key, fence in enumerate(FENCES, 1):
            await front.put(record_of(key, fence=fence))
            await front.put(record_of(key, fence=fence - 1, state=State.FAILED_FINAL))
            assert (await front.found(key)).state is State.SUCCEEDED, f"fence {fence - 1} replaced {fence}"
            await front.put(record_of(key, fence=fence + 1, state=State.FAILED_FINAL))
            assert (await front.found(key)).fence == fence + 1, f"fence {fence + 1} did not replace {fence}"

    @_alone
    async def test_many_at_once_get_what_is_theirs(self, front: Asked) -> None:
        """By threads, for a Front; by tasks, for one that is waited for."""
        waited_for = iscoroutinefunction(front.front.get)

        async def work(seed: int) -> None:
            dice = random.Random(seed)
            for fence in range(1, 50):
                key = dice.randrange(1, 10)
                await front.put(record_of(key, fence=fence))
                found = await front.get(key)
                assert found is None or found.key_hash == record_of(key).key_hash

        works = [work(seed) for seed in range(4)]
        if waited_for:
            await asyncio.gather(*works)
        else:
            await asyncio.gather(*(asyncio.to_thread(asyncio.run, each) for each in works))


def _over() -> list[Record]:
    return [record_of(expires_left_ms=left_ms) for left_ms in (None, 0, -1)]
