"""SIGKILL of a service that was called directly, between its COMMIT and its Report or after it (B2, B3).

Its money is held, and neither the coordinator nor the caller need know. The money must not stay held, nor move twice.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from examples.transfer.databases import Account, Databases, eventually
from examples.transfer.processes import Process, free_address
from participant_sdk.fence import Status
from tests.coordinators import CALL_S, CoordinatorProcess, branch, refused, states
from tests.processes import OPENING, ForkedProcesses, fresh_databases, opening_accounts
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import types_pb2

from .business import Buyer
from .called_bank import pay
from .relay import Relay
from .scene import QUICK, finished

CENTS = 1_000


class Banks(ForkedProcesses):
    """bank-a, which is called directly, and bank-b."""

    def __init__(self, folder: Path, databases: Databases, coordinator: str, relay: str) -> None:
        super().__init__(folder)
        self.business = free_address()
        self.called = self._called(free_address(), databases.banks["bank-a"], relay)
        self.other = self.bank("bank-b", free_address(), databases.banks["bank-b"], coordinator, OPENING["bank-b"])

    def _called(self, listen: str, database: str, relay: str) -> Process:
        accounts = ",".join(f"{account}={cents}" for account, cents in OPENING["bank-a"].items())
        command = [sys.executable, "-m", "tests.integration.called_bank", "--serve", self.business, "--name", "bank-a"]
        command += ["--listen", listen, "--database", database, "--coordinator", relay, "--accounts", accounts]
        return self._add("bank-a", command, "participant bank-a serves on ")


class Scene:
    """A transaction with a direct debit at bank-a, whose process was killed, and a credit tried at bank-b."""

    def __init__(self, stack: ExitStack, folder: Path, databases: Databases) -> None:
        self.databases = databases
        self.coordinator = stack.enter_context(CoordinatorProcess(store=databases.store, **QUICK))
        self.relay = stack.enter_context(Relay(self.coordinator.endpoint))
        self.banks = stack.enter_context(Banks(folder, databases, self.coordinator.endpoint, self.relay.address))
        self.pool = stack.enter_context(ThreadPoolExecutor(1))
        for process in (self.banks.called, self.banks.other):
            process.start()
        self.buyer = Buyer(self.coordinator)

    def pay(self) -> bytes:
        """Debit alice at bank-a, by the same business call each time."""
        with self.buyer.shopping():
            return pay(self.banks.business, "order-1", "alice", CENTS)

    def kill_at_its_report(self, when: str) -> None:
        """Kill bank-a when its Try is committed and its Report under way: not arrived yet, or not answered yet."""
        self.relay.hold("Report", when)
        paying: Future[bytes] = self.pool.submit(self.pay)
        assert self.relay.reached.wait(CALL_S)
        self.banks.called.kill()
        self.relay.release()
        with pytest.raises(grpc.RpcError) as raised:
            paying.result()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert self.databases.fence_status("bank-a", self.buyer.xid) is Status.TRIED
        assert self.databases.accounts()["alice@bank-a"].held == CENTS
        credit = branch("bank-b", "credit", b'{"account": "bob", "amount": %d}' % CENTS)
        request = pb.CoordinatorServiceTryRequest(xid=self.buyer.xid, branch_key="2", branch=credit)
        tried = self.buyer.service.Try(request, timeout=CALL_S).branch
        assert tried.state == types_pb2.BRANCH_STATE_TRIED
        self.buyer.seen.add(tried.branch_id)

    def check_rest(self, end: str) -> None:
        """All branches have come to the same end, nothing is held, and the money is where it must be."""
        assert states(finished(self.buyer.service, xid=self.buyer.xid)) == [end] * 3
        eventually("stored", lambda: not self.databases.transactions(unfinished=True))
        expected = opening_accounts()
        if end == "CONFIRMED":
            expected["alice@bank-a"] = Account(OPENING["bank-a"]["alice"] - CENTS)
            expected["bob@bank-b"] = Account(OPENING["bank-b"]["bob"] + CENTS)
        assert self.databases.accounts() == expected
        status = Status.COMMITTED if end == "CONFIRMED" else Status.ROLLBACKED
        assert [self.databases.fence_status(bank, self.buyer.xid) for bank in self.databases.banks] == [status] * 2


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.database)])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    server = request.getfixturevalue("postgres_server") if request.param == "postgresql" else None
    with ExitStack() as stack:
        databases = stack.enter_context(fresh_databases(tmp_path, server))
        yield Scene(stack, tmp_path, databases)


KILLED = pytest.mark.parametrize(
    ("when", "reason"), [("before", "BRANCHES_NOT_TRIED"), ("after", "BRANCHES_NOT_NAMED")]
)


@KILLED
def test_b3_what_its_caller_did_not_see_tried_bars_the_confirm_and_is_cancelled(
    scene: Scene, when: str, reason: str
) -> None:
    scene.kill_at_its_report(when)
    request = pb.CoordinatorServiceConfirmRequest(xid=scene.buyer.xid, tried_branch_ids=sorted(scene.buyer.seen))
    found = refused(scene.buyer.service.Confirm, request)
    assert (found.reason, found.metadata["branch_ids"]) == (reason, "1")
    request_cancel = pb.CoordinatorServiceCancelRequest(xid=scene.buyer.xid, wait=pb.WAIT_DECIDED)
    scene.buyer.service.Cancel(request_cancel, timeout=CALL_S)
    scene.banks.called.start()
    scene.check_rest("CANCELLED")


@KILLED
def test_b2_the_call_that_is_sent_again_is_the_same_branch_and_may_be_confirmed(
    scene: Scene, when: str, reason: str
) -> None:
    scene.kill_at_its_report(when)
    scene.banks.called.start()
    assert scene.pay() == b"held"
    assert scene.buyer.seen == {1, 2}
    assert scene.databases.accounts()["alice@bank-a"].held == CENTS  # once
    scene.buyer.confirm()
    scene.check_rest("CONFIRMED")


def test_b3_the_deadline_cancels_what_nobody_asks_about_any_more(scene: Scene) -> None:
    scene.kill_at_its_report("before")
    renew = pb.RenewRequest(xid=scene.buyer.xid)
    renew.timeout.FromMilliseconds(200)
    scene.buyer.service.Renew(renew, timeout=CALL_S)
    eventually("decided", lambda: scene.buyer.get().state == types_pb2.TRANSACTION_STATE_CANCELLING)
    assert scene.databases.accounts()["alice@bank-a"].held == CENTS  # nobody is there who could give it back
    scene.banks.called.start()
    scene.check_rest("CANCELLED")
