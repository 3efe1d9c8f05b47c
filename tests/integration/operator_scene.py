"""What tests of operators' actions share: two coordinators, two participants whose Confirm a test holds up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request
from tricord.v1 import coordinator_pb2, types_pb2
from tricord.v1 import operator_pb2 as pb
from tricord.v1 import participant_pb2 as participant_pb

from .participant_server import ParticipantServer, done

PARKED_MS = 3_600_000
"""What contradicts the protocol is parked for so long: only a retry makes it due in time."""
BROKEN, SILENT = "broken", "silent"


class OperatorScene:
    """Coordinators on one store. What a branch's Confirm does is told by its payload until it is ``mended``."""

    def __init__(self, coordinators: list[CoordinatorProcess], *, exchange: bool = True) -> None:
        self.coordinators = coordinators
        self.operators = [coordinator.operator_service() for coordinator in coordinators]
        self.mended, self.settles = threading.Event(), threading.Event()
        self.settles.set()
        self.bank, self.shop = (ParticipantServer(self._answer, exchange=exchange) for _ in range(2))

    def _answer(self, call: participant_pb.Call) -> participant_pb.Reply | None:
        what = call.payload.data.decode()
        if call.phase in (participant_pb.PHASE_SETTLE_CONFIRMED, participant_pb.PHASE_SETTLE_CANCELLED):
            unknown = participant_pb.Reply(outcome=participant_pb.OUTCOME_UNKNOWN, error="not yet", attention=True)
            return done(call) if self.settles.is_set() else unknown
        if call.phase != participant_pb.PHASE_CONFIRM or self.mended.is_set():
            return done(call)
        if what == SILENT:
            return None
        if what == BROKEN:
            return participant_pb.Reply(outcome=participant_pb.OUTCOME_VIOLATION, error="the ledger is closed")
        return done(call)

    def stuck(self, bank: str = BROKEN, shop: str = "") -> str:
        """A transaction that is CONFIRMING; every broken branch has failed once, durably, and is parked."""
        branches = [branch(data=bank.encode())]
        if shop:
            branches.append(branch("shop", "credit", shop.encode()))
        request = execute_request(*branches, wait=coordinator_pb2.WAIT_DECIDED)
        tx = self.coordinators[0].coordinator_service().Execute(request, timeout=CALL_S).transaction
        broken = [n for n, what in enumerate((bank, shop)) if what == BROKEN]
        while any(self.get(tx.xid).branches[n].attempts < 1 for n in broken):
            pass
        return tx.xid

    def get(self, xid: str, at: int = 0) -> types_pb2.Transaction:
        return self.shown(xid, at).transaction

    def shown(self, xid: str, at: int = 0) -> pb.OperatorServiceGetResponse:
        return self.operators[at].Get(pb.OperatorServiceGetRequest(xid=xid), timeout=CALL_S)

    def retry(self, xid: str, at: int = 0, reason: str = "") -> types_pb2.Transaction:
        request = pb.RetryRequest(xid=xid, actor="alice", reason=reason)
        return self.operators[at].Retry(request, timeout=CALL_S).transaction

    def finished(self, xid: str) -> types_pb2.Transaction:
        """The transaction, as soon as it is finished in the store, which is a moment after everybody is told."""
        request = coordinator_pb2.WatchRequest(xid=xid)
        *_, last = self.coordinators[0].coordinator_service().Watch(request, timeout=CALL_S)
        while (stored := self.get(xid)).state != last.transaction.state:
            pass
        return stored

    def audit(self, xid: str = "", at: int = 0) -> list[pb.AuditRecord]:
        """The newest records, oldest first."""
        request = pb.ListAuditRequest(xid=xid, page_size=1_000)
        return list(self.operators[at].ListAudit(request, timeout=CALL_S).records)[::-1]

    def confirms(self, xid: str) -> list[str]:
        """The participants of a transaction's Confirms so far, as they arrived at each."""
        calls = [(seen.call, name) for name in ("bank", "shop") for seen in getattr(self, name).seen("CONFIRM")]
        return [name for call, name in calls if call.xid == xid]


@contextmanager
def operator_scene(store: str | Path, *, coordinators: int = 1, exchange: bool = True) -> Iterator[OperatorScene]:
    """The scene, running."""
    settings: dict[str, Any] = {
        "backoff_cap_ms": PARKED_MS,
        "call_timeout_ms": 25_000,
        "lease_ms": 60_000,
        "drain_ms": 0,
    }
    processes = [CoordinatorProcess(store=store, **settings) for _ in range(coordinators)]
    started = []
    try:
        for process in processes:
            process.start()
            started.append(process)
        scene = OperatorScene(started, exchange=exchange)
        with scene.bank, scene.shop:
            for process in started:
                process.register("bank", scene.bank.address)
                process.register("shop", scene.shop.address)
            yield scene
            scene.mended.set()
            for process in started:
                process.stop()
    finally:
        for process in started:
            process.stop()
