"""Looking up many transactions at once, on every store: only what is durable, by the key, and whose it is."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
import sqlalchemy as sa

from coordinator.engine import Engine
from coordinator.model import BranchSpec, Phase, Policy, Reply, Transaction
from coordinator.model import Outcome as ReplyOutcome
from coordinator.participants import Participants
from coordinator.server import CoordinatorService
from coordinator.store import postgres
from coordinator.store.rows import StoreError
from coordinator.store.store import Store
from tests.coordinators import CALL_S
from tests.integration.test_hardship_engine import Scripted
from tests.postgres import PostgresServer
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import coordinator_pb2_grpc, types_pb2

from .rows import CONFIRMED, CONFIRMING, TRYING, begin, new_row, open_store, save, saved
from .stores import KINDS, OpenStore, empty_store, stores
from .test_store_postgres import _nodes

LEASE_MS = 3_600_000


@pytest.fixture(params=KINDS)
def store_url(request: pytest.FixtureRequest) -> str:
    """The address of an empty store of each kind."""
    return empty_store(request)


@pytest.fixture
async def opened() -> AsyncIterator[OpenStore]:
    """Opens stores, and closes them after the test."""
    async with stores() as open_one:
        yield open_one


async def test_states_of_what_is_there_and_nothing_of_what_is_not(store_url: str, opened: OpenStore) -> None:
    store = await opened(store_url)
    rows = [new_row() for _ in range(3)]
    await begin(store, *rows)
    await save(store, saved(rows[1], state=CONFIRMING), saved(rows[2], state=CONFIRMED, wake_ms=None))
    absent = os.urandom(16)
    found = await store.look_up([rows[2].xid, absent, rows[0].xid, rows[1].xid])
    assert found.states == {rows[0].xid: TRYING, rows[1].xid: CONFIRMING, rows[2].xid: CONFIRMED}
    assert (await store.look_up([absent])).states == {}


@pytest.mark.parametrize("count", [1, 499, 500, 501, 1_000])
async def test_many_at_once(store_url: str, opened: OpenStore, count: int) -> None:
    store = await opened(store_url)
    rows = [new_row() for _ in range(count)]
    await begin(store, *rows, new_row())
    xids = [row.xid for row in rows]
    assert (await store.look_up(xids)).states == dict.fromkeys(xids, TRYING)


async def test_an_old_sqlite_takes_them_too(opened: OpenStore, tmp_path: Path) -> None:
    """Before 3.32 a statement had at most 999 parameters."""
    store = await opened(str(tmp_path / "tricord.db"))
    await begin(store, row := new_row())

    def limit(connection: sqlite3.Connection, *_: object) -> None:
        connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)

    assert store._engine is not None
    sa.event.listen(store._engine, "checkout", limit)
    xids = [os.urandom(16) for _ in range(999)]
    assert (await store.look_up([*xids, row.xid])).states == {row.xid: TRYING}


async def test_it_says_whose_states_they_are(store_url: str, opened: OpenStore) -> None:
    first = await open_store(store_url)
    try:
        found = await first.look_up([bytes(16)])
        assert found.store_id == first.store_id != ""
        assert found.incarnation == (timeline(store_url) if "://" in store_url else 0)
    finally:
        await first.close()
    assert await (await opened(store_url)).look_up([bytes(16)]) == found


async def test_another_store_under_the_address_is_not_vouched_for(store_url: str, opened: OpenStore) -> None:
    """The id is read with the states: what was learnt at the start may be another store's by now."""
    store = await opened(store_url)
    statement = "UPDATE tricord_store SET store_id = 'another'"
    if "://" in store_url:
        with psycopg.connect(store_url, autocommit=True) as connection:
            connection.execute(statement)
    else:
        with closing(sqlite3.connect(store_url, isolation_level=None)) as file:
            file.execute(statement)
    assert (await store.look_up([bytes(16)])).store_id == "another"


def timeline(dsn: str) -> int:
    """As the server's control file has it."""
    with psycopg.connect(dsn) as connection:
        (number,) = connection.execute("SELECT timeline_id FROM pg_control_checkpoint()").fetchone() or (0,)
        return int(number)


class Holding:
    """A lock on a store, under which no flush can be committed."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> None:
        if "://" in self._url:
            self._session = await psycopg.AsyncConnection.connect(self._url)
            await self._session.execute("LOCK TABLE tricord_transaction IN SHARE MODE")  # writes wait, reads do not
        else:
            self._file = sqlite3.connect(self._url, isolation_level=None)
            self._file.execute("BEGIN IMMEDIATE")

    async def __aexit__(self, *exc: object) -> None:
        if "://" in self._url:
            await self._session.close()
        else:
            self._file.close()


class Scene:
    """A coordinator in this process, served over gRPC on loopback; its participants never answer by themselves."""

    def __init__(self, store: Store, parts: AsyncExitStack) -> None:
        participants = Participants(store)
        self.delivery = Scripted(participants, [None] * 8)
        policy = Policy(lease_ms=LEASE_MS)
        self.engine = Engine(store, self.delivery, policy)
        self._participants = participants
        self._parts = parts

    async def serve(self) -> coordinator_pb2_grpc.CoordinatorServiceAsyncStub:
        server = grpc.aio.server()
        service = CoordinatorService(self.engine, self._participants, "", LEASE_MS)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._parts.push_async_callback(self.delivery.close)
        self._parts.push_async_callback(self.engine.stop, 0.0)
        self._parts.push_async_callback(server.stop, 0)
        channel = await self._parts.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        return coordinator_pb2_grpc.CoordinatorServiceStub(channel)


async def test_a_state_that_is_not_saved_yet_is_never_shown(
    store_url: str, opened: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision is made and on its way to the store, which cannot take it: the world hears TRYING until it has."""
    store = await opened(store_url)
    async with AsyncExitStack() as parts:
        scene = Scene(store, parts)
        service = await scene.serve()
        branches = (BranchSpec("bank", "debit"),)
        xid = (await scene.engine.begin(b"", LEASE_MS, branches)).tx.spec.xid
        await asyncio.wait_for(scene.delivery.called.wait(), CALL_S)
        saving = asyncio.Event()
        journal_save = scene.engine.journal.save

        async def save_and_tell(tx: Transaction) -> Transaction:
            saving.set()
            return await journal_save(tx)

        monkeypatch.setattr(scene.engine.journal, "save", save_and_tell)
        live = scene.engine._live[xid]
        async with Holding(store_url):
            live._receive(Reply(0, Phase.TRY, ReplyOutcome.DONE, "fence-1"))
            await asyncio.wait_for(saving.wait(), CALL_S)
            for _ in range(3):
                assert await told(service, xid) == [types_pb2.TRANSACTION_STATE_TRYING] * 2
        while (states := await told(service, xid)) == [types_pb2.TRANSACTION_STATE_TRYING] * 2:
            pass
        assert set(states) <= {types_pb2.TRANSACTION_STATE_TRYING, types_pb2.TRANSACTION_STATE_CONFIRMING}


async def told(service: coordinator_pb2_grpc.CoordinatorServiceAsyncStub, xid: bytes) -> list[int]:
    """What LookUp and Get say of a transaction."""
    looked_up = await service.LookUp(pb.LookUpRequest(xids=[xid.hex()]), timeout=CALL_S)
    (progress,) = looked_up.transactions
    assert progress.xid == xid.hex()
    found = await service.Get(pb.GetRequest(xid=xid.hex()), timeout=CALL_S)
    return [progress.state, found.transaction.state]


@pytest.mark.database
class TestPostgres:
    """What only PostgreSQL has: plans, roles, standbys and timelines."""

    async def test_the_primary_key_is_read_also_while_the_table_is_small(
        self, pg_database: str, opened: OpenStore
    ) -> None:
        """A plan that is made then may be kept, and the table grows."""
        store = await opened(pg_database)
        await begin(store, row := new_row())
        plans: list[dict[str, Any]] = []

        def explain(connection: sa.Connection, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
            if statement == postgres._STATES:
                (plan,) = cursor.execute(f"EXPLAIN (FORMAT JSON) {statement}", parameters).fetchone()
                plans.extend(plan)

        assert store._engine is not None
        sa.event.listen(store._engine, "before_cursor_execute", explain)
        many = [row.xid, *(os.urandom(16) for _ in range(99))]  # for a few the index would be chosen anyway
        assert (await store.look_up(many)).states == {row.xid: TRYING}
        scans = [node for plan in plans for node in _nodes(plan["Plan"]) if "Scan" in node["Node Type"]]
        assert [node for node in scans if node["Node Type"] == "Seq Scan"] == []
        (scan,) = [node for node in scans if "Index Name" in node]
        assert scan["Index Name"] == "tricord_transaction_pkey"
        assert "ANY" in scan["Index Cond"]

    async def test_a_role_that_may_not_ask_for_the_timeline(self, own_server: PostgresServer) -> None:
        dsn = own_server.create_database()
        await (await open_store(dsn)).close()
        role = f"poor_{secrets.token_hex(4)}"
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE {role} LOGIN".encode())
            connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}".encode())
            connection.execute("REVOKE EXECUTE ON FUNCTION pg_walfile_name(pg_lsn) FROM PUBLIC")
        store = await open_store(dsn.replace("postgres@", f"{role}@"))
        try:
            await begin(store, row := new_row())
            found = await store.look_up([row.xid])
            assert (found.states, found.store_id, found.incarnation) == ({row.xid: TRYING}, store.store_id, 0)
        finally:
            await store.close()
            own_server.drop_database(dsn)

    async def test_a_standby_refuses_and_what_became_of_it_has_another_number(self, own_server: PostgresServer) -> None:
        """What a standby has not heard of would look as if it had never been."""
        dsn = own_server.create_database()
        store = await open_store(dsn)
        try:
            await begin(store, row := new_row())
            before = await store.look_up([row.xid])
            with psycopg.connect(dsn) as connection:
                (folder,) = connection.execute("SHOW data_directory").fetchone() or ("",)
            own_server.stop()
            Path(folder, "standby.signal").touch()  # noqa: ASYNC240 - nothing else runs here
            own_server.start()
            with pytest.raises(StoreError, match="recovery is in progress"):
                await store.look_up([row.xid])
            with psycopg.connect(dsn, autocommit=True) as connection:
                assert connection.execute("SELECT pg_promote()").fetchone() == (True,)
            after = await store.look_up([row.xid])
            assert (after.states, after.store_id) == (before.states, before.store_id)
            assert after.incarnation == before.incarnation + 1
        finally:
            await store.close()
