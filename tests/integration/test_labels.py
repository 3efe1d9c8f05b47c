"""Labels of a transaction, from the initiator to the operator."""

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from participant_sdk import AsyncTricordClient, InvalidRequest, TricordClient, branch
from tests.coordinators import CALL_S, CoordinatorProcess, execute_request, refused, states, tricord
from tests.coordinators import branch as wire_branch
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import operator_pb2

from .participant_server import ParticipantServer

LABELS = {"order": "42", "tenant.name": "é 漢 a=b", "a" * 63: "v" * 255}
LARGEST = {f"n{n:062}": "😀" * 255 for n in range(16)}


@pytest.fixture
def bank() -> Iterator[ParticipantServer]:
    """A participant that says yes to everything."""
    with ParticipantServer() as participant:
        yield participant


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.database)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the transactions are kept."""
    if request.param == "sqlite":
        return str(tmp_path / "tricord.db")
    dsn: str = request.getfixturevalue("pg_database")
    return dsn


@pytest.fixture
def coordinator(store: str, bank: ParticipantServer) -> Iterator[CoordinatorProcess]:
    """A coordinator that knows the participant."""
    with CoordinatorProcess(store=store) as process:
        process.register("bank", bank.address)
        yield process


def request_with(labels: dict[str, str], key: str = "") -> pb.ExecuteRequest:
    """A request to run a transaction of one branch."""
    request = execute_request(wire_branch(), key=key)
    request.labels.update(labels)
    return request


def test_they_come_back_and_participants_do_not_see_them(
    coordinator: CoordinatorProcess, bank: ParticipantServer
) -> None:
    service = coordinator.coordinator_service()
    tx = service.Execute(request_with(LABELS, "k"), timeout=CALL_S).transaction
    assert (states(tx)[0], dict(tx.labels)) == ("CONFIRMED", LABELS)
    assert dict(service.Get(pb.GetRequest(idempotency_key="k"), timeout=CALL_S).transaction.labels) == LABELS
    assert all(b"tenant.name" not in seen.call.SerializeToString() for seen in bank.seen())
    listed = coordinator.operator_service().List(operator_pb2.ListRequest(), timeout=CALL_S).transactions
    assert [dict(each.labels) for each in listed] == [LABELS]


def test_the_first_ones_stand(coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
    service = coordinator.coordinator_service()
    first = service.Execute(request_with({"order": "1"}, "k"), timeout=CALL_S).transaction
    for other in ({"order": "2"}, {}, {"order": "1", "more": "x"}):
        again = service.Execute(request_with(other, "k"), timeout=CALL_S).transaction
        assert (again.xid, dict(again.labels)) == (first.xid, {"order": "1"})
    assert len(bank.seen()) == 2


def test_the_largest_are_stored(coordinator: CoordinatorProcess) -> None:
    tx = coordinator.coordinator_service().Execute(request_with(LARGEST), timeout=CALL_S).transaction
    assert dict(tx.labels) == LARGEST


def test_an_interactive_one_keeps_them(coordinator: CoordinatorProcess) -> None:
    service = coordinator.coordinator_service()
    tx = service.Begin(pb.BeginRequest(labels=LABELS), timeout=CALL_S).transaction
    assert dict(tx.labels) == LABELS
    added = pb.CoordinatorServiceTryRequest(xid=tx.xid, branch_key="1", branch=wire_branch())
    service.Try(added, timeout=CALL_S)
    confirm = pb.CoordinatorServiceConfirmRequest(xid=tx.xid, tried_branch_ids=[1])
    confirmed = service.Confirm(confirm, timeout=CALL_S).transaction
    assert (states(confirmed), dict(confirmed.labels)) == (["CONFIRMED", "CONFIRMED"], LABELS)


def test_the_sdk_sends_and_tells_them(coordinator: CoordinatorProcess) -> None:
    with TricordClient(coordinator.endpoint) as client:
        tx = client.execute(branch("bank", "debit", {}), labels=LABELS)
        assert tx.labels == LABELS
        with client.transaction(labels={"order": "43"}) as interactive:
            interactive.try_(branch("bank", "debit", {}))
        assert client.get(xid=interactive.xid).labels == {"order": "43"}

    async def asynchronously() -> None:
        async with AsyncTricordClient(coordinator.endpoint) as client:
            assert (await client.execute(branch("bank", "debit", {}), labels=LABELS)).labels == LABELS
            async with client.transaction(labels={"order": "44"}) as interactive:
                await interactive.try_(branch("bank", "debit", {}))
            assert (await client.get(xid=interactive.xid)).labels == {"order": "44"}

    asyncio.run(asynchronously())


WRONG: dict[str, tuple[Any, str, str]] = {
    "17": ({f"k{n}": "x" for n in range(17)}, "labels", "has 17 labels; the limit is 16"),
    "empty name": ({"": "x"}, 'labels[""]', "a name is a letter a-z and up to 62 more characters of a-z 0-9 _ . -"),
    "long name": ({"k" * 64: "x"}, f'labels["{"k" * 63}"]', "a name is a letter a-z"),
    "capital": ({"Order": "x"}, 'labels["Order"]', "a name is a letter a-z"),
    "a digit first": ({"1a": "x"}, 'labels["1a"]', "a name is a letter a-z"),
    "newline after": ({"a\n": "x"}, r'labels["a\n"]', "a name is a letter a-z"),
    "empty value": ({"order": ""}, 'labels["order"]', "the value has 0 characters; it needs 1 to 255"),
    "long value": ({"order": "é" * 256}, 'labels["order"]', "the value has 256 characters; it needs 1 to 255"),
    "NUL": ({"ok": "x", "order": "a\0b"}, 'labels["order"]', "the value has control or other unprintable characters"),
    "bidi": ({"order": "a\u202eb"}, 'labels["order"]', "unprintable"),
}


def test_wrong_ones_are_refused_and_nothing_is_stored(tmp_path: Path) -> None:
    with CoordinatorProcess(store=tmp_path / "tricord.db") as coordinator:
        service = coordinator.coordinator_service()
        for labels, field, text in WRONG.values():
            for method, request in (
                (service.Execute, pb.ExecuteRequest(branches=[wire_branch()], labels=labels)),
                (service.Begin, pb.BeginRequest(labels=labels)),
            ):
                error = refused(method, request)
                assert error.reason == "INVALID_REQUEST"
                assert list(error.fields) == [field]
                assert text in error.fields[field]
        assert not coordinator.operator_service().List(operator_pb2.ListRequest(), timeout=CALL_S).transactions


@pytest.mark.parametrize("case", WRONG)
def test_the_sdk_refuses_them_before_anything_is_sent(case: str) -> None:
    labels, field, text = WRONG[case]
    with TricordClient("127.0.0.1:9") as client:
        for start in (
            lambda: client.execute(branch("bank", "debit", {}), labels=labels),
            lambda: client.transaction(labels=labels),
        ):
            with pytest.raises(InvalidRequest, match="the labels cannot be sent") as caught:
                start()
            assert list(caught.value.fields) == [field]
            assert text in caught.value.fields[field]


@pytest.mark.parametrize(
    ("labels", "field", "text"),
    [
        ("order", "labels", "is str and not a mapping"),
        ({"order": 42}, 'labels["order"]', "the value is int and not a string"),
        ({42: "order"}, "labels[42]", "a name is a letter"),
    ],
)
def test_the_sdk_refuses_what_are_none(labels: Any, field: str, text: str) -> None:
    with TricordClient("127.0.0.1:9") as client, pytest.raises(InvalidRequest) as caught:
        client.execute(branch("bank", "debit", {}), labels=labels)
    assert text in caught.value.fields[field]


def test_a_store_that_older_programs_may_use_takes_none(tmp_path: Path, bank: ParticipantServer) -> None:
    path = tmp_path / "tricord.db"
    with CoordinatorProcess(store=path) as coordinator:
        coordinator.register("bank", bank.address)
    with closing(sqlite3.connect(path)) as connection:  # as `tricord migrate` without --finish leaves it
        connection.execute("UPDATE tricord_store SET format = 2, oldest_program = 2")
        connection.commit()
    with CoordinatorProcess(store=path) as coordinator:
        service = coordinator.coordinator_service()
        error = refused(service.Execute, request_with({"order": "1"}))
        assert error.reason == "STORE_FORMAT"
        assert "row format is 2, this needs 3" in error.message
        assert "tricord migrate --finish" in error.message
        assert states(service.Execute(request_with({}), timeout=CALL_S).transaction)[0] == "CONFIRMED"
        listed = coordinator.operator_service().List(operator_pb2.ListRequest(), timeout=CALL_S).transactions
        assert len(listed) == 1


def test_the_command_line_shows_them(coordinator: CoordinatorProcess) -> None:
    tx = coordinator.coordinator_service().Execute(request_with(LABELS), timeout=CALL_S).transaction
    env = {"TRICORD_ENDPOINT": coordinator.endpoint}
    assert json.loads(tricord("show", tx.xid, "-o", "json", env=env).stdout)["labels"] == LABELS
    assert "order=42" in tricord("show", tx.xid, env=env).stdout
    (listed,) = json.loads(tricord("list", "-o", "json", env=env).stdout)["transactions"]
    assert listed["labels"] == LABELS
