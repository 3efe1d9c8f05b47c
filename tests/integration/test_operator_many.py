"""What operators do to many transactions, over real gRPC: pages, dry runs, a record of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.coordinators import CALL_S, refused, states
from tricord.v1 import coordinator_pb2, types_pb2
from tricord.v1 import operator_pb2 as pb

from .operator_scene import BROKEN, OperatorScene, operator_scene
from .test_operator_actions import ASKED, DONE, begin


@pytest.fixture
def scene(tmp_path: Any) -> Iterator[OperatorScene]:
    """One coordinator on SQLite."""
    with operator_scene(tmp_path / "tricord.db") as made:
        yield made


class TestRetryMany:
    """All that wait for a participant."""

    def many(self, scene: OperatorScene, **fields: Any) -> list[pb.RetryManyResponse]:
        """All pages."""
        request = pb.RetryManyRequest(**{"participant": "bank", "actor": "alice", **fields})
        pages = []
        while True:
            pages.append(scene.operators[0].RetryMany(request, timeout=CALL_S))
            if not pages[-1].next_page_token:
                return pages
            request.page_token = pages[-1].next_page_token

    def test_a_dry_run_counts_and_changes_nothing(self, scene: OperatorScene) -> None:
        xids = [scene.stuck() for _ in range(3)]
        before = [scene.get(xid).version for xid in xids]
        assert [page.count for page in self.many(scene, dry_run=True, page_size=2)] == [2, 1]
        assert [scene.get(xid).version for xid in xids] == before
        assert scene.audit() == []

    def test_page_after_page(self, scene: OperatorScene) -> None:
        xids = [scene.stuck() for _ in range(3)]
        scene.mended.set()
        assert [page.count for page in self.many(scene, page_size=2, reason="open again")] == [2, 1]
        assert {states(scene.finished(xid))[0] for xid in xids} == {"CONFIRMED"}
        assert self.many(scene)[0].count == 0

    def test_only_that_participants_branches(self, scene: OperatorScene) -> None:
        both, other = scene.stuck(shop=BROKEN), scene.stuck()
        (page,) = self.many(scene, participant="shop")
        assert page.count == 1
        while scene.get(both).branches[1].attempts < 2:
            pass
        assert [b.attempts for b in scene.get(both).branches] == [1, 2]
        assert scene.get(other).branches[0].attempts == 1

    def test_only_these_states(self, scene: OperatorScene) -> None:
        scene.stuck()
        assert self.many(scene, states=[types_pb2.TRANSACTION_STATE_CANCELLING], dry_run=True)[0].count == 0
        assert self.many(scene, states=[types_pb2.TRANSACTION_STATE_CONFIRMING], dry_run=True)[0].count == 1

    def test_each_transaction_has_its_record(self, scene: OperatorScene) -> None:
        xids = [scene.stuck() for _ in range(2)]
        self.many(scene, reason="open again")
        asked, *ones, last = scene.audit()
        assert (asked.action, asked.outcome, asked.xid) == ("retry-many", ASKED, "")
        assert json.loads(asked.before) == {"participant": "bank", "xids": xids[::-1]}
        assert {(one.action, one.outcome, one.asked_id) for one in ones} == {("retry", DONE, asked.id)}
        assert {one.xid for one in ones} == set(xids)
        assert (last.action, last.outcome, json.loads(last.after)["retried"]) == ("retry-many", DONE, 2)
        assert [(e.event, e.detail) for e in scene.shown(xids[0]).history][-1] == ("retry", "done: open again")

    def test_a_token_of_another_participant_is_refused(self, scene: OperatorScene) -> None:
        for _ in range(2):
            scene.stuck()
        request = pb.RetryManyRequest(participant="bank", actor="alice", page_size=1, dry_run=True)
        request.page_token = scene.operators[0].RetryMany(request, timeout=CALL_S).next_page_token
        request.participant = "shop"
        answer = refused(scene.operators[0].RetryMany, request)
        assert answer.fields == {"page_token": "belongs to a request with other filters"}

    def test_those_of_a_filter(self, scene: OperatorScene) -> None:
        both, other = scene.stuck(shop=BROKEN), scene.stuck()
        assert self.many(scene, filter="participant = shop", dry_run=True)[0].count == 1
        assert self.many(scene, participant="", filter="state = TRYING", dry_run=True)[0].count == 0
        (page,) = self.many(scene, participant="", filter="participant = shop")
        assert page.count == 1
        while [b.attempts for b in scene.get(both).branches] != [2, 2]:
            pass
        assert scene.get(other).branches[0].attempts == 1
        assert json.loads(scene.audit()[0].before) == {"filter": "participant = shop", "xids": [both]}


class TestCancelMany:
    """All of a filter that are undecided."""

    def many(self, scene: OperatorScene, **fields: Any) -> list[pb.CancelManyResponse]:
        """All pages."""
        request = pb.CancelManyRequest(**{"filter": "age >= 0s", "actor": "bob", "reason": "a bad day", **fields})
        pages = []
        while True:
            pages.append(scene.operators[0].CancelMany(request, timeout=CALL_S))
            if not pages[-1].next_page_token:
                return pages
            request.page_token = pages[-1].next_page_token

    def test_a_dry_run_counts_and_changes_nothing(self, scene: OperatorScene) -> None:
        xids = [begin(scene) for _ in range(3)]
        before = [scene.get(xid) for xid in (*xids, scene.stuck())]
        pages = self.many(scene, dry_run=True, reason="", page_size=3)  # nothing is written down that it would stand in
        assert [(page.count, page.left_alone) for page in pages] == [(2, 1), (1, 0)]
        assert [scene.get(tx.xid) for tx in before] == before
        assert scene.audit() == []

    def test_only_what_is_trying_each_with_its_record(self, scene: OperatorScene) -> None:
        xids, decided = [begin(scene) for _ in range(3)], scene.stuck()
        labels = coordinator_pb2.BeginRequest(labels={"keep": "yes"})
        labels.timeout.FromSeconds(3_600)
        kept = scene.coordinators[0].coordinator_service().Begin(labels, timeout=CALL_S).transaction.xid
        pages = self.many(scene, filter="NOT labels.keep = yes", page_size=2)
        assert [(page.count, page.left_alone, list(page.failed_xids)) for page in pages] == [(1, 1, []), (2, 0, [])]
        assert {(scene.get(xid).state, scene.get(xid).cancel_reason) for xid in xids} == {
            (types_pb2.TRANSACTION_STATE_CANCELLED, "cancelled by an operator (bob): a bad day")
        }
        assert states(scene.get(kept)) == ["TRYING"]
        assert states(scene.get(decided)) == ["CONFIRMING", "TRIED"]
        asked, one, last, *_ = scene.audit()
        assert (asked.action, asked.outcome, asked.xid) == ("cancel-many", ASKED, "")
        assert json.loads(asked.before) == {"filter": "NOT labels.keep = yes", "xids": [xids[2]]}
        assert (one.action, one.outcome, one.xid, one.asked_id) == ("cancel", DONE, xids[2], asked.id)
        assert (last.action, last.outcome, json.loads(last.after)["cancelled"]) == ("cancel-many", DONE, 1)
        assert {(r.actor, r.reason) for r in scene.audit()} == {("bob", "a bad day")}
        assert [(page.count, page.left_alone) for page in self.many(scene)] == [(1, 4)]

    def test_a_token_of_another_filter_is_refused(self, scene: OperatorScene) -> None:
        for _ in range(2):
            begin(scene)
        request = pb.CancelManyRequest(filter="age > 0s", actor="b", reason="r", page_size=1, dry_run=True)
        request.page_token = scene.operators[0].CancelMany(request, timeout=CALL_S).next_page_token
        request.filter = "age > 1s"
        answer = refused(scene.operators[0].CancelMany, request)
        assert answer.fields == {"page_token": "belongs to a request with other filters"}
