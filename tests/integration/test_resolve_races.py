"""Resolving by hand while coordinators recover the same transactions: real fences, real processes, real PostgreSQL."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from coordinator.model import State
from tests.contract.participant.records import COMMITTED, ROLLBACKED, TRIED, branch
from tests.contract.participant.world import World, new_xid, sqlite_url
from tests.coordinators import CALL_S, CoordinatorProcess
from tests.servers import eventually
from tricord.v1 import operator_pb2 as pb
from tricord.v1 import operator_pb2_grpc, types_pb2

from .doctor_town import Town
from .test_operator_resolves import CANCELLED, CONFIRMED, CONFLICT, resolve_request

XIDS, STEP_S = 16, 0.05


class Race:
    """Transactions to be confirmed that are due now, each TRIED in the fence of a real participant."""

    def __init__(self, town: Town, operators: list[operator_pb2_grpc.OperatorServiceStub]) -> None:
        self.town = town
        self.operators = operators

    async def resolve(self, xid: str, at: int, state: types_pb2.BranchState.ValueType) -> bool:
        """Whether it was recorded; it is only ever refused by what has happened."""
        request, method = resolve_request(xid, state), self.operators[at].Resolve
        try:
            await asyncio.to_thread(method, request, timeout=CALL_S)
            return True
        except grpc.RpcError as error:
            code, said = error.code(), error.details() or ""
        assert code is CONFLICT, said
        assert "contradicts: COMMITTED since" in said or "has answered for good" in said
        return False

    def get(self, xid: str) -> types_pb2.Transaction:
        return self.operators[0].Get(pb.OperatorServiceGetRequest(xid=xid), timeout=CALL_S).transaction

    def rests(self, xid: str) -> bool:
        """Whether nothing will happen any more without a person: it is finished, or the fence has contradicted."""
        tx = self.get(xid)
        finished = tx.state == types_pb2.TRANSACTION_STATE_CONFIRMED
        return finished or "has ended otherwise than it was resolved by hand" in tx.branches[0].last_error

    async def one(self, at: int, delay_s: float) -> str:
        """The record and the fence agree at the end, or a person is told that they do not."""
        bank = self.town.bank
        xid = await branch(bank, TRIED, new_xid())
        await self.town.put(xid, State.CONFIRMING, wake_ms=self.town.store.now_ms())
        await asyncio.sleep(delay_s)  # so that some come before the recovery, some while it runs, some after
        recorded = await self.resolve(xid, at, CANCELLED)
        assert await asyncio.to_thread(eventually, lambda: self.rests(xid), CALL_S)
        tx, status, effects = self.get(xid), bank.status(xid), len(bank.effects(xid))
        assert tx.mixed is recorded
        if not recorded:
            assert (tx.branches[0].state, status, effects) == (CONFIRMED, COMMITTED, 2)
            return "too late"
        assert tx.attention == types_pb2.ATTENTION_VIOLATION
        if tx.state == types_pb2.TRANSACTION_STATE_CONFIRMED:
            assert (tx.branches[0].state, status, effects) == (CANCELLED, ROLLBACKED, 1)
            return "in time"
        assert (status, effects) == (COMMITTED, 2)  # the Confirm that was out has come first
        assert await self.resolve(xid, at, CONFIRMED)  # as the fence says: it is reversed
        await asyncio.to_thread(
            eventually, lambda: self.get(xid).state == types_pb2.TRANSACTION_STATE_CONFIRMED, CALL_S
        )
        assert self.get(xid).mixed
        assert len(bank.effects(xid)) == 2
        return "contradicted"


@pytest.mark.database
async def test_recovery_races_a_resolution(pg_database: str, tmp_path: Path) -> None:
    bank = World("sqlite-sync", sqlite_url(tmp_path))
    with CoordinatorProcess(store=pg_database) as first, CoordinatorProcess(store=pg_database) as second:
        town = Town(pg_database, first, bank)
        try:
            await town.store.open()
            await bank.start(coordinator=first.endpoint, upkeep=None)
            assert await asyncio.to_thread(bank.serving.wait_registered, CALL_S)
            race = Race(town, [first.operator_service(), second.operator_service()])
            ends = [await race.one(n % 2, n * STEP_S) for n in range(XIDS)]
            assert len(ends) == XIDS
        finally:
            await bank.close()
            await town.store.close()
