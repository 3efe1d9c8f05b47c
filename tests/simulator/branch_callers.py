"""Who calls one participant: callers that repeat, lose and delay, and keep to what a coordinator promises, no more.

Confirm only after Try was answered "done", one decision per branch, its call repeated until it is done. A person may
have done by hand what is owed. Everything else comes as the seed has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from coordinator.delivery_messages import call_message, reply_of
from coordinator.model import BranchSpec, Outcome, Payload, Phase, Spec
from coordinator.model import Call as OwedCall
from participant_sdk import payload as sdk_payload
from participant_sdk.transaction import Branch as SdkBranch
from participant_sdk.transaction import BranchState, LookedUp, Transaction, TransactionState
from tests.simulator.branch_watch import Broken
from tests.simulator.handlers import CHARGE, MOVE, payload_of
from tests.simulator.loop import World
from tests.simulator.participants import ParticipantNode
from tricord.v1 import participant_pb2

CALL_MS = 1_000
UNDECIDED_MS_MAX = 2_000
LATE_MS_MAX = 12_000
NAME = "bank"
_SETTLE = {Phase.CONFIRM: Phase.SETTLE_CONFIRMED, Phase.CANCEL: Phase.SETTLE_CANCELLED}


@dataclass(slots=True)
class Branch:
    """What its caller knows of a branch; it is number 1 of its transaction."""

    spec: Spec
    xid: str
    decision: Phase | None = None
    decided_ms: int = 0
    by_hand: bool = False
    unreachable: bool = False
    """Nothing of what was decided reaches the participant, until all faults end."""
    tried: bool = False
    done: bool = False
    attempt: int = 0

    @property
    def owed(self) -> Phase:
        """The call that is owed now."""
        if self.decision is None:
            return Phase.TRY
        return _SETTLE[self.decision] if self.by_hand else self.decision

    @property
    def state(self) -> TransactionState:
        """As its coordinator's store has it."""
        if self.decision is None:
            return TransactionState.TRYING
        if self.decision is Phase.CONFIRM:
            return TransactionState.CONFIRMED if self.done else TransactionState.CONFIRMING
        return TransactionState.CANCELLED if self.done else TransactionState.CANCELLING


@dataclass(slots=True)
class Chaos:
    """How much goes wrong between callers and processes, of 1."""

    loss: float = 0.0
    repeat: float = 0.0
    slow: float = 0.0
    crash: float = 0.0


class Callers:
    """All callers of one participant's processes. ``calm``: nothing is to go wrong."""

    def __init__(
        self,
        world: World,
        chaos: Chaos,
        nodes: Sequence[ParticipantNode],
        fence_id: str,
        broken: Callable[[Broken], None],
        retention_ms: int,
        *,
        calm: bool,
    ) -> None:
        self._world = world
        self._rng = world.random
        self.chaos = chaos
        self._nodes = nodes
        self._fence_id = fence_id
        self._broken = broken
        self._retention_ms = retention_ms
        self._calm = calm
        self.branches: dict[str, Branch] = {}
        self.in_flight = 0
        self.healed = calm

    @property
    def over(self) -> bool:
        """Whether all is done, and nothing on its way."""
        return self.in_flight == 0 and bool(self.branches) and all(map(_is_done, self.branches.values()))

    def begin(self) -> Branch:
        """A new branch: its Try is sent at once."""
        rng, now_ms = self._rng, self._world.now_ms
        xid = f"{now_ms:012x}7{rng.getrandbits(12):03x}8{rng.getrandbits(60):015x}"
        action = CHARGE if not self._calm and rng.random() < 0.2 else MOVE
        amount = -1 if self._calm else rng.choice((-30, -5, 5, 30))
        payload = Payload(payload_of("a", amount), sdk_payload.BYTES)
        spec = Spec(bytes.fromhex(xid), b"", now_ms, UNDECIDED_MS_MAX, (BranchSpec(NAME, action, payload),))
        branch = self.branches[xid] = Branch(spec, xid)
        self._tick(branch)
        if not self._calm:
            branch.unreachable = rng.random() < 0.1
            self._stray(branch)
            self._world.at(1000 * rng.randint(0, UNDECIDED_MS_MAX), self._decide, branch, Phase.CANCEL)
        return branch

    def _stray(self, branch: Branch) -> None:
        rng, xid = self._rng, branch.xid
        if rng.random() < 0.3:  # a Try that comes when all is over
            late = call_message(xid, branch.spec, OwedCall(0, Phase.TRY, 2, CALL_MS))
            about = rng.choice((rng.randint(0, LATE_MS_MAX), max(0, self._retention_ms + rng.randint(-1_500, 1_500))))
            self._deliver(late, about)
        if rng.random() < 0.1:  # a Confirm of a branch that was never tried, here
            other = f"{xid[:31]}{int(xid[31], 16) ^ 1:x}"
            stray = call_message(other, branch.spec, OwedCall(0, Phase.CONFIRM, 1, CALL_MS))
            self._deliver(stray, rng.randint(0, LATE_MS_MAX))

    def _another(self, branch: Branch) -> None:
        """A call with the same key and another payload, such as only a broken caller sends."""
        rng = self._rng
        what = branch.spec.branches[0]._replace(payload=Payload(payload_of("a", 41), sdk_payload.BYTES))
        phase = rng.choice((Phase.TRY, Phase.CONFIRM, Phase.CANCEL))
        message = call_message(branch.xid, branch.spec._replace(branches=(what,)), OwedCall(0, phase, 1, CALL_MS))
        self._deliver(message, rng.randint(0, UNDECIDED_MS_MAX))

    def _decide(self, branch: Branch, decision: Phase) -> None:
        if branch.decision is not None:
            return
        branch.decision, branch.decided_ms, branch.attempt = decision, self._world.now_ms, 0
        if not self._calm and self._rng.random() < 0.1:
            self._world.at(1000 * self._rng.randint(0, 5_000), self._resolve, branch)
        self._tick(branch)

    def _resolve(self, branch: Branch) -> None:
        """An operator tells that it was done by hand."""
        if not branch.done:
            branch.by_hand, branch.attempt = True, 0
            self._tick(branch)

    def _tick(self, branch: Branch) -> None:
        """What is owed now is sent, and again later."""
        rng, phase = self._rng, branch.owed
        if branch.done or (phase is Phase.TRY and branch.tried):
            return
        branch.attempt += 1
        call = OwedCall(0, phase, branch.attempt, CALL_MS)
        message = call_message(branch.xid, branch.spec, call)
        for _ in range(2 if rng.random() < self.chaos.repeat else 1):
            walled = branch.unreachable and phase is not Phase.TRY and not self.healed
            if walled or rng.random() < self.chaos.loss:
                self._world.counts["lost"] += 1
                continue
            late = rng.random() < self.chaos.slow
            self._deliver(message, rng.randint(0, 3_000 if late else 3), branch, call)
        self._world.at(1000 * rng.randint(CALL_MS // 2, 2 * CALL_MS), self._tick_again, branch, phase)

    def _tick_again(self, branch: Branch, phase: Phase) -> None:
        if branch.owed is phase:
            self._tick(branch)

    def _deliver(
        self,
        message: participant_pb2.Call,
        delay_ms: int,
        branch: Branch | None = None,
        call: OwedCall | None = None,
    ) -> None:
        def arrive() -> None:
            self.in_flight -= 1
            node = self._rng.choice(self._nodes)
            node.loop.arrive(node.receive_message, message, on_reply)

        def on_reply(reply: participant_pb2.Reply) -> None:
            if branch is not None and call is not None and self._rng.random() >= self.chaos.loss:
                self._world.at(1000 * self._rng.randint(0, 3), self._replied, branch, call, reply)

        self.in_flight += 1
        self._world.at(1000 * delay_ms, arrive)

    def _replied(self, branch: Branch, call: OwedCall, message: participant_pb2.Reply) -> None:
        reply = reply_of(call.branch, call.phase, message, self._fence_id)
        if reply.outcome is Outcome.VIOLATION and not branch.done:
            self._broken(Broken(f"{branch}: {reply}"))
        elif call.phase is not Phase.TRY:
            branch.done = branch.done or reply.outcome is Outcome.DONE
        elif reply.outcome is Outcome.REFUSED:
            self._decide(branch, Phase.CANCEL)
        elif reply.outcome is Outcome.DONE and branch.decision is None:
            branch.tried = True
            if not self._calm and self._rng.random() < 0.1:
                self._another(branch)
            if self._rng.random() < 0.6 or self.healed:
                self._decide(branch, Phase.CONFIRM)

    # --- what a coordinator's store says -------------------------------------------------------------------

    async def look_up(self, xids: Sequence[str]) -> LookedUp:
        """See Records."""
        return LookedUp({xid: self.branches[xid].state for xid in xids if xid in self.branches}, "store", 1)

    async def fetch(self, xid: str) -> Transaction | None:
        """See Records."""
        branch = self.branches[xid]
        what = branch.spec.branches[0]
        payload = sdk_payload.Payload(what.payload.data, what.payload.content_type)
        branches = (SdkBranch(1, NAME, what.action, payload, BranchState.TRIED, None, None, 0, ""),)
        decided = datetime.fromtimestamp(branch.decided_ms / 1000, UTC) if branch.decided_ms else None
        return Transaction(xid, "", branch.state, False, branches, "", None, decided)


def _is_done(branch: Branch) -> bool:
    return branch.done
