"""What a call tells was tried is known to its caller as soon as it has the answer; and only if all went well."""

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import grpc
import pytest

from participant_sdk.context import bound, collecting, current_scope, note_tried
from participant_sdk.interceptors import (
    AsyncXidServerInterceptor,
    XidClientInterceptor,
    XidServerInterceptor,
    async_xid_client_interceptors,
)

from .told_service import CALL_S, KINDS, STREAMED, Handlers, ask, generic_handler, path, serving

A, B = "a" * 32, "b" * 32


def notes(context: Any) -> bytes:
    """See two branches tried, and have something of its own to tell."""
    context.set_trailing_metadata((("own", "x"),))
    note_tried(A, [3])
    note_tried(A, [12])
    note_tried(B, [99])
    return b"x"


def plain_handlers(ending: str = "") -> Handlers:
    """Handlers in threads, which fail at the end if told to."""

    def one(request: Any, context: grpc.ServicerContext) -> bytes:
        if not isinstance(request, bytes):
            list(request)
        notes(context)
        if ending == "abort":
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")
        if ending == "raise":
            raise LookupError
        if ending == "code":
            context.set_code(grpc.StatusCode.NOT_FOUND)
        return b"x"

    def many(request: Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"first"
        yield one(request, context)

    return {kind: many if kind in STREAMED else one for kind in KINDS}


def task_handlers(ending: str = "") -> Handlers:
    """The same as coroutines."""

    async def one(request: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        if not isinstance(request, bytes):
            assert len([each async for each in request]) == 2
        notes(context)
        if ending == "abort":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")
        if ending == "raise":
            raise LookupError
        if ending == "code":
            context.set_code(grpc.StatusCode.NOT_FOUND)
        return b"x"

    async def many(request: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        yield b"first"
        yield await one(request, context)

    return {kind: many if kind in STREAMED else one for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
class TestThreads:
    """grpc.server and grpc channels."""

    def test_it_is_known_with_the_answer(self, kind: str) -> None:
        with serving(plain_handlers(), XidServerInterceptor()) as (address, _), grpc.insecure_channel(address) as plain:
            channel = grpc.intercept_channel(plain, XidClientInterceptor())
            with bound(A), collecting() as seen:
                ask(channel, kind)
                assert seen == {3, 12}
            with collecting() as seen:  # no xid: none is told
                ask(channel, kind)
            assert seen == set()

    @pytest.mark.parametrize("ending", ["abort", "raise", "code"])
    def test_b3_a_call_that_failed_names_nothing(self, kind: str, ending: str) -> None:
        with (
            serving(plain_handlers(ending), XidServerInterceptor()) as (address, _),
            grpc.insecure_channel(address) as plain,
        ):
            channel = grpc.intercept_channel(plain, XidClientInterceptor())
            with bound(A), collecting() as seen, pytest.raises(grpc.RpcError):
                ask(channel, kind)
            assert seen == set()


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(STREAMED)))
@pytest.mark.parametrize("by", ["result", "exception", "callback"])
def test_it_is_known_with_a_futures_answer(kind: str, by: str) -> None:
    with serving(plain_handlers(), XidServerInterceptor()) as (address, _), grpc.insecure_channel(address) as plain:
        channel = grpc.intercept_channel(plain, XidClientInterceptor())
        method: Any = getattr(channel, kind)(path(kind))
        for _ in range(50):
            with bound(A), collecting() as seen:
                request = iter([b"1", b"2"]) if kind.startswith("stream") else b"1"
                future = method.future(request, timeout=CALL_S)
                told: list[set[int]] = []
                if by == "callback":
                    future.add_done_callback(lambda call, told=told, seen=seen: told.append(set(seen)))
                assert future.exception() is None if by == "exception" else future.result() == b"x"
                assert seen == {3, 12}
        assert future.code() is grpc.StatusCode.OK
        assert dict(future.trailing_metadata()) == {"own": "x", "tricord-tried": "3,12"}


@pytest.mark.parametrize("kind", KINDS)
class TestTasks:
    """grpc.aio servers and channels."""

    async def test_it_is_known_with_the_answer(self, kind: str) -> None:
        async with connected(task_handlers()) as channel:
            with bound(A), collecting() as seen:
                call = await finished(channel, kind)
                assert seen == {3, 12}
            assert dict(await call.trailing_metadata()) == {"own": "x", "tricord-tried": "3,12"}

    async def test_it_is_known_from_handlers_in_threads_too(self, kind: str) -> None:
        async with connected(plain_handlers()) as channel:
            with bound(A), collecting() as seen:
                await finished(channel, kind)
                assert seen == {3, 12}

    @pytest.mark.parametrize("ending", ["abort", "raise", "code"])
    async def test_b3_a_call_that_failed_names_nothing(self, kind: str, ending: str) -> None:
        async with connected(task_handlers(ending)) as channel:
            with bound(A), collecting() as seen, pytest.raises(grpc.aio.AioRpcError):
                await finished(channel, kind)
            assert seen == set()


class connected:
    """A channel to a grpc.aio server that runs."""

    def __init__(self, handlers: Handlers) -> None:
        self.server = grpc.aio.server(handlers=[generic_handler(handlers)], interceptors=[AsyncXidServerInterceptor()])

    async def __aenter__(self) -> grpc.aio.Channel:
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", interceptors=async_xid_client_interceptors())
        return self.channel

    async def __aexit__(self, *raised: object) -> None:
        await self.channel.close()
        await self.server.stop(None)


async def finished(channel: grpc.aio.Channel, kind: str) -> Any:
    """A call of that kind whose answer is there."""
    method: Any = getattr(channel, kind)(path(kind))
    call = method(iter([b"1", b"2"]) if kind.startswith("stream") else b"1", timeout=CALL_S)
    if kind in STREAMED:
        assert [response async for response in call] == [b"first", b"x"]
    else:
        assert await call == b"x"
    return call


@pytest.mark.parametrize("seconds", [CALL_S, None])
async def test_the_callers_deadline_is_known(seconds: float | None) -> None:
    """How long an enlisted Try may take."""
    expires: list[float | None] = []

    def plain(request: bytes, context: object) -> bytes:
        expires.append(current_scope().expires_at)
        return b""

    async def task(request: bytes, context: object) -> bytes:
        return plain(request, context)

    async with connected({"unary_unary": task}) as channel:
        method: Any = channel.unary_unary(path("unary_unary"))
        await method(b"", timeout=seconds)
    with (
        serving({"unary_unary": plain}, XidServerInterceptor()) as (address, _),
        grpc.insecure_channel(address) as sync,
    ):
        method = sync.unary_unary(path("unary_unary"))
        method(b"", timeout=seconds)
    if seconds is None:
        assert expires == [None, None]
    else:
        left = [at - time.monotonic() for at in expires if at is not None]
        assert len(left) == 2
        assert all(0 < each <= seconds + 1 for each in left)
