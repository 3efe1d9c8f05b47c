"""The command, as people and scripts use it: processes, exit codes, what is printed where."""

import json
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from tests.coordinators import (
    CALL_S,
    CoordinatorProcess,
    branch,
    execute_request,
    states,
    tricord,
)
from tests.postgres import free_port
from tricord.v1 import coordinator_pb2 as pb

from .participant_server import ParticipantServer, done, refuse

OK, ERROR, USAGE, NOT_FOUND, UNAVAILABLE = 0, 1, 2, 3, 5


def fails(run: subprocess.CompletedProcess[str], code: int, *said: str) -> None:
    """It ended with this code, and told on standard error what is wrong, without a traceback."""
    assert run.returncode == code, run.stderr
    assert run.stdout == ""
    assert "Traceback" not in run.stderr
    for words in said:
        assert words in run.stderr


class Filled:
    """A coordinator with three transactions."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self.endpoint = coordinator.endpoint
        service = coordinator.coordinator_service()
        requests = [
            execute_request(branch(), branch("shop", "credit"), key="confirmed"),
            execute_request(branch(data=b"no"), key="refused"),
            execute_request(branch(data=b"stuck"), key="stuck", wait=pb.WAIT_DECIDED),
        ]
        transactions = [service.Execute(request, timeout=CALL_S).transaction for request in requests]
        assert [states(tx)[0] for tx in transactions] == ["CONFIRMED", "CANCELLED", "CONFIRMING"]
        self.xids = [tx.xid for tx in transactions]
        while service.Get(pb.GetRequest(xid=self.xids[2]), timeout=CALL_S).transaction.branches[0].attempts < 2:
            pass

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command, with this coordinator's address in the environment."""
        return tricord(*arguments, env={"TRICORD_ENDPOINT": self.endpoint})

    def listed(self, *arguments: str) -> list[str]:
        """The xids that ``list`` prints."""
        run = self.run("list", "-o", "json", *arguments)
        assert (run.returncode, run.stderr) == (OK, "")
        return [tx["xid"] for tx in json.loads(run.stdout)["transactions"]]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """One for all tests: they only read."""
    store = tmp_path_factory.mktemp("cli") / "tricord.db"
    with CoordinatorProcess(store=store, backoff_cap_ms=100, drain_ms=0) as coordinator, ParticipantServer() as server:

        def answer(call: object) -> object:
            data = call.payload.data  # type: ignore[attr-defined]
            if data == b"no":
                return refuse(call)  # type: ignore[arg-type]
            reply = done(call)  # type: ignore[arg-type]
            if data == b"stuck" and call.phase == 2:  # type: ignore[attr-defined]
                reply.outcome, reply.error = 3, "the ledger is closed"  # type: ignore[assignment]
            return reply

        server.answer = answer  # type: ignore[assignment]
        coordinator.register("bank", server.address)
        coordinator.register("shop", server.address)
        yield Filled(coordinator)


class TestListAndShow:
    """What operators look at."""

    def test_list_as_json(self, filled: Filled) -> None:
        run = filled.run("list", "-o", "json")
        page = json.loads(run.stdout)
        assert [tx["xid"] for tx in page["transactions"]] == filled.xids[::-1]
        assert page["next_page_token"] == ""
        newest = page["transactions"][0]
        assert (newest["state"], newest["idempotency_key"], newest["timeout_ms"]) == ("CONFIRMING", "stuck", 30_000)
        assert newest["branches"][0]["last_error"] == "the ledger is closed"

    def test_list_as_a_table(self, filled: Filled) -> None:
        run = filled.run("list")
        head, *rows = run.stdout.splitlines()
        # The stuck one may have been tried often enough by now to want attention; else that column is left out.
        assert [name for name in head.split() if name != "ATTENTION"] == ["XID", "STATE", "CREATED", "BRANCHES"]
        assert [row.split()[0] for row in rows] == filled.xids[::-1]
        assert [row.split()[1] for row in rows] == ["CONFIRMING", "CANCELLED", "CONFIRMED"]
        assert "bank.debit, shop.credit" in rows[2]

    def test_filters(self, filled: Filled) -> None:
        confirmed, cancelled, stuck = filled.xids
        assert filled.listed("--state", "confirmed") == [confirmed]
        assert filled.listed("--state", "CONFIRMING", "--state", "CANCELLED") == [stuck, cancelled]
        assert filled.listed("--participant", "shop") == [confirmed]
        assert filled.listed("--older-than", "1d") == []
        assert filled.listed("--older-than", "0s") == filled.xids[::-1]

    def test_pages(self, filled: Filled) -> None:
        first = filled.run("list", "--limit", "2")
        assert first.stderr.startswith("more: --page-token ")
        token = first.stderr.split()[-1]
        assert filled.listed("--limit", "2", "--page-token", token) == filled.xids[:1]

    def test_show(self, filled: Filled) -> None:
        run = filled.run("show", filled.xids[1], "-o", "json")
        (line,) = filled.run("show", filled.xids[1], "-o", "jsonl").stdout.splitlines()
        assert json.loads(line) == json.loads(run.stdout)
        tx = json.loads(run.stdout)
        assert run.returncode == OK
        assert (tx["xid"], tx["state"]) == (filled.xids[1], "CANCELLED")
        assert tx["branches"][0]["refusal"] == {"reason": "insufficient_funds", "message": "only 3 left"}
        assert tx["decide_time"] >= tx["create_time"]
        table = filled.run("show", filled.xids[2]).stdout
        for words in (filled.xids[2], "CONFIRMING", "TRIED", "the ledger is closed", "timeout_ms", "NEXT ATTEMPT"):
            assert words in table

    def test_exit_codes(self, filled: Filled) -> None:
        fails(filled.run("show", "0" * 32), NOT_FOUND, "there is no transaction")
        fails(filled.run("show", "nonsense"), USAGE, "xid", "32 hexadecimal digits")
        fails(filled.run("list", "--page-token", "nonsense"), USAGE, "page_token")
        fails(filled.run("list", "--participant", "a\nb"), USAGE, "participant")
        fails(filled.run("list", "--state", "DONE"), USAGE, "trying", "DONE")
        fails(filled.run("list", "--limit", "1001"), USAGE, "1000")
        fails(filled.run("list", "--older-than", "5 parsecs"), USAGE, "30s, 5m, 2h or 1d")
        fails(filled.run("nonsense"), USAGE, "No such command")

    def test_nobody_there(self) -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        fails(tricord("list", "--endpoint", endpoint), UNAVAILABLE, endpoint, "TRICORD_ENDPOINT")
        fails(tricord("show", "0" * 32, "--endpoint", endpoint), UNAVAILABLE, endpoint)

    def test_arguments_that_are_no_text(self, filled: Filled) -> None:
        run = tricord("show", b"\xff\xfe", env={"TRICORD_ENDPOINT": filled.endpoint})
        fails(run, USAGE, "XID", "UTF-8")

    def test_an_age_beyond_all(self, filled: Filled) -> None:
        run = filled.run("list", "--older-than", "999999999d", "--limit", "1")
        assert "Traceback" not in run.stderr
        assert run.returncode in (OK, USAGE)


class TestServeRefuses:
    """A coordinator that cannot start says why, in one line."""

    def serve(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return tricord("serve", "--listen", f"127.0.0.1:{free_port()}", *arguments, cwd=cwd)

    def test_a_port_in_use(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", free_port())) as taken:
            listen = f"127.0.0.1:{taken.getsockname()[1]}"
            run = tricord("serve", "--listen", listen, "--store", str(tmp_path / "tricord.db"))
        fails(run, ERROR, listen, "in use", "--listen")

    def test_a_port_in_use_by_another_coordinator(self, tmp_path: Path) -> None:
        with CoordinatorProcess(store=tmp_path / "one.db") as one:
            run = tricord("serve", "--listen", one.listen, "--store", str(tmp_path / "two.db"))
            fails(run, ERROR, one.listen, "in use")

    def test_an_address_that_is_none(self, tmp_path: Path) -> None:
        for listen in ("nonsense", "127.0.0.1:99999", "203.0.113.1:7800"):
            run = tricord("serve", "--listen", listen, "--store", str(tmp_path / "tricord.db"))
            assert run.returncode in (ERROR, USAGE)
            fails(run, run.returncode, "listen", listen)

    def test_a_second_coordinator_on_one_file(self, tmp_path: Path) -> None:
        path = tmp_path / "tricord.db"
        with CoordinatorProcess(store=path) as first:
            for name in (str(path), f"sqlite:///{path}"):
                fails(self.serve("--store", name), ERROR, "another coordinator", str(path), "PostgreSQL")
            assert first.kill() == -9
        with CoordinatorProcess(store=path):  # a lock does not outlive its holder
            pass

    def test_a_store_of_a_newer_schema(self, tmp_path: Path) -> None:
        path = tmp_path / "tricord.db"
        with CoordinatorProcess(store=path):
            pass
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE tricord_schema_version SET version_num = '9999'")
            connection.execute("UPDATE tricord_store SET oldest_program = 99")
            connection.commit()
        fails(self.serve("--store", str(path)), ERROR, "99", "newer")
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT version_num FROM tricord_schema_version").fetchone() == ("9999",)

    @pytest.mark.database
    def test_a_postgresql_store_of_a_newer_schema(self, pg_database: str) -> None:
        with CoordinatorProcess(store=pg_database):
            pass
        with psycopg.connect(pg_database) as connection:
            connection.execute("UPDATE tricord_schema_version SET version_num = '9999'")
            connection.execute("UPDATE tricord_store SET oldest_program = 99")
        fails(self.serve("--store", pg_database), ERROR, "99", "newer")

    def test_an_unreachable_postgresql(self) -> None:
        port = free_port()
        run = self.serve("--store", f"postgresql://tricord:s3cret@127.0.0.1:{port}/tricord")
        fails(run, UNAVAILABLE, "cannot be reached", str(port))
        assert "s3cret" not in run.stderr

    @pytest.mark.parametrize("store", ["postgresql://[nonsense", "mysql://localhost/x", "postgresql://h:port/x"])
    def test_a_store_url_that_is_none(self, store: str) -> None:
        run = self.serve("--store", store)
        assert run.returncode in (ERROR, USAGE, UNAVAILABLE)
        fails(run, run.returncode, "store")

    def test_a_file_that_is_no_store(self, tmp_path: Path) -> None:
        path = tmp_path / "letter.txt"
        path.write_text("Dear Sir or Madam, " * 100)
        fails(self.serve("--store", str(path)), ERROR, str(path), "SQLite")
        fails(self.serve("--store", str(tmp_path / "no" / "folder.db")), ERROR, "folder")
        fails(self.serve("--store", str(tmp_path)), ERROR, str(tmp_path))

    def test_wrong_settings(self, tmp_path: Path) -> None:
        fails(self.serve("--lease-ms", "soon"), USAGE, "lease_ms", "--lease-ms", "soon")
        fails(self.serve("--lease-ms", "1000"), USAGE, "lease_ms (1000)", "call_timeout_ms (5000)")
        fails(self.serve("--config", str(tmp_path / "none.toml")), USAGE, "none.toml", "cannot be read")
        config = tmp_path / "wrong.toml"
        config.write_text("leas_ms = 5\n")
        fails(self.serve("--config", str(config)), USAGE, "unknown setting leas_ms", "lease_ms")
        fails(self.serve("--nonsense"), USAGE, "--nonsense")
        assert not list(tmp_path.glob("*.db"))


def test_stop_by_sigterm_is_in_order(tmp_path: Path) -> None:
    coordinator = CoordinatorProcess(store=tmp_path / "tricord.db")
    coordinator.start()
    assert coordinator.stop() == OK
    assert len(coordinator.log("coordinator.stopped")) == 1
    assert "Traceback" not in coordinator.text_log()


class TestConfigShow:
    """The effective settings."""

    def test_masks_passwords_and_tells_origins(self, tmp_path: Path) -> None:
        config = tmp_path / "tricord.toml"
        config.write_text('log_level = "warning"\nlease_ms = 11000\ndrain_ms = 1\n')
        run = tricord(
            "config", "show", "-o", "json", "--config", str(config), "--drain-ms", "3", "--store",
            "postgresql://me:s3cret@db/tricord", env={"TRICORD_LEASE_MS": "12000", "TRICORD_DRAIN_MS": "2"},
        )  # fmt: skip
        shown = json.loads(run.stdout)
        assert shown["store"] == {"value": "postgresql://me:***@db/tricord", "from": "flag --store"}
        assert shown["drain_ms"] == {"value": 3, "from": "flag --drain-ms"}
        assert shown["lease_ms"] == {"value": 12000, "from": "environment TRICORD_LEASE_MS"}
        assert shown["log_level"] == {"value": "warning", "from": f"file {config}"}
        assert shown["timeout_ms"] == {"value": 30000, "from": "default"}
        table = tricord("config", "show", "--store", "postgresql://me:s3cret@db/tricord").stdout
        assert "s3cret" not in table
        assert "flag --store" in table

    def test_a_password_in_the_query_is_masked_too(self) -> None:
        run = tricord("config", "show", "--store", "postgresql://db/tricord?user=me&password=s3cret")
        assert run.returncode == OK
        assert "s3cret" not in run.stdout

    def test_a_url_that_is_none(self) -> None:
        run = tricord("config", "show", "--store", "postgresql://[nonsense")
        assert "Traceback" not in run.stderr


def test_help() -> None:
    run = tricord("--help")
    for words in (
        "serve",
        "config",
        "list",
        "show",
        "participants",
        "stats",
        "watch",
        "completion",
        "Exit codes: 0 ok",
    ):
        assert words in run.stdout


COMMANDS = (
    "serve",
    "migrate",
    "config",
    "config show",
    "list",
    "show",
    "participants",
    "stats",
    "watch",
    "completion",
    "retry",
    "cancel",
    "resolve",
    "audit",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    run = tricord(*command.split(), "--help")
    assert (run.returncode, run.stderr) == (OK, "")
    assert run.stdout.startswith("Usage: ")


def test_version() -> None:
    assert tricord("--version").stdout == "tricord 0.1.0\n"
