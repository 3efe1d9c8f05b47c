"""gRPC client interceptors: one key per intent, in the metadata, sent again until it is answered.

    grpc.intercept_channel(channel, RetryClientInterceptor())
    grpc.aio.insecure_channel(address, interceptors=async_retry_client_interceptors())

Every call with one response gets metadata `idempotency-key`: its own, else that of the `intent` it is in, else a new
one; and is sent again by the rules of `retry_rules`, until its deadline. Requests that are streamed are sent again if
they are a list or a tuple; an iterator is used up by its first try, so it gets a key and is sent once. So is what a
sync caller sends by `.future()`, for nobody waits in it. Calls whose responses are streamed are left alone.

gRPC sends again by itself, and unseen, what has never reached a server; that stays. A retry policy in a channel's
service config multiplies with these retries: leave it out, or turn it off with `ONE_RETRY_LAYER` among the options.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from participant_sdk.idempotency.intents import current_intent, first_sent_text, new_key
from participant_sdk.idempotency.retry_errors import retries_exhausted
from participant_sdk.idempotency.retry_rules import Fault, RetryBudget, RetryPolicy, Tries, grpc_fault

KEY_METADATA: Final = "idempotency-key"
ONE_RETRY_LAYER: Final = (("grpc.enable_retries", 0),)
"""Channel options under which gRPC carries out no retry policy of its own."""
_STATUS_DETAILS: Final = "grpc-status-details-bin"
_PUSHBACK: Final = "grpc-retry-pushback-ms"

Pairs = tuple[tuple[str, str | bytes], ...]


class _Setup:
    """What an interceptor was given, and what its calls share."""

    def __init__(
        self,
        policy: RetryPolicy | None,
        keyed: Callable[[str], bool] | None,
        clock: Callable[[], float],
        first_sent: str | None,
    ) -> None:
        self.policy = policy or RetryPolicy()
        self.budget = RetryBudget(self.policy)
        self.keyed = keyed
        self.clock = clock
        self.first_sent = None if first_sent is None else first_sent.lower()


class _Sending:
    """The tries of one call, as far as they are the same for sync and async."""

    def __init__(self, given: Any, setup: _Setup, replayable: bool) -> None:
        self._setup = setup
        self.metadata, self.key = _keyed(given, setup)
        if self.key and setup.first_sent is not None and all(name != setup.first_sent for name, _ in self.metadata):
            self.metadata = (*self.metadata, (setup.first_sent, first_sent_text(self.key, time.time())))
        self.replayable = replayable and bool(self.key)
        self._timeout_s: float | None = given.timeout
        self._began = setup.clock()
        self._tries = Tries(setup.policy, setup.budget, self._began, self._timeout_s)

    def timeout_s(self) -> float | None:
        """Of the next try: what is left of the call's deadline, and no more than `try_s`."""
        left_s = None
        if self._timeout_s is not None:
            left_s = max(0.0, self._began + self._timeout_s - self._setup.clock())
        limits = [limit for limit in (left_s, self._setup.policy.try_s) if limit is not None and self.replayable]
        return min(limits) if limits else left_s

    def fault(self, code: grpc.StatusCode | None, trailing_metadata: Iterable[Any] | None) -> Fault | None:
        """What is wrong with a call that has ended; None: nothing that another try could mend."""
        if code is None or code is grpc.StatusCode.OK or not self.replayable:
            return None
        return grpc_fault(code.name, _retry_after_s(trailing_metadata or ()), self._setup.policy)

    def wait_s(self, fault: Fault) -> float | None:
        """How long to wait before the next try; None: there is none."""
        return self._tries.wait_s(self._setup.clock(), fault)

    def exhausted(self, error: grpc.RpcError) -> BaseException:
        """The error to raise when there is no next try."""
        return retries_exhausted(error, self._tries.attempts, self._setup.clock() - self._began, self.key)


def _keyed(given: Any, setup: _Setup) -> tuple[Pairs, str]:
    """The call's metadata with its key, and the key; "" if it has none."""
    metadata: Pairs = tuple(tuple(pair) for pair in given.metadata or ())
    for name, value in metadata:
        if name.lower() == KEY_METADATA:
            return metadata, value if isinstance(value, str) else value.decode("ascii", "replace")
    method = given.method.decode() if isinstance(given.method, bytes) else given.method
    if setup.keyed is not None and not setup.keyed(method):
        return metadata, ""
    key = current_intent() or new_key()
    return (*metadata, (KEY_METADATA, key)), key


def _retry_after_s(metadata: Iterable[Any]) -> float | None:
    """How long the server wants to be left alone, in seconds; below 0: for ever."""
    for name, value in metadata:
        try:
            if name == _PUSHBACK:
                return float(value) / 1000
            if name == _STATUS_DETAILS:
                for detail in status_pb2.Status.FromString(value).details:
                    info = error_details_pb2.RetryInfo()
                    if detail.Unpack(info):
                        return max(0.0, float(info.retry_delay.ToMilliseconds()) / 1000)
        except (ValueError, TypeError, DecodeError):  # not of gRPC's form: nothing was asked for
            continue
    return None


class _Details(grpc.ClientCallDetails):
    """The details of one try."""

    def __init__(self, given: Any, metadata: Pairs, timeout_s: float | None) -> None:
        self.method = given.method
        self.timeout = timeout_s
        self.metadata = metadata
        self.credentials = given.credentials
        self.wait_for_ready = given.wait_for_ready
        self.compression = given.compression


class RetryClientInterceptor(grpc.UnaryUnaryClientInterceptor, grpc.StreamUnaryClientInterceptor):
    """For `grpc.intercept_channel`. For any number of threads.

    `keyed(method)` says which methods get a key, such as "/shop.Orders/Place" (None: all); others are sent once.
    `first_sent`: the metadata, such as "first-sent", in which each call with a key says when its intent began. When
    the tries are used up, RetriesExhausted is raised, which is also the RpcError of the last one, with its code.
    """

    def __init__(
        self,
        policy: RetryPolicy | None = None,
        *,
        keyed: Callable[[str], bool] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        first_sent: str | None = None,
    ) -> None:
        self._setup = _Setup(policy, keyed, clock, first_sent)
        self._sleep = sleep

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """See `grpc`."""
        return self._send(continuation, client_call_details, lambda: request, True)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """See `grpc`."""
        again = isinstance(request_iterator, list | tuple)
        return self._send(continuation, client_call_details, lambda: iter(request_iterator), again)

    def _send(self, continuation: Any, given: Any, request: Callable[[], Any], replayable: bool) -> Any:
        sending = _Sending(given, self._setup, replayable)
        while True:
            call: Any = continuation(_Details(given, sending.metadata, sending.timeout_s()), request())
            # Well, or of `.future()`: such a call is an iterator, unlike the error that another one has ended with.
            if not isinstance(call, grpc.RpcError) or hasattr(call, "__next__"):
                return call
            fault = sending.fault(call.code(), call.trailing_metadata())
            if fault is None:
                return call
            wait_s = sending.wait_s(fault)
            if wait_s is None:
                raise sending.exhausted(call)
            self._sleep(wait_s)


class _AsyncSender:
    def __init__(self, setup: _Setup, sleep: Callable[[float], Awaitable[None]]) -> None:
        self._setup = setup
        self._sleep = sleep

    async def send(self, continuation: Any, given: Any, request: Callable[[], Any], replayable: bool) -> Any:
        sending = _Sending(given, self._setup, replayable)
        while True:
            metadata = grpc.aio.Metadata(*sending.metadata)
            details = grpc.aio.ClientCallDetails(
                given.method, sending.timeout_s(), metadata, given.credentials, given.wait_for_ready
            )
            call = await continuation(details, request())
            if not sending.replayable:
                return call
            try:
                await call
                return call
            except grpc.RpcError as error:
                fault = sending.fault(await call.code(), await call.trailing_metadata())
                if fault is None:
                    return call
                wait_s = sending.wait_s(fault)
                if wait_s is None:
                    raise sending.exhausted(error) from error
            await self._sleep(wait_s)


class _AsyncUnaryUnary(_AsyncSender, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """See `grpc.aio`."""
        return await self.send(continuation, client_call_details, lambda: request, True)


class _AsyncStreamUnary(_AsyncSender, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """See `grpc.aio`."""
        again = isinstance(request_iterator, list | tuple)
        return await self.send(continuation, client_call_details, lambda: request_iterator, again)


def async_retry_client_interceptors(
    policy: RetryPolicy | None = None,
    *,
    keyed: Callable[[str], bool] | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
    first_sent: str | None = None,
) -> list[grpc.aio.ClientInterceptor]:
    """As RetryClientInterceptor, for the `interceptors` of a `grpc.aio` channel; put them before others.

    Two of them, for a grpc.aio channel uses one interceptor for one kind of calls only. They share one budget.
    """
    setup = _Setup(policy, keyed, clock, first_sent)
    return [_AsyncUnaryUnary(setup, sleep), _AsyncStreamUnary(setup, sleep)]
