"""One participant that does not answer may have so many calls, and so many bytes of them, on their way; then no more.

What is beyond is rejected at once and asked again later, so that nothing piles up in the coordinator. No call times out
here: its time-out is far longer than the test.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from coordinator.delivery_link import BYTES_MAX, CALLS_MAX
from examples.transfer.databases import eventually
from tests.coordinators import CALL_S, branch, execute_request, states
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import operator_pb2, types_pb2

from .participant_server import done
from .scene import Call, Reply, Scene, finished

MIB = 1024 * 1024
PATIENT: dict[str, Any] = {"timeout_ms": 3_000_000, "call_timeout_ms": 1_000_000, "lease_ms": 2_000_000}
UNFINISHED = "state = TRYING OR state = CONFIRMING OR state = CANCELLING"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack, str(tmp_path / "tricord.db"))


@pytest.mark.parametrize(
    ("payload_bytes", "bound", "beyond", "told"),
    [
        (2, CALLS_MAX, 50, f"{CALLS_MAX} calls with "),
        (MIB, BYTES_MAX // MIB, 12, f"{BYTES_MAX // MIB} calls with "),
    ],
    ids=["calls", "bytes"],
)
def test_what_is_beyond_the_bound_is_rejected_and_asked_again(
    scene: Scene, payload_bytes: int, bound: int, beyond: int, told: str
) -> None:
    go_on = threading.Event()

    def answer(call: Call) -> Reply:
        go_on.wait()
        return done(call)

    scene.bank.answer = answer
    coordinator = scene.coordinator(**PATIENT)
    stub, operator = coordinator.coordinator_service(), coordinator.operator_service()
    data = b"x" * payload_bytes
    try:
        xids = set()
        for _ in range(bound + beyond):
            request = execute_request(branch(data=data), wait=pb.WAIT_ACCEPTED)
            xids.add(stub.Execute(request, timeout=CALL_S).transaction.xid)
        on_their_way = {seen.call.xid for seen in scene.bank.wait_for(bound)}
        rejected = xids - on_their_way
        assert (len(on_their_way), len(rejected)) == (bound, beyond)

        def branch_of(xid: str) -> types_pb2.Branch:
            return stub.Get(pb.GetRequest(xid=xid), timeout=CALL_S).transaction.branches[0]

        for xid in rejected:
            eventually("asked again", lambda xid=xid: branch_of(xid).attempts >= 2)  # type: ignore[misc]
            error = branch_of(xid).last_error
            assert error.startswith(told)
            assert error.endswith(f"bytes are on their way to {scene.bank.address}")
        other = stub.Execute(execute_request(branch("stock", data=data)), timeout=CALL_S)  # nobody waits for another
        assert states(other.transaction) == ["CONFIRMED", "CONFIRMED"]
        assert len(scene.bank.seen()) == bound
    finally:
        go_on.set()
    for xid in rejected:
        assert states(finished(stub, xid=xid)) == ["CONFIRMED", "CONFIRMED"]
    unfinished = operator_pb2.ListRequest(filter=UNFINISHED)
    eventually("all have ended", lambda: not operator.List(unfinished, timeout=CALL_S).transactions)
    calls = Counter((seen.call.xid, seen.phase) for seen in scene.bank.seen())
    assert calls == Counter({(xid, phase): 1 for xid in xids for phase in ("TRY", "CONFIRM")})
