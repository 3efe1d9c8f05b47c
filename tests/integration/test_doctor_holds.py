"""`tricord doctor` and what participants hold: leaks and missing holds are found, and nothing while traffic runs."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from sqlalchemy import Connection

from examples.transfer import bank
from participant_sdk import Hold, Participant
from participant_sdk.payload import encode
from tests.contract.participant.vault import Vault, open_vault, rows
from tests.contract.participant.world import CONFIRM, DONE, TRY, Debit, World, new_xid, sqlite_url
from tests.coordinators import CALL_S, CoordinatorProcess, tricord
from tricord.v1 import coordinator_pb2, participant_pb2, participant_pb2_grpc, types_pb2

from .doctor_town import FINDINGS, Town, kinds


class VaultTown(Town):
    """Its bank keeps a row for each hold."""

    vault: Vault

    async def drop(self, xid: str) -> None:
        """The hold of a branch, as something else than its handlers would."""
        assert await self.vault.execute("DELETE FROM vault WHERE xid = :xid", xid=xid) == 1


@pytest.fixture
async def town(pg_database: str, tmp_path: Path) -> AsyncIterator[VaultTown]:
    with CoordinatorProcess(store=pg_database) as coordinator:
        world = World("sqlite-sync", sqlite_url(tmp_path))
        town = VaultTown(pg_database, coordinator, world)
        await town.store.open()
        try:
            async with open_vault(world, coordinator=coordinator.endpoint, upkeep=None) as town.vault:
                assert await asyncio.to_thread(world.serving.wait_registered, CALL_S)
                yield town
        finally:
            await town.store.close()


async def test_what_is_held_and_does_not_fit_is_found(town: VaultTown) -> None:
    good, gone = await town.vault.reserved(), await town.vault.reserved()
    await town.drop(gone)
    left = await town.vault.reserved(CONFIRM)
    await town.vault.put(left, 70)
    await town.vault.put(unknown := new_xid(), 5, unit="points")
    code, findings, messages = await town.examine("--apply")
    assert code == FINDINGS
    assert kinds(findings) == {
        ("HOLDS_DIFFER", "bank", ""),
        ("HOLD_LEAKED", "bank", left),
        ("HOLD_LEAKED", "bank", unknown),
        ("HOLD_MISSING", "bank", gone),
    }
    assert [each["severity"] for each in findings] == ["ERROR"] * 4 + ["WARNING"]
    assert not any(each["mendable"] or each["mended"] for each in findings)
    assert all(each["advice"] for each in findings)
    told = {(each["xid"] or each["problem"].split()[1]): each["problem"] for each in findings}
    assert told["EUR"] == "80 EUR are reserved in its tables, only 10 EUR of this by branches that are TRIED"
    assert told["points"] == "5 points are reserved in its tables, only 0 points of this by branches that are TRIED"
    assert told[left] == ("70 EUR are held for branch 1 (reserve), which is COMMITTED: its Confirm has left them")
    assert told[unknown] == "5 points are held for branch 1, which its fence does not know"
    assert told[gone] == "branch 1 (reserve) is TRIED, and nothing is held for it"
    assert messages.endswith("errors: 4, warnings: 1, infos: 0\n")
    assert f"bank at {town.bank.serving.address}: 3 holds compared with 2 TRIED branches …\n" in messages
    assert town.vault.world.query("SELECT count(*) FROM vault WHERE xid IN (:a, :b)", a=good, b=left) == [(2,)]
    table = (await asyncio.to_thread(tricord, "doctor", "--endpoint", town.coordinator.endpoint)).stdout
    assert re.search(f"^ERROR +HOLD_LEAKED +bank +{left} ", table, re.MULTILINE)


async def test_nothing_is_found_while_traffic_runs(town: VaultTown) -> None:
    stub = town.coordinator.coordinator_service()
    payload = types_pb2.Payload(data=encode(Debit()).data, content_type=encode(Debit()).content_type)
    good = coordinator_pb2.BranchRequest(participant="bank", action="reserve", payload=payload)
    refused = coordinator_pb2.BranchRequest(participant="bank", action="debit", payload=payload)
    refused.payload.data = encode(Debit(mode="refuse")).data
    stopping = False

    def traffic(*branches: coordinator_pb2.BranchRequest) -> int:
        done = 0
        while not stopping:
            stub.Execute(coordinator_pb2.ExecuteRequest(branches=branches), timeout=CALL_S)
            done += 1
        return done

    tasks = [
        asyncio.create_task(asyncio.to_thread(traffic, *each)) for each in ((good,), (good, good), (good, refused))
    ]
    try:
        for _ in range(3):
            assert (await town.examine())[:2] == (0, [])
    finally:
        stopping = True
        done = await asyncio.gather(*tasks)
    assert all(done)
    assert (await town.examine())[:2] == (0, [])


async def test_more_than_is_told_one_by_one_is_counted(town: VaultTown) -> None:
    for _ in range(53):
        await town.vault.put(new_xid())
    _, findings, _ = await town.examine()
    leaks = [each for each in findings if each["code"] == "HOLD_LEAKED"]
    assert len(leaks) == 51
    assert leaks[-1]["problem"] == "and 3 more of that kind"
    assert findings[0]["problem"].startswith("530 EUR ")


async def test_a_query_that_fails_is_a_warning(town: VaultTown) -> None:
    def fails(db: Connection) -> Iterator[Hold]:
        raise ValueError("no such table")

    town.vault.query = fails
    code, (finding,), _ = await town.examine()
    assert (code, finding["severity"], finding["code"]) == (FINDINGS, "WARNING", "HOLDS_FAILED")
    assert "holds(): ValueError: no such table" in finding["problem"]
    town.vault.query = rows
    assert (await town.examine())[:2] == (0, [])


def test_the_banks_of_the_example_declare_what_they_hold(tmp_path: Path) -> None:
    engine = bank.open_database(f"sqlite:///{tmp_path / 'bank.db'}")
    bank.open_accounts(engine, {"alice": 100})
    example = Participant("bank-a", engine)
    bank.add_actions(example)
    serving = example.start("127.0.0.1:0")
    try:
        with grpc.insecure_channel(serving.address) as channel:
            stub = participant_pb2_grpc.ParticipantServiceStub(channel)
            payload = encode(bank.Debit("alice", 70))
            call = participant_pb2.Call(
                phase=TRY, xid=new_xid(), branch_id=1, participant="bank-a", action="debit", attempt=1,
                payload=types_pb2.Payload(data=payload.data, content_type=payload.content_type),
            )  # fmt: skip
            call.timeout.FromSeconds(10)
            assert stub.Try(participant_pb2.TryRequest(call=call)).reply.outcome == DONE
            request = participant_pb2.CompareHoldsRequest(participant="bank-a")
            told = stub.CompareHolds(request)
            assert [(each.unit, each.reserved, each.tried) for each in told.sums] == [("cents", "70", "70")]
            assert not told.mismatches
            call.phase = CONFIRM
            assert stub.Confirm(participant_pb2.ConfirmRequest(call=call)).reply.outcome == DONE
            assert stub.CompareHolds(request).holds == 0
    finally:
        serving.stop(CALL_S)
        engine.dispose()
