"""The xid through grpc.server and grpc channels: all four kinds of calls, on few threads, whatever goes wrong."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from participant_sdk.context import bound, current_xid
from participant_sdk.interceptors import XidClientInterceptor, XidServerInterceptor

from .told_service import CALL_S, KINDS, NONE, STREAMED, Handlers, Metadata, ask, path, serving, told

A, B = "a" * 32, "b" * 32
TOLD_A = f"{A}/7".encode()


def carrying(address: str) -> grpc.Channel:
    """A channel whose calls take the xid along."""
    return grpc.intercept_channel(grpc.insecure_channel(address), XidClientInterceptor())


@contextmanager
def connected(handlers: Handlers, *outside: grpc.ServerInterceptor, workers: int = 2) -> Iterator[grpc.Channel]:
    """Such a channel to a server that runs, with interceptors `outside` of ours."""
    with (
        serving(handlers, *outside, XidServerInterceptor(), workers=workers) as (address, _),
        carrying(address) as channel,
    ):
        yield channel


def plain_handlers(before: Callable[[], None] = lambda: None) -> Handlers:
    """Handlers that run `before` at each step, and tell what they see."""

    def one(request: object, context: grpc.ServicerContext) -> bytes:
        before()
        return told()

    def many(request: object, context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in range(3):
            before()
            yield told()

    def last(requests: Iterable[bytes], context: grpc.ServicerContext) -> bytes:
        *_, answer = [one(request, context) for request in requests]
        return answer

    def each(requests: Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            yield one(request, context)

    return {"unary_unary": one, "unary_stream": many, "stream_unary": last, "stream_stream": each}


class Outside(grpc.ServerInterceptor):
    """Goes before ours, and notes what is seen there: before a handler, between its responses, after it."""

    def __init__(self) -> None:
        self.seen: list[str | None] = []

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        kind = handler_call_details.method.rpartition("/")[2]
        behavior = getattr(handler, kind)

        def one(request: object, context: object) -> Any:
            self.note()
            try:
                return behavior(request, context)
            finally:
                self.note()

        def many(request: object, context: object) -> Iterator[Any]:
            self.note()
            try:
                for response in behavior(request, context):
                    self.note()
                    yield response
            finally:
                self.note()

        return getattr(grpc, f"{kind}_rpc_method_handler")(many if kind in STREAMED else one)

    def note(self) -> None:
        self.seen.append(current_xid())


@pytest.mark.parametrize("kind", KINDS)
class TestEachKind:
    """What holds for every kind of call."""

    def test_it_arrives_holds_and_is_gone(self, kind: str) -> None:
        outside = Outside()
        with connected(plain_handlers(), outside, workers=1) as channel:
            with bound(A, 7):
                assert set(ask(channel, kind)) == {TOLD_A}
            assert set(ask(channel, kind)) == {NONE}
            with bound(B):
                assert set(ask(channel, kind)) == {f"{B}/None".encode()}
        assert set(outside.seen) == {None}

    @pytest.mark.parametrize("ending", ["raise", "abort"])
    def test_case_15_an_error_leaves_nothing_to_the_next_request(self, kind: str, ending: str) -> None:
        seen: list[bytes] = []

        def one(request: object, context: grpc.ServicerContext) -> bytes:
            seen.append(told())
            if seen[-1] == NONE:
                return NONE
            if ending == "abort":
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")
            raise LookupError("no")

        def many(request: object, context: grpc.ServicerContext) -> Iterator[bytes]:
            yield told()
            yield one(request, context)

        handlers: Handlers = {name: many if name in STREAMED else one for name in KINDS}
        outside = Outside()
        with connected(handlers, outside, workers=1) as channel:
            with bound(A, 7), pytest.raises(grpc.RpcError) as caught:
                ask(channel, kind)
            assert set(ask(channel, kind)) == {NONE}
        assert seen == [TOLD_A, NONE]
        assert caught.value.code().name == ("FAILED_PRECONDITION" if ending == "abort" else "UNKNOWN")
        assert set(outside.seen) == {None}

    @pytest.mark.parametrize(
        ("metadata", "told"),
        [
            ((("tricord-xid", B),), f"{B}/None"),
            ((("tricord-xid", B), ("tricord-branch-id", "9")), f"{B}/9"),
            ((("other", "x"),), TOLD_A.decode()),
        ],
    )
    def test_what_the_caller_gives_itself_stays(self, kind: str, metadata: Metadata, told: str) -> None:
        with connected(plain_handlers()) as channel, bound(A, 7):
            assert set(ask(channel, kind, metadata)) == {told.encode()}

    @pytest.mark.parametrize(
        ("metadata", "details"),
        [
            ((("tricord-xid", "A" * 32),), "metadata tricord-xid is not 32 lowercase hexadecimal characters"),
            ((("tricord-xid", A), ("tricord-xid", B)), "metadata tricord-xid is there more than once"),
            (
                (("tricord-xid", A), ("tricord-branch-id", "0")),
                "metadata tricord-branch-id is not a whole number from 1 to 4294967295",
            ),
            ((("tricord-branch-id", "1"),), "metadata tricord-branch-id is there without tricord-xid"),
        ],
    )
    def test_a_malformed_value_is_refused_and_nothing_runs(self, kind: str, metadata: Metadata, details: str) -> None:
        ran: list[None] = []
        with connected(plain_handlers(lambda: ran.append(None))) as channel, pytest.raises(grpc.RpcError) as caught:
            ask(channel, kind, metadata)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, details)
        assert not ran

    def test_requests_at_once_see_their_own(self, kind: str) -> None:
        workers, count = 3, 30
        together = threading.Barrier(workers)

        def meet() -> None:
            together.wait(CALL_S)

        with connected(plain_handlers(meet), workers=workers) as channel, ThreadPoolExecutor(2 * workers) as clients:

            def client(number: int) -> set[bytes]:
                with bound(f"{number:032x}", number):
                    return set(ask(channel, kind, requests=[b"1", b"2", b"3"]))

            numbers = range(1, count + 1)
            for number, answers in zip(numbers, clients.map(client, numbers, timeout=CALL_S), strict=True):
                assert answers == {f"{number:032x}/{number}".encode()}

    def test_it_goes_on_to_the_next_service(self, kind: str) -> None:
        with connected(plain_handlers()) as onward:

            def one(request: object, context: grpc.ServicerContext) -> bytes:
                return ask(onward, kind)[0]

            def many(request: object, context: grpc.ServicerContext) -> Iterator[bytes]:
                yield from ask(onward, kind)

            with connected({kind: many if kind in STREAMED else one}) as channel, bound(A, 7):
                assert set(ask(channel, kind)) == {TOLD_A}


class TestStreams:
    """What a handler that yields may do."""

    @pytest.mark.parametrize("kind", STREAMED)
    def test_case_15_a_cancelled_stream_leaves_nothing_behind(self, kind: str) -> None:
        cancelled, ended = threading.Event(), threading.Event()
        seen: list[bytes] = []

        def many(request: object, context: grpc.ServicerContext) -> Iterator[bytes]:
            if told() == NONE:
                yield NONE
                return
            context.add_callback(cancelled.set)
            try:
                yield told()
                assert cancelled.wait(CALL_S)
                yield told()
            finally:
                seen.append(told())
                ended.set()

        outside = Outside()
        with connected(dict.fromkeys(STREAMED, many), outside, workers=1) as channel:
            call: Any = getattr(channel, kind)(path(kind))
            with bound(A, 7):
                stream = call(iter([b"1"]) if kind == "stream_stream" else b"1", timeout=CALL_S)
            assert next(stream) == TOLD_A
            stream.cancel()
            assert ended.wait(CALL_S)
            assert ask(channel, kind) == [NONE]
        assert seen == [TOLD_A]
        assert set(outside.seen) == {None}

    def test_what_a_handler_binds_across_its_yields_holds(self) -> None:
        def many(request: object, context: grpc.ServicerContext) -> Iterator[bytes]:
            with bound(B, 1):
                yield told()
                yield told()
            yield told()

        with connected({"unary_stream": many}) as channel, bound(A, 7):
            assert ask(channel, "unary_stream") == [f"{B}/1".encode()] * 2 + [TOLD_A]

    def test_an_iterator_that_is_no_generator(self) -> None:
        def many(request: object, context: grpc.ServicerContext) -> Iterator[bytes]:
            return map(bytes.__add__, iter(told, NONE), [b"!", b"?"])

        with connected({"unary_stream": many}) as channel, bound(A, 7):
            assert ask(channel, "unary_stream") == [TOLD_A + b"!", TOLD_A + b"?"]

    def test_requests_are_made_in_the_callers_context(self) -> None:
        def requests() -> Iterator[bytes]:
            yield told()

        def echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            return next(requests)

        with connected({"stream_unary": echo}) as channel, bound(A, 7):
            assert ask(channel, "stream_unary", requests=requests()) == [TOLD_A]


class TestAround:
    """What else a server and a client have."""

    def test_futures_and_calls_carry_it(self) -> None:
        with connected(plain_handlers()) as channel:
            method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path("unary_unary"))
            with bound(A, 7):
                future = method.future(b"", timeout=CALL_S)
                answer, call = method.with_call(b"", timeout=CALL_S)
            assert (answer, call.code()) == (TOLD_A, grpc.StatusCode.OK)
            assert future.result() == TOLD_A

    def test_nothing_is_added_without_an_xid(self) -> None:
        keys: list[str] = []

        def one(request: object, context: grpc.ServicerContext) -> bytes:
            keys.extend(key for key, _ in context.invocation_metadata())
            return b""

        with serving({"unary_unary": one}) as (address, _), carrying(address) as channel:
            ask(channel, "unary_unary")
        assert keys
        assert not [key for key in keys if key.startswith("tricord")]

    @pytest.mark.parametrize("xid", [A, "malformed"])
    def test_a_method_that_nobody_serves(self, xid: str) -> None:
        with connected({}) as channel, pytest.raises(grpc.RpcError) as caught:
            ask(channel, "unary_unary", (("tricord-xid", xid),))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    def test_watching_the_health_service_holds_no_worker(self) -> None:
        with serving(plain_handlers(), XidServerInterceptor(), workers=1) as (address, server):
            health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
            with carrying(address) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=CALL_S)
                assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
                with bound(A, 7):
                    assert ask(channel, "unary_unary") == [TOLD_A]
                watch.cancel()
