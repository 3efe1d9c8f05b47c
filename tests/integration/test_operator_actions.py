"""What operators do to transactions, over real gRPC, and what is written down of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import psycopg
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.coordinators import CALL_S, refused, states
from tricord.v1 import coordinator_pb2, types_pb2
from tricord.v1 import operator_pb2 as pb

from .operator_scene import BROKEN, SILENT, OperatorScene, operator_scene

ASKED, DONE, REFUSED = pb.AUDIT_OUTCOME_ASKED, pb.AUDIT_OUTCOME_DONE, pb.AUDIT_OUTCOME_REFUSED
CONFLICT = grpc.StatusCode.FAILED_PRECONDITION
NOBODY = "0" * 32


@pytest.fixture
def scene(tmp_path: Any) -> Iterator[OperatorScene]:
    """One coordinator on SQLite."""
    with operator_scene(tmp_path / "tricord.db") as made:
        yield made


@pytest.fixture
def pair(pg_database: str) -> Iterator[OperatorScene]:
    """Two coordinators on one PostgreSQL."""
    with operator_scene(pg_database, coordinators=2) as made:
        yield made


def begin(scene: OperatorScene) -> str:
    """An interactive transaction, which stays TRYING."""
    request = coordinator_pb2.BeginRequest()
    request.timeout.FromSeconds(3_600)
    return scene.coordinators[0].coordinator_service().Begin(request, timeout=CALL_S).transaction.xid


def cancel_request(xid: str, reason: str = "order 7 is a duplicate") -> pb.OperatorServiceCancelRequest:
    return pb.OperatorServiceCancelRequest(xid=xid, actor="bob", reason=reason)


class TestRetry:
    """One transaction."""

    def test_what_is_parked_is_called_at_once(self, scene: OperatorScene) -> None:
        xid = scene.stuck()
        scene.mended.set()
        tx = scene.retry(xid, reason="the ledger is open again")
        assert tx.state == types_pb2.TRANSACTION_STATE_CONFIRMING
        assert states(scene.finished(xid)) == ["CONFIRMED", "CONFIRMED"]
        assert scene.confirms(xid) == ["bank", "bank"]

    def test_what_is_out_is_not_sent_again(self, scene: OperatorScene) -> None:
        xid = scene.stuck(bank=SILENT, shop=BROKEN)
        for count in (2, 3):
            scene.retry(xid)
            scene.shop.wait_for(count, "CONFIRM")
            while scene.get(xid).branches[1].attempts < count:
                pass
        assert scene.confirms(xid) == ["bank", "shop", "shop", "shop"]

    @pytest.mark.database
    def test_at_a_coordinator_that_does_not_drive_it(self, pair: OperatorScene) -> None:
        xid = pair.stuck()
        pair.mended.set()
        pair.retry(xid, at=1)
        assert states(pair.finished(xid)) == ["CONFIRMED", "CONFIRMED"]
        assert [record.outcome for record in pair.audit(xid)] == [ASKED, DONE]

    @pytest.mark.database
    def test_at_another_coordinator_while_a_call_is_out(self, pair: OperatorScene) -> None:
        xid = pair.stuck(bank=SILENT, shop=BROKEN)
        pair.retry(xid, at=1)
        other = pair.stuck()  # by the time that this one has come and gone, whoever meant to claim it has done so
        pair.mended.set()
        pair.retry(other, at=1)
        assert states(pair.finished(other))[0] == "CONFIRMED"
        assert pair.confirms(xid) == ["bank", "shop"]

    def test_a_finished_one_is_refused(self, scene: OperatorScene) -> None:
        scene.mended.set()
        xid = scene.stuck(bank="")
        scene.finished(xid)
        answer = refused(scene.operators[0].Retry, pb.RetryRequest(xid=xid, actor="alice"))
        assert (answer.code, answer.reason) == (CONFLICT, "FINISHED")
        assert answer.message == f"transaction {xid} is CONFIRMED: no participant is owed a call any more"
        assert answer.metadata == {"xid": xid, "state": "CONFIRMED"}


class TestCancel:
    """Only what is undecided."""

    def test_an_undecided_one(self, scene: OperatorScene) -> None:
        xid = begin(scene)
        tx = scene.operators[0].Cancel(cancel_request(xid), timeout=CALL_S).transaction
        assert states(tx) == ["CANCELLED"]
        assert tx.cancel_reason == "cancelled by an operator (bob): order 7 is a duplicate"

    @pytest.mark.parametrize("twice", [True, False], ids=["cancelled before", "confirming"])
    def test_a_decided_one_is_refused_with_its_state(self, scene: OperatorScene, twice: bool) -> None:
        xid = begin(scene) if twice else scene.stuck()
        if twice:
            scene.operators[0].Cancel(cancel_request(xid), timeout=CALL_S)
        answer = refused(scene.operators[0].Cancel, cancel_request(xid, "again"))
        state = "CANCELLED" if twice else "CONFIRMING"
        assert (answer.code, answer.reason, answer.metadata["state"]) == (CONFLICT, "NOT_TRYING", state)
        assert f"transaction {xid} is {state} and cannot be cancelled any more" in answer.message
        assert scene.audit(xid)[-1].outcome == REFUSED


TOO_LONG = "x" * 501
STATES = "only what is unfinished can be retried: TRYING, CONFIRMING, CANCELLING"
ACTOR = "needs 1 to 64 printable characters"
CONFIRMED = [types_pb2.TRANSACTION_STATE_CONFIRMED]
SIX = [types_pb2.TRANSACTION_STATE_TRYING] * 6
NO_STATE: Any = [99]
BAD: list[tuple[str, Any, dict[str, str]]] = [
    ("Retry", pb.RetryRequest(xid="no", actor="a"), {"xid": "32 hexadecimal digits"}),
    ("Retry", pb.RetryRequest(xid=NOBODY), {"actor": ACTOR}),
    ("Retry", pb.RetryRequest(xid=NOBODY, actor="a" * 65), {"actor": ACTOR}),
    ("Retry", pb.RetryRequest(xid=NOBODY, actor="a\x00b", reason="\n"), {"actor": ACTOR, "reason": "unprintable"}),
    ("Retry", pb.RetryRequest(xid=NOBODY, actor="a", reason=TOO_LONG), {"reason": "has 501 characters; the limit"}),
    ("Cancel", pb.OperatorServiceCancelRequest(xid=NOBODY, actor="a"), {"reason": "is needed: 1 to 500"}),
    ("Cancel", pb.OperatorServiceCancelRequest(xid=NOBODY, actor="a", reason="  "), {"reason": "is needed: 1 to 500"}),
    ("RetryMany", pb.RetryManyRequest(actor="a"), {"participant": "a name is 1 to"}),
    ("RetryMany", pb.RetryManyRequest(participant="bank"), {"actor": ACTOR}),
    ("RetryMany", pb.RetryManyRequest(participant="bank", actor="a", page_size=501), {"page_size": "the limit is 500"}),
    ("RetryMany", pb.RetryManyRequest(participant="bank", actor="a", states=CONFIRMED), {"states": STATES}),
    ("RetryMany", pb.RetryManyRequest(participant="bank", actor="a", states=NO_STATE), {"states": STATES}),
    ("RetryMany", pb.RetryManyRequest(participant="bank", actor="a", states=SIX), {"states": "the limit is 5"}),
    ("RetryMany", pb.RetryManyRequest(participant="bank", actor="a", page_token="x"), {"page_token": "is not a token"}),
    ("RetryMany", pb.RetryManyRequest(filter="state =", actor="a"), {"filter": "column"}),
    ("CancelMany", pb.CancelManyRequest(actor="a", reason="r"), {"filter": "is needed"}),
    ("CancelMany", pb.CancelManyRequest(filter="  ", actor="a", reason="r"), {"filter": "is needed"}),
    ("CancelMany", pb.CancelManyRequest(filter="state = OPEN", actor="a", reason="r"), {"filter": "column 9"}),
    ("CancelMany", pb.CancelManyRequest(filter="age > 1s"), {"actor": ACTOR, "reason": "is needed: 1 to 500"}),
    (
        "CancelMany",
        pb.CancelManyRequest(filter="age > 1s", actor="a", reason="r", page_size=501),
        {"page_size": "the limit is 500"},
    ),
    ("ListAudit", pb.ListAuditRequest(xid="no"), {"xid": "32 hexadecimal digits"}),
    ("ListAudit", pb.ListAuditRequest(page_size=1_001), {"page_size": "is 1001; the limit is 1000"}),
    ("ListAudit", pb.ListAuditRequest(page_token="é"), {"page_token": "is not a token"}),
    ("ListAudit", pb.ListAuditRequest(newer_than=Duration(seconds=-1)), {"newer_than": "must be 0 to 36500 days"}),
    ("ListAudit", pb.ListAuditRequest(older_than=Duration(seconds=2**40)), {"older_than": "must be 0 to 36500 days"}),
]  # fmt: skip


def test_bad_input_names_the_field_and_the_limit_and_stores_nothing(scene: OperatorScene) -> None:
    for method, request, fields in BAD:
        answer = refused(getattr(scene.operators[0], method), request)
        assert answer.code == grpc.StatusCode.INVALID_ARGUMENT, (method, request)
        assert answer.fields.keys() == fields.keys(), (method, request)
        for field, words in fields.items():
            assert words in answer.fields[field]
    unknown = refused(scene.operators[0].Retry, pb.RetryRequest(xid=NOBODY, actor="a"))
    assert (unknown.code, unknown.reason) == (grpc.StatusCode.NOT_FOUND, "TRANSACTION_NOT_FOUND")
    assert scene.audit() == []


class TestAudit:
    """No action without a record."""

    def test_what_was_asked_for_and_what_came_of_it(self, scene: OperatorScene) -> None:
        xid = begin(scene)
        scene.operators[0].Cancel(cancel_request(xid), timeout=CALL_S)
        asked, done = scene.audit(xid)
        for record in (asked, done):
            assert (record.action, record.xid, record.actor) == ("cancel", xid, "bob")
            assert record.reason == "order 7 is a duplicate"
            assert record.peer.startswith("ipv4:127.0.0.1:")
            assert json.loads(record.before) == {"state": "TRYING", "version": 1, "attention": "NONE", "branches": []}
        assert (asked.outcome, asked.asked_id, asked.after) == (ASKED, "", "")
        assert (done.outcome, done.asked_id) == (DONE, asked.id)
        assert json.loads(done.after)["state"] == "CANCELLED"
        assert asked.time.ToMilliseconds() < done.time.ToMilliseconds()

    def test_pages_and_times(self, scene: OperatorScene) -> None:
        for _ in range(2):
            scene.operators[0].Cancel(cancel_request(begin(scene)), timeout=CALL_S)
        whole = scene.audit()[::-1]
        request = pb.ListAuditRequest(page_size=3, newer_than=Duration(seconds=3_600))
        page = scene.operators[0].ListAudit(request, timeout=CALL_S)
        request.page_token = page.next_page_token
        rest = scene.operators[0].ListAudit(request, timeout=CALL_S)
        assert [*page.records, *rest.records] == whole
        assert rest.next_page_token == ""
        request.older_than.FromSeconds(60)
        assert refused(scene.operators[0].ListAudit, request).fields.keys() == {"page_token"}
        old = pb.ListAuditRequest(older_than=Duration(seconds=3_600))
        assert not scene.operators[0].ListAudit(old, timeout=CALL_S).records

    def test_history_in_the_order_of_time(self, scene: OperatorScene) -> None:
        xid = scene.stuck()
        scene.retry(xid, reason="try it")
        refused(scene.operators[0].Cancel, cancel_request(xid))
        while scene.get(xid).branches[0].attempts < 2:
            pass
        scene.mended.set()
        scene.retry(xid)
        scene.finished(xid)
        shown = scene.shown(xid)
        events = [(e.event, e.detail, e.actor) for e in shown.history]
        assert events[:2] == [("created", "with 1 branch, timeout 30000 ms", ""), ("decided", "to confirm", "")]
        failed, *acted = events[2:]
        assert (failed[0], failed[1][-len("ledger is closed") :]) == ("failed", "ledger is closed")
        assert acted[:2] == [
            ("retry", "done: try it", "alice"),
            ("cancel", "refused: order 7 is a duplicate", "bob"),
        ]
        assert {*acted[2:]} == {
            ("retry", "done", "alice"),
            ("confirmed", "branch 1 (bank.debit)", ""),
            ("finished", "CONFIRMED", ""),
        }
        times = [e.time.ToMilliseconds() for e in shown.history]
        assert times == sorted(times)
        assert not shown.history_incomplete
        assert shown.history[1].time == shown.transaction.decide_time

    @pytest.mark.database
    def test_what_cannot_be_written_down_is_not_done(self, pair: OperatorScene, pg_database: str) -> None:
        xid, trying = pair.stuck(), begin(pair)
        before = pair.get(xid)
        with psycopg.connect(pg_database, autocommit=True) as connection:
            connection.execute("ALTER TABLE tricord_audit RENAME TO away")
            for method, request in (
                (pair.operators[0].Retry, pb.RetryRequest(xid=xid, actor="a")),
                (pair.operators[0].Cancel, cancel_request(trying)),
                (pair.operators[0].RetryMany, pb.RetryManyRequest(participant="bank", actor="a")),
            ):
                assert refused(method, request).code == grpc.StatusCode.UNAVAILABLE
            shown = pair.shown(xid)
            assert shown.history_incomplete
            assert [event.event for event in shown.history] == ["created", "decided", "failed"]
            connection.execute("ALTER TABLE away RENAME TO tricord_audit")
        assert pair.get(xid, at=1) == before
        assert pair.get(trying, at=1).state == types_pb2.TRANSACTION_STATE_TRYING
        assert pair.audit() == []

    @pytest.mark.database
    def test_a_coordinator_that_dies_in_between_leaves_what_was_asked_for(
        self, pair: OperatorScene, pg_database: str
    ) -> None:
        xid = begin(pair)
        with psycopg.connect(pg_database) as blocker:
            blocker.execute("SELECT 1 FROM tricord_transaction WHERE xid = %s FOR UPDATE", [bytes.fromhex(xid)])
            cancelling = pair.operators[0].Cancel.future(cancel_request(xid), timeout=CALL_S)
            while not pair.audit(xid, at=1):
                pass
            pair.coordinators[0].kill()
            assert cancelling.exception(CALL_S) is not None
        (asked,) = pair.audit(xid, at=1)
        assert asked.outcome == ASKED
        events = [(event.event, event.detail) for event in pair.shown(xid, at=1).history]
        assert ("cancel", "asked; what came of it was not written down: order 7 is a duplicate") in events

    @pytest.mark.database
    def test_a_caller_that_goes_away_changes_nothing(self, pair: OperatorScene, pg_database: str) -> None:
        xid = begin(pair)
        with psycopg.connect(pg_database) as blocker:
            blocker.execute("SELECT 1 FROM tricord_transaction WHERE xid = %s FOR UPDATE", [bytes.fromhex(xid)])
            cancelling = pair.operators[0].Cancel.future(cancel_request(xid), timeout=CALL_S)
            while not pair.audit(xid, at=1):
                pass
            cancelling.cancel()
        while len(records := pair.audit(xid, at=1)) < 2:
            pass
        assert [record.outcome for record in records] == [ASKED, DONE]
        assert states(pair.get(xid, at=1)) == ["CANCELLED"]
