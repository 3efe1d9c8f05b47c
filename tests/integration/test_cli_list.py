"""`tricord list`: filters, what is wrong with one and where, and the forms of its output."""

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request, tricord

from .participant_server import ParticipantServer, done, refuse

OK, USAGE = 0, 2


class Filled:
    """A coordinator with three transactions: 1 confirmed, 2 cancelled, 3 confirmed at another tenant."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self._endpoint = coordinator.endpoint
        service = coordinator.coordinator_service()
        self.xids = []
        for number, tenant in enumerate(("a", "a", 'b "x" \\'), 1):
            request = execute_request(branch(data=b"no" if number == 2 else b"{}"), key=f"key-{number}")
            request.labels.update({"order": str(number), "tenant": tenant})
            self.xids.append(service.Execute(request, timeout=CALL_S).transaction.xid)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``tricord list``."""
        return tricord("list", *arguments, env={"TRICORD_ENDPOINT": self._endpoint})

    def numbers(self, *arguments: str) -> list[int]:
        """The numbers of those that it lists."""
        run = self.run("-o", "jsonl", *arguments)
        assert (run.returncode, run.stderr) == (OK, "")
        return [self.xids.index(json.loads(line)["xid"]) + 1 for line in run.stdout.splitlines()]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """One for all tests: they only read."""
    store = tmp_path_factory.mktemp("cli_list") / "tricord.db"
    with CoordinatorProcess(store=store) as coordinator, ParticipantServer() as server:
        server.answer = lambda call: refuse(call) if call.payload.data == b"no" else done(call)
        coordinator.register("bank", server.address)
        yield Filled(coordinator)


def test_all_options_must_hold(filled: Filled) -> None:
    assert filled.numbers() == [3, 2, 1]
    assert filled.numbers("--order", "oldest") == [1, 2, 3]
    assert filled.numbers("--label", "order=2") == [2]
    assert filled.numbers("--label", "tenant=a", "--label", "order=1") == [1]
    assert filled.numbers("--label", 'tenant=b "x" \\') == [3]
    assert filled.numbers("--filter", "labels.order = 1 OR labels.order = 3") == [3, 1]
    assert filled.numbers("--filter", "labels.order = 1 OR labels.order = 3", "--label", "tenant=a") == [1]
    assert filled.numbers("--state", "confirmed", "--state", "cancelled", "--label", "tenant=a") == [2, 1]
    options = (
        "--older-than",
        "0s",
        "--participant",
        "bank",
        "--state",
        "confirmed",
        "--filter",
        "NOT labels.order = 1",
    )
    assert filled.numbers(*options) == [3]
    assert filled.numbers("--filter", "action = bank.debit", "--participant", "bank") == [3, 2, 1]


def test_json_lines_and_pages(filled: Filled) -> None:
    run = filled.run("-o", "jsonl", "--limit", "2")
    first, second = map(json.loads, run.stdout.splitlines())
    assert (first["idempotency_key"], second["labels"]) == ("key-3", {"order": "2", "tenant": "a"})
    assert run.stderr.startswith("more: --page-token ")
    assert filled.numbers("--limit", "2", "--page-token", run.stderr.split()[-1]) == [1]
    other = filled.run("--order", "oldest", "--page-token", run.stderr.split()[-1])
    assert other.returncode == USAGE
    assert "page_token: belongs to a request with other filters" in other.stderr


def test_a_wide_table_has_more_columns(filled: Filled) -> None:
    head, *rows = filled.run("-o", "wide").stdout.splitlines()
    assert head.split() == ["XID", "STATE", "CREATED", "BRANCHES", "LABELS", "UPDATED", "KEY", "CANCELLED", "BECAUSE"]
    assert "order=2, tenant=a" in rows[1]
    assert "key-2" in rows[1]
    assert "LABELS" not in filled.run().stdout


@pytest.mark.parametrize(
    ("arguments", "complaint", "shown", "caret"),
    [
        (["--filter", "state = DONE"], "column 9: expected one of TRYING,", "state = DONE", 9),
        (["--filter", "age > 5m OR", "--label", "a=b"], "column 12: expected a field,", "age > 5m OR", 12),
        (["--filter", 'labels.a = "漢漢" x'], "column 17: expected AND, OR or the end", 'labels.a = "漢漢" x', 19),
        (["--filter", "age\t>\n5"], "column 7: expected an age", "age > 5", 7),
        (["--participant", "a b"], "column 15: expected a name", 'participant = "a b"', 15),
        (["--label", "a="], "column 12: expected 1 to 255 printable characters", 'labels.a = ""', 12),
    ],
)
def test_a_caret_stands_under_what_is_wrong(arguments: list[str], complaint: str, shown: str, caret: int) -> None:
    """Before anything is asked: there is no coordinator."""
    run = tricord("list", *arguments, "--endpoint", "127.0.0.1:9")
    assert (run.returncode, run.stdout) == (USAGE, "")
    message, text, mark = run.stderr.splitlines()
    assert message.startswith(f"tricord: the filter is wrong at {complaint}")
    assert text == f"  {shown}"
    assert mark == " " * (caret + 1) + "^"


@pytest.mark.parametrize("label", ["order", "=x", "Order=1", "a b=1"])
def test_a_label_that_is_none(label: str) -> None:
    run = tricord("list", "--label", label)
    assert run.returncode == USAGE
    assert "write NAME=VALUE" in run.stderr
