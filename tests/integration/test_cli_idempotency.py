"""`tricord idempotency`, as people and scripts use it: exit codes, what is printed where, and what is never printed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from participant_sdk.idempotency.fronts import front_key
from participant_sdk.idempotency.keys import key_hash
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.redis_front import RedisFront
from participant_sdk.idempotency.stores import store_of
from participant_sdk.idempotency.tables import DEFAULT, IdempotencyTables
from participant_sdk.steps import run as run_script
from tests.contract.idempotency.rows import HOUR_MS, Shelf, key_of
from tests.coordinators import tricord
from tests.mariadb import asyncmy_url, pymysql_url

from .test_cli import NOT_FOUND, OK, UNAVAILABLE, USAGE, fails
from .test_completion import completed_by_bash, path

CONFLICT = 4
KEY = "a-secret-key-of-order-1"
HASH = key_hash("default", "acme", "orders.create", KEY)
__all__ = ["path"]  # a fixture


class Filled:
    """A SQLite file with records, and the command on it."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return tricord("idempotency", *arguments, env={"TRICORD_IDEMPOTENCY_DATABASE": self.shelf.url})

    def asked(self, *arguments: str) -> Any:
        run = self.run(*arguments, "-o", "json")
        assert (run.returncode, run.stderr) == (OK, ""), run.stderr
        return json.loads(run.stdout)


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Filled]:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    engine = create_engine(url)
    DEFAULT.metadata.create_all(engine)
    shelf = Shelf(url, url, engine, DEFAULT)
    shelf.put(1, left_ms=HOUR_MS, key_hash=HASH, key_hint="a-se")
    shelf.put(2, State.UNKNOWN, reason="the bank\x1b[2J did not answer")
    shelf.put(3, State.PROCESSING, lease_left_ms=HOUR_MS)
    shelf.put(4, State.PROCESSING, lease_left_ms=-HOUR_MS, age_ms=2 * HOUR_MS)
    shelf.put(5, left_ms=-1, tenant="umbrella")
    yield Filled(shelf)
    engine.dispose()


def test_a_list_for_programs(filled: Filled) -> None:
    everything = filled.asked("list")
    assert len(everything["records"]) == 5
    assert everything["next_page_token"] == ""
    (unknown,) = filled.asked("list", "--state", "unknown")["records"]
    assert (unknown["state"], unknown["tenant"], unknown["operation"]) == ("UNKNOWN", "acme", "orders.create")
    assert unknown["key_hash"] == key_of(2).hex()
    (lapsed,) = filled.asked("list", "--lapsed", "--older-than", "1h")["records"]
    assert lapsed["lapsed"]
    assert lapsed["lease_left_ms"] <= -HOUR_MS
    lines = filled.run("list", "--tenant", "acme", "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line)["tenant"] for line in lines] == ["acme"] * 4
    assert filled.asked("list", "--tenant", "nobody")["records"] == []


def test_pages(filled: Filled) -> None:
    first = filled.asked("list", "--limit", "3")
    rest = filled.asked("list", "--limit", "3", "--page-token", first["next_page_token"])
    hashes = [record["key_hash"] for page in (first, rest) for record in page["records"]]
    assert len(set(hashes)) == 5
    assert rest["next_page_token"] == ""
    told = filled.run("list", "--limit", "3")
    assert told.stderr == f"more: --page-token {first['next_page_token']}\n"


def test_one_record(filled: Filled) -> None:
    by_key = filled.asked("show", KEY, "--operation", "orders.create", "--tenant", "acme")
    by_hash = filled.asked("show", "--hash", HASH.hex().upper())
    for facts in (by_key, by_hash):
        del facts["age_ms"], facts["completed_ago_ms"], facts["expires_left_ms"]
    assert by_key == by_hash
    assert by_key["answer"] == {"codec": "HTTP", "status": 201, "body_bytes": 2}


def test_a_key_is_never_printed_nor_is_what_moves_the_cursor(filled: Filled) -> None:
    whose = ("--operation", "orders.create", "--tenant", "acme")
    runs = [
        filled.run("show", KEY, *whose),
        filled.run("show", KEY, "--operation", "orders.create", "--tenant", "umbrella"),
        filled.run("resolve", KEY, *whose, "--as", "tombstone", "--reason", "x"),
        filled.run("purge", KEY, *whose),
        filled.run("list"),
        filled.run("list", "-o", "json"),
    ]
    for run in runs:
        assert KEY[:8] not in run.stdout + run.stderr
        assert "\x1b" not in run.stdout + run.stderr
    assert "a-se…" in runs[0].stdout


def test_counts(filled: Filled) -> None:
    facts = filled.asked("stats")
    assert {each["state"]: (each["records"], each["lapsed"], each["expired"]) for each in facts["states"]} == {
        "PROCESSING": (2, 1, 0), "SUCCEEDED": (2, 0, 1), "UNKNOWN": (1, 0, 0),
    }  # fmt: skip
    assert facts["oldest_processing"]["key_hash"] == key_of(4).hex()
    assert facts["oldest_unknown"]["key_hash"] == key_of(2).hex()


def test_an_answer_out_of_a_file(filled: Filled, tmp_path: Path) -> None:
    body = tmp_path / "answer"
    body.write_bytes(b"\x00\xffpaid")
    facts = filled.asked(
        "resolve", "--hash", key_of(2).hex(), "--as", "succeeded", "--status", "201", "--header", "X-Shop: 1",
        "--body-file", str(body), "--reason", "it is paid", "--actor", "alice", "--yes",
    )  # fmt: skip
    assert facts["state"] == "SUCCEEDED"
    assert facts["reason"] == "alice: it is paid"
    row = filled.shelf.row(2)
    assert (row.status, bytes(row.body)) == (201, b"\x00\xffpaid")
    again = filled.run("resolve", "--hash", key_of(2).hex(), "--as", "tombstone", "--reason", "twice", "--yes")
    fails(again, CONFLICT, "it is SUCCEEDED: only what is UNKNOWN can be resolved")


def test_what_is_live_stays(filled: Filled) -> None:
    live, lapsed = key_of(3).hex(), key_of(4).hex()
    word = ("--as", "failed_retryable", "--reason", "gone", "--yes")
    for more in ((), ("--force",)):
        fails(filled.run("resolve", "--hash", live, *word, *more), CONFLICT, "it is being run")
        fails(filled.run("purge", "--hash", live, "--yes", *more), CONFLICT, "it is being run")
    fails(filled.run("resolve", "--hash", lapsed, *word), CONFLICT, "with force")
    assert filled.asked("resolve", "--hash", live, *word, "--live")["state"] == "FAILED_RETRYABLE"
    filled.shelf.put(6, State.PROCESSING, lease_left_ms=HOUR_MS)
    assert filled.asked("resolve", "--hash", lapsed, *word, "--force")["state"] == "FAILED_RETRYABLE"
    assert filled.asked("purge", "--operation", "orders.create", "--force", "--yes")["count"] == 5
    assert filled.shelf.numbers() == [6]


def test_nothing_is_deleted_unasked(filled: Filled) -> None:
    for arguments in (
        ("purge", "--tenant", "umbrella"),
        ("purge", "--hash", HASH.hex()),
        ("resolve", "--hash", key_of(2).hex(), "--as", "tombstone", "--reason", "x"),
    ):
        fails(filled.run(*arguments), USAGE, "say --yes")
    assert filled.asked("purge", "--tenant", "umbrella", "--dry-run") == {"count": 1, "dry_run": True}
    assert filled.asked("purge", "--hash", HASH.hex(), "--dry-run") == {"count": 1, "dry_run": True}
    assert filled.shelf.count() == 5


def test_purge_reaches_the_front_in_redis(filled: Filled, redis_url: str) -> None:
    store = store_of(filled.shelf.engine.dialect, filled.shelf.tables)
    with filled.shelf.engine.connect() as connection:
        identity = run_script(store.identity(), connection)
        record = run_script(store.read(HASH), connection)
    assert record is not None
    front = RedisFront.connect(redis_url, timeout_s=1)
    held = replace(record, key_hash=front_key(identity, HASH))
    front.put(held)
    assert front.get(held.key_hash) is not None
    gone = filled.run("purge", "--hash", HASH.hex(), "--redis", "redis://127.0.0.1:1", "--yes")
    fails(gone, UNAVAILABLE, "a front could not be told, and nothing is deleted")
    fails(filled.run("purge", "--hash", HASH.hex(), "--redis", "cache", "--yes"), USAGE, "the address of Redis")
    assert front.get(held.key_hash) is not None
    assert filled.asked("purge", "--tenant", "acme", "--redis", redis_url, "--yes")["count"] == 1
    assert front.get(held.key_hash) is None
    front.close()


def test_an_export_is_all_that_is_stored(filled: Filled) -> None:
    filled.shelf.put_many(range(100, 205), left_ms=HOUR_MS, tenant="many", headers=None)
    run = filled.run("export", "--tenant", "acme")
    assert (run.returncode, run.stderr) == (OK, "")
    records = {record["key_hash"]: record for record in map(json.loads, run.stdout.splitlines())}
    assert len(records) == 4
    answer = {"codec": "HTTP", "status": 201, "body_bytes": 2, "headers": [], "body_base64": "e30="}
    assert records[HASH.hex()]["answer"] == answer
    assert records[key_of(2).hex()]["answer"] is None
    assert len(filled.run("export", "--tenant", "many").stdout.splitlines()) == 105


def test_sweep_and_extend(filled: Filled) -> None:
    assert filled.asked("extend", "--hash", HASH.hex(), "--ttl", "7d")["expires_left_ms"] > 6 * 24 * HOUR_MS
    fails(filled.run("extend", "--hash", key_of(5).hex(), "--ttl", "1d"), CONFLICT, "it has expired")
    report = filled.asked("sweep")
    assert (report["deleted"], report["processing"], report["lapsed"], report["error"]) == (1, 2, 1, "")
    assert filled.shelf.count() == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show",), "name the record by KEY"),
        (("show", "k", "--hash", "00" * 32), "name the record by KEY"),
        (("show", "--hash", "12"), "is not 64 hexadecimal digits"),
        (("show", "--hash", "zz" * 32), "is not 64 hexadecimal digits"),
        (("list", "--state", "DONE"), "'DONE' is not one of"),
        (("list", "--older-than", "yesterday"), "'yesterday' is no age; write 30s, 5m, 2h or 1d"),
        (("list", "--limit", "0"), "0 is not in the range"),
        (("list", "--page-token", "x"), "is not 64 hexadecimal digits"),
        (("list", "--table", "x" * 60), "records_name"),
        (("list", "--table", "no_such_table"), "there is no table no_such_table in the database"),
        (("purge",), "name a record, or say which"),
        (("purge", "--force", "--yes"), "name a record, or say which"),
        (("purge", "k", "--state", "UNKNOWN"), "go without KEY and --hash"),
        (("purge", "k", "--hash", "00" * 32), "name the record by KEY"),
        (("extend", "k"), "Missing option '--ttl'"),
        (("extend", "--hash", HASH.hex(), "--ttl", "0s"), "ttl_s 0 is not 1 to"),
        (("sweep", "--rows-per-s", "0"), "0 is not in the range"),
        (("resolve", "k", "--reason", "x"), "Missing option '--as'"),
        (("resolve", "k", "--as", "tombstone"), "Missing option '--reason'"),
        (("resolve", "k", "--as", "succeeded", "--reason", "x"), "--as succeeded needs the answer"),
        (("resolve", "k", "--as", "tombstone", "--status", "200", "--reason", "x"), "stores no answer"),
        (("resolve", "k", "--as", "succeeded", "--status", "99", "--reason", "x"), "99 is not in the range"),
        (
            ("resolve", "k", "--as", "succeeded", "--status", "200", "--header", "nonsense", "--reason", "x"),
            "is not 'NAME: VALUE'",
        ),
        (
            ("resolve", "k", "--as", "succeeded", "--status", "200", "--header", "a: b\r\nc: d", "--reason", "x"),
            "is not 'NAME: VALUE'",
        ),
        (
            ("resolve", "--hash", key_of(2).hex(), "--as", "tombstone", "--reason", " ", "--yes"),
            "reason is not 1 to",
        ),
        (
            ("resolve", "--hash", key_of(2).hex(), "--as", "tombstone", "--reason", "x" * 3_000, "--yes"),
            "reason is not 1 to",
        ),
    ],
)
def test_wrong_usage(filled: Filled, arguments: tuple[str, ...], said: str) -> None:
    before = filled.shelf.row(2)
    fails(filled.run(*arguments), USAGE, said)
    assert filled.shelf.row(2) == before
    assert filled.shelf.count() == 5


def test_no_such_record(filled: Filled) -> None:
    nobody = ("--hash", "00" * 32)
    fails(filled.run("show", *nobody), NOT_FOUND, "no record under that key")
    fails(filled.run("purge", *nobody, "--yes"), NOT_FOUND, "no record under that key")
    fails(filled.run("show", KEY, "--operation", "orders.create"), NOT_FOUND, "no record under that key")
    fails(filled.run("show", KEY, "--operation", "orders.create", "--tenant", "acme", "--namespace", "x"), NOT_FOUND)


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("postgresql://bob:hunter2@127.0.0.1:1/shop", UNAVAILABLE, "the database cannot be reached"),
        ("mysql://bob:hunter2@127.0.0.1:1/shop", UNAVAILABLE, "the database cannot be reached"),
        ("sqlite:////no/such/hunter2.db", USAGE, "there is no file"),
        ("sqlite://", USAGE, "there is no file"),
        ("hunter2", USAGE, "no address of SQLAlchemy's"),
        ("oracle://bob:hunter2@127.0.0.1/shop", USAGE, ""),
        ("nonsense://bob:hunter2@127.0.0.1/shop", USAGE, "no address of SQLAlchemy's"),
        ("postgresql://bob:hunter2@127.0.0.1:port/shop", USAGE, "no address of SQLAlchemy's"),
    ],
)
def test_a_database_that_is_none(url: str, code: int, said: str) -> None:
    run = tricord("idempotency", "stats", "--database", url)
    fails(run, code, said)
    if "no/such" not in url:
        assert "hunter2" not in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_another_table(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    engine = create_engine(url)
    tables = IdempotencyTables("shop_keys")
    tables.metadata.create_all(engine)
    Shelf(url, url, engine, tables).put(1, left_ms=HOUR_MS)
    engine.dispose()
    run = tricord("idempotency", "list", "--database", url, "--table", "shop_keys", "-o", "json")
    assert len(json.loads(run.stdout)["records"]) == 1
    statement = tricord("idempotency", "ddl", "--dialect", "sqlite", "--table", "more_keys").stdout
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(statement.strip().removesuffix(";"))
    engine.dispose()
    run = tricord("idempotency", "stats", "--database", url, "--table", "more_keys")
    assert (run.returncode, run.stdout) == (OK, "STATE  RECORDS  OLDEST  EXPIRED  LAPSED\n")


def test_a_service_with_asyncio_has_the_same_address(filled: Filled) -> None:
    url = filled.shelf.url.replace("sqlite:", "sqlite+aiosqlite:")
    assert tricord("idempotency", "stats", "--database", url).returncode == OK


def test_a_database_that_is_damaged(tmp_path: Path) -> None:
    damaged = tmp_path / "shop.db"
    damaged.write_bytes(b"not a database" * 100)
    fails(tricord("idempotency", "stats", "--database", f"sqlite:///{damaged}"), UNAVAILABLE, "cannot be reached")


def test_completion(path: str) -> None:
    assert completed_by_bash("tricord idempotency ", path) == [
        "ddl", "export", "extend", "list", "purge", "resolve", "show", "stats", "sweep",
    ]  # fmt: skip
    assert completed_by_bash("tricord idempotency resolve --as f", path) == ["failed_final", "failed_retryable"]


def test_on_mariadb(mariadb_database: str) -> None:
    """By the address that any client has, and by that of a service with asyncio."""
    engine = create_engine(pymysql_url(mariadb_database))
    DEFAULT.metadata.create_all(engine)
    shelf = Shelf(mariadb_database, mariadb_database, engine, DEFAULT)
    shelf.put(1, State.UNKNOWN)
    shelf.put(2, left_ms=-1)
    filled = Filled(shelf)
    assert len(filled.asked("list", "--state", "UNKNOWN")["records"]) == 1
    word = ("--as", "tombstone", "--reason", "it took 12 €", "--actor", "alice", "--yes")
    assert filled.asked("resolve", "--hash", key_of(1).hex(), *word)["reason"] == "alice: it took 12 €"
    filled.shelf.url = asyncmy_url(mariadb_database)
    assert filled.asked("sweep")["deleted"] == 1
    assert shelf.numbers() == [1]
    engine.dispose()
