"""The gRPC server: which services it has, its options, and where it listens."""

from __future__ import annotations

import contextlib
import ipaddress

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from tricord.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)

from .config import Settings
from .engine import Engine
from .listening import cannot_listen
from .operator import OperatorService
from .participants import Participants
from .registry import RegistryService
from .server import CoordinatorService
from .wire import MESSAGE_BYTES_MAX

SERVER_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
# By default a second server would bind the same port silently, and take half of the connections.
ALONE_OPTIONS = (("grpc.so_reuseport", 0),)
CONNECTION_AGE_MS = 60_000
SHARED_OPTIONS = (
    ("grpc.so_reuseport", 1),
    # A connection stays with the worker that has taken it: without an end all could be one worker's for ever. What
    # runs on it goes on.
    ("grpc.max_connection_age_ms", CONNECTION_AGE_MS),
)

STORE_SERVICES = (
    coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name,
    operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].full_name,
    registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name,
)
"""Those that can do nothing without the store."""
SERVICES = (*STORE_SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)


async def make_server(
    engine: Engine, participants: Participants, settings: Settings
) -> tuple[grpc.aio.Server, CoordinatorService, health_aio.HealthServicer]:
    """The server with all its services, not started yet; what initiators call; what tells that all are SERVING."""
    server = grpc.aio.server(options=SERVER_OPTIONS + (SHARED_OPTIONS if settings.workers > 1 else ALONE_OPTIONS))
    service = CoordinatorService(
        engine, participants, settings.key_namespace, settings.timeout_ms, settings.stream_calls_max
    )
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(service, server)
    operator = OperatorService(engine, participants, settings)
    operator_pb2_grpc.add_OperatorServiceServicer_to_server(operator, server)
    allowed = settings.allow_registration or is_loopback(settings.listen)
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(RegistryService(participants, allowed=allowed), server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection([*SERVICES, reflection.SERVICE_NAME], server)
    for name in ("", *SERVICES):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, service, health


def bind(server: grpc.aio.Server, listen: str) -> int:
    """Listen on ``host:port``; returns the port. Raises OSError, saying what is wrong and what to do."""
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise cannot_listen(listen) from error
    if not port:
        raise OSError(f"listen: cannot listen on {listen}: name it as host:port")
    return port


def is_loopback(listen: str) -> bool:
    """Whether only this host can reach that address."""
    host = listen.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return listen.startswith("unix:")
