"""The coordinator's store in the long run: purged, migrated, away for a while."""

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from coordinator.purge import Purge
from coordinator.store.rows import Batch
from tests.contract.rows import new_row, open_store
from tests.contract.stores import OpenStore, empty_store, stores
from tests.coordinators import CoordinatorProcess, tricord
from tests.postgres import free_port

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
        for table in ("participant_address", "label", "audit"):
            connection.execute(f"DROP TABLE tricord_{table}")
        for column in ("store DROP COLUMN format", "store DROP COLUMN oldest_program"):
            connection.execute(f"ALTER TABLE tricord_{column}")
        for column in ("claims", "claimed_version"):
            connection.execute(f"ALTER TABLE tricord_transaction DROP COLUMN {column}")
        connection.execute("UPDATE tricord_schema_version SET version_num = '0001'")
        connection.commit()
    refused = tricord("serve", "--store", str(path))
    assert refused.returncode == 1
    assert "tricord migrate" in refused.stderr
    told = tricord("migrate", "--store", str(path), "--dry-run")
    assert "schema revision 0001, this version has 0003" in told.stdout
    assert '"format": 1' in tricord("migrate", "--store", str(path), "-o", "json").stdout
    with CoordinatorProcess(store=path):
        busy = tricord("migrate", "--store", str(path), "--finish")
        assert (busy.returncode, "another coordinator" in busy.stderr) == (1, True)
    assert "format 3, for programs from format 3" in tricord("migrate", "--store", str(path), "--finish").stdout
    assert tricord("migrate", "--store", str(path), "--finish").returncode == 0
    nowhere = tricord("migrate", "--store", "mysql://h/x")
    assert (nowhere.returncode, "store" in nowhere.stderr) == (1, True)


class TestMigrateDryRun:
    """It only looks."""

    @pytest.mark.parametrize("store", ["tricord.db", "sqlite:///tricord.db", None])
    def test_a_file_that_is_not_there_is_not_made(self, tmp_path: Path, store: str | None) -> None:
        flags = ["--store", store] if store else []
        told = tricord("migrate", "--dry-run", *flags, cwd=tmp_path)
        assert (told.returncode, told.stderr) == (0, "")
        assert "tricord.db: schema revision (no tables yet)" in told.stdout
        assert list(tmp_path.iterdir()) == []
        assert tricord("migrate", *flags, cwd=tmp_path).returncode == 0
        assert "schema revision 0003" in tricord("migrate", "--dry-run", *flags, cwd=tmp_path).stdout

    def test_a_store_at_work_is_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "a store?.db"
        with CoordinatorProcess(store=path):
            told = tricord("migrate", "--dry-run", "--finish", "-o", "json", "--store", str(path))
            assert json.loads(told.stdout)["revision"] == "0003"
        path.with_name(path.name + ".lock").unlink()
        before = path.read_bytes()
        assert tricord("migrate", "--dry-run", "--store", str(path)).returncode == 0
        assert [file.name for file in tmp_path.iterdir()] == [path.name]
        assert path.read_bytes() == before

    def test_what_is_no_store(self, tmp_path: Path) -> None:
        letter = tmp_path / "letter.txt"
        letter.write_text("Dear Sir or Madam, " * 100)
        for store, complaint in ((letter, "SQLite"), (tmp_path / "no" / "tricord.db", "folder"), (tmp_path, "SQLite")):
            told = tricord("migrate", "--dry-run", "--store", str(store))
            assert (told.returncode, told.stdout) == (1, "")
            assert complaint in told.stderr
            assert str(store) in told.stderr
        assert list(tmp_path.iterdir()) == [letter]

    @pytest.mark.database
    def test_an_empty_database_stays_empty(self, pg_database: str) -> None:
        told = tricord("migrate", "--dry-run", "--store", pg_database)
        assert "(no tables yet)" in told.stdout
        with psycopg.connect(pg_database) as connection:
            assert connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)

    def test_a_server_that_is_away(self) -> None:
        told = tricord("migrate", "--dry-run", "--store", f"postgresql://me:s3cret@127.0.0.1:{free_port()}/tricord")
        assert (told.returncode, "cannot be reached" in told.stderr, "s3cret" in told.stderr) == (5, True, False)


def test_migrate_uses_the_store_that_serve_would_use(tmp_path: Path) -> None:
    def migrated(*flags: str, **env: str) -> str:
        run = tricord("migrate", "-o", "json", *flags, env=env, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        return str(json.loads(run.stdout)["store"])

    for name in ("file", "other"):
        (tmp_path / f"{name}.toml").write_text(f'store = "{name}.db"\nlog_level = "error"\n')
    assert migrated(TRICORD_CONFIG="file.toml") == "file.db"
    assert migrated("--config", "other.toml", TRICORD_CONFIG="file.toml") == "other.db"
    assert migrated(TRICORD_CONFIG="file.toml", TRICORD_STORE="env.db") == "env.db"
    assert migrated("--store", "flag.db", TRICORD_CONFIG="file.toml", TRICORD_STORE="env.db") == "flag.db"
    assert migrated() == "./tricord.db"
    assert {path.name for path in tmp_path.glob("*.db")} == {"file.db", "other.db", "env.db", "flag.db", "tricord.db"}
    (tmp_path / "wrong.toml").write_text('stoer = "file.db"\n')
    for flags, complaint in (
        (["--config", "wrong.toml"], "unknown setting stoer"),
        (["--config", "none.toml"], "cannot be read"),
    ):
        refused = tricord("migrate", *flags, cwd=tmp_path)
        assert (refused.returncode, complaint in refused.stderr) == (2, True)


async def test_settings_of_a_purge_that_keeps_everything(tmp_path: Path) -> None:
    store = await open_store(str(tmp_path / "tricord.db"))
    purge = Purge(store, 0, 1)
    purge.start()
    await purge.stop()
    assert purge.deleted == 0
    await store.close()
