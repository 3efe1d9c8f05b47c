"""How a participant makes itself known at a coordinator, and stays known.

It asks until it is accepted, then again as often as the coordinator wants to hear of it: an instance that is silent
for long gets no calls any more while another one of its name is there. Only a definite "no" ends the start: the name
belongs to another fence database or to a participant that can do something else, or registering is not allowed. At its
end it withdraws the address, so that calls go to other instances at once. Written once as a generator of steps; a
thread or a task carries it out.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc

from participant_sdk.errors import ConfigurationError, printable
from tricord.v1 import registry_pb2, registry_pb2_grpc

logger = logging.getLogger("tricord.participant")

CALL_SECONDS: Final = 5.0
WITHDRAW_SECONDS: Final = 2.0
AGAIN_SECONDS: Final = 30.0
"""How often it is repeated at a coordinator that does not say how often."""
AGAIN_SECONDS_MIN: Final = 0.5
PAUSE_FIRST_SECONDS: Final = 0.1
PAUSE_MAX_SECONDS: Final = 5.0

CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

_DEFINITE: Final = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request; gives the answer, or the error."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so many seconds, or until told to stop."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """The coordinator knows the participant."""


Move: TypeAlias = Send | Pause | Accepted
Answer: TypeAlias = registry_pb2.RegisterParticipantResponse | grpc.RpcError


def request_of(
    participant: str, address: str, actions: list[str], fence_id: str
) -> registry_pb2.RegisterParticipantRequest:
    """The registration of a participant whose actions share one fence database."""
    return registry_pb2.RegisterParticipantRequest(
        participant=participant,
        address=address,
        actions=[registry_pb2.ActionRegistration(name=name, fence_id=fence_id) for name in sorted(actions)],
    )


def registering(who: str, coordinator: str) -> Generator[Move, Answer | None, None]:
    """Register for ever; raises ConfigurationError if the first definite answer is "no"."""
    accepted = False
    failures = 0
    while True:
        answer = yield Send()
        assert answer is not None
        if isinstance(answer, registry_pb2.RegisterParticipantResponse):
            accepted, failures = True, 0
            yield Accepted()
            yield Pause(_again_seconds(answer))
            continue
        why = f"{answer.code().name}: {printable(answer.details() or '', 500)}"
        definite = answer.code() in _DEFINITE
        if definite and not accepted:
            refused = f"the coordinator at {coordinator} does not accept participant {who!r}: {why}"
            logger.error("%s", refused)  # for a program that never asks whether it is registered
            raise ConfigurationError(refused)
        if failures == 0:
            level = logging.ERROR if definite else logging.WARNING
            logger.log(level, "participant %s waits for the coordinator at %s (%s)", who, coordinator, why)
        failures += 1
        longest = min(PAUSE_MAX_SECONDS, PAUSE_FIRST_SECONDS * 2 ** min(failures, 10))
        yield Pause(random.uniform(longest / 4, longest))


def _again_seconds(answer: registry_pb2.RegisterParticipantResponse) -> float:
    if not answer.HasField("heartbeat_interval"):
        return AGAIN_SECONDS * random.uniform(0.9, 1.1)
    interval = answer.heartbeat_interval
    seconds = interval.seconds + interval.nanos / 1e9
    return max(AGAIN_SECONDS_MIN, min(seconds, AGAIN_SECONDS)) * random.uniform(0.8, 1.0)


def _withdrawal(request: registry_pb2.RegisterParticipantRequest) -> registry_pb2.WithdrawParticipantRequest:
    return registry_pb2.WithdrawParticipantRequest(participant=request.participant, address=request.address)


def _not_withdrawn(who: str, error: grpc.RpcError) -> None:
    """Nothing depends on it: a silent address is found out by and by."""
    logger.info("participant %s could not withdraw its address: %s", who, error.code().name)


class ThreadRegistration:
    """Keeps a participant registered, in a thread of its own."""

    def __init__(self, coordinator: str, request: registry_pb2.RegisterParticipantRequest) -> None:
        self._coordinator = coordinator
        self._request = request
        self._stopping = threading.Event()
        self._settled = threading.Event()
        self._error: ConfigurationError | None = None
        self._call: grpc.Future[Any] | None = None
        self._channel = grpc.insecure_channel(coordinator, options=CHANNEL_OPTIONS)
        self._thread = threading.Thread(target=self._loop, name="tricord-registration", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for the first acceptance; raises ConfigurationError if it is refused."""
        settled = self._settled.wait(timeout)
        if self._error is not None:
            raise self._error
        return settled

    def leave(self) -> None:
        """Register no more, and withdraw the address in the background; `stop` waits for that."""
        self._stopping.set()
        if self._call is not None:
            self._call.cancel()

    def stop(self) -> None:
        """Register no more, and withdraw the address: the coordinator goes on knowing the participant."""
        self.leave()
        self._thread.join(CALL_SECONDS)
        self._channel.close()

    def _loop(self) -> None:
        moves = registering(self._request.participant, self._coordinator)
        answer: Answer | None = None
        stub = registry_pb2_grpc.RegistryServiceStub(self._channel)
        try:
            while not self._stopping.is_set():
                move = next(moves) if answer is None else moves.send(answer)
                answer = None
                match move:
                    case Send():
                        self._call = stub.RegisterParticipant.future(self._request, timeout=CALL_SECONDS)
                        if self._stopping.is_set():
                            self._call.cancel()
                        try:
                            answer = self._call.result()
                        except grpc.RpcError as failure:
                            answer = failure
                        except grpc.FutureCancelledError:
                            break
                    case Pause(seconds):
                        self._stopping.wait(seconds)
                    case Accepted():
                        self._settled.set()
        except ConfigurationError as refused:
            self._error = refused
            self._settled.set()
            return
        if self._settled.is_set():
            try:
                stub.WithdrawParticipant(_withdrawal(self._request), timeout=WITHDRAW_SECONDS)
            except grpc.RpcError as failure:
                _not_withdrawn(self._request.participant, failure)


class TaskRegistration:
    """Keeps a participant registered, in a task of its own."""

    def __init__(self, coordinator: str, request: registry_pb2.RegisterParticipantRequest) -> None:
        self._coordinator = coordinator
        self._request = request
        self._stopping = False
        loop = asyncio.get_running_loop()
        self._settled: asyncio.Future[None] = loop.create_future()
        self._settled.add_done_callback(lambda settled: settled.cancelled() or settled.exception())
        self._task = loop.create_task(self._loop())

    async def wait(self) -> None:
        """Wait for the first acceptance; raises ConfigurationError if it is refused."""
        await asyncio.shield(self._settled)

    def leave(self) -> None:
        """Register no more, and withdraw the address in the background; `stop` waits for that."""
        if not self._stopping:
            self._stopping = True
            self._task.cancel()  # of the heartbeat; it goes on with the withdrawal

    async def stop(self) -> None:
        """Register no more, and withdraw the address: the coordinator goes on knowing the participant."""
        self.leave()
        await asyncio.wait([self._task])

    async def _loop(self) -> None:
        async with grpc.aio.insecure_channel(self._coordinator, options=CHANNEL_OPTIONS) as channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            try:
                await self._keep_registered(stub)
            except ConfigurationError as refused:
                self._settled.set_exception(refused)
            except asyncio.CancelledError:
                if not self._stopping:
                    raise
                if self._settled.done():
                    try:
                        await stub.WithdrawParticipant(_withdrawal(self._request), timeout=WITHDRAW_SECONDS)
                    except grpc.RpcError as failure:
                        _not_withdrawn(self._request.participant, failure)

    async def _keep_registered(self, stub: registry_pb2_grpc.RegistryServiceAsyncStub) -> None:
        moves = registering(self._request.participant, self._coordinator)
        answer: Answer | None = None
        while True:
            move = next(moves) if answer is None else moves.send(answer)
            answer = None
            match move:
                case Send():
                    try:
                        answer = await stub.RegisterParticipant(self._request, timeout=CALL_SECONDS)
                    except grpc.RpcError as failure:
                        answer = failure
                case Pause(seconds):
                    await asyncio.sleep(seconds)
                case Accepted():
                    if not self._settled.done():
                        self._settled.set_result(None)
