"""Resolving a branch by hand: what its participant's fence says is asked first, and what contradicts it is refused.

The question and the record are two steps, and much may happen between them: a Confirm that was on its way may commit.
That is safe, because the question only keeps a person from a mistake; what holds is Settle, which is sent after the
record and is the fence's own word, given under the lock of the row: it either writes the resolution down or tells of
the contradiction, for ever, and until then the branch does not rest. Only a resolution of a ``lost`` fence has no
Settle behind it: there is no row any more in which anything could happen in between, and should the database turn up
again after all, its own resolver reads the resolution and runs nothing (protocol G1).
"""

from __future__ import annotations

from typing import NamedTuple

from tricord.v1 import operator_pb2 as pb
from tricord.v1 import types_pb2

from .delivery_fence import words_of
from .engine import FormatNotReady
from .errors import Violation
from .fence_word import Judgement, Verdict, judge, refusal_of
from .model import Transaction
from .operator_acting import OperatorActing, to_its_end
from .operator_audit import Asker, read_asker
from .orders import BRANCHES_MAX, Denied
from .orders import Resolve as ResolveOrder
from .rpc import Context, answering
from .wire import transaction_message
from .wire_open import raise_wrong, xid_of

_RESOLVED = {types_pb2.BRANCH_STATE_CONFIRMED: True, types_pb2.BRANCH_STATE_CANCELLED: False}
_VERDICTS = {
    Verdict.FITS: pb.FENCE_VERDICT_FITS,
    Verdict.CONTRADICTS: pb.FENCE_VERDICT_CONTRADICTS,
    Verdict.UNCLEAR: pb.FENCE_VERDICT_UNCLEAR,
}


class _Prospect(NamedTuple):
    """What would come of a resolution."""

    tx: Transaction
    """As it would stand; as it stands, if it would be refused."""
    said: Judgement | None
    """What the fence says; None: it was not asked, since that would change nothing."""
    refusal: Denied | FormatNotReady | None


class OperatorResolve(OperatorActing):
    """Resolve."""

    @answering
    async def Resolve(self, request: pb.ResolveRequest, context: Context) -> pb.ResolveResponse:
        """Record what became of a branch by hand, unless its participant's fence says otherwise."""
        wrong: list[Violation] = []
        xid = xid_of(request.xid, wrong)
        if not 0 < request.branch_id <= BRANCHES_MAX:
            wrong.append(Violation("branch_id", f"is {request.branch_id}; branches are 1 to {BRANCHES_MAX}"))
        if request.resolved_state not in _RESOLVED:
            names = " or ".join(types_pb2.BranchState.Name(state) for state in _RESOLVED)
            wrong.append(Violation("resolved_state", f"must be {names}"))
        asker = read_asker(request.actor, request.reason, context.peer(), wrong, needs_reason=True)
        raise_wrong(wrong)
        confirmed = _RESOLVED[request.resolved_state]
        order = ResolveOrder(request.branch_id, confirmed, asker.actor, asker.reason, request.lost)
        if request.dry_run:
            prospect = await self._foresee(xid, order, force=request.force)
        else:
            prospect = await to_its_end(self._resolve(xid, order, asker, force=request.force))
        response = pb.ResolveResponse(transaction=transaction_message(prospect.tx))
        if prospect.said is not None:
            response.fence_verdict = _VERDICTS[prospect.said.verdict]
            response.fence = prospect.said.text
        if prospect.refusal is not None:
            response.refusal = str(prospect.refusal)
        return response

    async def _resolve(self, xid: bytes, order: ResolveOrder, asker: Asker, *, force: bool) -> _Prospect:
        """Raises what ``act`` raises, and Denied where the fence says otherwise; either is written down."""
        prospect = await self._foresee(xid, order, force=force)
        facts: dict[str, object] = {"forced": True} if force else {}
        facts |= {"lost": True} if order.lost else {}
        facts |= {"fence": prospect.said.text} if prospect.said is not None else {}
        # Also what the order itself has refused stays refused: its fence was not asked.
        tx = await self.act("resolve", xid, order, asker, facts=facts, refused=prospect.refusal)
        return prospect._replace(tx=tx, refusal=None)

    async def _foresee(self, xid: bytes, order: ResolveOrder, *, force: bool) -> _Prospect:
        """Changes nothing. Raises UnknownXid, UnreadableRow, StoreError."""
        engine = self._engine
        tx = await engine.get_by_xid(xid)
        try:
            engine.check_format_for(order)
            after = order.obey(tx, engine.store.now_ms(), engine.policy)
        except (Denied, FormatNotReady) as error:
            return _Prospect(tx, None, error)
        if after is tx:
            return _Prospect(tx, None, None)  # a repeat
        said = await self._ask_fence(tx, order)
        refusal = None if force else refusal_of(tx, order, said)
        return _Prospect(after if refusal is None else tx, said, refusal)

    async def _ask_fence(self, tx: Transaction, order: ResolveOrder) -> Judgement:
        """Raises StoreError."""
        branch, step = tx.spec.branches[order.branch_id - 1], tx.steps[order.branch_id - 1]
        await self._participants.refresh()
        known = self._participants.known.get(branch.participant)
        addresses = [instance.address for instance in known.instances] if known is not None else []
        words = await words_of(branch.participant, addresses, step.fence_id, tx.spec.xid.hex(), order.branch_id)
        return judge(tx, order, words, self._engine.store.now_ms())
