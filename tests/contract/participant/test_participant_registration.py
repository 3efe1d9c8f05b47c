"""How a participant makes itself known at a coordinator, stays known, and leaves."""

import asyncio
import socket
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from participant_sdk import ConfigurationError
from tests.contract.participant.world import World
from tricord.v1 import registry_pb2, registry_pb2_grpc


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    """A coordinator's registry that answers as it is told and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[registry_pb2.RegisterParticipantRequest] = []
        self.withdrawals: list[registry_pb2.WithdrawParticipantRequest] = []
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.heartbeat: Duration | None = None
        self.heard = asyncio.Condition()

    async def RegisterParticipant(self, request: Any, context: Any) -> registry_pb2.RegisterParticipantResponse:
        async with self.heard:
            self.requests.append(request)
            self.heard.notify_all()
        if self.refusal is not None:
            await context.abort(*self.refusal)
        return registry_pb2.RegisterParticipantResponse(heartbeat_interval=self.heartbeat)

    async def WithdrawParticipant(self, request: Any, context: Any) -> registry_pb2.WithdrawParticipantResponse:
        self.withdrawals.append(request)
        return registry_pb2.WithdrawParticipantResponse()


async def start_registry(registry: Registry, port: int = 0) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, f"127.0.0.1:{bound}"


async def start_registering(world: World, coordinator: str, advertise: str | None = None) -> Any:
    if world.is_async:
        return await world.participant.start_async("127.0.0.1:0", coordinator=coordinator, advertise=advertise)
    return await asyncio.to_thread(world.participant.start, "127.0.0.1:0", coordinator=coordinator, advertise=advertise)


async def registered(world: World, serving: Any, timeout: float) -> bool:  # noqa: ASYNC109
    if world.is_async:
        return bool(await serving.wait_registered(timeout))
    return bool(await asyncio.to_thread(serving.wait_registered, timeout))


async def stop(world: World, serving: Any) -> None:
    if world.is_async:
        await serving.stop()
    else:
        await asyncio.to_thread(serving.stop)


async def test_it_registers_itself(world: World) -> None:
    registry = Registry()
    server, address = await start_registry(registry)
    serving = await start_registering(world, address)
    try:
        assert await registered(world, serving, 10)
        (request,) = registry.requests
        assert (request.participant, request.address) == ("bank", serving.address)
        assert [(each.name, each.fence_id) for each in request.actions] == [("debit", serving.fence_id)]
    finally:
        await stop(world, serving)
        await server.stop(None)


async def test_it_registers_again_as_often_as_the_coordinator_wants(world: World) -> None:
    registry = Registry()
    registry.heartbeat = Duration(nanos=500_000_000)
    server, address = await start_registry(registry)
    serving = await start_registering(world, address)
    try:
        async with asyncio.timeout(20), registry.heard:
            await registry.heard.wait_for(lambda: len(registry.requests) >= 3)
        assert all(request == registry.requests[0] for request in registry.requests)
    finally:
        await stop(world, serving)
        await server.stop(None)


async def test_it_withdraws_its_address_when_it_stops(world: World) -> None:
    """So that calls go to other instances at once; and it registers no more."""
    registry = Registry()
    registry.heartbeat = Duration(nanos=500_000_000)
    server, address = await start_registry(registry)
    serving = await start_registering(world, address)
    try:
        assert await registered(world, serving, 10)
        assert registry.withdrawals == []
        await stop(world, serving)
        expected = registry_pb2.WithdrawParticipantRequest(participant="bank", address=serving.address)
        assert registry.withdrawals == [expected]
        await stop(world, serving)  # twice is fine
        assert registry.withdrawals == [expected]
    finally:
        await server.stop(None)


async def test_it_withdraws_nothing_that_was_never_accepted(world: World) -> None:
    registry = Registry()
    registry.refusal = (grpc.StatusCode.UNAVAILABLE, "the store is away")
    server, address = await start_registry(registry)
    serving = await start_registering(world, address)
    try:
        async with asyncio.timeout(20), registry.heard:
            await registry.heard.wait_for(lambda: bool(registry.requests))
        await stop(world, serving)
        assert registry.withdrawals == []
    finally:
        await server.stop(None)


async def test_it_stops_although_the_coordinator_is_gone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tricord.participant")
    registry = Registry()
    server, address = await start_registry(registry)
    serving = await start_registering(world, address)
    try:
        assert await registered(world, serving, 10)
    finally:
        await server.stop(None)
        await stop(world, serving)
    assert any("could not withdraw its address" in record.message for record in caplog.records)


async def test_it_waits_for_a_coordinator_that_is_not_there_yet(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serving = await start_registering(world, f"127.0.0.1:{port}", advertise="bank.example:1")
    try:
        assert not await registered(world, serving, 0.3)
        registry = Registry()
        server, _ = await start_registry(registry, port)
        try:
            assert await registered(world, serving, 20)
            assert registry.requests[0].address == "bank.example:1"
        finally:
            await server.stop(None)
    finally:
        await stop(world, serving)
    waits = [record for record in caplog.records if "waits for the coordinator" in record.message]
    assert len(waits) == 1


async def test_a_definite_refusal_ends_the_start(world: World, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    registry.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "bank/debit belongs to another fence database")
    server, address = await start_registry(registry)
    serving = await start_registering(world, address)
    try:
        with pytest.raises(ConfigurationError, match="does not accept participant 'bank': FAILED_PRECONDITION"):
            await registered(world, serving, 10)
        errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == 1, "a program that only starts it has to learn it, too"
        assert "does not accept participant 'bank': FAILED_PRECONDITION" in errors[0]
    finally:
        await stop(world, serving)
        await server.stop(None)
