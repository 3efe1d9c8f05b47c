"""The xid through grpc.aio servers and channels: all four kinds of calls, and every kind of handler."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from participant_sdk.context import bound, current_xid
from participant_sdk.interceptors import AsyncXidServerInterceptor, async_xid_client_interceptors
from tests.postgres import free_port

from .told_service import CALL_S, KINDS, NONE, STREAMED, Handlers, Metadata, generic_handler, path, told

A, B = "a" * 32, "b" * 32
TOLD_A = f"{A}/7".encode()


@asynccontextmanager
async def connected(handlers: Handlers, *outside: grpc.aio.ServerInterceptor) -> AsyncIterator[grpc.aio.Channel]:
    """A channel whose calls take the xid along, to a server that runs, with interceptors `outside` of ours."""
    address = f"127.0.0.1:{free_port()}"
    server = grpc.aio.server(
        handlers=[generic_handler(handlers)],
        interceptors=[*outside, AsyncXidServerInterceptor()],
        options=[("grpc.so_reuseport", 0)],
    )
    server.add_insecure_port(address)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address, interceptors=async_xid_client_interceptors()) as channel:
            yield channel
    finally:
        await server.stop(None)


def calling(channel: grpc.aio.Channel, kind: str, metadata: Metadata = (), requests: int = 2) -> Any:
    """A call of that kind that has begun. No requests: whoever called would write them."""
    call: Callable[..., Any] = getattr(channel, kind)(path(kind))
    streamed = iter([b"1"] * requests) if requests else None
    return call(streamed if kind.startswith("stream") else b"1", timeout=CALL_S, metadata=metadata)


async def ask(channel: grpc.aio.Channel, kind: str, metadata: Metadata = (), requests: int = 2) -> list[bytes]:
    """The responses to one call of that kind."""
    call = calling(channel, kind, metadata, requests)
    return [response async for response in call] if kind in STREAMED else [await call]


async def nothing() -> None:
    """Go on at once."""


def task_handlers(before: Callable[[], Awaitable[None]] = nothing) -> Handlers:
    """Async handlers that await `before` at each step, and tell what they see."""

    async def one(request: object, context: object) -> bytes:
        await before()
        return told()

    async def many(request: object, context: object) -> AsyncIterator[bytes]:
        for _ in range(3):
            await before()
            yield told()

    async def last(requests: AsyncIterator[bytes], context: object) -> bytes:
        return [await one(request, context) async for request in requests][-1]

    async def each(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield await one(request, context)

    return {"unary_unary": one, "unary_stream": many, "stream_unary": last, "stream_stream": each}


def writing_handlers() -> Handlers:
    """Async handlers that write their responses by themselves."""

    async def many(request: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        for _ in range(3):
            await context.write(told())

    return dict.fromkeys(STREAMED, many)


def plain_handlers() -> Handlers:
    """Handlers that are no coroutines: grpc.aio runs them in threads."""

    def one(request: object, context: object) -> bytes:
        return told()

    def many(request: object, context: object) -> Iterator[bytes]:
        for _ in range(3):
            yield told()

    def last(requests: Iterable[bytes], context: object) -> bytes:
        *_, answer = [told() for _ in requests]
        return answer

    def each(requests: Iterable[bytes], context: object) -> Iterator[bytes]:
        for _ in requests:
            yield told()

    return {"unary_unary": one, "unary_stream": many, "stream_unary": last, "stream_stream": each}


STYLES = [
    *(pytest.param(task_handlers, kind, id=f"task-{kind}") for kind in KINDS),
    *(pytest.param(writing_handlers, kind, id=f"writing-{kind}") for kind in STREAMED),
    *(pytest.param(plain_handlers, kind, id=f"plain-{kind}") for kind in KINDS),
]


class Outside(grpc.aio.ServerInterceptor):
    """Goes before ours, and notes what is seen there: before an async handler, between its responses, after it."""

    def __init__(self) -> None:
        self.seen: list[str | None] = []

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        kind = handler_call_details.method.rpartition("/")[2]
        behavior = getattr(handler, kind)

        async def one(request: object, context: object) -> Any:
            self.note()
            try:
                return await behavior(request, context)
            finally:
                self.note()

        async def many(request: object, context: object) -> AsyncIterator[Any]:
            self.note()
            try:
                async for response in behavior(request, context):
                    self.note()
                    yield response
            finally:
                self.note()

        return getattr(grpc, f"{kind}_rpc_method_handler")(many if kind in STREAMED else one)

    def note(self) -> None:
        self.seen.append(current_xid())


@pytest.mark.parametrize(("handlers", "kind"), STYLES)
class TestEachStyle:
    """What holds for every kind of handler."""

    async def test_it_arrives_and_is_gone(self, handlers: Callable[[], Handlers], kind: str) -> None:
        async with connected(handlers()) as channel:
            with bound(A, 7):
                assert set(await ask(channel, kind)) == {TOLD_A}
            assert set(await ask(channel, kind)) == {NONE}
            with bound(B):
                assert set(await ask(channel, kind)) == {f"{B}/None".encode()}

    @pytest.mark.parametrize(
        ("metadata", "details"),
        [
            ((("tricord-xid", "A" * 32),), "metadata tricord-xid is not 32 lowercase hexadecimal characters"),
            (
                (("tricord-xid", A), ("tricord-branch-id", "4294967296")),
                "metadata tricord-branch-id is not a whole number from 1 to 4294967295",
            ),
        ],
    )
    async def test_a_malformed_value_is_refused(
        self, handlers: Callable[[], Handlers], kind: str, metadata: Metadata, details: str
    ) -> None:
        async with connected(handlers()) as channel:
            # Nothing is written: a write that meets the end of its stream would tell of itself, not of why it ended.
            call = calling(channel, kind, metadata, requests=0)
            assert (await call.code(), await call.details()) == (grpc.StatusCode.INVALID_ARGUMENT, details)

    async def test_the_context_in_which_the_server_was_started_is_not_seen(
        self, handlers: Callable[[], Handlers], kind: str
    ) -> None:
        with bound(B, 1):
            async with connected(handlers()) as channel:
                with bound(None):
                    assert set(await ask(channel, kind)) == {NONE}


@pytest.mark.parametrize("kind", KINDS)
class TestEachKind:
    """What holds for every kind of call."""

    async def test_nothing_is_seen_around_the_handler(self, kind: str) -> None:
        outside = Outside()
        async with connected(task_handlers(), outside) as channel:
            with bound(A, 7):
                assert set(await ask(channel, kind)) == {TOLD_A}
        assert len(outside.seen) >= 2
        assert set(outside.seen) == {None}

    @pytest.mark.parametrize("ending", ["raise", "abort"])
    async def test_case_15_an_error_leaves_nothing_behind(self, kind: str, ending: str) -> None:
        async def one(request: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            if told() == NONE:
                return NONE
            if kind.startswith("stream"):
                assert len([each async for each in request]) == 2  # a client that still writes is told of that
            if ending == "abort":
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")
            raise LookupError("no")

        async def many(request: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
            yield told()
            yield await one(request, context)

        outside = Outside()
        async with connected({name: many if name in STREAMED else one for name in KINDS}, outside) as channel:
            with bound(A, 7), pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel, kind)
            assert set(await ask(channel, kind)) == {NONE}
        assert caught.value.code().name == ("FAILED_PRECONDITION" if ending == "abort" else "UNKNOWN")
        assert set(outside.seen) == {None}

    async def test_case_15_a_cancelled_call_leaves_nothing_behind(self, kind: str) -> None:
        started, ended = asyncio.Event(), asyncio.Event()
        seen: list[bytes] = []

        async def hang() -> None:
            if told() == NONE:
                return
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                seen.append(told())
                ended.set()

        outside = Outside()
        async with connected(task_handlers(hang), outside) as channel, asyncio.timeout(CALL_S):
            with bound(A, 7):
                call = calling(channel, kind)
            await started.wait()
            call.cancel()
            await ended.wait()
            assert set(await ask(channel, kind)) == {NONE}
        assert seen == [TOLD_A]
        assert set(outside.seen) == {None}

    async def test_requests_at_once_see_their_own(self, kind: str) -> None:
        count = 40
        together = asyncio.Barrier(count)

        async def meet() -> None:
            await together.wait()
            await asyncio.sleep(0)

        async with connected(task_handlers(meet)) as channel:

            async def client(number: int) -> set[bytes]:
                with bound(f"{number:032x}", number):
                    return set(await ask(channel, kind, requests=3))

            numbers = range(1, count + 1)
            for number, answers in zip(numbers, await asyncio.gather(*map(client, numbers)), strict=True):
                assert answers == {f"{number:032x}/{number}".encode()}

    async def test_what_the_caller_gives_itself_stays(self, kind: str) -> None:
        async with connected(task_handlers()) as channel:
            with bound(A, 7):
                assert set(await ask(channel, kind, (("tricord-xid", B),))) == {f"{B}/None".encode()}
                assert set(await ask(channel, kind, (("other", "x"),))) == {TOLD_A}

    async def test_it_goes_on_to_the_next_service(self, kind: str) -> None:
        async with connected(task_handlers()) as onward:

            async def one(request: object, context: object) -> bytes:
                return (await ask(onward, kind))[0]

            async def many(request: object, context: object) -> AsyncIterator[bytes]:
                for response in await ask(onward, kind):
                    yield response

            async with connected({kind: many if kind in STREAMED else one}) as channel:
                with bound(A, 7):
                    assert set(await ask(channel, kind)) == {TOLD_A}


class Taster(grpc.aio.ServerInterceptor):
    """Goes before ours, takes one response, and has another task close the handler."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)

        async def many(request: object, context: object) -> AsyncIterator[Any]:
            responses = handler.unary_stream(request, context)
            yield await anext(responses)
            await asyncio.create_task(responses.aclose())

        return grpc.unary_stream_rpc_method_handler(many)


class TestStreams:
    """What a handler that yields may do."""

    async def test_what_it_binds_across_its_yields_holds(self) -> None:
        async def many(request: object, context: object) -> AsyncIterator[bytes]:
            with bound(B, 1):
                yield told()
                await asyncio.sleep(0)
                yield told()
            yield told()

        async with connected({"unary_stream": many}) as channel:
            with bound(A, 7):
                assert await ask(channel, "unary_stream") == [f"{B}/1".encode()] * 2 + [TOLD_A]

    async def test_its_tasks_threads_and_time_outs_are_as_without_us(self) -> None:
        async def many(request: object, context: object) -> AsyncIterator[bytes]:
            yield await asyncio.to_thread(told)
            yield await asyncio.create_task(asyncio.to_thread(told))
            try:
                async with asyncio.timeout(0):
                    await asyncio.Event().wait()
            except TimeoutError:
                yield told()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(asyncio.to_thread(told)) for _ in range(2)]
            for task in tasks:
                yield task.result()

        async with connected({"unary_stream": many}) as channel:
            with bound(A, 7):
                assert await ask(channel, "unary_stream") == [TOLD_A] * 5

    async def test_case_15_one_that_is_closed_by_another_task_ends_in_its_own_context(self) -> None:
        seen: list[bytes] = []

        async def many(request: object, context: object) -> AsyncIterator[bytes]:
            try:
                with bound(B, 1):
                    yield told()
            finally:
                await asyncio.sleep(0)
                seen.append(told())

        async with connected({"unary_stream": many}, Taster()) as channel:
            with bound(A, 7):
                assert await ask(channel, "unary_stream") == [f"{B}/1".encode()]
        assert seen == [TOLD_A]


async def test_nothing_is_added_without_an_xid() -> None:
    keys: list[str] = []

    async def one(request: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        keys.extend(key for key, _ in context.invocation_metadata() or ())
        return b""

    async with connected({"unary_unary": one}) as channel:
        await ask(channel, "unary_unary")
    assert keys
    assert not [key for key in keys if key.startswith("tricord")]


@pytest.mark.parametrize("xid", [A, "malformed"])
async def test_a_method_that_nobody_serves(xid: str) -> None:
    async with connected({}) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, "unary_unary", (("tricord-xid", xid),))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
