"""The RPCs on a transaction that is stored already: its branches, its decision, its deadline.

Any coordinator serves any of them: each is an order on the row (``orders``), whoever drives it.
"""

from __future__ import annotations

from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import coordinator_pb2_grpc as pb_grpc

from .engine import Engine, Until
from .errors import UnknownName, Violation
from .model import BranchSpec, BranchStatus, State, Transaction
from .orders import AddBranch, Cancel, Confirm, Renew, Report
from .participants import Participants
from .rpc import Context, answering
from .wire import branch_message, timestamp, transaction_message
from .wire_open import read_cancel, read_confirm, read_enlist, read_renew, read_report, read_try

ANSWER_MARGIN_SHARE, ANSWER_MARGIN_S_MAX = 0.1, 0.25
"""How long before the caller's deadline it is told the state of that moment, rather than nothing."""
NAMES_TOLD_MAX = 10

_UNTIL = {pb.WAIT_ACCEPTED: Until.ACCEPTED, pb.WAIT_DECIDED: Until.DECIDED}


class OpenTransactions(pb_grpc.CoordinatorServiceServicer):
    """Try, Confirm, Cancel, Renew, Enlist and Report."""

    def __init__(self, engine: Engine, participants: Participants) -> None:
        self._engine = engine
        self._participants = participants

    @answering
    async def Try(self, request: pb.CoordinatorServiceTryRequest, context: Context) -> pb.CoordinatorServiceTryResponse:
        """Add a branch, and answer when its Try was answered, or the transaction is decided without it."""
        xid, order = read_try(request)
        tx, index = await self._add(xid, order)

        def answered(now: Transaction) -> bool:
            return now.steps[index].status is not BranchStatus.PENDING or now.state is not State.TRYING

        tx = await self._engine.wait(tx, answered, left_s(context))
        return pb.CoordinatorServiceTryResponse(
            branch=branch_message(tx, index),
            state=int(tx.state),  # type: ignore[arg-type]  # the same numbers; a test compares them
            cancel_reason=tx.cancel_reason,
        )

    @answering
    async def Confirm(
        self, request: pb.CoordinatorServiceConfirmRequest, context: Context
    ) -> pb.CoordinatorServiceConfirmResponse:
        """Decide to confirm."""
        xid, named = read_confirm(request)
        tx = await self._engine.order(xid, Confirm(named))
        tx = await self._engine.wait(tx, until_of(request.wait), left_s(context))
        return pb.CoordinatorServiceConfirmResponse(transaction=transaction_message(tx))

    @answering
    async def Cancel(
        self, request: pb.CoordinatorServiceCancelRequest, context: Context
    ) -> pb.CoordinatorServiceCancelResponse:
        """Decide to cancel."""
        xid, reason = read_cancel(request)
        tx = await self._engine.order(xid, Cancel(reason))
        tx = await self._engine.wait(tx, until_of(request.wait), left_s(context))
        return pb.CoordinatorServiceCancelResponse(transaction=transaction_message(tx))

    @answering
    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        """Move the deadline."""
        xid, timeout_ms = read_renew(request)
        tx = await self._engine.order(xid, Renew(timeout_ms))
        return pb.RenewResponse(deadline_time=timestamp(tx.deadline_ms))

    @answering
    async def Enlist(self, request: pb.EnlistRequest, context: Context) -> pb.EnlistResponse:
        """Add a branch whose participant reports by itself."""
        xid, order = read_enlist(request)
        tx, index = await self._add(xid, order)
        return pb.EnlistResponse(branch=branch_message(tx, index))

    @answering
    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:
        """Take note of what became of an enlisted branch's Try."""
        xid, reply = read_report(request)
        tx = await self._engine.order(xid, Report(reply, self._registered))
        return pb.ReportResponse(state=int(tx.state))  # type: ignore[arg-type]  # the same numbers

    def _registered(self, participant: str, action: str) -> str:
        """The fence database that must answer for an action, as last heard; empty if it was never told."""
        known = self._participants.find(participant)
        return "" if known is None else known.fence_id(action)

    async def _add(self, xid: bytes, order: AddBranch) -> tuple[Transaction, int]:
        try:
            await check_name(self._participants, order.branch, "branch")
        except UnknownName:
            # What was added before the name went away keeps its answer.
            found = await self._engine.get(xid=xid)
            if found is None or order.find(found) is None:
                raise
        tx = await self._engine.order(xid, order)
        index = order.find(tx)
        if index is None:
            raise AssertionError(f"branch {order.joined.key!r} was added and is not there")
        return tx, index


async def check_name(participants: Participants, branch: BranchSpec, field: str) -> None:
    """Refuse what no participant has registered, before anything is stored. Raises UnknownName, StoreError."""
    row = await participants.look_up(branch.participant, branch.action)
    if row is None:
        text = f"no participant {branch.participant} is registered; start it with --coordinator, or mend the name"
        raise UnknownName(text, violations=(Violation(f"{field}.participant", text),))
    if branch.action not in row.actions:
        known = ", ".join(sorted(row.actions)[:NAMES_TOLD_MAX])
        text = f"participant {branch.participant} has no action {branch.action}; it has {known}"
        raise UnknownName(text, reason="UNKNOWN_ACTION", violations=(Violation(f"{field}.action", text),))


def until_of(wait: pb.Wait.ValueType) -> Until:
    """What a request waits for."""
    return _UNTIL.get(wait, Until.FINISHED)


def left_s(context: Context) -> float | None:
    """How long the caller waits for its answer, less what the answer needs on its way."""
    left_s = context.time_remaining()
    return None if left_s is None else answer_s(left_s)


def answer_s(patience_s: float) -> float:
    """After how long somebody with so much patience is answered."""
    return patience_s - min(patience_s * ANSWER_MARGIN_SHARE, ANSWER_MARGIN_S_MAX)
