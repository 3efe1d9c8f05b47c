"""The front in a real Redis: what it holds, and that no trouble of Redis is one of the caller's."""

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import redis

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency import breaker, redis_front
from participant_sdk.idempotency.fronts import AnyFront
from participant_sdk.idempotency.record import Record, State
from participant_sdk.idempotency.redis_front import AsyncRedisFront, RedisFront
from participant_sdk.idempotency.testing.front_suite import FrontSuite, record_of
from tests.redis import RedisServer

KEY = record_of().key_hash


class Both:
    """A front of either kind, asked in the same words."""

    def __init__(self, front: RedisFront | AsyncRedisFront) -> None:
        self.front = front

    async def get(self, key_hash: bytes = KEY) -> Record | None:
        found = self.front.get(key_hash)
        return await found if inspect.isawaitable(found) else found

    async def put(self, record: Record) -> None:
        told = self.front.put(record)
        if inspect.isawaitable(told):
            await told

    async def forget(self, fences: dict[bytes, int]) -> None:
        done = self.front.forget(fences)
        if inspect.isawaitable(done):
            await done

    async def flush(self) -> None:
        done = self.front.flush()
        if inspect.isawaitable(done):
            await done


@pytest.fixture(params=["threads", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def front_of(kind: str, url: str, **settings: Any) -> AsyncIterator[Both]:
    timeout_s = settings.pop("timeout_s", 1.0)
    if kind == "threads":
        sync = RedisFront.connect(url, timeout_s=timeout_s, **settings)
        try:
            yield Both(sync)
        finally:
            sync.close()
    else:
        front = AsyncRedisFront.connect(url, timeout_s=timeout_s, **settings)
        try:
            yield Both(front)
        finally:
            await front.close()


@pytest.fixture
def client(redis_url: str) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@contextmanager
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(breaker, "PAUSE_MIN_S", 0.05)
        patched.setattr(breaker, "PAUSE_MAX_S", 0.1)
        yield


async def until_found(front: Both, record: Record) -> None:
    """Put and get until it is found."""
    async with asyncio.timeout(60):
        while True:
            await front.put(record)
            if await front.get(record.key_hash) is not None:
                return
            await asyncio.sleep(0.02)


class OfRedis(FrontSuite):
    kind = ""

    @pytest.fixture(autouse=True)
    def server(self, redis_url: str) -> None:
        self.url = redis_url

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[AnyFront]:
        async with front_of(self.kind, self.url) as both:
            yield both.front


class TestSuiteInThreads(OfRedis):
    kind = "threads"


class TestSuiteInAsyncio(OfRedis):
    kind = "asyncio"


async def test_it_counts_and_what_it_has_is_as_old_as_the_record(kind: str, redis_url: str) -> None:
    async with front_of(kind, redis_url) as front:
        assert await front.get() is None
        await front.put(record_of())
        found = await front.get()
        assert found is not None
        assert found.expires_left_ms is not None
        assert found.age_ms + found.expires_left_ms == 65_000
        counts = front.front.counts
        assert (counts.hits, counts.misses, counts.stored, counts.errors) == (1, 1, 1, 0)


@pytest.mark.parametrize("record", [record_of(state=State.PROCESSING), record_of(expires_left_ms=0)])
async def test_what_is_not_final_is_not_sent(kind: str, redis_url: str, client: "redis.Redis", record: Record) -> None:
    async with front_of(kind, redis_url) as front:
        await front.put(record)
        assert list(client.scan_iter()) == []


async def test_what_one_process_puts_the_others_find(redis_url: str) -> None:
    async with front_of("threads", redis_url) as one, front_of("asyncio", redis_url) as other:
        await one.put(record_of())
        assert await other.get() is not None
        async with front_of("threads", redis_url, prefix="another shop:") as stranger:
            assert await stranger.get() is None


async def test_redis_forgets_it_when_the_record_expires(kind: str, redis_url: str, client: "redis.Redis") -> None:
    async with front_of(kind, redis_url) as front:
        await front.put(record_of(expires_left_ms=40_000))
        (key,) = [key for key in client.scan_iter() if not key.endswith(b"epoch")]
        assert 0 < client.pttl(key) <= 40_000
        client.pexpire(key, 15_000)  # 25 seconds later
        found = await front.get()
        assert found is not None
        assert found.expires_left_ms is not None
        assert found.expires_left_ms <= 15_000
        client.pexpire(key, 0)
        assert await front.get() is None


async def test_nothing_is_held_longer_than_the_front_may(kind: str, redis_url: str, client: "redis.Redis") -> None:
    async with front_of(kind, redis_url, age_max_s=5) as front, front_of(kind, redis_url) as other:
        await front.put(record_of())
        (key,) = [key for key in client.scan_iter() if not key.endswith(b"epoch")]
        assert 0 < client.pttl(key) <= 5_000
        found = await other.get()
        assert found is not None
        assert found.expires_left_ms is not None
        assert found.expires_left_ms > 50_000, "what is left of the record is not what is left of the entry"


async def test_what_is_too_large_is_not_held(kind: str, redis_url: str) -> None:
    async with front_of(kind, redis_url, value_bytes_max=100) as front:
        await front.put(record_of())
        assert await front.get() is None


async def test_flush_is_seen_by_all(kind: str, redis_url: str, client: "redis.Redis") -> None:
    async with front_of(kind, redis_url) as front, front_of("threads", redis_url) as other:
        await front.put(record_of())
        await other.flush()
        assert await front.get() is None
        await front.put(record_of())
        assert await other.get() is not None
        client.delete(redis_front.PREFIX + "epoch")  # thrown out for want of memory
        assert await front.get() is None
        await front.put(record_of(2))
        assert await front.get() is None, "an entry of an epoch that is lost never comes back"
        assert await front.get(record_of(2).key_hash) is not None


async def test_what_is_erased_does_not_come_back(kind: str, redis_url: str, client: "redis.Redis") -> None:
    async with front_of(kind, redis_url) as front, front_of("threads", redis_url) as other:
        await front.put(record_of())
        await front.put(record_of(2))
        before = front.front.counts.errors
        await front.forget({KEY: record_of().fence})
        assert await other.get() is None
        assert await front.get() is None
        assert front.front.counts.errors == before, "it is no damage"
        assert await front.get(record_of(2).key_hash) is not None
        await other.put(record_of())  # by who has read it before
        assert await front.get() is None
        assert not any(b"order" in (client.get(key) or b"") for key in client.scan_iter() if KEY.hex().encode() in key)
        await other.put(record_of(fence=record_of().fence + 1))
        assert await front.get() is not None, "another run of the key is another record"
    async with front_of(kind, "redis://127.0.0.1:1") as gone:
        with pytest.raises(redis.ConnectionError):
            await gone.forget({KEY: 1})


@pytest.mark.parametrize("damage", ["cut", "changed", "other version", "noise", "other type", "of another key"])
async def test_what_cannot_be_read_is_a_miss(kind: str, redis_url: str, client: "redis.Redis", damage: str) -> None:
    async with front_of(kind, redis_url) as front:
        await front.put(record_of())
        await front.put(record_of(2, fence=record_of().fence))
        name = redis_front.PREFIX.encode() + KEY.hex().encode()
        value = client.get(name)
        assert isinstance(value, bytes)
        match damage:
            case "cut":
                client.set(name, value[:-9], keepttl=True)
            case "changed":
                client.set(name, value[:60] + b"?" + value[61:], keepttl=True)
            case "other version":
                client.set(name, value[:24] + b"\x63" + value[25:], keepttl=True)
            case "noise":
                client.set(name, b"\x80\x04}.", px=60_000)
            case "other type":
                client.delete(name)
                client.rpush(name, "x")
            case "of another key":
                stranger = client.get(redis_front.PREFIX.encode() + record_of(2).key_hash.hex().encode())
                assert isinstance(stranger, bytes)
                client.set(name, stranger, keepttl=True)
        assert await front.get() is None
        if damage != "other type":
            await front.put(record_of())
            assert await front.get() is not None, "and is replaced"


async def test_a_dead_redis_costs_one_call_and_comes_back(
    kind: str, redis_server: RedisServer, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front_of(kind, redis_url) as front:
        await front.put(record_of())
        redis_server.kill()
        try:
            for _ in range(200):
                assert await front.get() is None
                await front.put(record_of())
            counts = front.front.counts
            assert counts.errors <= 5, "nearly none of 400 was tried"
            assert counts.errors + counts.skipped == 400
        finally:
            redis_server.start()
        with short_pauses(monkeypatch):
            await until_found(front, record_of())


async def test_a_redis_that_hangs_costs_one_time_out(
    kind: str, redis_server: RedisServer, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front_of(kind, redis_url, timeout_s=0.2) as front:
        await until_found(front, record_of())
        before = front.front.counts
        with redis_server.frozen():
            for _ in range(100):
                assert await front.get() is None
                await front.put(record_of())
            counts = front.front.counts
        assert 1 <= counts.errors - before.errors <= 5
        assert counts.skipped - before.skipped >= 190
        with short_pauses(monkeypatch):
            await until_found(front, record_of(3))


async def test_a_restart_loses_entries_and_nothing_else(
    kind: str, redis_server: RedisServer, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front_of(kind, redis_url) as front:
        await front.put(record_of())
        redis_server.restart()
        with short_pauses(monkeypatch):
            assert await front.get() is None, "a lost connection, or an empty Redis"
            await until_found(front, record_of(2))
            assert await front.get() is None


async def test_a_redis_that_is_full_or_may_not_be_written_is_no_error(
    kind: str, redis_url: str, client: "redis.Redis"
) -> None:
    async with front_of(kind, redis_url) as front:
        await front.put(record_of())
        client.config_set("maxmemory", "1")
        try:
            await front.put(record_of(2))
        finally:
            client.config_set("maxmemory", "0")
        assert await front.get(record_of(2).key_hash) is None
        assert front.front.counts.errors == 1


async def test_a_call_that_is_cancelled_leaves_the_connection_right(redis_server: RedisServer, redis_url: str) -> None:
    """An answer that comes late must not be taken for that to the next question."""
    async with front_of("asyncio", redis_url) as front:
        for key in range(20):
            await front.put(record_of(key))
        for key in range(20):
            with redis_server.frozen():
                call = asyncio.ensure_future(front.get(record_of(key).key_hash))
                await asyncio.sleep(0.005)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            found = await front.get(record_of((key + 1) % 20).key_hash)
            assert found is None or found.key_hash == record_of((key + 1) % 20).key_hash
        assert front.front.counts.hits == 20


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "socket_timeout .* is not above 0"),
        ({"socket_timeout": 0.1}, "socket_connect_timeout .* is not above 0"),
        ({"socket_timeout": 60, "socket_connect_timeout": 0.1}, "socket_timeout 60 is not"),
        ({"socket_timeout": 0.1, "socket_connect_timeout": 0.1}, "tries again"),
        ({"decode_responses": True}, "decode_responses"),
    ],
)
def test_a_client_that_would_make_requests_wait_is_refused(settings: dict[str, Any], text: str) -> None:
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    settings.setdefault("retry", Retry(NoBackoff(), 3))
    client = redis.Redis.from_url("redis://127.0.0.1:1", **settings)
    with pytest.raises(ConfigurationError, match=text):
        RedisFront(client)


def test_a_pool_in_which_calls_queue_is_refused() -> None:
    pool = redis.BlockingConnectionPool.from_url(
        "redis://127.0.0.1:1", timeout=20, socket_timeout=0.1, socket_connect_timeout=0.1
    )
    with pytest.raises(ConfigurationError, match="wait 20 seconds for a connection"):
        RedisFront(redis.Redis(connection_pool=pool))


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    for kind in (RedisFront, AsyncRedisFront):
        with pytest.raises(ConfigurationError, match=r"pip install 'tricord\[redis\]'"):
            kind.connect("redis://127.0.0.1:1")


def test_a_setting_that_cannot_be_is_refused() -> None:
    url = "redis://127.0.0.1:1"
    for settings, text in (
        ({"prefix": ""}, "prefix '' is not 1 to 100"),
        ({"value_bytes_max": 0}, "value_bytes_max 0"),
        ({"age_max_s": 0}, "age_max_s 0"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            RedisFront.connect(url, **settings)
    with pytest.raises(ConfigurationError, match="no client of Redis"):
        RedisFront(url)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="address of Redis"):
        RedisFront.connect("http://127.0.0.1")
    with pytest.raises(ConfigurationError, match="timeout_s 9"):
        AsyncRedisFront.connect(url, timeout_s=9)
