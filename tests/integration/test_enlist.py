"""Services that are called directly enlist their branches: a real coordinator, real business services, nested ones too.

B2, B3, case 14: whatever a caller swallows, a branch that was not reported tried bars the confirm, and so does one
that nobody names.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest

from participant_sdk import TransactionCancelled, TricordClient, branch
from participant_sdk.context import pinned_branch_key
from tests.contract.proxy import Proxy
from tests.coordinators import CALL_S, CoordinatorProcess, refused, states
from tests.servers import eventually
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import types_pb2

from .business import Buyer, Order, Shop

CONFIRMED = types_pb2.TRANSACTION_STATE_CONFIRMED
CANCELLED = types_pb2.TRANSACTION_STATE_CANCELLED


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator that repeats soon."""
    with CoordinatorProcess(store=tmp_path / "tricord.db", backoff_base_ms=20, backoff_cap_ms=100) as process:
        yield process


@pytest.fixture
def supplier(tmp_path: Path, coordinator: CoordinatorProcess) -> Iterator[Shop]:
    """C: calls nobody."""
    with Shop("supplier", tmp_path, coordinator.endpoint) as shop:
        yield shop


@pytest.fixture
def shop(tmp_path: Path, coordinator: CoordinatorProcess, supplier: Shop) -> Iterator[Shop]:
    """B: calls C in its Try, if its order says so."""
    with Shop("shop", tmp_path, coordinator.endpoint, onward=supplier) as shop:
        yield shop


@pytest.fixture
def buyer(coordinator: CoordinatorProcess) -> Buyer:
    """A, with an open transaction."""
    return Buyer(coordinator)


def confirm_refused(buyer: Buyer, named: list[int] | None = None) -> tuple[str, dict[str, str]]:
    """How the coordinator refuses to confirm."""
    ids = sorted(buyer.seen) if named is None else named
    request = pb.CoordinatorServiceConfirmRequest(xid=buyer.xid, tried_branch_ids=ids)
    found = refused(buyer.service.Confirm, request)
    assert found.code is grpc.StatusCode.FAILED_PRECONDITION
    return found.reason, found.metadata


def two_branches(buyer: Buyer) -> bool:
    """Whether the second one is stored, at last."""
    return eventually(lambda: len(buyer.get().branches) == 2, CALL_S)


class TestDirect:
    """A calls B."""

    @pytest.mark.parametrize("end", ["confirmed", "cancelled"])
    def test_b3_the_coordinator_confirms_or_cancels_what_was_enlisted(self, buyer: Buyer, shop: Shop, end: str) -> None:
        assert buyer.buy(shop) == "tea#1"
        assert (buyer.seen, shop.holds()) == ({1}, [(1, "held")])
        (one,) = buyer.get().branches
        assert (one.enlisted, one.parent_branch_id, one.state) == (True, 0, types_pb2.BRANCH_STATE_TRIED)
        tx = buyer.confirm() if end == "confirmed" else buyer.cancel()
        assert states(tx) == [end.upper(), end.upper()]
        assert shop.holds() == [(1, end)]

    def test_b2_a_request_that_is_sent_again_is_the_same_branch_and_answer(self, buyer: Buyer, shop: Shop) -> None:
        with pinned_branch_key("order-1/tea"):
            assert [buyer.buy(shop), buyer.buy(shop)] == ["tea#1", "tea#1"]
        assert buyer.buy(shop) == "tea#2"  # another call, with the same content
        assert (shop.ran, len(buyer.get().branches), buyer.seen) == (2, 2, {1, 2})
        assert shop.keys[:2] == ["order-1/tea"] * 2
        assert len(set(shop.keys)) == 2
        assert buyer.confirm().state == CONFIRMED

    def test_b2_a_repeat_after_the_decision_tells_what_became_of_it(self, buyer: Buyer, shop: Shop) -> None:
        with pinned_branch_key("tea"):
            buyer.buy(shop)
            buyer.confirm()
            assert buyer.buy(shop) == "tea#1"
        assert (shop.ran, shop.holds()) == (1, [(1, "confirmed")])

    def test_b2_a_repeat_after_it_was_cancelled_is_refused(self, buyer: Buyer, shop: Shop) -> None:
        with pinned_branch_key("tea"):
            buyer.buy(shop)
            buyer.cancel()
            with pytest.raises(grpc.RpcError, match="NOT_TRYING"):
                buyer.buy(shop)
        assert (shop.ran, shop.holds()) == (1, [(1, "cancelled")])

    def test_b2_the_same_key_for_something_else_is_refused(self, buyer: Buyer, shop: Shop) -> None:
        with pinned_branch_key("order-1"):
            buyer.buy(shop)
            with pytest.raises(grpc.RpcError, match="BRANCH_KEY_REUSED"):
                buyer.buy(shop, Order(item="coffee"))
        assert shop.holds() == [(1, "held")]

    def test_b2_a_lost_enlist_answer_gives_the_same_branch(
        self, buyer: Buyer, coordinator: CoordinatorProcess, tmp_path: Path
    ) -> None:
        with Proxy(f"tcp://{coordinator.endpoint}") as proxy:
            through = urlsplit(proxy.dsn).netloc
            with Shop("far", tmp_path, through) as far:
                buyer.buy(far)  # the connection is there
                stored = threading.Event()
                proxy.lose_next_answer(lambda: stored.set() if two_branches(buyer) else None)
                assert buyer.buy(far) == "tea#2"
                assert stored.is_set()
                assert (len(buyer.get().branches), far.ran) == (2, 2)
                assert buyer.confirm().state == CONFIRMED
                assert far.holds() == [(1, "confirmed"), (2, "confirmed")]

    @pytest.mark.parametrize("end", ["confirmed", "cancelled"])
    def test_b3_one_that_comes_after_the_decision_is_refused_and_runs_nothing(
        self, buyer: Buyer, shop: Shop, supplier: Shop, end: str
    ) -> None:
        buyer.buy(shop)
        tx = buyer.confirm() if end == "confirmed" else buyer.cancel()
        with pytest.raises(grpc.RpcError, match="NOT_TRYING"):
            buyer.buy(supplier)
        assert (supplier.ran, supplier.fence_rows(), supplier.holds()) == (0, 0, [])
        assert eventually(lambda: states(buyer.get()) == states(tx), CALL_S)

    def test_one_of_a_transaction_that_nobody_knows_is_refused(
        self, coordinator: CoordinatorProcess, supplier: Shop
    ) -> None:
        stranger = Buyer(coordinator)
        stranger.xid = stranger.xid[:-4] + "0000"
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            stranger.buy(supplier)
        assert supplier.fence_rows() == 0


class TestBarred:
    """What a caller swallows."""

    def test_b3_a_branch_whose_outcome_is_unknown_bars_the_confirm(
        self, buyer: Buyer, shop: Shop, supplier: Shop
    ) -> None:
        with pytest.raises(grpc.RpcError, match="the shelf fell down"):
            buyer.buy(shop, Order(["raise"]))
        assert buyer.buy(supplier) == "tea#2"  # then from another one
        assert buyer.seen == {2}
        assert confirm_refused(buyer)[0] == "BRANCHES_NOT_TRIED"
        assert states(buyer.get()) == ["TRYING", "PENDING", "TRIED"]
        assert states(buyer.cancel()) == ["CANCELLED"] * 3
        assert (shop.holds(), supplier.holds()) == ([], [(2, "cancelled")])

    def test_b3_a_refused_branch_cancels_all_of_it(self, buyer: Buyer, shop: Shop, supplier: Shop) -> None:
        buyer.buy(supplier)
        with pytest.raises(grpc.RpcError, match="sold_out: no tea"):
            buyer.buy(shop, Order(["refuse"]))
        assert confirm_refused(buyer)[0] == "NOT_TRYING"
        assert eventually(lambda: buyer.get().state == CANCELLED, CALL_S)
        assert "sold_out" in buyer.get().cancel_reason
        assert (shop.holds(), supplier.holds()) == ([], [(1, "cancelled")])

    def test_b3_a_branch_whose_answer_was_not_heard_bars_the_confirm(
        self, buyer: Buyer, shop: Shop, supplier: Shop
    ) -> None:
        """It was tried, and the buyer, who does not know, has bought elsewhere."""
        buyer.buy(shop)
        buyer.seen.clear()
        buyer.buy(supplier)
        reason, metadata = confirm_refused(buyer)
        assert (reason, metadata["branch_ids"]) == ("BRANCHES_NOT_NAMED", "1")
        assert buyer.cancel().state == CANCELLED


class TestNested:
    """A calls B, and B calls C within its Try."""

    def test_case_14_all_of_it_is_confirmed(self, buyer: Buyer, shop: Shop, supplier: Shop) -> None:
        assert buyer.buy(shop, Order(["plain", "plain"])) == "tea#1"
        assert buyer.seen == {1, 2}
        outer, inner = buyer.get().branches
        assert (outer.participant, outer.parent_branch_id, list(outer.tried_branch_ids)) == ("shop", 0, [2])
        assert (inner.participant, inner.parent_branch_id, inner.enlisted) == ("supplier", 1, True)
        assert states(buyer.confirm([1])) == ["CONFIRMED"] * 3  # 1 has named 2
        assert (shop.holds(), supplier.holds()) == ([(1, "confirmed")], [(2, "confirmed")])

    @pytest.mark.parametrize("swallowed", [True, False])
    def test_case_14_when_c_refuses_b_is_cancelled_too(
        self, buyer: Buyer, shop: Shop, supplier: Shop, swallowed: bool
    ) -> None:
        order = Order(["swallow" if swallowed else "plain", "refuse"])
        with pytest.raises(grpc.RpcError):  # C's report has decided: B's own comes too late
            buyer.buy(shop, order)
        assert confirm_refused(buyer, [1])[0] == "NOT_TRYING"
        assert eventually(lambda: buyer.get().state == CANCELLED, CALL_S)
        assert supplier.holds() == []
        assert shop.holds() == ([(1, "cancelled")] if swallowed else [])

    def test_case_14_when_cs_outcome_is_unknown_the_confirm_is_barred_though_b_swallowed_it(
        self, buyer: Buyer, shop: Shop, supplier: Shop
    ) -> None:
        assert buyer.buy(shop, Order(["swallow", "raise"])) == "tea#1"
        assert buyer.seen == {1}
        reason, metadata = confirm_refused(buyer)
        assert (reason, metadata["branch_ids"]) == ("BRANCHES_NOT_TRIED", "2")
        assert states(buyer.cancel()) == ["CANCELLED"] * 3
        assert (shop.holds(), supplier.holds()) == ([(1, "cancelled")], [])

    def test_case_14_in_a_transaction_that_the_coordinator_drives(
        self, coordinator: CoordinatorProcess, shop: Shop, supplier: Shop
    ) -> None:
        with TricordClient(coordinator.endpoint) as client:
            done = client.execute(branch("shop", "reserve", Order(["plain", "plain"])))
            assert [each.state.name for each in done.branches] == ["CONFIRMED", "CONFIRMED"]
            with pytest.raises(TransactionCancelled, match="sold_out"):
                client.execute(branch("shop", "reserve", Order(["swallow", "refuse"])))
        statuses = [status for _, status in shop.holds()], [status for _, status in supplier.holds()]
        assert statuses in ((["confirmed", "cancelled"], ["confirmed"]), (["confirmed"], ["confirmed"]))

    def test_case_14_a_try_that_runs_again_finds_the_branches_of_its_first_run(
        self, coordinator: CoordinatorProcess, shop: Shop, supplier: Shop
    ) -> None:
        """B's first run is lost after C was tried. Its second run is the same call to C: the same branch."""
        with TricordClient(coordinator.endpoint) as client:
            done = client.execute(branch("shop", "reserve", Order(["once", "plain"])))
        assert (shop.ran, supplier.ran, len(set(supplier.keys)), len(supplier.keys)) == (2, 1, 1, 2)
        assert [each.state.name for each in done.branches] == ["CONFIRMED", "CONFIRMED"]
        assert (shop.holds(), supplier.holds()) == ([(1, "confirmed")], [(2, "confirmed")])
