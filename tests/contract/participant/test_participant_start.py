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
from sqlalchemy.pool import AssertionPool, NullPool, SingletonThreadPool, StaticPool

from participant_sdk import Call, ConfigurationError, Participant, metadata
from tests.contract.participant.world import (
    CANCEL,
    CONFIRM,
    DONE,
    TRY,
    UNKNOWN,
    WAIT_SECONDS,
    World,
    new_xid,
    sqlite_url,
)
from tricord.v1 import participant_pb2, participant_pb2_grpc

sqlite_only = pytest.mark.parametrize("flavour", ["sqlite-sync", "sqlite-async"], indirect=True)
sync_only = pytest.mark.parametrize("flavour", ["sqlite-sync", "postgres-sync"], indirect=True)


def participant_on(engine: Any, **settings: Any) -> Participant:
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


@pytest.mark.parametrize("pool", [StaticPool, AssertionPool])
async def test_a_pool_that_lends_one_connection_to_all_is_refused(world: World, pool: Any) -> None:
    """Two calls on one connection: the COMMIT of one would be the COMMIT of the other's half."""
    await refused(world, world.make_engine(poolclass=pool), f"the engine's pool .{pool.__name__}. lends one connection")


@sync_only
async def test_a_pool_with_one_connection_per_thread_is_refused(world: World) -> None:
    await refused(world, world.make_engine(poolclass=SingletonThreadPool), "lends one connection")


async def test_a_table_of_an_earlier_version_is_told(world: World) -> None:
    with world.auditor.begin() as db:
        db.execute(text("ALTER TABLE tcc_fence_log DROP COLUMN finished_at"))
    await refused(world, world.make_engine(), "cannot be set up in the database: .*finished_at")


async def test_another_fence_database_behind_the_same_engine_is_noticed(world: World) -> None:
    """Protocol C3: as when the name of the host leads to a restored copy; its answers would be another fence's."""
    xid = new_xid()
    assert (await world.call(TRY, xid)).outcome == DONE
    with world.auditor.begin() as db:
        db.execute(text("UPDATE tcc_fence_info SET fence_id = 'another'"))
    await world.dispose(world.engine)  # so that new connections are made, as to another server
    for phase in (TRY, CONFIRM, CANCEL):
        reply = await world.call(phase, xid)
        assert (reply.outcome, reply.attention) == (UNKNOWN, True)
        assert "its id is another" in reply.error
    with world.auditor.begin() as db:
        db.execute(text("UPDATE tcc_fence_info SET fence_id = :id"), {"id": world.serving.fence_id})
    assert (await world.call(CONFIRM, xid)).outcome == DONE


async def test_a_pool_without_a_limit_is_taken(world: World) -> None:
    engine = world.make_engine(poolclass=NullPool)
    try:
        await prepare(participant_on(engine))
    finally:
        await world.dispose(engine)


def test_a_database_that_is_not_supported_is_refused() -> None:
    engine = create_engine("mssql+pymssql://localhost/x", module=_Driver())
    with pytest.raises(ConfigurationError, match="mssql is not supported: the fence needs PostgreSQL, MariaDB or"):
        participant_on(engine).prepare()


class _Driver:
    """Enough of a driver to make an engine that never connects."""

    paramstyle = "pyformat"
    __version__ = "2.3.0"
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


async def test_serving_until_a_signal_needs_the_main_thread(tmp_path: Path) -> None:
    async_engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'x.db'}")
    bank = participant_on(async_engine)

    def in_a_thread() -> None:
        asyncio.run(bank.serve_async("127.0.0.1:0"))

    with pytest.raises(ConfigurationError, match="use start_async"):
        await asyncio.to_thread(in_a_thread)


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


async def test_several_participants_on_one_server(flavour: str, participant_url: str, tmp_path: Path) -> None:
    """Two fence databases in one process, behind one address; a server calls one ParticipantService only."""
    (tmp_path / "second").mkdir()
    second_url = participant_url
    if flavour.startswith("sqlite"):
        second_url = sqlite_url(tmp_path / "second", asynchronous=flavour.endswith("async"))
    worlds = [World(flavour, participant_url, "bank-a"), World(flavour, second_url, "bank-b")]
    workers = ThreadPoolExecutor(24)
    server: Any = grpc.aio.server() if worlds[0].is_async else grpc.server(workers)
    attached: list[Any] = []
    for world in worlds:
        await asyncio.to_thread(world.create_business_tables)
        attached.append(await _add(world, server))
    with pytest.raises(ConfigurationError, match="already has a participant 'bank-a'"):
        await _add(worlds[0], server)
    port = server.add_insecure_port("127.0.0.1:0")
    started = server.start()
    if started is not None:
        await started
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for world in worlds:
                world.stub = participant_pb2_grpc.ParticipantServiceStub(channel)
            await _call_both(worlds, attached)
            await _drain(worlds[0], attached[0])
            message = worlds[1].message(TRY, new_xid())
            assert (await worlds[1].exchange([message]))[7].outcome == DONE
            message = worlds[0].message(TRY, new_xid())
            assert (await worlds[0].exchange([message]))[7].error == "the participant is stopping"
    finally:
        await _drain(worlds[1], attached[1])
        stopped = server.stop(None)
        await stopped if worlds[0].is_async else await asyncio.to_thread(stopped.wait)
        for world in worlds:
            await world.close()
        workers.shutdown()


async def _call_both(worlds: list[World], attached: list[Any]) -> None:
    xid = new_xid()
    for branch_id, (world, each) in enumerate(zip(worlds, attached, strict=True), 1):
        message = world.message(TRY, xid, branch_id=branch_id)
        reply = (await world.exchange([message]))[7]
        assert (reply.outcome, reply.fence_id) == (DONE, each.fence_id)
        unary = participant_pb2.ConfirmRequest(call=world.message(CONFIRM, xid, branch_id=branch_id))
        reply = (await world.stub.Confirm(unary)).reply
        assert (reply.outcome, reply.fence_id) == (DONE, each.fence_id)
        assert world.status(xid, branch_id) == 2
    reply = (await worlds[0].exchange([worlds[0].message(TRY, new_xid(), participant="bank-c")]))[7]
    assert (reply.outcome, reply.fence_id) == (UNKNOWN, "")
    assert reply.error == "this is participant 'bank-a' and 'bank-b', not 'bank-c'"


async def _add(world: World, server: Any) -> Any:
    if world.is_async:
        return await world.participant.add_to_server_async(server)
    return await asyncio.to_thread(world.participant.add_to_server, server)


async def _drain(world: World, attached: Any) -> None:
    if world.is_async:
        assert await attached.drain(5)
    else:
        assert await asyncio.to_thread(attached.drain, 5)


@sync_only
async def test_a_caller_that_is_gone_frees_its_worker(flavour: str, participant_url: str) -> None:
    """A unary call whose handler hangs: else a participant that is told to end would wait out every such call."""
    world = World(flavour, participant_url)
    await world.start()
    try:
        gate = world.gate("slow")
        service: Any = world.serving._attached._service
        calling = asyncio.create_task(world.call(TRY, new_xid(), account="slow", timeout=3600))
        await gate.wait_reached()
        assert service._unary_trys == 1
        assert not await world.stop(grace=0)
        with pytest.raises(grpc.aio.AioRpcError):
            await calling
        workers = world.serving._server._state.thread_pool
        await asyncio.wait_for(asyncio.to_thread(workers.shutdown), WAIT_SECONDS / 2)  # the gate gives up later
        assert (service._unary_trys, gate.opened.is_set()) == (0, False)
    finally:
        await world.close()


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
        # Nothing is written: a write that meets the end of its stream would tell of itself, not of why it ended.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Exchange().read()
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
    return participant_pb2.ExchangeRequest(calls=[message])


def test_the_tables_hold_what_the_design_says(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    participant_on(engine).prepare()
    with engine.connect() as db:
        columns = {row[1] for row in db.execute(text("PRAGMA table_info(tcc_fence_log)"))}
    engine.dispose()
    assert columns >= {"xid", "branch_id", "action", "status", "fingerprint", "result", "created_at", "modified_at"}
