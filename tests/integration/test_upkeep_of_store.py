"""The coordinator's store in the long run: purged, migrated, away for a while."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.purge import Purge
from coordinator.store.rows import Batch
from tests.contract.rows import new_row, open_store
from tests.contract.stores import OpenStore, empty_store, stores
from tests.coordinators import CALL_S, CoordinatorProcess, tricord
from tests.postgres import PostgresServer

HOUR_MS = 3_600_000


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.database)])
async def test_case_29_only_what_finished_long_ago_is_purged(kind: str, request: pytest.FixtureRequest) -> None:
    class Parameter:
        param = kind
        getfixturevalue = request.getfixturevalue

    parameter: Any = Parameter()
    url = empty_store(parameter)
    async with stores() as open_one:
        opened: OpenStore = open_one
        store = await opened(url)
        now_ms = store.now_ms()
        old_ms = now_ms - 30 * HOUR_MS
        finished, unfinished, fresh, slow = ([], [], [], [])
        for n in range(1_300):
            stamp = (old_ms + n).to_bytes(6, "big") + n.to_bytes(10, "big")
            finished.append(new_row()._replace(xid=stamp, wake_ms=None, state=3, updated_ms=old_ms, created_ms=old_ms))
        for n in range(3):
            stamp = (old_ms + n).to_bytes(6, "big") + (90_000 + n).to_bytes(10, "big")
            unfinished.append(new_row()._replace(xid=stamp, state=1, updated_ms=old_ms, created_ms=old_ms))
            stamp = (old_ms + n).to_bytes(6, "big") + (80_000 + n).to_bytes(10, "big")
            slow.append(new_row()._replace(xid=stamp, wake_ms=None, state=5, updated_ms=now_ms, created_ms=old_ms))
            stamp = now_ms.to_bytes(6, "big") + n.to_bytes(10, "big")
            fresh.append(new_row()._replace(xid=stamp, wake_ms=None, state=3, updated_ms=now_ms, created_ms=now_ms))
        for start in range(0, len(finished), 500):
            await store.flush(Batch(finished[start : start + 500], ()))
        await store.flush(Batch([*unfinished, *slow, *fresh], ()))
        purges = [Purge(store, 26 * HOUR_MS, 1_000) for _ in range(2)]
        deleted = await asyncio.gather(*(purge.once() for purge in purges))
        assert sum(deleted) == 1_300
        for row in (*unfinished, *slow, *fresh):
            assert await store.get(xid=row.xid) is not None
        assert await store.get(xid=finished[700].xid) is None
        assert await purges[0].once() == 0


def test_a_store_of_the_version_before_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "tricord.db"
    with CoordinatorProcess(store=path):
        pass
    with closing(sqlite3.connect(path)) as connection:  # as the version before has left it
        connection.execute("DROP TABLE tricord_participant_address")
        connection.execute("ALTER TABLE tricord_store DROP COLUMN format")
        connection.execute("ALTER TABLE tricord_store DROP COLUMN oldest_program")
        connection.execute("UPDATE tricord_schema_version SET version_num = '0001'")
        connection.commit()
    refused = tricord("serve", "--store", str(path))
    assert refused.returncode == 1
    assert "tricord migrate" in refused.stderr
    told = tricord("migrate", "--store", str(path), "--dry-run")
    assert "schema revision 0001, this version has 0002" in told.stdout
    assert '"format": 1' in tricord("migrate", "--store", str(path), "-o", "json").stdout
    with CoordinatorProcess(store=path):
        busy = tricord("migrate", "--store", str(path), "--finish")
        assert (busy.returncode, "another coordinator" in busy.stderr) == (1, True)
    assert "format 2, for programs from format 2" in tricord("migrate", "--store", str(path), "--finish").stdout
    assert tricord("migrate", "--store", str(path), "--finish").returncode == 0
    nowhere = tricord("migrate", "--store", "mysql://h/x")
    assert (nowhere.returncode, "store" in nowhere.stderr) == (1, True)


@pytest.mark.database
def test_health_is_false_while_the_store_is_away(own_server: PostgresServer) -> None:
    store = own_server.create_database()
    with CoordinatorProcess(store=store, lease_ms=2_000, call_timeout_ms=1_000) as coordinator:
        stub: Any = health_pb2_grpc.HealthStub(coordinator.channel())
        request = health_pb2.HealthCheckRequest(service="tricord.v1.CoordinatorService")
        watching = stub.Watch(request, timeout=CALL_S)
        serving, not_serving = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        assert next(watching).status == serving
        own_server.kill()
        assert next(watching).status == not_serving
        own_server.start()
        assert next(watching).status == serving
        watching.cancel()
        with pytest.raises(grpc.RpcError):
            next(watching)


async def test_settings_of_a_purge_that_keeps_everything(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "tricord.db"))
    purge = Purge(store, 0, 1)
    purge.start()
    await purge.stop()
    assert purge.deleted == 0
    await store.close()
