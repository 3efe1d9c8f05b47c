"""Participants on a gRPC server. Several may share one: the server's service finds the participant by its name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

import grpc

from participant_sdk.enlist import TaskEnlisting, ThreadEnlisting
from participant_sdk.errors import ConfigurationError
from participant_sdk.lanes import TaskLanes, ThreadLanes
from participant_sdk.local_transaction import Fence
from participant_sdk.registration import TaskRegistration, ThreadRegistration, request_of
from participant_sdk.service import TaskService, ThreadService
from participant_sdk.service_inspection import TaskInspection, ThreadInspection
from participant_sdk.upkeep import DEFAULT as UPKEEP
from participant_sdk.upkeep import Upkeep, UpkeepState
from participant_sdk.upkeep_loops import TaskUpkeep, ThreadUpkeep
from tricord.v1 import participant_pb2_grpc

WORKERS_BESIDE_STREAMS: Final = 4

_lock = threading.Lock()
_thread_services: WeakKeyDictionary[grpc.Server, ThreadService] = WeakKeyDictionary()
_task_services: WeakKeyDictionary[grpc.aio.Server, TaskService] = WeakKeyDictionary()
"""A server takes a second service of the same name silently, and never calls it."""


class Attached:
    """A participant on a `grpc.server` that its program owns."""

    def __init__(
        self,
        name: str,
        fence: Fence,
        lanes: ThreadLanes,
        server: grpc.Server,
        streams_max: int,
        begin_upkeep: Callable[[str, Upkeep], ThreadUpkeep],
        enlisting: ThreadEnlisting,
        inspection: ThreadInspection,
    ) -> None:
        self.name = name
        self.fence_id = fence.fence_id
        self._actions = list(fence.actions)
        self._lanes = lanes
        self._begin_upkeep = begin_upkeep
        self._upkeep: ThreadUpkeep | None = None
        self._enlisting = enlisting
        self._service = _thread_service_of(server)
        unary_trys_max = unary_trys_of(server, streams_max)
        self._service.add(name, fence.fence_id, lanes, inspection, streams_max, unary_trys_max)

    def register(self, coordinator: str, address: str) -> ThreadRegistration:
        """Keep the participant registered at `coordinator` as reachable at `address`; both "host:port".

        Its actions enlist there.
        """
        self._enlisting.at(coordinator)
        return ThreadRegistration(coordinator, request_of(self.name, address, self._actions, self.fence_id))

    def start_upkeep(self, coordinator: str, upkeep: Upkeep = UPKEEP) -> None:
        """Purge and resolve in the background, by what the `coordinator` ("host:port") says, until `drain`.

        Raises ConfigurationError if it has begun already.
        """
        _check_no_upkeep(self.name, self._upkeep)
        self._upkeep = self._begin_upkeep(coordinator, upkeep)

    @property
    def upkeep(self) -> UpkeepState | None:
        """What the upkeep has done so far; None if it was not started."""
        return self._upkeep.state if self._upkeep is not None else None

    def drain(self, grace: float) -> bool:
        """Take no more calls, wait up to `grace` s for those that run; whether all calls ended.

        The streams end with the last participant of the server. Call it before the server's own `stop`.
        """
        if self._upkeep is not None:
            self._upkeep.stop()
        ended = self._lanes.drain(grace)
        self._enlisting.close()
        self._service.leave(self.name)
        return ended


class AsyncAttached:
    """A participant on a `grpc.aio.server` that its program owns."""

    def __init__(
        self,
        name: str,
        fence: Fence,
        lanes: TaskLanes,
        server: grpc.aio.Server,
        begin_upkeep: Callable[[str, Upkeep], TaskUpkeep],
        enlisting: TaskEnlisting,
        inspection: TaskInspection,
    ) -> None:
        self.name = name
        self.fence_id = fence.fence_id
        self._actions = list(fence.actions)
        self._lanes = lanes
        self._begin_upkeep = begin_upkeep
        self._upkeep: TaskUpkeep | None = None
        self._enlisting = enlisting
        self._service = _task_service_of(server)
        self._service.add(name, fence.fence_id, lanes, inspection)

    def register(self, coordinator: str, address: str) -> TaskRegistration:
        """As `Attached.register`; call it in the event loop."""
        self._enlisting.at(coordinator)
        return TaskRegistration(coordinator, request_of(self.name, address, self._actions, self.fence_id))

    def start_upkeep(self, coordinator: str, upkeep: Upkeep = UPKEEP) -> None:
        """As `Attached.start_upkeep`; call it in the event loop."""
        _check_no_upkeep(self.name, self._upkeep)
        self._upkeep = self._begin_upkeep(coordinator, upkeep)

    @property
    def upkeep(self) -> UpkeepState | None:
        """As `Attached.upkeep`."""
        return self._upkeep.state if self._upkeep is not None else None

    async def drain(self, grace: float) -> bool:
        """As `Attached.drain`."""
        if self._upkeep is not None:
            await self._upkeep.stop()
        ended = await self._lanes.drain(grace)
        await self._enlisting.close()
        self._service.leave(self.name)
        return ended


def _check_no_upkeep(name: str, upkeep: ThreadUpkeep | TaskUpkeep | None) -> None:
    if upkeep is not None:
        raise ConfigurationError(f"the upkeep of participant {name!r} has begun already")


def _thread_service_of(server: grpc.Server) -> ThreadService:
    with _lock:
        service = _thread_services.get(server)
        if service is None:
            service = _thread_services[server] = ThreadService()
            participant_pb2_grpc.add_ParticipantServiceServicer_to_server(service, server)
        return service


def _task_service_of(server: grpc.aio.Server) -> TaskService:
    with _lock:
        service = _task_services.get(server)
        if service is None:
            service = _task_services[server] = TaskService()
            participant_pb2_grpc.add_ParticipantServiceServicer_to_server(service, server)
        return service


def unary_trys_of(server: grpc.Server, streams_max: int) -> int | None:
    """How many unary Trys may wait for their replies at a time, so that workers are left for Confirm and Cancel.

    None if it cannot be told how many worker threads the server has. Raises ConfigurationError if they are too few
    for so many streams.
    """
    pool = getattr(getattr(server, "_state", None), "thread_pool", None)
    workers = getattr(pool, "_max_workers", None)
    if isinstance(workers, int) and workers <= streams_max + WORKERS_BESIDE_STREAMS:
        raise ConfigurationError(
            f"the gRPC server has {workers} workers, but with up to {streams_max} Exchange streams it needs more than "
            f"{streams_max + WORKERS_BESIDE_STREAMS}: give it more, or lower streams_max"
        )
    return workers - streams_max - WORKERS_BESIDE_STREAMS if isinstance(workers, int) else None
