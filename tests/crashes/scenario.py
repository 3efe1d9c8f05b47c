"""What is asked of the coordinator in a run, how its initiator asks, and how it may end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc

from coordinator.model import State
from tests.coordinators import CALL_S, branch, execute_request
from tests.crashes.banks import BANKS, MUTE, OPEN
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import coordinator_pb2_grpc, types_pb2

CENTS = 10
PATIENT_MS = 60_000
SILENT_MS = 500
LATE_MS = 900
"""Shorter than a lease."""

OUTCOMES: Mapping[str, Sequence[str]] = {
    "commit": ("before save CONFIRMING", "after save CONFIRMED", "after send CONFIRM 1", "before reply CONFIRM 1"),
    "refuse": ("before save CANCELLING", "after save CANCELLED", "after send CANCEL 1", "before reply CANCEL 1"),
    "silent": ("after save CANCELLING", "before save CANCELLED", "after send CANCEL 1", "before reply CANCEL 1"),
    "late": ("before save CONFIRMING", "after save CONFIRMING", "before send CONFIRM 1"),
    "stumble": ("after claim", "before send TRY 2 #2", "after save CONFIRMING"),
    "takeover": ("after claim", "after send TRY 2", "before save CONFIRMING", "after send CONFIRM 1"),
    "interactive": ("after save TRYING", "before save CONFIRMING", "after send CONFIRM 1"),
}
"""The outcomes, and points that each must have.

commit       all are tried and confirmed
refuse       the last branch is refused
silent       the last branch's Try is never answered, so that the deadline cancels
late         as commit, but the deadline comes before anybody takes over what was not decided
stumble      the last branch's first Try fails, so that it rests and is claimed again
takeover     as commit, but another coordinator has begun it and died; the one that dies has taken it over
interactive  as commit, with the branches added one by one
"""


class Told(NamedTuple):
    """What a coordinator has answered."""

    xid: str
    state: State


class Scenario(NamedTuple):
    """So many branches, and what becomes of them."""

    branches: int
    outcome: str

    def __str__(self) -> str:
        return f"{self.branches} {self.outcome}"

    @property
    def participants(self) -> Sequence[str]:
        """Those of its branches."""
        return BANKS[: self.branches]

    @property
    def must_have(self) -> Sequence[str]:
        """Points without which it is not this scenario."""
        begins = () if self.forsaken_at else ("before begin", "after begin")
        return (*begins, "before send TRY 1", "after send TRY 1", *OUTCOMES[self.outcome])

    @property
    def forsaken_at(self) -> str:
        """Where a coordinator dies before this one takes over; empty if there was none."""
        return "after send TRY 2" if self.outcome == "takeover" else ""

    @property
    def timeout_ms(self) -> int:
        """The transaction's."""
        return {"silent": SILENT_MS, "late": LATE_MS}.get(self.outcome, PATIENT_MS)

    def changes(self) -> Mapping[str, int]:
        """By how much each bank's open account changes when it is confirmed: together by nothing, if they are two."""
        debit = -CENTS * max(1, self.branches - 1)
        return dict(zip(self.participants, [debit, CENTS, CENTS], strict=False))

    def undisturbed(self) -> State:
        """How it ends when nobody dies."""
        return State.CANCELLED if self.outcome in ("refuse", "silent") else State.CONFIRMED

    def may_end(self, at_death: State | None) -> set[State]:
        """How it may end, by what was stored when its coordinator died."""
        if at_death in (State.CONFIRMING, State.CONFIRMED):
            return {State.CONFIRMED}
        if at_death in (State.CANCELLING, State.CANCELLED):
            return {State.CANCELLED}
        if self.outcome == "late" and at_death is not None:
            return {State.CANCELLED}
        return {self.undisturbed()}

    def requests(self) -> Sequence[pb.BranchRequest]:
        """Its branches."""
        asked = []
        for number, name in enumerate(self.participants, 1):
            last = number == self.branches
            action, account = "debit" if number == 1 else "credit", OPEN
            if last and self.outcome in ("refuse", "silent"):
                account = "nobody" if self.outcome == "refuse" else MUTE
            amount = abs(self.changes()[name])
            if last and self.outcome == "stumble":
                action = "stumble"
            asked.append(branch(name, action, json.dumps({"account": account, "amount": amount}).encode()))
        return asked


class Initiator:
    """Asks for one transaction, step by step; what was not answered is asked again, of whoever is there."""

    def __init__(self, scenario: Scenario, key: str) -> None:
        self._scenario = scenario
        self._key = key
        self._channels = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channels.close()  # and with them what is still being waited for

    def ask(self, endpoint: str) -> Told:
        """Have it done by this coordinator, from the beginning. Raises grpc.RpcError."""
        channel = grpc.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)])
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channels.enter_context(channel))
        tx = self._interact(stub) if self._scenario.outcome == "interactive" else self._execute(stub)
        if not State(tx.state).finished:
            for response in stub.Watch(pb.WatchRequest(xid=tx.xid), timeout=CALL_S):
                tx = response.transaction
        return Told(tx.xid, State(tx.state))

    def _execute(self, stub: Any) -> types_pb2.Transaction:
        request = execute_request(
            *self._scenario.requests(), key=self._key, timeout_ms=self._scenario.timeout_ms, wait=pb.WAIT_FINISHED
        )
        return stub.Execute(request, timeout=CALL_S).transaction  # type: ignore[no-any-return]

    def _interact(self, stub: Any) -> types_pb2.Transaction:
        request = pb.BeginRequest(idempotency_key=self._key)
        request.timeout.FromMilliseconds(self._scenario.timeout_ms)
        tx = stub.Begin(request, timeout=CALL_S).transaction
        if State(tx.state) is not State.TRYING:
            return tx  # type: ignore[no-any-return]
        numbers = []
        for asked in self._scenario.requests():
            step = pb.CoordinatorServiceTryRequest(xid=tx.xid, branch_key=asked.participant, branch=asked)
            while True:
                added = stub.Try(step, timeout=CALL_S).branch
                if added.state != types_pb2.BRANCH_STATE_PENDING:
                    break
            numbers.append(added.branch_id)
        confirm = pb.CoordinatorServiceConfirmRequest(xid=tx.xid, tried_branch_ids=numbers)
        return stub.Confirm(confirm, timeout=CALL_S).transaction  # type: ignore[no-any-return]
