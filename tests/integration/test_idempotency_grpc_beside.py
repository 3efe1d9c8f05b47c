"""The gRPC door beside other things: handlers that end runs themselves, xids, a participant, look-ups, outages."""

import threading
from typing import Any

import grpc
import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from participant_sdk import AsyncXidServerInterceptor, Call, Participant, XidServerInterceptor
from participant_sdk.idempotency.current import current_run
from participant_sdk.idempotency.operation import Mode
from participant_sdk.idempotency.tables import DEFAULT
from participant_sdk.payload import encode
from tests.contract.participant.world import postgres_url
from tests.postgres import PostgresServer
from tricord.v1 import idempotency_pb2 as pb
from tricord.v1 import idempotency_pb2_grpc, participant_pb2, participant_pb2_grpc

from .keyed_shop import Shop, policy
from .keyed_shop_handlers import CALL_S
from .keyed_shops import MOST, Open, flavours, open_shop, replayed, told

__all__ = ["open_shop"]  # a fixture

flavour = flavours(MOST)

pytestmark = pytest.mark.database
LEASED = {"mode": Mode.LEASED}
XID = "a" * 32


@pytest.mark.parametrize("mode", [Mode.ATOMIC, Mode.LEASED])
def test_a_session_that_a_handler_brings(open_shop: Open, mode: Mode) -> None:
    shop = open_shop(policy(operation={"mode": mode}))
    assert shop.ask(plan="join") == shop.ask(plan="join") == b"1:tea"
    assert (shop.runs, shop.items()) == (1, [b"tea"])


def test_a_handler_that_commits_itself(open_shop: Open) -> None:
    shop = open_shop(policy(operation=LEASED))
    assert shop.ask(plan="complete") == b"1:tea"
    again = shop.done(plan="complete")
    assert (again.result().data, replayed(again)) == (b"completed", True)
    assert (shop.runs, shop.items()) == (1, [b"tea"])


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_beside_the_xids_interceptor(open_shop: Open, flavour: str, place: str) -> None:
    """Behind ours, what its handler has seen tried is part of the answer; in front, it is told to the first call."""
    xids = XidServerInterceptor() if flavour.startswith("threads") else AsyncXidServerInterceptor()
    shop = open_shop(policy(), **{place: [xids]})
    in_transaction = (("tricord-xid", XID),)
    first = shop.done(plan="tried:7", metadata=in_transaction)
    again = shop.done(plan="tried:7", metadata=in_transaction)
    assert first.result() == again.result()
    assert replayed(again)
    assert dict(first.trailing_metadata())["tricord-tried"] == "7"
    assert ("tricord-tried" in dict(again.trailing_metadata())) == (place == "inside")
    other = shop.done(plan="tried:7", metadata=(("tricord-xid", "b" * 32),))
    assert told(other)[1] == "IDEMPOTENCY_KEY_REUSED"
    assert (
        shop.done(metadata=(("tricord-xid", "no xid"),)).code() is grpc.StatusCode.INVALID_ARGUMENT or place == "inside"
    )


def look_up(shop: Shop, key: str = "k1", *, tenant: str = "alice", operation: str = "shop.Create") -> Any:
    """What the look-up says of a key: a record, or a call that was refused."""
    request = pb.GetIdempotencyKeyRequest(operation=operation, idempotency_key=key)
    stub: Any = idempotency_pb2_grpc.IdempotencyServiceStub(shop.channel)
    call = stub.GetIdempotencyKey.future(request, metadata=(("tenant", tenant),), timeout=CALL_S)
    return call.result().record if call.code() is grpc.StatusCode.OK else call


def test_looking_a_key_up(open_shop: Open) -> None:
    settings = {**LEASED, "answer_bytes_max": 1_000}
    shop = open_shop(policy(operation=settings, stored_codes=[grpc.StatusCode.NOT_FOUND]))
    running = shop.call(plan="gate")
    shop.gate.wait_reached()
    record = look_up(shop)
    assert (record.state, record.attempt) == (pb.IDEMPOTENCY_KEY_STATE_PROCESSING, 1)
    assert 0 < record.lease_left.ToMilliseconds() <= 30_000
    assert {"lease_left"} == {field.name for field, _ in record.ListFields()} & {
        "lease_left",
        "expires_in",
        "answer_status",
    }
    shop.gate.open.set()
    running.result()
    record = look_up(shop)
    assert (record.operation, record.state, record.answer_status) == (
        "shop.Create",
        pb.IDEMPOTENCY_KEY_STATE_SUCCEEDED,
        0,
    )
    assert [record.HasField(name) for name in ("answer_status", "lease_left")] == [True, False]
    assert not record.answer_is_http
    assert 86_000_000 < record.expires_in.ToMilliseconds() <= 86_400_000
    for key, plan, state in (
        ("final", "abort:NOT_FOUND", pb.IDEMPOTENCY_KEY_STATE_FAILED_FINAL),
        ("again", "abort:UNAVAILABLE", pb.IDEMPOTENCY_KEY_STATE_FAILED_RETRYABLE),
        ("large", "size:5000", pb.IDEMPOTENCY_KEY_STATE_TOMBSTONE),
    ):
        shop.done("Create", key, plan=plan)
        assert look_up(shop, key).state == state
    assert look_up(shop, "final").answer_status == grpc.StatusCode.NOT_FOUND.value[0]


def test_what_is_not_ones_own_is_not_there(open_shop: Open) -> None:
    shop = open_shop()
    shop.ask()
    missing = [
        look_up(shop, tenant="bob"),
        look_up(shop, "unknown"),
        look_up(shop, operation="shop.Other"),
        look_up(shop, operation="shop.Other", tenant="bob"),
    ]
    found = {(*told(call), call.details(), tuple(call.trailing_metadata())) for call in missing}
    assert len(found) == 1
    assert told(missing[0]) == (grpc.StatusCode.NOT_FOUND, "IDEMPOTENCY_KEY_NOT_FOUND", None)
    assert told(look_up(shop, tenant=""))[:2] == (grpc.StatusCode.PERMISSION_DENIED, "IDEMPOTENCY_SCOPE_MISSING")
    for key in ("", "x" * 256, "a\nb"):
        assert look_up(shop, key).code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_expired_answer_is_not_there_and_its_key_is_free(open_shop: Open) -> None:
    shop = open_shop(policy(operation={"ttl_s": 1.0}))
    assert shop.ask() == b"1:tea"
    pause = threading.Event()
    while not isinstance(look_up(shop), grpc.Call):
        pause.wait(0.05)
    assert shop.ask(item=b"coffee") == b"2:coffee"


@pytest.mark.parametrize("flavour", ["threads-postgres", "tasks-postgres"], indirect=True)
def test_a_commit_that_fails_is_not_answered_as_done(open_shop: Open) -> None:
    shop = open_shop(policy(), policy("Change", operation=LEASED))
    with shop.engine.begin() as db:
        db.execute(text("CREATE TABLE bill (id int PRIMARY KEY)"))
        db.execute(text("CREATE TABLE receipt (bill int REFERENCES bill DEFERRABLE INITIALLY DEFERRED)"))
    for method in ("Create", "Change"):
        for _ in range(2):
            call = shop.done(method, plan="deferred initial:early")
            assert call.code() is not grpc.StatusCode.OK
            assert "request-id" not in dict(call.initial_metadata()), "nothing is told before the COMMIT"
    assert shop.runs == 4
    with shop.engine.begin() as db:
        db.execute(text("INSERT INTO bill VALUES (7)"))
    assert [shop.ask(method, plan="deferred initial:early") for method in ("Create", "Change") * 2] == [
        b"5:tea",
        b"6:tea",
        b"5:tea",
        b"6:tea",
    ]


@pytest.mark.parametrize("flavour", ["threads-postgres", "tasks-postgres"], indirect=True)
@pytest.mark.parametrize("mode", [Mode.ATOMIC, Mode.LEASED])
def test_work_that_loses_a_race_is_to_be_sent_again(open_shop: Open, mode: Mode) -> None:
    shop = open_shop(policy(operation={"mode": mode}))
    assert told(shop.done(plan="race")) == (grpc.StatusCode.ABORTED, "IDEMPOTENCY_RACE_LOST", 0)
    assert shop.ask(plan="race") == b"2:tea"
    assert shop.items() == [b"tea"]


@pytest.mark.parametrize("flavour", ["tasks-postgres", "tasks-sqlite"], indirect=True)
def test_a_coroutine_is_cancelled_when_another_run_takes_over(open_shop: Open) -> None:
    shop = open_shop(policy(operation={**LEASED, "lease_s": 0.3}))
    late = shop.call(plan="gate")
    shop.gate.wait_reached()
    with shop.engine.begin() as db:
        db.execute(DEFAULT.records.update().values(fence=DEFAULT.records.c.fence + 1))
    assert told(late)[:2] == (grpc.StatusCode.ABORTED, "IDEMPOTENCY_LEASE_LOST")
    assert (shop.cancelled, shop.items()) == (1, [])


@pytest.mark.parametrize("server", ["threads", "tasks"])
@pytest.mark.parametrize("mode", [Mode.ATOMIC, Mode.LEASED])
def test_case_44_nothing_runs_while_the_store_is_away(own_server: PostgresServer, server: str, mode: Mode) -> None:
    url = postgres_url(own_server.create_database())
    with Shop(server, (url, url), [policy(operation={"mode": mode})]) as shop:
        assert shop.ask() == b"1:tea"
        own_server.kill()
        try:
            for key in ("k1", "k2"):
                code, reason, after = told(shop.done("Create", key))
                assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "IDEMPOTENCY_STORE_UNAVAILABLE")
                assert after is not None
        finally:
            own_server.start()
        assert shop.runs == 1
        pause = threading.Event()
        while (call := shop.done("Create", "k2")).code() is grpc.StatusCode.UNAVAILABLE:
            pause.wait(0.1)
        assert call.result().data == b"2:tea"
        assert shop.ask() == b"1:tea"


@pytest.mark.parametrize("flavour", ["threads-sqlite", "threads-postgres"], indirect=True)
def test_in_a_server_that_also_serves_a_participant(open_shop: Open, request: pytest.FixtureRequest) -> None:
    """Its methods are not listed: the coordinator's calls, with their own keys, go by."""
    held: list[str] = []

    def add(server: grpc.Server) -> None:
        bank = Participant("bank", shop_engine())

        @bank.action("debit")
        def debit(call: Call[dict[str, int]], db: Connection) -> None:
            assert current_run() is None
            held.append(call.xid)

        @debit.confirm
        def confirm(call: Call[dict[str, int]], db: Connection) -> None:
            held.remove(call.xid)

        @debit.cancel
        def cancel(call: Call[dict[str, int]], db: Connection) -> None:
            held.remove(call.xid)

        attached = bank.add_to_server(server, streams_max=1)
        request.addfinalizer(lambda: attached.drain(5))

    engines: list[Engine] = []

    def shop_engine() -> Engine:
        engines.append(create_engine(open_shop.urls[0]))
        request.addfinalizer(engines[-1].dispose)
        return engines[-1]

    shop = open_shop(policy(), more=add)
    stub: Any = participant_pb2_grpc.ParticipantServiceStub(shop.channel)
    call = participant_pb2.Call(call_id=1, xid=XID, branch_id=1, participant="bank", action="debit", attempt=1)
    sent = encode({"cents": 5})
    call.payload.data, call.payload.content_type = sent.data, sent.content_type
    keyed = (("idempotency-key", "k1"), ("tenant", "alice"))
    call.phase = participant_pb2.PHASE_TRY
    for _ in range(2):
        tried = stub.Try(participant_pb2.TryRequest(call=call), metadata=keyed, timeout=CALL_S).reply
        assert (tried.outcome, held) == (participant_pb2.OUTCOME_DONE, [XID])
    assert shop.ask() == shop.ask() == b"1:tea"
    call.phase = participant_pb2.PHASE_CONFIRM
    stub.Confirm(participant_pb2.ConfirmRequest(call=call), metadata=keyed, timeout=CALL_S)
    assert (held, shop.items(), shop.records()) == ([], [b"tea"], 1)
