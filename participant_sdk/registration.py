"""How a participant makes itself known at a coordinator, and stays known.

It asks until it is accepted, then again every so often, so that a coordinator that starts over with a new store
learns it. Only a definite "no" ends the start: the name belongs to another fence database, or registering is not
allowed. Written once as a generator of steps; a thread or a task carries it out.
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
AGAIN_SECONDS: Final = 30.0
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
    """Send the request; gives the error, or None."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so many seconds, or until told to stop."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """The coordinator knows the participant."""


Move: TypeAlias = Send | Pause | Accepted


def request_of(
    participant: str, address: str, actions: list[str], fence_id: str
) -> registry_pb2.RegisterParticipantRequest:
    """The registration of a participant whose actions share one fence database."""
    return registry_pb2.RegisterParticipantRequest(
        participant=participant,
        address=address,
        actions=[registry_pb2.ActionRegistration(name=name, fence_id=fence_id) for name in sorted(actions)],
    )


def registering(who: str, coordinator: str) -> Generator[Move, grpc.RpcError | None, None]:
    """Register for ever; raises ConfigurationError if the first definite answer is "no"."""
    accepted = False
    failures = 0
    while True:
        error = yield Send()
        if error is None:
            accepted, failures = True, 0
            yield Accepted()
            yield Pause(AGAIN_SECONDS * random.uniform(0.9, 1.1))
            continue
        why = f"{error.code().name}: {printable(error.details() or '', 500)}"
        definite = error.code() in _DEFINITE
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


class ThreadRegistration:
    """Keeps a participant registered, in a thread of its own."""

    def __init__(self, coordinator: str, request: registry_pb2.RegisterParticipantRequest) -> None:
        self._coordinator = coordinator
        self._request = request
        self._stopping = threading.Event()
        self._settled = threading.Event()
        self._error: ConfigurationError | None = None
        self._channel = grpc.insecure_channel(coordinator, options=CHANNEL_OPTIONS)
        self._thread = threading.Thread(target=self._loop, name="tricord-registration", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds for the first acceptance; raises ConfigurationError if it is refused."""
        settled = self._settled.wait(timeout)
        if self._error is not None:
            raise self._error
        return settled

    def stop(self) -> None:
        """Register no more; the coordinator goes on knowing the participant."""
        self._stopping.set()
        self._channel.close()  # ends a call that is on its way
        self._thread.join(CALL_SECONDS)

    def _loop(self) -> None:
        moves = registering(self._request.participant, self._coordinator)
        error: grpc.RpcError | None = None
        stub = registry_pb2_grpc.RegistryServiceStub(self._channel)
        try:
            while not self._stopping.is_set():
                move = moves.send(error) if error is not None else next(moves)
                error = None
                match move:
                    case Send():
                        try:
                            stub.RegisterParticipant(self._request, timeout=CALL_SECONDS)
                        except grpc.RpcError as failure:
                            error = failure
                        except ValueError:  # the channel was closed
                            return
                    case Pause(seconds):
                        self._stopping.wait(seconds)
                    case Accepted():
                        self._settled.set()
        except ConfigurationError as refused:
            self._error = refused
            self._settled.set()


class TaskRegistration:
    """Keeps a participant registered, in a task of its own."""

    def __init__(self, coordinator: str, request: registry_pb2.RegisterParticipantRequest) -> None:
        self._coordinator = coordinator
        self._request = request
        self._settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settled.add_done_callback(lambda settled: settled.cancelled() or settled.exception())
        self._task = asyncio.get_running_loop().create_task(self._loop())

    async def wait(self) -> None:
        """Wait for the first acceptance; raises ConfigurationError if it is refused."""
        await asyncio.shield(self._settled)

    async def stop(self) -> None:
        """Register no more; the coordinator goes on knowing the participant."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _loop(self) -> None:
        moves = registering(self._request.participant, self._coordinator)
        error: grpc.RpcError | None = None
        async with grpc.aio.insecure_channel(self._coordinator, options=CHANNEL_OPTIONS) as channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            try:
                while True:
                    move = moves.send(error) if error is not None else next(moves)
                    error = None
                    match move:
                        case Send():
                            try:
                                await stub.RegisterParticipant(self._request, timeout=CALL_SECONDS)
                            except grpc.RpcError as failure:
                                error = failure
                        case Pause(seconds):
                            await asyncio.sleep(seconds)
                        case Accepted():
                            if not self._settled.done():
                                self._settled.set_result(None)
            except ConfigurationError as refused:
                self._settled.set_exception(refused)
