"""A bank goes down in the middle of transfers: real processes, for tests of what operators then see and do.

The coordinator stands on PostgreSQL, the banks (examples/transfer) on a SQLite file each. Whatever has failed is
called again only after minutes, so that nothing ends by itself while an operator looks.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
from sqlalchemy import create_engine, text

from examples.transfer.bank import Credit, Debit
from examples.transfer.databases import Databases, sqlite_databases
from examples.transfer.processes import Process
from participant_sdk import TricordClient, Wait, branch
from participant_sdk.client_request import BranchRequest
from participant_sdk.coordinator_messages import write_payload
from tests.coordinators import CALL_S, tricord
from tests.processes import Cast
from tricord.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    participant_pb2,
    participant_pb2_grpc,
    types_pb2,
)

HOUR_MS = 3_600_000
SETTINGS = {"attention_after": 2, "timeout_ms": HOUR_MS, "backoff_base_ms": 60_000, "backoff_cap_ms": HOUR_MS}
FAR_S = 60
"""No test looks for so long."""
CENTS = 1_000
FINISHED = (types_pb2.TRANSACTION_STATE_CONFIRMED, types_pb2.TRANSACTION_STATE_CANCELLED)


class Outage:
    """Transfers from ``alice`` at bank-a to bank-b, by the order that each is labelled with."""

    def __init__(self, cast: Cast, client: TricordClient, channel: grpc.Channel) -> None:
        self.cast = cast
        self.xids: dict[str, str] = {}
        self._client = client
        self._operator = operator_pb2_grpc.OperatorServiceStub(channel)
        self._service = coordinator_pb2_grpc.CoordinatorServiceStub(channel)

    @property
    def bank_b(self) -> Process:
        """The bank that goes down."""
        return self.cast.banks["bank-b"]

    @property
    def bank_b_address(self) -> str:
        """Where it is called."""
        request = operator_pb2.ListParticipantsRequest(participant="bank-b")
        (bank,) = self._operator.ListParticipants(request, timeout=CALL_S).participants
        return bank.addresses[0].address

    def happen(self, orders: Sequence[str], *, strays: Sequence[str], begun: str) -> None:
        """Kill bank-b between Try and Confirm of ``orders``, and of ``strays``, which are for dave.

        ``begun`` comes too late for bank-b to try it. When this returns, all have attention and wait for the next
        attempt, and dave's account is gone.
        """
        self.fall(orders, strays)
        late = self._client.execute(*_transfer("bob"), labels={"order": begun}, wait=Wait.ACCEPTED)
        self.xids[begun] = late.xid
        engine = create_engine(self.cast.databases.banks["bank-b"])
        with engine.begin() as db:
            assert db.execute(text("DELETE FROM account WHERE name = 'dave'")).rowcount == 1
        engine.dispose()
        self.let_them_fail()

    def fall(self, orders: Sequence[str], strays: Sequence[str] = ()) -> None:
        """Kill bank-b between Try and Confirm of these."""
        with ExitStack() as open_ones:
            for order in (*orders, *strays):
                start = self._client.transaction(labels={"order": order}, wait=Wait.DECIDED)
                tx = open_ones.enter_context(start)
                for each in _transfer("dave" if order in strays else "bob"):
                    tx.try_(each)
                self.xids[order] = tx.xid
            self.bank_b.kill()

    def confirm_unheard(self, order: str) -> None:
        """Start bank-b and have it confirm an order for bob, of which the coordinator does not hear."""
        self.bank_b.start()
        credit = _transfer("bob")[1]
        call = participant_pb2.Call(
            phase=participant_pb2.PHASE_CONFIRM,
            xid=self.xids[order],
            branch_id=2,
            participant=credit.participant,
            action=credit.action,
            payload=write_payload(credit.payload),
        )
        with grpc.insecure_channel(self.bank_b_address) as channel:
            bank = participant_pb2_grpc.ParticipantServiceStub(channel)
            answer = bank.Confirm(participant_pb2.ConfirmRequest(call=call), timeout=CALL_S, wait_for_ready=True)
        assert answer.reply.outcome == participant_pb2.OUTCOME_DONE, answer

    def run(self, *arguments: str, merged: bool = False) -> subprocess.CompletedProcess[str]:
        """The command ``tricord``, at this coordinator."""
        env = {"TRICORD_ENDPOINT": self.cast.endpoints[0], "COLUMNS": "100"}
        return tricord(*arguments, env=env, merged=merged)

    def begin(self, order: str, **labels: str) -> None:
        """An interactive transaction of no branch yet, which stays TRYING."""
        request = coordinator_pb2.BeginRequest(labels={"order": order, **labels})
        self.xids[order] = self._service.Begin(request, timeout=CALL_S).transaction.xid

    def findings(self, code: str = "") -> list[dict[str, Any]]:
        """What the doctor finds of things that are a second old."""
        ran = self.run("doctor", "--grace", "1s", "-o", "json")
        found: list[dict[str, Any]] = json.loads(ran.stdout)["findings"]
        return [each for each in found if code in ("", each["code"])]

    def get(self, order: str) -> types_pb2.Transaction:
        """A transaction as it stands."""
        request = operator_pb2.OperatorServiceGetRequest(xid=self.xids[order])
        return self._operator.Get(request, timeout=CALL_S).transaction

    def until(self, order: str, reached: Callable[[types_pb2.Transaction], bool]) -> types_pb2.Transaction:
        """A transaction, as soon as it is as wanted; the suite's own time-out ends what never is."""
        while not reached(tx := self.get(order)):
            pass
        return tx

    def finish(self, order: str) -> types_pb2.Transaction:
        """A transaction, as soon as its end is stored."""
        return self.until(order, lambda tx: tx.state in FINISHED)

    def let_them_fail(self, *orders: str) -> None:
        """Retry in vain, again and again, until each of these, or of all, has attention and rests for long."""
        orders = orders or tuple(self.xids)
        request = operator_pb2.RetryManyRequest(participant="bank-b", actor="night shift", reason="is it back?")
        while True:
            self._operator.RetryMany(request, timeout=CALL_S)
            for order in orders:
                self.until(order, lambda tx: _next_s(tx) > time.time())
            found = [self.get(order) for order in orders]
            rested_s = min(map(_next_s, found)) - time.time()
            if rested_s > FAR_S and all(tx.attention == types_pb2.ATTENTION_RETRYING for tx in found):
                return


def _transfer(to: str) -> tuple[BranchRequest, BranchRequest]:
    return branch("bank-a", "debit", Debit("alice", CENTS)), branch("bank-b", "credit", Credit(to, CENTS))


def _next_s(tx: types_pb2.Transaction) -> int:
    """When bank-b is called next."""
    return tx.branches[1].next_attempt_time.seconds


@contextmanager
def outage(folder: Path, store: str) -> Iterator[Outage]:
    """The scene, before anything has happened."""
    databases = Databases(store, sqlite_databases(folder).banks)
    with (
        Cast(folder, databases, settings=SETTINGS) as cast,
        TricordClient(cast.endpoints[0]) as client,
        grpc.insecure_channel(cast.endpoints[0]) as channel,
    ):
        yield Outage(cast, client, channel)
