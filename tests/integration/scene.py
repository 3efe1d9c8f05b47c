"""What the tests of the coordinator's cases share: coordinators, two scripted participants, and what came of it all."""

from collections import Counter
from contextlib import ExitStack
from typing import Any

from tests.coordinators import CALL_S, CoordinatorProcess
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import coordinator_pb2_grpc, types_pb2
from tricord.v1 import participant_pb2 as participant_pb

from .participant_server import ParticipantServer

TRY, CONFIRM, CANCEL = participant_pb.PHASE_TRY, participant_pb.PHASE_CONFIRM, participant_pb.PHASE_CANCEL
QUICK: dict[str, Any] = {"backoff_base_ms": 20, "backoff_cap_ms": 100, "call_timeout_ms": 1_000, "lease_ms": 2_000}

Call = participant_pb.Call
Reply = participant_pb.Reply


def unknown(why: str = "not now") -> Reply:
    return Reply(outcome=participant_pb.OUTCOME_UNKNOWN, error=why)


def counted(participant: ParticipantServer) -> Counter[tuple[str, int, int, int]]:
    """How often each call came: by xid, branch, phase and attempt."""
    calls = (seen.call for seen in participant.seen())
    return Counter((call.xid, call.branch_id, call.phase, call.attempt) for call in calls)


def attempts(participant: ParticipantServer, branch_id: int, phase: int) -> list[int]:
    """The attempts that came, as they came."""
    calls = (seen.call for seen in participant.seen())
    return [call.attempt for call in calls if (call.branch_id, call.phase) == (branch_id, phase)]


class Scene:
    """Coordinators on one database, and two participants."""

    def __init__(self, stack: ExitStack, store: str) -> None:
        self._stack = stack
        self.store = store
        self.bank = stack.enter_context(ParticipantServer())
        self.stock = stack.enter_context(ParticipantServer())
        self.coordinators: list[CoordinatorProcess] = []

    def coordinator(self, **settings: Any) -> CoordinatorProcess:
        """One more."""
        process = self._stack.enter_context(CoordinatorProcess(store=self.store, **{**QUICK, **settings}))
        self.coordinators.append(process)
        process.register("bank", self.bank.address)
        process.register("stock", self.stock.address)
        return process


def finished(stub: coordinator_pb2_grpc.CoordinatorServiceStub, **by: str) -> types_pb2.Transaction:
    """A transaction, when it is finished."""
    *_, last = stub.Watch(pb.WatchRequest(**by), timeout=CALL_S)
    return last.transaction
