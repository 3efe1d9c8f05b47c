"""The retrying interceptors, sync and grpc.aio, against a server that fails as it is told, or is not there."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from participant_sdk.context import bound
from participant_sdk.idempotency import (
    RetriesExhausted,
    RetryClientInterceptor,
    RetryPolicy,
    async_retry_client_interceptors,
    intent,
)
from participant_sdk.idempotency.retry_grpc import ONE_RETRY_LAYER
from participant_sdk.interceptors import XidClientInterceptor, async_xid_client_interceptors
from tests.integration.told_service import CALL_S, path, serving
from tests.postgres import free_port

QUICK: Final = RetryPolicy(attempts_max=6, total_s=60.0, base_s=0.001, cap_s=0.002)
DOWN: Final = (grpc.StatusCode.UNAVAILABLE, ())
XID: Final = "a" * 32
Step = tuple[grpc.StatusCode, tuple[tuple[str, str | bytes], ...]]


def retry_info(seconds: float) -> tuple[tuple[str, str | bytes], ...]:
    """As our servers say when to come back."""
    detail = any_pb2.Any()
    delay = duration_pb2.Duration(nanos=round(seconds * 1e9))
    detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=10, message="in progress", details=[detail])
    return (("grpc-status-details-bin", status.SerializeToString()),)


class Service:
    """Does its work by key, once, then answers or fails as its script says; what it has seen."""

    def __init__(self) -> None:
        self.script: list[Step] = []
        self.keys: list[str] = []
        self.xids: list[str] = []
        self.requests: list[list[bytes]] = []
        self.left_s: list[float] = []
        self._lock = threading.Lock()
        self.address = ""

    def serve(self, requests: bytes | Iterable[bytes], context: grpc.ServicerContext) -> bytes:
        """One call, unary or client-streaming."""
        metadata = dict(context.invocation_metadata() or ())
        with self._lock:
            self.keys.append(str(metadata.get("idempotency-key", "")))
            self.xids.append(str(metadata.get("tricord-xid", "")))
            self.requests.append([requests] if isinstance(requests, bytes) else list(requests))
            self.left_s.append(context.time_remaining() or 0.0)
            step = self.script.pop(0) if self.script else None
        if step is not None:
            context.set_trailing_metadata(step[1])
            context.abort(step[0], "as told")
        return b"done"


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    handlers: dict[str, Callable[..., Any]] = {"unary_unary": service.serve, "stream_unary": service.serve}
    with serving(handlers) as (service.address, _):
        yield service


class Caller:
    """Calls with the interceptors of one kind; it does not really wait."""

    def __init__(self, asynchronous: bool, policy: RetryPolicy = QUICK, xid: bool = False, **options: Any) -> None:
        self._asynchronous = asynchronous
        self._policy = policy
        self._xid = xid
        self._options = options
        self.waits: list[float] = []

    def call(
        self,
        address: str,
        request: Any = b"1",
        *,
        seconds: float = CALL_S,
        metadata: Any = (),
        options: Any = (),
    ) -> bytes:
        """One call; a request that is not bytes is streamed."""
        kind = "unary_unary" if isinstance(request, bytes) else "stream_unary"
        if self._asynchronous:
            return asyncio.run(self._call(address, kind, request, seconds, metadata, options))
        retry = RetryClientInterceptor(self._policy, sleep=self.waits.append, **self._options)
        interceptors = [retry, XidClientInterceptor()] if self._xid else [retry]
        with grpc.insecure_channel(address, options) as plain:
            call: Any = getattr(grpc.intercept_channel(plain, *interceptors), kind)(path(kind))
            answer: bytes = call(request, timeout=seconds, metadata=metadata)
            return answer

    async def _call(self, address: str, kind: str, request: Any, seconds: float, metadata: Any, options: Any) -> bytes:
        async def sleep(seconds: float) -> None:
            self.waits.append(seconds)

        interceptors = async_retry_client_interceptors(self._policy, sleep=sleep, **self._options)
        if self._xid:
            interceptors = [*interceptors, *async_xid_client_interceptors()]
        async with grpc.aio.insecure_channel(address, options, interceptors=interceptors) as channel:
            call: Any = getattr(channel, kind)(path(kind))
            answer: bytes = await call(request, timeout=seconds, metadata=metadata)
            return answer


Make = Callable[..., Caller]


@pytest.fixture(params=["sync", "aio"])
def make(request: pytest.FixtureRequest) -> Make:
    return lambda *given, **options: Caller(request.param == "aio", *given, **options)


@pytest.mark.parametrize("request_", [b"1", [b"1", b"2"], (b"1", b"2")], ids=["unary", "list", "tuple"])
def test_one_key_goes_on_every_try(make: Make, service: Service, request_: Any) -> None:
    service.script = [DOWN, (grpc.StatusCode.ABORTED, retry_info(0.5))]
    caller = make()
    assert caller.call(service.address, request_) == b"done"
    assert len(service.keys) == 3
    assert len(set(service.keys)) == 1
    assert service.keys[0]
    assert service.requests == [[b"1"] if request_ == b"1" else [b"1", b"2"]] * 3
    assert caller.waits[0] < 0.01
    assert 0.5 <= caller.waits[1] < 0.51


def test_an_iterator_gets_a_key_and_is_sent_once(make: Make, service: Service) -> None:
    service.script = [DOWN]
    with pytest.raises(grpc.RpcError) as told:
        make().call(service.address, iter([b"1", b"2"]))
    assert not isinstance(told.value, RetriesExhausted)
    assert len(service.keys) == 1
    assert service.keys[0]


@pytest.mark.parametrize(
    "step",
    [
        (grpc.StatusCode.FAILED_PRECONDITION, retry_info(0.1)),
        (grpc.StatusCode.INVALID_ARGUMENT, ()),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ()),
        (grpc.StatusCode.INTERNAL, ()),
        (grpc.StatusCode.UNAVAILABLE, (("grpc-retry-pushback-ms", "-1"),)),
    ],
)
def test_a_definite_answer_is_the_answer(make: Make, service: Service, step: Step) -> None:
    service.script = [step]
    with pytest.raises(grpc.RpcError) as told:
        make().call(service.address)
    error: Any = told.value
    assert not isinstance(error, RetriesExhausted)
    assert (error.code(), error.details(), len(service.keys)) == (step[0], "as told", 1)


def test_the_error_is_that_of_the_last_try_and_tells_how_many_there_were(make: Make, service: Service) -> None:
    service.script = [DOWN] * 5 + [(grpc.StatusCode.ABORTED, retry_info(0.1))]
    with pytest.raises(RetriesExhausted, match=r"sent 6 times in .* the last error: ABORTED: as told") as told:
        make().call(service.address, metadata=(("idempotency-key", "mine"),))
    assert isinstance(told.value, grpc.RpcError)
    error: Any = told.value
    assert (error.code(), error.details(), error.attempts, error.key) == (
        grpc.StatusCode.ABORTED, "as told", 6, "mine",
    )  # fmt: skip
    assert [name for name, _ in error.trailing_metadata()] == ["grpc-status-details-bin"]
    assert service.keys == ["mine"] * 6


def test_a_server_that_is_not_there_is_tried_again(make: Make) -> None:
    caller = make()
    with pytest.raises(RetriesExhausted, match=r"sent 6 times .* UNAVAILABLE"):
        caller.call(f"127.0.0.1:{free_port()}")
    assert len(caller.waits) == 5


def test_the_deadline_of_the_call_bounds_all_tries(make: Make, service: Service) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    service.script = [DOWN] * 100
    with pytest.raises(RetriesExhausted):
        make(RetryPolicy(attempts_max=100, budget_burst=100, base_s=0), clock=clock).call(service.address, seconds=20.0)
    assert 3 <= len(service.keys) < 20
    assert service.left_s == sorted(service.left_s, reverse=True)
    assert service.left_s[0] <= 20.0


def test_a_try_may_have_a_deadline_of_its_own(make: Make, service: Service) -> None:
    service.script = [DOWN]
    assert make(RetryPolicy(try_s=7.0, base_s=0)).call(service.address) == b"done"
    assert all(0 < left_s < 8.0 for left_s in service.left_s)


def test_where_the_key_comes_from(make: Make, service: Service) -> None:
    caller = make()
    with intent("intent"):
        caller.call(service.address, metadata=(("idempotency-key", "own"),))
        caller.call(service.address)
    make(keyed=lambda method: method != path("unary_unary")).call(service.address)
    caller.call(service.address)
    assert service.keys[:3] == ["own", "intent", ""]
    assert service.keys[3] not in ("", "intent")


def test_without_a_key_it_is_sent_once(make: Make, service: Service) -> None:
    service.script = [DOWN]
    with pytest.raises(grpc.RpcError) as told:
        make(keyed=lambda method: False).call(service.address)
    assert not isinstance(told.value, RetriesExhausted)
    assert len(service.keys) == 1


def test_a_retry_of_the_program_itself_uses_the_same_key(make: Make, service: Service) -> None:
    caller = make(RetryPolicy(attempts_max=1))
    service.script = [DOWN]
    with intent() as key:
        with pytest.raises(RetriesExhausted, match="sent once"):
            caller.call(service.address)
        assert caller.call(service.address) == b"done"
    assert service.keys == [key, key]


def test_beside_the_xid_interceptor(make: Make, service: Service) -> None:
    service.script = [DOWN]
    with bound(XID):
        assert make(xid=True).call(service.address) == b"done"
    assert service.xids == [XID, XID]
    assert len(set(service.keys)) == 1


def test_grpcs_own_retry_policy_multiplies_unless_it_is_off(make: Make, service: Service) -> None:
    policy = {
        "name": [{}],
        "retryPolicy": {
            "maxAttempts": 3, "initialBackoff": "0.05s", "maxBackoff": "0.05s", "backoffMultiplier": 1,
            "retryableStatusCodes": ["UNAVAILABLE"],
        },
    }  # fmt: skip
    configured = [("grpc.service_config", json.dumps({"methodConfig": [policy]}))]
    for options, seen in ((configured, 9), ([*configured, *ONE_RETRY_LAYER], 3), ([], 3)):
        service.keys, service.script = [], [DOWN] * seen
        with pytest.raises(RetriesExhausted, match="sent 3 times"):
            make(RetryPolicy(attempts_max=3, base_s=0)).call(service.address, options=options)
        assert len(service.keys) == seen
        assert len(set(service.keys)) == 1


class Ended(grpc.UnaryUnaryClientInterceptor):
    """Under it, a future has come to its end before anybody sees it."""

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        call = continuation(client_call_details, request)
        call.exception()
        return call


def test_a_future_gets_a_key_and_is_sent_once(service: Service) -> None:
    service.script = [DOWN]
    with grpc.insecure_channel(service.address) as plain:
        channel = grpc.intercept_channel(plain, RetryClientInterceptor(QUICK), Ended())
        method: Any = channel.unary_unary(path("unary_unary"))
        call = method.future(b"1", timeout=CALL_S)
        assert call.exception() is not None
    assert len(service.keys) == 1
    assert service.keys[0]


async def test_a_call_that_is_cancelled_is_cancelled_at_the_server_and_not_sent_again() -> None:
    arrived, cancelled = asyncio.Event(), asyncio.Event()
    calls = 0

    async def hang(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        nonlocal calls
        calls += 1
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"unary_unary": grpc.unary_unary_rpc_method_handler(hang)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Told", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        interceptors = async_retry_client_interceptors(QUICK)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", interceptors=interceptors) as channel:
            method: Any = channel.unary_unary(path("unary_unary"))
            call = method(b"1", timeout=CALL_S)
            async with asyncio.timeout(CALL_S):
                await arrived.wait()
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                await cancelled.wait()
        assert calls == 1
    finally:
        await server.stop(None)
