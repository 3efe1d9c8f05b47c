"""The coordinator's cases of what outlasts restarts and outages, and of clocks and time-outs, by their number."""

import asyncio
import json
from typing import Any

from coordinator.codec import saved_row, transaction
from coordinator.store.rows import Batch
from tests.contract.rows import open_store
from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request, states, tricord
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import types_pb2

from .participant_server import done, refuse
from .scene import CANCEL, CONFIRM, Call, Reply, Scene, finished, unknown


def listed(coordinator: CoordinatorProcess) -> dict[str, Any]:
    """What ``tricord list`` tells, by xid."""
    run = tricord("list", "-o", "json", "--endpoint", coordinator.endpoint)
    assert run.returncode == 0, run.stderr
    return {tx["xid"]: tx for tx in json.loads(run.stdout)["transactions"]}


def shown(coordinator: CoordinatorProcess, xid: str) -> dict[str, Any]:
    """What ``tricord show`` tells."""
    run = tricord("show", xid, "-o", "json", "--endpoint", coordinator.endpoint)
    assert run.returncode == 0, run.stderr
    tx: dict[str, Any] = json.loads(run.stdout)
    return tx


def test_case_22_what_ended_and_what_failed_is_listed_after_a_restart(scene: Scene) -> None:
    def bank(call: Call) -> Reply:
        order = call.payload.data
        if (order, call.phase) == (b"hard", CONFIRM) and call.attempt < 3:
            return unknown("the ledger is locked")
        if (order, call.phase) == (b"refused", CANCEL) and call.attempt < 3:
            return unknown("the vault is shut")
        if (order, call.phase) == (b"stuck", CONFIRM):
            return unknown("no paper in the printer")
        return done(call)

    scene.bank.answer = bank
    scene.stock.answer = lambda call: refuse(call) if call.payload.data == b"refused" else done(call)
    coordinator = scene.coordinator()
    stub = coordinator.coordinator_service()
    xids = {}
    for order in (b"smooth", b"hard", b"refused", b"stuck"):
        branches = [branch(data=order), branch("stock", data=order)]
        request = execute_request(*branches, key=order.decode(), wait=pb.WAIT_DECIDED)
        xids[order] = stub.Execute(request, timeout=CALL_S).transaction.xid
    for order in (b"smooth", b"hard", b"refused"):
        finished(stub, xid=xids[order])
    scene.bank.wait_for(1 + 3 + 3, "CONFIRM")
    coordinator.kill()
    coordinator.start()

    stub = coordinator.coordinator_service()
    for order in (b"smooth", b"hard", b"refused"):  # the last save of each may have been lost
        finished(stub, xid=xids[order])
    errors = {b"smooth": "", b"hard": "the ledger is locked", b"refused": "the vault is shut"}
    errors[b"stuck"] = "no paper in the printer"
    ends = {b"smooth": "CONFIRMED", b"hard": "CONFIRMED", b"refused": "CANCELLED", b"stuck": "CONFIRMING"}
    told = listed(coordinator)
    while any(told[xids[order]]["state"] != end for order, end in ends.items()):  # nobody waits for a last save
        told = listed(coordinator)
    assert set(told) == set(xids.values())
    for order, xid in xids.items():
        for tx in (told[xid], shown(coordinator, xid)):
            assert (tx["state"], tx["branches"][0]["last_error"]) == (ends[order], errors[order])
    assert told[xids[b"hard"]]["branches"][0]["attempts"] == 2
    assert told[xids[b"stuck"]]["branches"][0]["attempts"] >= 2
    assert told[xids[b"refused"]]["branches"][1]["refusal"]["reason"] == "insufficient_funds"


async def as_after_an_outage(store: str, xid: str, attempts: int, rests_ms: int = 0) -> None:
    """Store that the first branch has been tried in vain so often, and rests for so long now."""
    opened = await open_store(store)
    try:
        row = await opened.get(xid=bytes.fromhex(xid))
        assert row is not None
        tx = transaction(row)
        step = tx.steps[0]._replace(attempts=attempts)
        if rests_ms:
            step = step._replace(next_ms=opened.now_ms() + rests_ms)
            tx = tx._replace(wake_ms=step.next_ms)
        steps = (step, *tx.steps[1:])
        later = saved_row(tx._replace(steps=steps, version=tx.version + 1, save_id=tx.save_id ^ 1))
        assert await opened.flush(Batch((), [later])) == [None]
    finally:
        await opened.close()


def test_case_25_after_a_long_outage_the_next_attempt_is_within_the_cap(scene: Scene) -> None:
    cap_ms, attempts = 400, 9_000
    scene.bank.answer = lambda call: unknown("closed for the night") if call.phase == CONFIRM else done(call)
    coordinator = scene.coordinator(backoff_cap_ms=cap_ms)
    request = execute_request(branch(), branch("stock"), wait=pb.WAIT_DECIDED)
    xid = coordinator.coordinator_service().Execute(request, timeout=CALL_S).transaction.xid
    scene.bank.wait_for(2, "CONFIRM")
    scene.bank.stop()  # nothing of it answers any more
    coordinator.stop()
    asyncio.run(as_after_an_outage(scene.store, xid, attempts))
    coordinator.start()

    pauses_ms: list[int] = []
    for change in coordinator.coordinator_service().Watch(pb.WatchRequest(xid=xid), timeout=CALL_S):
        tx = change.transaction
        if tx.state == types_pb2.TRANSACTION_STATE_CONFIRMING and tx.branches[0].attempts > attempts:
            pauses_ms.append(tx.branches[0].next_attempt_time.ToMilliseconds() - tx.update_time.ToMilliseconds())
            if len(pauses_ms) == 10:
                scene.bank.answer = done
                scene.bank.start()
    assert states(tx) == ["CONFIRMED"] * 3
    assert len(pauses_ms) >= 10
    assert max(pauses_ms) <= cap_ms


def test_case_25_a_retry_starts_now_what_would_rest_for_an_hour(scene: Scene) -> None:
    scene.bank.answer = lambda call: unknown("closed for the night") if call.phase == CONFIRM else done(call)
    coordinator = scene.coordinator()
    request = execute_request(branch(), branch("stock"), wait=pb.WAIT_DECIDED)
    xid = coordinator.coordinator_service().Execute(request, timeout=CALL_S).transaction.xid
    scene.bank.wait_for(2, "CONFIRM")
    coordinator.stop()
    asyncio.run(as_after_an_outage(scene.store, xid, 9_000, rests_ms=3_600_000))
    scene.bank.answer = done
    asked = len(scene.bank.seen())
    coordinator.start()
    assert shown(coordinator, xid)["state"] == "CONFIRMING"

    run = tricord("retry", xid, "--actor", "alice", "--endpoint", coordinator.endpoint)
    assert run.returncode == 0, run.stderr
    assert states(finished(coordinator.coordinator_service(), xid=xid)) == ["CONFIRMED"] * 3
    assert [seen.phase for seen in scene.bank.seen()[asked:]] == ["CONFIRM"]


def test_case_27_both_timeouts_are_named_shown_and_compared(scene: Scene) -> None:
    settings: dict[str, Any] = {"call_timeout_ms": 1_200, "call_timeouts_ms": "stock.debit=700,stock=600"}
    coordinator = scene.coordinator(**settings)
    branches = [branch(), branch("stock"), branch("stock", "credit")]
    stub = coordinator.coordinator_service()
    tx = stub.Execute(execute_request(*branches, timeout_ms=9_000), timeout=CALL_S).transaction
    assert all(not b.HasField("call_timeout") for b in tx.branches)  # a setting of the operators
    for told in (shown(coordinator, tx.xid), listed(coordinator)[tx.xid]):
        assert told["timeout_ms"] == 9_000
        assert told["deadline_time"] > told["create_time"]
        assert [b["call_timeout_ms"] for b in told["branches"]] == [1_200, 700, 600]
    table = tricord("show", tx.xid, "--endpoint", coordinator.endpoint).stdout
    facts, _, rows = table.partition("BRANCH")
    assert "timeout_ms" in facts
    assert "9000" in facts
    assert "CALL MS" in rows
    assert [ms in rows for ms in ("1200", "700", "600")] == [True] * 3

    for flags, named in (
        (["--call-timeout-ms=3000"], "call_timeout_ms (3000)"),
        (["--call-timeout-ms=1000", "--call-timeouts-ms=stock=3000"], "call_timeouts_ms of stock (3000)"),
    ):
        refused = tricord("serve", "--store", scene.store, "--timeout-ms=2000", *flags)
        assert refused.returncode == 2
        assert f"timeout_ms (2000) must be at least {named}" in refused.stderr
