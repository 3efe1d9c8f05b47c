"""`execute` calls that run at once, by either client, against a real server that has ExecuteStream as a test likes."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2

from participant_sdk import (
    ConfigurationError,
    IdempotencyKeyReused,
    InvalidRequest,
    OutcomeUnknown,
    RequestFailed,
    TransactionCancelled,
    TransactionState,
    UnknownParticipant,
    client_streams,
)
from tests.contract.participant.test_client import CANCELLED, CONFIRMED, CREDIT, DEBIT, Client, transaction
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import coordinator_pb2_grpc

CALLS = 4
"""At once, beside the one that goes alone."""

Result = pb.ExecuteStreamResult


def confirmed(call: pb.ExecuteStreamCall) -> Result:
    answer = pb.ExecuteResponse(transaction=transaction(CONFIRMED, idempotency_key=call.request.idempotency_key))
    return Result(call_id=call.call_id, response=answer)


def failed(code: grpc.StatusCode, reason: str = "", **fields: str) -> Callable[[pb.ExecuteStreamCall], Result]:
    """An error of one call, with details."""
    violations = [error_details_pb2.BadRequest.FieldViolation(field=f, description=text) for f, text in fields.items()]
    details = []
    for detail in (
        error_details_pb2.ErrorInfo(reason=reason),
        error_details_pb2.BadRequest(field_violations=violations),
    ):
        packed = AnyMessage()
        packed.Pack(detail)
        details.append(packed)
    error = pb.ExecuteStreamError(code=code.value[0], message=f"about {reason}", details=details)
    return lambda call: Result(call_id=call.call_id, error=error)


class Coordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Its unary Execute answers when it is allowed to; its streams as ``streams`` says, one after another."""

    def __init__(self) -> None:
        self.unary: list[pb.ExecuteRequest] = []
        self.streamed: list[list[pb.ExecuteStreamCall]] = []
        """The calls of each stream."""
        self.hold = True
        """Whether the first unary call waits for ``release``, so that others run beside it."""
        self.release = asyncio.Event()
        self.held = asyncio.Event()
        """It waits."""
        self.answer: Callable[[pb.ExecuteStreamCall], Result] = confirmed
        self.broken: list[grpc.StatusCode] = []
        """How the next streams end once they have read all calls."""
        self.silent = 0
        """How many streams answer nothing."""
        self.full = asyncio.Event()
        """All calls have come on one stream."""
        self.ended = asyncio.Event()
        """A stream was ended by the client."""

    async def Execute(self, request: Any, context: Any) -> pb.ExecuteResponse:
        self.unary.append(request)
        if self.hold:
            self.hold = False
            self.held.set()
            await self.release.wait()
        return pb.ExecuteResponse(transaction=transaction(CONFIRMED, idempotency_key=request.idempotency_key))

    async def ExecuteStream(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.ExecuteStreamResponse]:
        calls: list[pb.ExecuteStreamCall] = []
        self.streamed.append(calls)
        code = self.broken.pop(0) if self.broken else None
        silent, self.silent = self.silent > 0, max(0, self.silent - 1)
        yield pb.ExecuteStreamResponse()
        async for request in request_iterator:
            calls += request.calls
            if len(calls) >= CALLS:
                self.full.set()
            if code is not None and len(calls) == CALLS:
                await context.abort(code, "broken by the test")
            if code is None and not silent:
                for call in request.calls:
                    yield pb.ExecuteStreamResponse(results=[self.answer(call)])
        self.ended.set()


class Counter(grpc.aio.ServerInterceptor):
    """Counts the calls of each method, also of one that the server does not have."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        self.methods.append(details.method.rpartition("/")[2])
        return await continuation(details)


@asynccontextmanager
async def serving(
    coordinator: Any, *, without_stream: bool = False, counter: Counter | None = None
) -> AsyncIterator[str]:
    """A server; ``without_stream``: as it was before there was an ExecuteStream."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)], interceptors=[counter] if counter else [])
    if without_stream:
        handler = grpc.unary_unary_rpc_method_handler(
            coordinator.Execute, pb.ExecuteRequest.FromString, pb.ExecuteResponse.SerializeToString
        )
        generic = grpc.method_handlers_generic_handler("tricord.v1.CoordinatorService", {"Execute": handler})
        server.add_generic_rpc_handlers((generic,))
    else:
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def coordinator() -> Coordinator:
    return Coordinator()  # type: ignore[abstract]


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture
async def client(kind: str, coordinator: Coordinator) -> AsyncIterator[Client]:
    async with serving(coordinator) as endpoint:
        client = Client(kind, endpoint)
        yield client
        coordinator.release.set()
        await client.close()


async def beside_another(
    client: Client, coordinator: Coordinator, count: int = CALLS, **arguments: Any
) -> Sequence[Any]:
    """What so many executes come to, that run while another one does."""
    coordinator.hold = True
    coordinator.release.clear()
    coordinator.held.clear()
    first = asyncio.create_task(client.execute(DEBIT, CREDIT))
    await coordinator.held.wait()
    calls = (client.execute(DEBIT, CREDIT, idempotency_key=f"call {n}", **arguments) for n in range(count))
    found = await asyncio.gather(*calls, return_exceptions=True)
    coordinator.release.set()
    assert (await first).state is TransactionState.CONFIRMED
    return found


def check(found: Sequence[Any], count: int = CALLS) -> None:
    """Each was confirmed, and has its own answer."""
    assert [(each.state, each.idempotency_key) for each in found] == [
        (TransactionState.CONFIRMED, f"call {n}") for n in range(count)
    ]


async def test_calls_at_once_share_one_stream(client: Client, coordinator: Coordinator) -> None:
    for _ in range(2):
        check(await beside_another(client, coordinator))
    assert [len(calls) for calls in coordinator.streamed] == [2 * CALLS]
    assert len(coordinator.unary) == 2
    (call, *_) = coordinator.streamed[0]
    assert [each.participant for each in call.request.branches] == ["bank-a", "bank-b"]
    assert call.patience_ms == 5_000
    coordinator.hold = False
    assert (await client.execute(DEBIT)).state is TransactionState.CONFIRMED
    assert len(coordinator.unary) == 3  # a lone one goes alone
    assert len(coordinator.streamed[0]) == 2 * CALLS


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (failed(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", branches="is empty"), InvalidRequest),
        (failed(grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_PARTICIPANT"), UnknownParticipant),
        (failed(grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_ACTION"), UnknownParticipant),
        (failed(grpc.StatusCode.FAILED_PRECONDITION, "IDEMPOTENCY_KEY_REUSED"), IdempotencyKeyReused),
        (failed(grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED"), RequestFailed),
        (failed(grpc.StatusCode.UNIMPLEMENTED), ConfigurationError),
    ],
)
async def test_a_call_of_a_stream_raises_what_a_lone_one_does(
    client: Client, coordinator: Coordinator, answer: Any, error: type[Any]
) -> None:
    coordinator.answer = lambda call: answer(call) if call.request.idempotency_key == "call 1" else confirmed(call)
    good_0, bad, *good = await beside_another(client, coordinator)
    assert type(bad) is error
    assert getattr(bad, "fields", {}) in ({}, {"branches": "is empty"})
    assert {each.state for each in (good_0, *good)} == {TransactionState.CONFIRMED}


async def test_a_cancelled_transaction_is_told(client: Client, coordinator: Coordinator) -> None:
    coordinator.answer = lambda call: Result(
        call_id=call.call_id, response=pb.ExecuteResponse(transaction=transaction(CANCELLED, cancel_reason="deadline"))
    )
    for each in await beside_another(client, coordinator):
        assert isinstance(each, TransactionCancelled)


async def test_after_what_may_pass_it_is_asked_again(client: Client, coordinator: Coordinator) -> None:
    asked: set[str] = set()

    def answer(call: pb.ExecuteStreamCall) -> Result:
        key = call.request.idempotency_key
        if key not in asked:
            asked.add(key)
            return failed(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")(call)
        return confirmed(call)

    coordinator.answer = answer
    check(await beside_another(client, coordinator))
    assert len(coordinator.streamed[0]) == 2 * CALLS


async def test_a_broken_stream_leaves_its_calls_in_doubt(client: Client, coordinator: Coordinator) -> None:
    """They are asked again with the same key, on another stream."""
    coordinator.broken = [grpc.StatusCode.UNAVAILABLE]
    check(await beside_another(client, coordinator))
    first, second = coordinator.streamed
    keys = sorted(call.request.idempotency_key for call in first)
    assert keys == sorted(call.request.idempotency_key for call in second) == [f"call {n}" for n in range(CALLS)]


async def test_patience_over_on_a_broken_stream_is_unknown(client: Client, coordinator: Coordinator) -> None:
    coordinator.broken = [grpc.StatusCode.UNAVAILABLE] * 1_000
    for n, each in enumerate(await beside_another(client, coordinator, patience=0.3)):
        assert isinstance(each, OutcomeUnknown)
        assert each.idempotency_key == f"call {n}"


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_what_may_be_one_calls_doing_sends_each_alone(
    client: Client, coordinator: Coordinator, code: grpc.StatusCode
) -> None:
    coordinator.broken = [code]
    check(await beside_another(client, coordinator))
    assert len(coordinator.streamed) == 1
    assert sorted(request.idempotency_key for request in coordinator.unary[1:]) == [f"call {n}" for n in range(CALLS)]


@pytest.mark.parametrize("times", range(5))
async def test_an_older_coordinator_gets_unary_calls_for_good(kind: str, coordinator: Coordinator, times: int) -> None:
    counter = Counter()
    async with serving(coordinator, without_stream=True, counter=counter) as endpoint:
        client = Client(kind, endpoint)
        for n in (1, 2):
            check(await beside_another(client, coordinator))
            assert len(coordinator.unary) == n * (CALLS + 1)
            assert counter.methods.count("ExecuteStream") == 1
        await client.close()


async def test_a_stream_that_is_silent_is_given_up(client: Client, coordinator: Coordinator) -> None:
    coordinator.silent = 1
    check(await beside_another(client, coordinator, patience=2.0))
    assert len(coordinator.streamed) == 2


async def test_a_stream_that_is_idle_is_ended(
    client: Client, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_streams, "IDLE_SECONDS", 0.2)
    check(await beside_another(client, coordinator))
    await asyncio.wait_for(coordinator.ended.wait(), 60)
    check(await beside_another(client, coordinator))
    assert len(coordinator.streamed) == 2


async def test_large_calls_go_alone(client: Client, coordinator: Coordinator) -> None:
    large = [client.execute(DEBIT, CREDIT, metadata={}, idempotency_key="k" * 300_000) for _ in range(2)]
    await asyncio.gather(asyncio.to_thread(lambda: None), *large, asyncio.to_thread(coordinator.release.set))
    assert len(coordinator.unary) == 2
    assert not coordinator.streamed


async def test_closing_tells_who_waits_that_it_is_not_known(kind: str, coordinator: Coordinator) -> None:
    coordinator.silent = 1
    async with serving(coordinator) as endpoint:
        client = Client(kind, endpoint)
        calls = [asyncio.create_task(client.execute(DEBIT, idempotency_key=f"call {n}")) for n in range(CALLS + 1)]
        await coordinator.full.wait()
        await client.close()
        assert "tricord-execute-stream" not in [thread.name for thread in threading.enumerate()]
        for each in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(each, OutcomeUnknown)
        with pytest.raises(ConfigurationError, match="closed"):
            await client.execute(DEBIT)


async def test_a_task_that_is_cancelled_leaves_the_others(coordinator: Coordinator) -> None:
    async with serving(coordinator) as endpoint:
        client = Client("async", endpoint)
        coordinator.silent = 1
        calls = [asyncio.create_task(client.execute(DEBIT, patience=2.0)) for _ in range(CALLS + 1)]
        await coordinator.full.wait()
        calls[2].cancel()
        coordinator.release.set()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(found.pop(2), asyncio.CancelledError)
        assert [getattr(each, "state", each) for each in found] == [TransactionState.CONFIRMED] * CALLS
        await client.close()


LEFT_OPEN = {
    "sync": """
import sys
from concurrent.futures import ThreadPoolExecutor
from participant_sdk import TricordClient, branch
client = TricordClient(sys.argv[1])
with ThreadPoolExecutor(8) as threads:
    found = list(threads.map(lambda n: client.execute(branch("bank", "debit", {})), range(40)))
print(len(found), bool(client._streams.all()))
""",
    "async": """
import asyncio, sys
from participant_sdk import AsyncTricordClient, branch
async def main():
    client = AsyncTricordClient(sys.argv[1])
    found = await asyncio.gather(*(client.execute(branch("bank", "debit", {})) for n in range(40)))
    print(len(found), bool(client._streams.all()))
asyncio.run(main())
""",
}


async def test_a_program_ends_quietly_without_closing_its_client(kind: str, coordinator: Coordinator) -> None:
    coordinator.hold = False
    async with serving(coordinator) as endpoint:
        program = [sys.executable, "-X", "dev", "-c", LEFT_OPEN[kind], endpoint]
        ended = await asyncio.to_thread(
            subprocess.run, program, capture_output=True, text=True, timeout=60, check=False
        )
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", "40 True\n")
