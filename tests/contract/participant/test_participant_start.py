"""What is proved and refused before a participant serves, and how it is put on the network."""

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from participant_sdk import Call, ConfigurationError, Participant, metadata
from tests.contract.participant.world import CONFIRM, DONE, TRY, World, new_xid
from tricord.v1 import participant_pb2_grpc, registry_pb2, registry_pb2_grpc

sqlite_only = pytest.mark.parametrize("flavour", ["sqlite-sync", "sqlite-async"], indirect=True)
sync_only = pytest.mark.parametrize("flavour", ["sqlite-sync", "postgres-sync"], indirect=True)


def participant_on(engine: Any, **settings: int) -> Participant:
    bank = Participant("bank", engine, **settings)
    if hasattr(engine, "sync_engine"):

        @bank.action("debit")
        async def debit_async(call: Call[bytes], db: Any) -> None: ...
        @debit_async.confirm
        async def _(call: Call[bytes], db: Any) -> None: ...
        @debit_async.cancel
        async def _(call: Call[bytes], db: Any) -> None: ...
    else:

        @bank.action("debit")
        def debit(call: Call[bytes], db: Any) -> None: ...
        @debit.confirm
        def _(call: Call[bytes], db: Any) -> None: ...
        @debit.cancel
        def _(call: Call[bytes], db: Any) -> None: ...

    return bank


async def prepare(bank: Participant) -> str:
    if hasattr(bank._engine, "sync_engine"):
        return await bank.prepare_async()
    return await asyncio.to_thread(bank.prepare)


async def refused(world: World, engine: Any, pattern: str, **settings: int) -> None:
    """Preparing on this engine fails, and leaves no row."""
    try:
        with pytest.raises(ConfigurationError, match=pattern):
            await prepare(participant_on(engine, **settings))
    finally:
        await world.dispose(engine)
    assert world.query("SELECT count(*) FROM tcc_fence_log") == [(0,)]


async def test_an_engine_in_autocommit_mode_is_refused(world: World) -> None:
    await refused(world, world.make_engine(isolation_level="AUTOCOMMIT"), "AUTOCOMMIT")
    await refused(world, world.make_engine().execution_options(isolation_level="AUTOCOMMIT"), "AUTOCOMMIT")


async def test_an_engine_that_commits_by_itself_is_found_out(world: World) -> None:
    """Protocol C2: proved, not assumed. Here a listener commits after every statement."""
    engine = world.make_engine()

    @event.listens_for(getattr(engine, "sync_engine", engine), "after_cursor_execute")
    def commit_at_once(connection: Any, cursor: Any, *rest: Any) -> None:
        connection.connection.commit()

    await refused(world, engine, "has no transactions|cannot be set up")


@sqlite_only
async def test_the_drivers_own_way_to_begin_does_not_matter(world: World) -> None:
    """SQLAlchemy's recipe for SQLite: the driver in autocommit, BEGIN by an event."""
    engine = world.make_engine()
    sync_engine = getattr(engine, "sync_engine", engine)

    @event.listens_for(sync_engine, "connect")
    def no_begin(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(sync_engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    try:
        await prepare(participant_on(engine))
    finally:
        await world.dispose(engine)


async def test_the_fence_id_is_the_databases(world: World) -> None:
    engine = world.make_engine()
    try:
        assert await prepare(participant_on(engine)) == world.serving.fence_id
    finally:
        await world.dispose(engine)


async def test_many_instances_may_start_at_once(flavour: str, participant_url: str) -> None:
    worlds = [World(flavour, participant_url) for _ in range(4)]
    try:
        fence_ids = await asyncio.gather(*(prepare(world.participant) for world in worlds))
        assert len(set(fence_ids)) == 1
    finally:
        for world in worlds:
            await world.close()


async def test_the_tables_are_those_of_the_exported_metadata(flavour: str, participant_url: str) -> None:
    world = World(flavour, participant_url)
    try:
        await asyncio.to_thread(metadata.create_all, world.auditor)
        await prepare(world.participant)
    finally:
        await world.close()


async def test_a_pool_that_is_too_small_is_refused(world: World) -> None:
    await refused(world, world.make_engine(pool_size=2, max_overflow=1), "at most 3 connections")


async def test_a_pool_without_a_limit_is_taken(world: World) -> None:
    engine = world.make_engine(poolclass=NullPool)
    try:
        await prepare(participant_on(engine))
    finally:
        await world.dispose(engine)


def test_a_database_that_is_not_supported_yet_is_refused() -> None:
    engine = create_engine("mysql+pymysql://localhost/x", module=_Driver())
    with pytest.raises(ConfigurationError, match="mysql is not supported yet"):
        participant_on(engine).prepare()


class _Driver:
    """Enough of a driver to make an engine that never connects."""

    paramstyle = "pyformat"
    version_info = (1, 4, 6)
    Error = Exception


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file::memory:?uri=true"])
def test_an_in_memory_database_is_refused(url: str) -> None:
    engine = create_engine(url)
    with pytest.raises(ConfigurationError, match="in-memory"):
        participant_on(engine).prepare()
    engine.dispose()


async def test_the_wrong_flavour_of_a_method_names_the_right_one(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    with pytest.raises(ConfigurationError, match="call serve, start"):
        await participant_on(engine).start_async("127.0.0.1:0")
    engine.dispose()
    async_engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'x.db'}")
    with pytest.raises(ConfigurationError, match="await serve_async"):
        participant_on(async_engine).start("127.0.0.1:0")
    await async_engine.dispose()


class TestNetwork:
    """Ports, addresses, servers and coordinators."""

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[Engine]:
        engine = create_engine(f"sqlite:///{tmp_path / 'bank.db'}")
        yield engine
        engine.dispose()

    def test_a_port_in_use_is_refused(self, engine: Engine) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(ConfigurationError, match=f"cannot listen on {address}: the port is in use"):
                participant_on(engine).start(address)

    def test_two_participants_never_share_a_port(self, engine: Engine) -> None:
        serving = participant_on(engine).start("127.0.0.1:0")
        try:
            with pytest.raises(ConfigurationError, match="the port is in use"):
                participant_on(engine).start(serving.address)
        finally:
            serving.stop()

    @pytest.mark.parametrize("listen", ["", "7801", ":7801", "host:", "host:x", "host:65536"])
    def test_an_address_is_host_and_port(self, engine: Engine, listen: str) -> None:
        with pytest.raises(ConfigurationError, match="host:port"):
            participant_on(engine).start(listen)

    def test_a_coordinator_must_be_told_where_to_call(self, engine: Engine) -> None:
        with pytest.raises(ConfigurationError, match="advertise"):
            participant_on(engine).start("0.0.0.0:0", coordinator="127.0.0.1:7800")

    def test_a_server_with_too_few_workers_is_refused(self, engine: Engine) -> None:
        with ThreadPoolExecutor(10) as workers:
            server = grpc.server(workers)
            with pytest.raises(ConfigurationError, match="has 10 workers, but with up to 16 Exchange streams"):
                participant_on(engine).add_to_server(server)
            participant_on(engine).add_to_server(server, streams_max=5)
            server.stop(None).wait()


async def test_a_participant_on_the_programs_own_server(flavour: str, participant_url: str) -> None:
    world = World(flavour, participant_url)
    await asyncio.to_thread(world.create_business_tables)
    workers = ThreadPoolExecutor(8)
    server: Any
    if world.is_async:
        server = grpc.aio.server()
        attached: Any = await world.participant.add_to_server_async(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
    else:
        server = grpc.server(workers)
        attached = await asyncio.to_thread(world.participant.add_to_server, server, streams_max=2)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            world.stub = participant_pb2_grpc.ParticipantServiceStub(channel)
            world.serving = attached
            xid = new_xid()
            assert (await world.call(TRY, xid)).outcome == DONE
            assert (await world.exchange([world.message(CONFIRM, xid)]))[7].outcome == DONE
    finally:
        world.serving = None
        if world.is_async:
            assert await attached.drain(5)
            await server.stop(None)
        else:
            assert await asyncio.to_thread(attached.drain, 5)
            server.stop(None).wait()
        await world.close()
        workers.shutdown()


@sync_only
async def test_more_streams_than_promised_are_turned_away(flavour: str, participant_url: str) -> None:
    world = World(flavour, participant_url)
    await asyncio.to_thread(world.create_business_tables)
    workers = ThreadPoolExecutor(8)
    server = grpc.server(workers)
    attached = await asyncio.to_thread(world.participant.add_to_server, server, streams_max=1)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    try:
        stub: Any = participant_pb2_grpc.ParticipantServiceStub(channel)
        world.stub, world.serving = stub, attached
        first = stub.Exchange()
        message = world.message(TRY, new_xid())
        await first.write(_request(message))
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.exchange([world.message(TRY, new_xid())])
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await world.call(TRY, new_xid())).outcome == DONE
        await first.done_writing()
        assert await first.read() is grpc.aio.EOF
    finally:
        world.serving = None
        await channel.close()
        attached.drain(5)
        server.stop(None).wait()
        await world.close()
        workers.shutdown()


def _request(message: Any) -> Any:
    from tricord.v1 import participant_pb2

    return participant_pb2.ExchangeRequest(calls=[message])


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    """A coordinator's registry that answers as it is told and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[registry_pb2.RegisterParticipantRequest] = []
        self.refusal: tuple[grpc.StatusCode, str] | None = None

    async def RegisterParticipant(self, request: Any, context: Any) -> registry_pb2.RegisterParticipantResponse:
        self.requests.append(request)
        if self.refusal is not None:
            await context.abort(*self.refusal)
        return registry_pb2.RegisterParticipantResponse()


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


async def test_a_definite_refusal_ends_the_start(world: World) -> None:
    registry = Registry()
    registry.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "bank/debit belongs to another fence database")
    server, address = await start_registry(registry)
    serving = await start_registering(world, address)
    try:
        with pytest.raises(ConfigurationError, match="does not accept participant 'bank': FAILED_PRECONDITION"):
            await registered(world, serving, 10)
    finally:
        await stop(world, serving)
        await server.stop(None)


def test_the_tables_hold_what_the_design_says(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    participant_on(engine).prepare()
    with engine.connect() as db:
        columns = {row[1] for row in db.execute(text("PRAGMA table_info(tcc_fence_log)"))}
    engine.dispose()
    assert columns >= {"xid", "branch_id", "action", "status", "fingerprint", "result", "created_at", "modified_at"}
