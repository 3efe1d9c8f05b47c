"""What operators and initiators get wrong: the exact error, the exit code, and nothing that is stored has changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from tests.coordinators import CALL_S, branch, execute_request, refused, tricord
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import operator_pb2, types_pb2

from .operator_scene import BROKEN, OperatorScene, operator_scene
from .test_operator_actions import begin, cancel_request

USAGE, NOT_FOUND, CONFLICT = 2, 3, 4
NOBODY = "0" * 32
BECAUSE = ("--reason", "order 7 is a duplicate")
AS_CONFIRMED = ("--as", "confirmed", "--yes")
LONG = "x" * 256
AUDIT = "tricord_audit"


class Filled(NamedTuple):
    """A coordinator with a transaction of each kind, all of which rest."""

    scene: OperatorScene
    database: Path
    names: dict[str, str]

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """A command's exit code, output and messages."""
        words = [word.format(**self.names) for word in arguments]
        ran = tricord(*words, env={"TRICORD_ENDPOINT": self.scene.coordinators[0].endpoint})
        return ran.returncode, ran.stdout, ran.stderr

    def stored(self) -> dict[str, list[Any]]:
        """Every row of every table."""
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            return {name: connection.execute(f"SELECT * FROM {name}").fetchall() for (name,) in tables}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """One for all tests, as none changes anything."""
    database = tmp_path_factory.mktemp("bad") / "tricord.db"
    with operator_scene(database) as scene:
        trying, cancelled, confirming = begin(scene), begin(scene), scene.stuck(bank="fine", shop=BROKEN)
        scene.operators[0].Cancel(cancel_request(cancelled), timeout=CALL_S)
        while scene.get(confirming).branches[0].state != types_pb2.BRANCH_STATE_CONFIRMED:
            pass
        added = pb.CoordinatorServiceTryRequest(xid=trying, branch_key="1", branch=branch())
        scene.coordinators[0].coordinator_service().Try(added, timeout=CALL_S)
        page = scene.operators[0].List(operator_pb2.ListRequest(page_size=1), timeout=CALL_S)
        audit = scene.operators[0].ListAudit(operator_pb2.ListAuditRequest(page_size=1), timeout=CALL_S)
        names = {
            "nobody": NOBODY,
            "trying": trying,
            "cancelled": cancelled,
            "confirming": confirming,
            "list_token": page.next_page_token,
            "audit_token": audit.next_page_token,
            "many_token": _token_of_many(scene),
        }
        yield Filled(scene, database, names)


def _token_of_many(scene: OperatorScene) -> str:
    """Of a CancelMany with the filter ``age >= 0s``; which goes on after the newest."""
    request = operator_pb2.CancelManyRequest(filter="age >= 0s", page_size=1, dry_run=True, actor="a", reason="r")
    return scene.operators[0].CancelMany(request, timeout=CALL_S).next_page_token


NO_XID = "tricord: xid: is not an xid: 32 hexadecimal digits\n"
UNKNOWN = "tricord: there is no transaction {nobody}\n"
NO_REASON = "tricord: reason: is needed: 1 to 500 printable characters\n"
LONG_REASON = "tricord: reason: has 501 characters; the limit is 500\n"
NOT_SURE = "tricord: this cannot be undone; say --yes, since there is no terminal to ask at\n"
OTHER_FILTERS = "tricord: page_token: belongs to a request with other filters\n"
NO_TOKEN = "tricord: page_token: is not a token that the page before has returned\n"
NO_STATE = "column 9: expected one of TRYING, CONFIRMING, CONFIRMED, CANCELLING, CANCELLED, found 'DONE'"
NO_FIELD = "column 19: expected a field, NOT, - or (, found the end"
NO_VALUE = "column 16: expected 1 to 255 printable characters, found '\"'"
LONG_NAME = (
    "column 1: expected labels.NAME, a name being a letter a-z and up to 62 more characters of a-z 0-9 _ . -, found "
)
ONE_OF_TWO = "Error: name either XID or "
NOT_BOTH = f"{ONE_OF_TWO}--filter, --label, --older-than or --participant\n"
NOT_BOTH_RETRY = f"{ONE_OF_TWO}--participant, --filter, --label or --older-than\n"
NO_LABEL = "is no label; write NAME=VALUE, a name being a-z 0-9 _ . - after a letter\n"
NO_FILTER = "tricord: filter: is needed: it says which transactions are cancelled\n"
NO_WAY_BACK = "Error: --lost cannot be taken back: it goes with --yes\n"
TOO_FAR = "is not in the range 1<=x<=64.\n"

REFUSED_AT_ONCE: list[tuple[list[str], int, str]] = [
    (["show", "{nobody}"], NOT_FOUND, UNKNOWN),
    (["watch", "{nobody}"], NOT_FOUND, UNKNOWN),
    (["retry", "{nobody}"], NOT_FOUND, UNKNOWN),
    (["cancel", "{nobody}", *BECAUSE, "--yes"], NOT_FOUND, UNKNOWN),
    (["resolve", "{nobody}", "1", *BECAUSE, *AS_CONFIRMED], NOT_FOUND, UNKNOWN),
    (["show", "12"], USAGE, NO_XID),
    (["retry", "12"], USAGE, NO_XID),
    (["cancel", "12", *BECAUSE, "--yes"], USAGE, NO_XID),
    (["resolve", "12", "1", *BECAUSE, *AS_CONFIRMED], USAGE, NO_XID),
    (["audit", "12"], USAGE, NO_XID),
    (["list", "--order", "oldest", "--page-token", "{list_token}"], USAGE, OTHER_FILTERS),
    (["list", "--page-token", "{audit_token}"], USAGE, OTHER_FILTERS),
    (["list", "--page-token", "stale"], USAGE, NO_TOKEN),
    (["audit", "{trying}", "--page-token", "{audit_token}"], USAGE, OTHER_FILTERS),
    (["audit", "--page-token", "stale"], USAGE, NO_TOKEN),
    (["resolve", "{confirming}", "2", *AS_CONFIRMED], USAGE, "Error: Missing option '--reason'.\n"),
    (["resolve", "{confirming}", "2", *AS_CONFIRMED, "--reason", " "], USAGE, NO_REASON),
    (["resolve", "{confirming}", "2", *AS_CONFIRMED, "--reason", "x" * 501], USAGE, LONG_REASON),
    (["resolve", "{confirming}", "2", *AS_CONFIRMED[:2], *BECAUSE], USAGE, NOT_SURE),
    (["resolve", "{confirming}", "65", *AS_CONFIRMED, *BECAUSE], USAGE, TOO_FAR),
    (["cancel", "{trying}", "--yes", "--reason", ""], USAGE, NO_REASON),
    (["cancel", "{trying}", *BECAUSE], USAGE, NOT_SURE),
    (["resolve", "{confirming}", "2", *AS_CONFIRMED[:2], *BECAUSE, "--lost"], USAGE, NO_WAY_BACK),
    (["resolve", "{confirming}", "2", *AS_CONFIRMED[:2], *BECAUSE, "--lost", "--force"], USAGE, NO_WAY_BACK),
    (["resolve", "{confirming}", "2", *AS_CONFIRMED[:2], "--dry-run"], USAGE, "Error: Missing option '--reason'.\n"),
    (["cancel", "--filter", "state = DONE", *BECAUSE, "--yes"], USAGE, f"at {NO_STATE}\n  state = DONE\n          ^\n"),
    (["retry", "--filter", "state = DONE"], USAGE, f"at {NO_STATE}\n  state = DONE\n          ^\n"),
    (["cancel", "--filter", " ", *BECAUSE, "--yes"], USAGE, NO_FILTER),
    (["cancel", "--label", "order", *BECAUSE, "--yes"], USAGE, f"'order' {NO_LABEL}"),
    (["retry", "--label", "Order=1"], USAGE, f"'Order=1' {NO_LABEL}"),
    (["cancel", "--label", "order=", *BECAUSE, "--yes"], USAGE, f'at {NO_VALUE}\n  labels.order = ""\n{" " * 17}^\n'),
    (["cancel", "--label", "order=1", "--yes"], USAGE, "Error: Missing option '--reason'.\n"),
    (["cancel", "--label", "order=1", *BECAUSE], USAGE, NOT_SURE),
    (["cancel", *BECAUSE, "--yes"], USAGE, NOT_BOTH),
    (["cancel", "{trying}", "--label", "order=1", *BECAUSE, "--yes"], USAGE, NOT_BOTH),
    (["cancel", "--older-than", "5", *BECAUSE, "--yes"], USAGE, "'5' is no age; write 30s, 5m, 2h or 1d\n"),
    (["retry"], USAGE, NOT_BOTH_RETRY),
    (["retry", "{trying}", "--filter", "age > 1s"], USAGE, NOT_BOTH_RETRY),
    (["list", "--filter", "state = DONE"], USAGE, f"at {NO_STATE}\n  state = DONE\n          ^\n"),
    (["list", "--filter", "state = TRYING AND"], USAGE, f"at {NO_FIELD}\n  state = TRYING AND\n{' ' * 20}^\n"),
    (["list", "--label", f"order={LONG}"], USAGE, f'at {NO_VALUE}\n  labels.order = "{LONG}"\n{" " * 17}^\n'),
    (
        ["list", "--label", f"{'a' * 64}=x"], USAGE,
        f"at {LONG_NAME}'labels.{'a' * 33}'\n  labels.{'a' * 64} = \"x\"\n  ^\n",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "said"), REFUSED_AT_ONCE, ids=lambda value: None)
def test_what_is_wrong_in_itself(filled: Filled, arguments: list[str], code: int, said: str) -> None:
    before = filled.stored()
    ended, printed, told = filled.run(*arguments)
    assert (ended, printed) == (code, "")
    said = said.format(**filled.names)
    if said.startswith("tricord: "):
        assert told == said
    else:  # click tells the usage before it; the filter's error says before it what it is
        assert told.endswith(said)
    assert filled.stored() == before


CONTRADICTIONS = [
    (
        ["resolve", "{trying}", "1", *BECAUSE, *AS_CONFIRMED],
        "transaction {trying} is TRYING: nothing can be resolved before it is decided; cancel it, or wait",
    ),
    (
        ["resolve", "{confirming}", "3", *BECAUSE, *AS_CONFIRMED],
        "branch_id: transaction {confirming} has no branch 3",
    ),
    (
        ["resolve", "{confirming}", "1", *BECAUSE, *AS_CONFIRMED],
        "branch 1 of transaction {confirming} is CONFIRMED: it has answered for good",
    ),
    (
        ["cancel", "{confirming}", *BECAUSE, "--yes"],
        "transaction {confirming} is CONFIRMING and cannot be cancelled any more",
    ),
    (
        ["cancel", "{cancelled}", *BECAUSE, "--yes"],
        "transaction {cancelled} is CANCELLED and cannot be cancelled any more: "
        "cancelled by an operator (bob): order 7 is a duplicate",
    ),
    (["retry", "{cancelled}"], "transaction {cancelled} is CANCELLED: no participant is owed a call any more"),
]


@pytest.mark.parametrize(("arguments", "said"), CONTRADICTIONS, ids=lambda value: None)
def test_what_contradicts_what_is_stored(filled: Filled, arguments: list[str], said: str) -> None:
    """Only the audit has more than before: that it was asked for, and refused."""
    before = filled.stored()
    assert filled.run(*arguments) == (CONFLICT, "", f"tricord: {said.format(**filled.names)}\n")
    after = filled.stored()
    xid = filled.names[arguments[1].strip("{}")]
    asked, denied = filled.scene.audit(xid)[-2:]
    assert (asked.outcome, denied.outcome) == (operator_pb2.AUDIT_OUTCOME_ASKED, operator_pb2.AUDIT_OUTCOME_REFUSED)
    assert (asked.action, denied.asked_id) == (arguments[0], asked.id)
    assert len(after.pop(AUDIT)) == len(before.pop(AUDIT)) + 2
    assert after == before


@pytest.mark.parametrize(
    ("token", "filter_", "said"),
    [
        ("stale", "age >= 0s", "is not a token that the page before has returned"),
        ("{many_token}", "age >= 1s", "belongs to a request with other filters"),
        ("{list_token}", "age >= 0s", "belongs to a request with other filters"),
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_stale_token_of_many(filled: Filled, token: str, filter_: str, said: str, *, dry_run: bool) -> None:
    """The command itself always begins with the first page."""
    before = filled.stored()
    operator = filled.scene.operators[0]
    asked: dict[str, Any] = {"page_token": token.format(**filled.names), "filter": filter_, "actor": "a", "reason": "r"}
    for method, request in (
        (operator.CancelMany, operator_pb2.CancelManyRequest(**asked, dry_run=dry_run)),
        (operator.RetryMany, operator_pb2.RetryManyRequest(**asked, dry_run=dry_run)),
    ):
        answer = refused(method, request)
        assert (answer.code, answer.fields) == (grpc.StatusCode.INVALID_ARGUMENT, {"page_token": said})
    assert filled.stored() == before


NAME = "a name is a letter a-z and up to 62 more characters of a-z 0-9 _ . -"


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({f"k{n}": "x" for n in range(17)}, "labels: has 17 labels; the limit is 16"),
        ({"k" * 64: "x"}, f'labels["{"k" * 63}"]: the name has 64 characters; {NAME}'),
        ({"order": LONG}, 'labels["order"]: the value has 256 characters; it needs 1 to 255'),
    ],
    ids=["many", "long name", "long value"],
)
def test_labels_over_the_limits(filled: Filled, labels: dict[str, str], said: str) -> None:
    before = filled.stored()
    service = filled.scene.coordinators[0].coordinator_service()
    execute = execute_request(branch())
    execute.labels.update(labels)
    for method, request in ((service.Execute, execute), (service.Begin, pb.BeginRequest(labels=labels))):
        answer = refused(method, request)
        assert (answer.code, answer.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert answer.message == said
    assert filled.stored() == before
