"""Bad requests: each is refused with the field, the limit and a stable reason, and nothing of it is stored."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.coordinators import (
    CALL_S,
    CoordinatorProcess,
    branch,
    execute_request,
    refused,
    registration,
)
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import operator_pb2, registry_pb2, registry_pb2_grpc, types_pb2

MIB = 1024 * 1024
INVALID = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The coordinator's file."""
    return tmp_path_factory.mktemp("bad") / "tricord.db"


@pytest.fixture(scope="module")
def running(database: Path) -> Iterator[CoordinatorProcess]:
    """One coordinator that knows one participant (at an address where nobody is)."""
    with CoordinatorProcess(store=database) as process:
        process.register("bank", "127.0.0.1:9")
        yield process


def counts(database: Path) -> tuple[int, int]:
    """Stored transactions and participants."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        tables = ("tricord_transaction", "tricord_participant")
        numbers = [connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]
        return numbers[0], numbers[1]


@pytest.fixture
def coordinator(running: CoordinatorProcess, database: Path) -> Iterator[CoordinatorProcess]:
    """The coordinator; after each test: nothing was stored, and it had no accident."""
    accidents = len(running.log("rpc.failed"))
    yield running
    assert counts(database) == (0, 1)
    assert len(running.log("rpc.failed")) == accidents


def timed(seconds: int, nanos: int = 0) -> pb.ExecuteRequest:
    """A request with this time-out."""
    return pb.ExecuteRequest(branches=[branch()], timeout=Duration(seconds=seconds, nanos=nanos))


def typed(content_type: str) -> pb.ExecuteRequest:
    """A request with this content type."""
    payload = types_pb2.Payload(content_type=content_type)
    return pb.ExecuteRequest(branches=[pb.BranchRequest(participant="bank", action="debit", payload=payload)])


def noted(metadata: dict[str, str]) -> pb.ExecuteRequest:
    """A request with this metadata."""
    return pb.ExecuteRequest(branches=[branch()], metadata=metadata)


WRONG_STARTS: dict[str, tuple[pb.ExecuteRequest, str, str]] = {
    "no branches": (execute_request(), "branches", "at least 1"),
    "65 branches": (execute_request(*[branch()] * 65), "branches", "has 65 branches; the limit is 64"),
    "payload": (
        execute_request(branch(), branch(data=bytes(MIB + 1))), "branches[1].payload",
        f"has {MIB + 1} bytes; the limit is {MIB}",
    ),
    "request": (execute_request(*[branch(data=bytes(MIB))] * 9), "request", f"the limit is {8 * MIB}"),
    "timeout 0": (timed(0), "timeout", "more than 0 and at most 24 h"),
    "timeout below 0": (timed(-1), "timeout", "more than 0"),
    "timeout just below 0": (timed(0, -1), "timeout", "more than 0"),
    "timeout above 24 h": (timed(24 * 3600, 1), "timeout", "at most 24 h"),
    "timeout beyond all": (timed(2**63 - 1, 999_999_999), "timeout", "at most 24 h"),
    "key of blanks": (execute_request(branch(), key="  "), "idempotency_key", "1 to 255 characters"),
    "key of 256": (execute_request(branch(), key="k" * 256), "idempotency_key", "has 256 characters; the limit is 255"),
    "key with NUL": (execute_request(branch(), key="a\0b"), "idempotency_key", "control"),
    "key with newline": (execute_request(branch(), key="a\nb"), "idempotency_key", "control"),
    "key with escape": (execute_request(branch(), key="a\x1b[2Jb"), "idempotency_key", "control"),
    "key with bidi": (execute_request(branch(), key="a\u202eb"), "idempotency_key", "unprintable"),
    "no participant": (execute_request(branch(participant="")), "branches[0].participant", "1 to 64"),
    "long participant": (execute_request(branch("p" * 65)), "branches[0].participant", "has 65 characters"),
    "control participant": (execute_request(branch("a\nb")), "branches[0].participant", "1 to 64"),
    "participant newline": (execute_request(branch("bank\n")), "branches[0].participant", "1 to 64"),
    "participant letters": (execute_request(branch("bänk")), "branches[0].participant", "A-Z a-z 0-9"),
    "no action": (execute_request(branch(action="")), "branches[0].action", "1 to 64"),
    "long action": (execute_request(branch(), branch(action="a" * 65)), "branches[1].action", "has 65 characters"),
    "content type": (typed("x" * 256), "branches[0].payload.content_type", "at most 255"),
    "content type control": (typed("a/b\r\n"), "branches[0].payload.content_type", "printable ASCII"),
    "17 entries": (noted({f"k{n}": "" for n in range(17)}), "metadata", "has 17 entries; the limit is 16"),
    "a million entries": (noted({f"{n:x}": "" for n in range(500_000)}), "metadata", "the limit is 16"),
    "empty metadata key": (noted({"": "x"}), 'metadata[""]', "a key is 1 to 64 of A-Z a-z 0-9 . _ -"),
    "long metadata key": (noted({"k" * 65: "x"}), f'metadata["{"k" * 64}"]', "has 65 characters; a key is 1 to 64"),
    "metadata key letters": (noted({"naïve": "x"}), r'metadata["na\u00efve"]', "a key is 1 to 64"),
    "metadata key blank": (noted({"a b": "x"}), 'metadata["a b"]', "is 'a b'; a key is"),
    "metadata key newline": (noted({"a\n": "x"}), r'metadata["a\n"]', "a key is"),
    "metadata key quote": (noted({'"': "x"}), r'metadata["\""]', "a key is"),
    "metadata value": (noted({"tenant": "é" * 257}), 'metadata["tenant"]', "has 257 characters; the limit is 256"),
    "metadata value NUL": (noted({"a": "x", "tenant": "a\0b"}), 'metadata["tenant"]', "control"),
    "metadata value newline": (noted({"tenant": "a\n"}), 'metadata["tenant"]', "control"),
    "metadata value bidi": (noted({"tenant": "a\u202eb"}), 'metadata["tenant"]', "unprintable"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_STARTS)
def test_a_wrong_start(coordinator: CoordinatorProcess, name: str) -> None:
    request, field, said = WRONG_STARTS[name]
    error = refused(coordinator.coordinator_service().Execute, request)
    assert (error.code, error.reason) == INVALID
    assert list(error.fields) == [field]
    assert said in error.fields[field]
    assert f"{field}: " in error.message  # for those who read only the message
    assert len(error.message) < 1_000


def test_all_wrong_fields_are_named_at_once(coordinator: CoordinatorProcess) -> None:
    request = execute_request(branch("", ""), branch(data=bytes(MIB + 1)))
    error = refused(coordinator.coordinator_service().Execute, request)
    assert list(error.fields) == ["branches[0].participant", "branches[0].action", "branches[1].payload"]
    request = execute_request(key="\n", timeout_ms=-1)
    error = refused(coordinator.coordinator_service().Execute, request)
    assert set(error.fields) == {"idempotency_key", "timeout", "branches"}
    request.metadata["tenant"] = "\n"
    error = refused(coordinator.coordinator_service().Execute, request)
    assert set(error.fields) == {"idempotency_key", "timeout", "branches", 'metadata["tenant"]'}


def test_many_wrong_entries_of_the_worst_kind_still_fit_into_the_answer(coordinator: CoordinatorProcess) -> None:
    """It travels in trailing metadata, of which clients take 8 KiB."""
    wrong = {chr(0x1F600 + n) * 100_000: "\0" * 100_000 for n in range(16)}
    error = refused(coordinator.coordinator_service().Execute, noted(wrong))
    assert (error.code, error.reason) == INVALID
    assert all(field.startswith('metadata["') for field in error.fields)
    assert "has 100000 characters; a key is 1 to 64" in error.message


def test_text_that_is_no_unicode(coordinator: CoordinatorProcess) -> None:
    """A lone surrogate, which protobuf's own writers refuse: its reader does not take the message either."""
    wire = noted({"tenant": "aXYZb"}).SerializeToString().replace(b"XYZ", b"\xed\xa0\x80")
    method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = coordinator.channel().unary_unary(
        "/tricord.v1.CoordinatorService/Execute"
    )
    with pytest.raises(grpc.RpcError, match="bad UTF-8"):
        method(wire, timeout=CALL_S)


WRONG_LOOK_UPS: dict[str, tuple[list[str], list[str], str]] = {
    "none": ([], ["xids"], "has 0 xids; 1 to 1000 are needed"),
    "too many": (["0" * 32] * 1_001, ["xids"], "has 1001 xids; 1 to 1000 are needed"),
    "short": (["0" * 32] * 3 + ["12"], ["xids[3]"], "is not an xid: 32 hexadecimal digits"),
    "letters": (["z" * 32, "0" * 32], ["xids[0]"], "is not an xid"),
    "empty": (["0" * 32, ""], ["xids[1]"], "is not an xid"),
    "control": (["0" * 31 + "\0"], ["xids[0]"], "is not an xid"),
    "many": (["x"] * 1_000, [f"xids[{n}]" for n in range(5)], "is not an xid"),
}


@pytest.mark.parametrize("name", WRONG_LOOK_UPS)
def test_a_wrong_look_up(coordinator: CoordinatorProcess, name: str) -> None:
    xids, fields, said = WRONG_LOOK_UPS[name]
    error = refused(coordinator.coordinator_service().LookUp, pb.LookUpRequest(xids=xids))
    assert (error.code, error.reason) == INVALID
    assert list(error.fields) == fields
    assert all(said in text for text in error.fields.values())


def test_unknown_names(coordinator: CoordinatorProcess) -> None:
    service = coordinator.coordinator_service()
    error = refused(service.Execute, execute_request(branch(), branch("bnak"), key="k"))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_PARTICIPANT")
    assert list(error.fields) == ["branches[1].participant"]
    assert "bnak" in error.message
    error = refused(service.Execute, execute_request(branch(action="debt"), key="k"))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_ACTION")
    assert list(error.fields) == ["branches[0].action"]
    assert "credit, debit" in error.message


def test_a_message_beyond_grpcs_own_limit(coordinator: CoordinatorProcess) -> None:
    error = refused(coordinator.coordinator_service().Execute, execute_request(branch(data=bytes(17 * MIB))))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(16 * MIB) in error.message


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GetRequest(), "xid"),
        (pb.GetRequest(xid="12"), "xid"),
        (pb.GetRequest(xid="z" * 32), "xid"),
        (pb.GetRequest(idempotency_key=""), "idempotency_key"),
        (pb.GetRequest(idempotency_key="k" * 256), "idempotency_key"),
        (pb.GetRequest(idempotency_key="a\nb"), "idempotency_key"),
    ],
    ids=["nothing", "short", "letters", "empty key", "long key", "control key"],
)
def test_a_wrong_get(coordinator: CoordinatorProcess, request_: pb.GetRequest, field: str) -> None:
    error = refused(coordinator.coordinator_service().Get, request_)
    assert (error.code, error.reason) == INVALID
    assert list(error.fields) == [field]


WRONG_LISTS: dict[str, tuple[operator_pb2.ListRequest, str]] = {
    "page size": (operator_pb2.ListRequest(page_size=1_001), "page_size"),
    "token": (operator_pb2.ListRequest(page_token="nonsense"), "page_token"),
    "token not base64": (operator_pb2.ListRequest(page_token="!§"), "page_token"),
    "token of another version": (operator_pb2.ListRequest(page_token="AQ" + "A" * 32), "page_token"),
    "long token": (operator_pb2.ListRequest(page_token="A" * 100_000), "page_token"),
    "state": (operator_pb2.ListRequest(filter="state = DONE"), "filter"),
    "no age": (operator_pb2.ListRequest(filter="age > -5s"), "filter"),
    "participant": (operator_pb2.ListRequest(filter='participant = "a\nb"'), "filter"),
    "long participant": (operator_pb2.ListRequest(filter=f"participant = {'p' * 65}"), "filter"),
    "long filter": (operator_pb2.ListRequest(filter=" " * 1_001), "filter"),
    "order": (operator_pb2.ListRequest(order_by="update_time"), "order_by"),
    "long order": (operator_pb2.ListRequest(order_by="é" * 100_000), "order_by"),
}


@pytest.mark.parametrize("name", WRONG_LISTS)
def test_a_wrong_list(coordinator: CoordinatorProcess, name: str) -> None:
    request, field = WRONG_LISTS[name]
    error = refused(coordinator.operator_service().List, request)
    assert (error.code, error.reason) == INVALID
    assert list(error.fields) == [field]


def test_a_wrong_xid_at_the_operator(coordinator: CoordinatorProcess) -> None:
    error = refused(coordinator.operator_service().Get, operator_pb2.OperatorServiceGetRequest(xid="x"))
    assert (error.code, error.reason, list(error.fields)) == (*INVALID, ["xid"])


WRONG_REGISTRATIONS: dict[str, tuple[registry_pb2.RegisterParticipantRequest, str]] = {
    "no name": (registration("", "127.0.0.1:1"), "participant"),
    "long name": (registration("p" * 65, "127.0.0.1:1"), "participant"),
    "control name": (registration("a\tb", "127.0.0.1:1"), "participant"),
    "no address": (registration("shop", ""), "address"),
    "no port": (registration("shop", "localhost"), "address"),
    "port 0": (registration("shop", "localhost:0"), "address"),
    "port 65536": (registration("shop", "localhost:65536"), "address"),
    "scheme": (registration("shop", "dns:///localhost:1"), "address"),
    "long address": (registration("shop", "h" * 254 + ":1"), "address"),
    "no actions": (registration("shop", "localhost:1", {}), "actions"),
    "257 actions": (registration("shop", "localhost:1", {f"a{n}": "f" for n in range(257)}), "actions"),
    "action name": (registration("shop", "localhost:1", {"a": "f", "": "f"}), "actions[1].name"),
    "no fence": (registration("shop", "localhost:1", {"a": ""}), "actions[0].fence_id"),
    "long fence": (registration("shop", "localhost:1", {"a": "f" * 65}), "actions[0].fence_id"),
    "control fence": (registration("shop", "localhost:1", {"a": "f\0"}), "actions[0].fence_id"),
    "action twice": (
        registry_pb2.RegisterParticipantRequest(
            participant="shop", address="localhost:1",
            actions=[registry_pb2.ActionRegistration(name="a", fence_id="f")] * 2,
        ), "actions[1].name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_REGISTRATIONS)
def test_a_wrong_registration(coordinator: CoordinatorProcess, name: str) -> None:
    request, field = WRONG_REGISTRATIONS[name]
    registry = registry_pb2_grpc.RegistryServiceStub(coordinator.channel())
    error = refused(registry.RegisterParticipant, request)
    assert (error.code, error.reason) == INVALID
    assert list(error.fields) == [field]


def test_what_is_just_within_the_limits_is_taken(tmp_path: Path) -> None:
    """The limits are where they are said to be. Nobody answers, so the caller's deadline comes first."""
    with CoordinatorProcess(store=tmp_path / "tricord.db") as coordinator:
        name = "p" * 64
        coordinator.register(name, "127.0.0.1:9", {f"{n:064}": "f" * 64 for n in range(256)})
        service = coordinator.coordinator_service()
        small = branch(name, f"{0:064}", b"")
        large = branch(name, f"{1:064}", bytes(MIB))
        for request in (
            execute_request(*[small] * 64, key="k" * 255, timeout_ms=1),
            execute_request(*[large] * 7, key="é" * 255, timeout_ms=24 * 3_600_000),
        ):
            request.metadata.update({f"{n:064}": "é" * 256 for n in range(16)})
            tx = service.Execute(request, timeout=5.0).transaction
            assert (tx.idempotency_key, len(tx.branches)) == (request.idempotency_key, len(request.branches))
            assert tx.timeout == request.timeout
            assert tx.metadata == request.metadata
        assert counts(tmp_path / "tricord.db") == (2, 1)
        coordinator.kill()
