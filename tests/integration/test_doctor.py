"""`tricord doctor`: what is seeded wrongly is found, each by its kind; a system in order has no findings."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.doctor import Severity
from coordinator.model import Attention, State
from coordinator.store.audit import AuditFilter
from participant_sdk.payload import encode
from tests.contract.participant.records import (
    COMMITTED,
    ROLLBACKED,
    SUSPENDED,
    TRIED,
    branch,
    change,
    copies,
    old_xid,
)
from tests.contract.participant.world import Debit, World, new_xid, sqlite_url
from tests.coordinators import CALL_S, CoordinatorProcess, refused, tricord
from tests.postgres import free_port
from tests.servers import eventually
from tricord.v1 import coordinator_pb2, operator_pb2, participant_pb2, types_pb2

from .doctor_town import FINDINGS, Town, kinds
from .participant_server import ParticipantServer

HOUR_MS = 3_600_000
OFF_MS = 600_000


@pytest.fixture
async def town(pg_database: str, tmp_path: Path) -> AsyncIterator[Town]:
    with CoordinatorProcess(store=pg_database, call_timeouts_ms="bnak=1000") as coordinator:
        bank = World("sqlite-sync", sqlite_url(tmp_path))
        town = Town(pg_database, coordinator, bank)
        try:
            await town.store.open()
            await bank.start(coordinator=coordinator.endpoint, upkeep=None)
            assert await asyncio.to_thread(bank.serving.wait_registered, CALL_S)
            yield town
        finally:
            await bank.close()
            await town.store.close()


class OddParticipant(ParticipantServer):
    """One made by other means, whose clock is wrong, and which forgets later than the coordinator."""

    def GetFence(self, request: participant_pb2.GetFenceRequest, context: Any) -> participant_pb2.GetFenceResponse:
        response = participant_pb2.GetFenceResponse(fence_id="another")
        response.now.FromMilliseconds(int(time.time() * 1000) - OFF_MS)
        response.retention.FromSeconds(60 * 86_400)
        return response

    def ListBranches(
        self, request: participant_pb2.ListBranchesRequest, context: Any
    ) -> participant_pb2.ListBranchesResponse:
        context.abort(grpc.StatusCode.UNAVAILABLE, "no time for that")
        raise AssertionError("unreachable")


class HungParticipant(ParticipantServer):
    """One that takes the question, and never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.stopping = threading.Event()

    def GetFence(self, request: participant_pb2.GetFenceRequest, context: Any) -> participant_pb2.GetFenceResponse:
        assert self.stopping.wait(CALL_S)
        return participant_pb2.GetFenceResponse()

    def stop(self) -> None:
        self.stopping.set()
        super().stop()


def severities(findings: list[dict[str, Any]]) -> dict[str, str]:
    return {each["code"]: each["severity"] for each in findings}


async def test_what_does_not_fit_in_the_records_is_found(town: Town) -> None:
    bank, day = town.bank, old_xid
    unknown = await branch(bank, TRIED, day(1))
    finished = await branch(bank, TRIED, await town.put(day(2), State.CONFIRMED))
    confirmed = await branch(bank, COMMITTED, await town.put(day(3), State.CANCELLED))
    cancelled = await branch(bank, ROLLBACKED, await town.put(day(4), State.CONFIRMED))
    suspended = await branch(bank, SUSPENDED, await town.put(day(5), State.CONFIRMED))
    half_done = await branch(bank, COMMITTED, await town.put(day(6), State.CONFIRMED))
    await asyncio.to_thread(change, bank, half_done, "finished_at = NULL")
    missing = await branch(bank, COMMITTED, day(7))
    await copies(bank, half_done, [await town.put(other := day(8), State.CANCELLED)], branch_ids=(2,))
    await asyncio.to_thread(change, bank, other, "finished_at = modified_at")
    nameless = await town.put(new_xid(), State.CANCELLING, participant="nobody")
    no_action = await town.put(new_xid(), State.CONFIRMING, action="lend")
    violated = await town.put(new_xid(), State.CONFIRMING, attention=Attention.VIOLATION, error="no such hold")
    retried = await town.put(day(0.1), State.CONFIRMING, attention=Attention.RETRYING, error="not now")
    stuck = await town.put(day(0.2), State.CONFIRMING, attention=Attention.STUCK)
    late = await town.put(new_xid(), State.TRYING, wake_ms=town.store.now_ms() + 24 * HOUR_MS)
    newer = await town.put(new_xid(), State.TRYING, wake_ms=town.store.now_ms() - HOUR_MS)
    await town.sql("UPDATE tricord_transaction SET format = 99 WHERE xid = %s", bytes.fromhex(newer))
    on_record = await town.put(day(9), State.CONFIRMED, attention=Attention.VIOLATION)
    code, findings, messages = await town.examine()
    assert code == FINDINGS
    assert kinds(findings) == {
        ("ORPHAN_UNKNOWN", "bank", unknown),
        ("ORPHAN_FINISHED", "bank", finished),
        ("CONFIRMED_AGAINST_RECORD", "bank", confirmed),
        ("CANCELLED_AGAINST_RECORD", "bank", cancelled),
        ("CANCELLED_AGAINST_RECORD", "bank", suspended),
        ("HALF_DONE", "bank", half_done),
        ("RECORD_MISSING", "bank", missing),
        ("BRANCH_UNKNOWN", "bank", other),
        ("NOT_REGISTERED", "nobody", nameless),
        ("NOT_REGISTERED", "bank", no_action),
        ("ATTENTION_VIOLATION", "", violated),
        ("ATTENTION_RETRYING", "", retried),
        ("ATTENTION_STUCK", "", stuck),
        ("BACKLOG", "bank", ""),
        ("WAKES_LATE", "", late),
        ("NOBODY_DRIVES", "", newer),
        ("ATTENTION_ON_RECORD", "", on_record),
        ("SETTING_UNUSED", "", ""),
    }
    told = [each["severity"] for each in findings]
    assert told == sorted(told, key=["ERROR", "WARNING", "INFO"].index)
    assert all(each["problem"] and each["advice"] for each in findings)
    assert [each["xid"] for each in findings if each["mendable"]] == [late]
    assert not any(each["mended"] for each in findings)
    assert f"bank at {bank.serving.address} answered in " in messages
    assert messages.endswith("errors: 12, warnings: 5, infos: 1\n")


async def test_what_does_not_fit_among_participants_is_found(town: Town) -> None:
    coordinator, gone = town.coordinator, f"127.0.0.1:{free_port()}"
    with OddParticipant() as odd, ParticipantServer() as plain, HungParticipant() as hung:
        coordinator.register("gone", gone)
        coordinator.register("odd", odd.address, {"debit": "fence-1"})
        coordinator.register("plain", plain.address)
        coordinator.register("hung", hung.address)
        coordinator.register("shop", town.bank.serving.address)
        coordinator.register("left", gone)
        coordinator.withdraw("left", gone)
        await town.sql("UPDATE tricord_store SET format = 2")
        code, findings, _ = await town.examine()
    assert code == FINDINGS
    assert {(each["code"], each["participant"]): each["severity"] for each in findings} == {
        ("ADDRESS_UNREACHABLE", "gone"): "ERROR",
        ("ADDRESS_UNREACHABLE", "hung"): "ERROR",
        ("CLOCK_SKEW", "odd"): "ERROR",
        ("RETENTION", "odd"): "WARNING",
        ("FENCE_DIFFERS", "odd"): "ERROR",
        ("NOT_COMPARED", "odd"): "INFO",
        ("FENCE_NOT_TOLD", "plain"): "INFO",
        ("ADDRESS_OF_ANOTHER", "shop"): "ERROR",
        ("PARTICIPANT_NOWHERE", "left"): "WARNING",
        ("ROW_FORMAT", ""): "INFO",
        ("SETTING_UNUSED", ""): "WARNING",
    }
    (skew,) = [each for each in findings if each["code"] == "CLOCK_SKEW"]
    assert "10 min behind" in skew["problem"]


async def test_a_system_in_order_has_no_findings(town: Town) -> None:
    bank = town.bank
    await branch(bank, COMMITTED, await town.put(old_xid(1), State.CONFIRMED))
    await branch(bank, COMMITTED, await town.put(old_xid(2), State.CONFIRMING, decided_ms=town.store.now_ms()))
    await branch(bank, ROLLBACKED, await town.put(old_xid(3), State.CANCELLED))
    await branch(bank, ROLLBACKED, await town.put(old_xid(4), State.CANCELLED), mode="refuse")
    await branch(bank, SUSPENDED, await town.put(old_xid(5), State.CANCELLED))
    await branch(bank, COMMITTED, old_xid(40))  # which the coordinator has forgotten, as it should
    waiting = await town.put(old_xid(0.5), State.TRYING)
    await branch(bank, TRIED, waiting)
    stub = town.coordinator.coordinator_service()
    payload = types_pb2.Payload(data=encode(Debit()).data, content_type=encode(Debit()).content_type)
    debit = coordinator_pb2.BranchRequest(participant="bank", action="debit", payload=payload)
    for _ in range(3):
        await asyncio.to_thread(stub.Execute, coordinator_pb2.ExecuteRequest(branches=[debit]), timeout=CALL_S)
    code, findings, messages = await town.examine("--participant", "bank")
    assert (code, findings) == (0, [])
    assert "errors: 0, warnings: 0, infos: 0" in messages
    _, findings, _ = await town.examine()
    assert severities(findings) == {"SETTING_UNUSED": "WARNING"}


async def test_apply_mends_what_is_safe_and_nothing_else(town: Town) -> None:
    late = await town.put(new_xid(), State.CANCELLING, wake_ms=town.store.now_ms() + 24 * HOUR_MS)
    orphan = await branch(town.bank, TRIED, old_xid(1))
    code, findings, messages = await town.examine("--apply", "--participant", "bank")
    assert code == FINDINGS
    assert {each["xid"]: each["mended"] for each in findings} == {late: True, orphan: False}
    assert "mended: 1" in messages
    stub = town.coordinator.coordinator_service()
    *_, last = await asyncio.to_thread(list, stub.Watch(coordinator_pb2.WatchRequest(xid=late), timeout=CALL_S))
    assert last.transaction.state == types_pb2.TRANSACTION_STATE_CANCELLED
    assert town.bank.status(orphan) == TRIED
    assert town.bank.status(late) == SUSPENDED
    done, asked = await town.store.audit(AuditFilter(bytes.fromhex(late)))
    assert (asked.action, json.loads(asked.before)["code"], asked.actor != "") == ("mend", "WAKES_LATE", True)
    assert (done.action, json.loads(done.after)["outcome"]) == ("mend", "done")
    assert await town.store.audit(AuditFilter(bytes.fromhex(orphan))) == []


async def test_a_flood_of_one_kind_hides_no_other(town: Town) -> None:
    first = await branch(town.bank, TRIED, old_xid(1))
    await copies(town.bank, first, [old_xid(1 + n / 1_000) for n in range(1, 1_500)])
    half_done = await branch(town.bank, COMMITTED, old_xid(3))
    await asyncio.to_thread(change, town.bank, half_done, "finished_at = NULL")
    _, findings, _ = await town.examine("--participant", "bank")
    orphans = [each for each in findings if each["code"] == "ORPHAN_UNKNOWN"]
    assert len(orphans) == 51
    assert orphans[-1]["problem"] == "and 1450 more of that kind"
    assert ("HALF_DONE", "bank", half_done) in kinds(findings)


async def test_who_stops_listening_ends_the_look(town: Town) -> None:
    first = await branch(town.bank, TRIED, old_xid(1))
    await copies(town.bank, first, [old_xid(1 + n / 10_000) for n in range(1, 5_000)])
    service = town.coordinator.operator_service()
    request = operator_pb2.ExamineRequest(participant="bank")

    def listen_for_one() -> bool:
        stream = service.Examine(request, timeout=CALL_S)
        found = any(response.WhichOneof("of") == "finding" for response in stream)
        stream.cancel()
        return found

    def listen_to_all() -> bool:
        try:
            return len(list(service.Examine(request, timeout=CALL_S))) > 50
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return False

    assert await asyncio.to_thread(listen_for_one)
    assert await asyncio.to_thread(eventually, listen_to_all, CALL_S)
    assert town.coordinator.log("rpc.failed") == []


async def test_bad_requests_are_refused(town: Town) -> None:
    service = town.coordinator.operator_service()

    def examine(request: operator_pb2.ExamineRequest, timeout: float) -> Any:
        return list(service.Examine(request, timeout=timeout))

    request = operator_pb2.ExamineRequest()
    request.grace.FromMilliseconds(999)
    assert "grace" in (await asyncio.to_thread(refused, examine, request)).fields
    request = operator_pb2.ExamineRequest(participant="no name")
    assert "participant" in (await asyncio.to_thread(refused, examine, request)).fields
    ran = await asyncio.to_thread(tricord, "doctor", "--endpoint", town.coordinator.endpoint, "--participant", "nobody")
    assert ran.returncode == 3
    assert ran.stderr.endswith("no participant nobody is registered\n")
    ran = await asyncio.to_thread(tricord, "doctor", "--endpoint", f"127.0.0.1:{free_port()}")
    assert ran.returncode == 5


async def test_outputs(town: Town) -> None:
    orphan = await branch(town.bank, TRIED, old_xid(1))
    where = ("--endpoint", town.coordinator.endpoint)
    lines = (await asyncio.to_thread(tricord, "doctor", *where, "-o", "jsonl")).stdout.splitlines()
    assert {json.loads(line)["code"] for line in lines} == {"ORPHAN_UNKNOWN", "SETTING_UNUSED"}
    table = (await asyncio.to_thread(tricord, "doctor", *where)).stdout.splitlines()
    assert table[0].split()[:4] == ["SEVERITY", "CODE", "PARTICIPANT", "XID"]
    assert table[1].split()[:4] == ["ERROR", "ORPHAN_UNKNOWN", "bank", orphan]


def test_the_numbers_of_severities_are_the_contracts() -> None:
    for severity in Severity:
        assert operator_pb2.Severity.Name(int(severity)) == f"SEVERITY_{severity.name}"  # type: ignore[arg-type]
