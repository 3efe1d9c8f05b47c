"""What operators do to transactions, and the audit of it. See ``operator_audit`` for what is written down when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import structlog

from tricord.v1 import operator_pb2 as pb
from tricord.v1 import operator_pb2_grpc as pb_grpc
from tricord.v1 import types_pb2

from .codec import readable
from .engine import Engine, FormatNotReady, UnknownXid
from .errors import InvalidRequest, Violation
from .filters_tree import And, Field, Node, Or, Term
from .journal import Overloaded
from .model import State, Transaction
from .operator_audit import (
    DONE,
    HISTORY_RECORDS_MAX,
    REFUSED,
    UNKNOWN,
    Asker,
    asked_row,
    history,
    outcome_row,
    read_asker,
    record_message,
    snapshot,
)
from .operator_pages import key_of, make_token
from .orders import BRANCHES_MAX, Denied, OperatorCancel, Order
from .orders import Resolve as ResolveOrder
from .orders import Retry as RetryOrder
from .rpc import Context, answering
from .store.audit import AuditFilter, AuditRow
from .store.rows import ListFilter, RowRejected, StoreError
from .wire import check_name, duration_ms, read_xid, transaction_message
from .wire_open import raise_wrong, xid_of

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")

RETRY_PAGE_DEFAULT, RETRY_PAGE_MAX = 100, 500
AUDIT_PAGE_DEFAULT, AUDIT_PAGE_MAX = 50, 1_000
AT_ONCE_MAX = 32
"""Transactions of one page that are being retried at the same time."""
AGE_DAYS_MAX = 36_500
OPEN_STATES = frozenset(int(state) for state in State if not state.finished)
_NOTHING_CHANGED = (Denied, Overloaded, RowRejected, UnknownXid, FormatNotReady)
_RESOLVED = {types_pb2.BRANCH_STATE_CONFIRMED: True, types_pb2.BRANCH_STATE_CANCELLED: False}


class OperatorActions(pb_grpc.OperatorServiceServicer):
    """Retry, RetryMany, Cancel, Resolve and ListAudit."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @answering
    async def Retry(self, request: pb.RetryRequest, context: Context) -> pb.RetryResponse:
        """Make due what waits for its next attempt."""
        wrong: list[Violation] = []
        xid = xid_of(request.xid, wrong)
        asker = read_asker(request.actor, request.reason, context.peer(), wrong)
        raise_wrong(wrong)
        tx = await _to_its_end(self._act("retry", xid, RetryOrder(), asker))
        return pb.RetryResponse(transaction=transaction_message(tx))

    @answering
    async def Cancel(
        self, request: pb.OperatorServiceCancelRequest, context: Context
    ) -> pb.OperatorServiceCancelResponse:
        """Decide to cancel, if it is undecided."""
        wrong: list[Violation] = []
        xid = xid_of(request.xid, wrong)
        asker = read_asker(request.actor, request.reason, context.peer(), wrong, needs_reason=True)
        raise_wrong(wrong)
        tx = await _to_its_end(self._act("cancel", xid, OperatorCancel(asker.actor, asker.reason), asker))
        return pb.OperatorServiceCancelResponse(transaction=transaction_message(tx))

    @answering
    async def Resolve(self, request: pb.ResolveRequest, context: Context) -> pb.ResolveResponse:
        """Record what became of a branch by hand."""
        wrong: list[Violation] = []
        xid = xid_of(request.xid, wrong)
        if not 0 < request.branch_id <= BRANCHES_MAX:
            wrong.append(Violation("branch_id", f"is {request.branch_id}; branches are 1 to {BRANCHES_MAX}"))
        if request.resolved_state not in _RESOLVED:
            names = " or ".join(types_pb2.BranchState.Name(state) for state in _RESOLVED)
            wrong.append(Violation("resolved_state", f"must be {names}"))
        asker = read_asker(request.actor, request.reason, context.peer(), wrong, needs_reason=True)
        raise_wrong(wrong)
        order = ResolveOrder(request.branch_id, _RESOLVED[request.resolved_state], asker.actor, asker.reason)
        tx = await _to_its_end(self._act("resolve", xid, order, asker))
        return pb.ResolveResponse(transaction=transaction_message(tx))

    @answering
    async def RetryMany(self, request: pb.RetryManyRequest, context: Context) -> pb.RetryManyResponse:
        """Retry for one page of a participant's unfinished transactions."""
        wrong: list[Violation] = []
        if request.page_size > RETRY_PAGE_MAX:
            wrong.append(Violation("page_size", f"is {request.page_size}; the limit is {RETRY_PAGE_MAX}"))
        if len(request.states) > len(State):
            wrong.append(Violation("states", f"has {len(request.states)} states; the limit is {len(State)}"))
        elif not {*map(int, request.states)} <= OPEN_STATES:
            names = ", ".join(State(state).name for state in sorted(OPEN_STATES))
            wrong.append(Violation("states", f"only what is unfinished can be retried: {names}"))
        asker = read_asker(request.actor, request.reason, context.peer(), wrong)
        raise_wrong(wrong)
        check_name("participant", request.participant)
        states = sorted({*map(int, request.states)} or OPEN_STATES)
        filters = f"retry|{request.participant}|{states}"
        limit = request.page_size or RETRY_PAGE_DEFAULT
        rows = await self._engine.store.list(
            ListFilter(
                _of_participant(request.participant, states),
                beyond_xid=key_of(request.page_token, filters) if request.page_token else None,
                limit=limit + 1,
            )
        )
        order = RetryOrder(request.participant)
        found = [tx for row in rows[:limit] if (tx := readable(row)) is not None and self._would_change(tx, order)]
        response = pb.RetryManyResponse(count=len(found))
        if len(rows) > limit:
            response.next_page_token = make_token(filters, rows[limit - 1].xid)
        if found and not request.dry_run:
            failed = await _to_its_end(self._act_on_many(found, order, asker))
            response.count -= len(failed)
            response.failed_xids.extend(failed)
        return response

    @answering
    async def ListAudit(self, request: pb.ListAuditRequest, context: Context) -> pb.ListAuditResponse:
        """A page of the audit, newest first."""
        if request.page_size > AUDIT_PAGE_MAX:
            raise InvalidRequest(Violation("page_size", f"is {request.page_size}; the limit is {AUDIT_PAGE_MAX}"))
        xid = read_xid(request.xid) if request.xid else b""
        now_ms = self._engine.store.now_ms()
        times: dict[str, int | None] = {}
        for field in ("newer_than", "older_than"):
            age_ms = duration_ms(getattr(request, field)) if request.HasField(field) else None
            if age_ms is not None and not 0 <= age_ms <= AGE_DAYS_MAX * 86_400_000:
                raise InvalidRequest(Violation(field, f"must be 0 to {AGE_DAYS_MAX} days"))
            times[field] = None if age_ms is None else max(0, now_ms - age_ms)
        filters = f"audit|{xid.hex()}|{request.newer_than.ToJsonString()}|{request.older_than.ToJsonString()}"
        before = key_of(request.page_token, filters) if request.page_token else None
        limit = request.page_size or AUDIT_PAGE_DEFAULT
        rows = await self._engine.store.audit(
            AuditFilter(xid, times["newer_than"], times["older_than"], before, limit + 1)
        )
        response = pb.ListAuditResponse(records=[record_message(row) for row in rows[:limit]])
        if len(rows) > limit:
            response.next_page_token = make_token(filters, rows[limit - 1].id)
        return response

    async def tell_history(self, tx: Transaction, response: pb.OperatorServiceGetResponse) -> None:
        """Add the transaction's history; without operators' actions if the store does not answer."""
        rows: list[AuditRow] = []
        try:
            rows += await self._engine.store.audit(AuditFilter(tx.spec.xid, limit=HISTORY_RECORDS_MAX))
        except StoreError as error:
            _log.warning("audit.read_failed", xid=tx.spec.xid.hex(), error=str(error))
            response.history_incomplete = True
        response.history.extend(history(tx, rows))

    # --- acting, with a record before and a record after ---------------------------------------------------

    async def _act(self, action: str, xid: bytes, order: Order, asker: Asker) -> Transaction:
        engine = self._engine
        before = await engine.get_by_xid(xid)
        asked = asked_row(engine.store.now_ms(), action, xid, asker, snapshot(before))
        await engine.store.add_audit([asked])  # if this fails, nothing is done
        if isinstance(order, RetryOrder):
            engine.delivery.trust({branch.participant for branch in before.spec.branches})
        tx, row = await self._carry_out(asked, xid, order)
        await self._note([row])
        if isinstance(tx, Exception):
            raise tx
        return tx

    async def _act_on_many(self, found: list[Transaction], order: RetryOrder, asker: Asker) -> list[str]:
        """Returns the xids of those that could not be retried."""
        store = self._engine.store
        about = {"participant": order.participant, "xids": [tx.spec.xid.hex() for tx in found]}
        asked = asked_row(store.now_ms(), "retry-many", None, asker, about)
        await store.add_audit([asked])  # if this fails, nothing is done
        self._engine.delivery.trust([order.participant])
        slots = asyncio.Semaphore(AT_ONCE_MAX)

        async def one(before: Transaction) -> tuple[Transaction | Exception, AuditRow]:
            xid = before.spec.xid
            async with slots:
                tx, row = await self._carry_out(asked, xid, order)
            # A record of its own: so that the history of each transaction has it.
            return tx, row._replace(action="retry", xid=xid, before=json.dumps(snapshot(before)))

        ends = await asyncio.gather(*map(one, found))
        failed = [tx.spec.xid.hex() for tx, (end, _) in zip(found, ends, strict=True) if isinstance(end, Exception)]
        rows = [row for _, row in ends]
        last_ms = max(store.now_ms(), *(row.time_ms + 1 for row in rows))
        last = outcome_row(asked, last_ms, DONE, {"retried": len(found) - len(failed), "failed_xids": failed})
        await self._note([*rows, last])
        return failed

    async def _carry_out(self, asked: AuditRow, xid: bytes, order: Order) -> tuple[Transaction | Exception, AuditRow]:
        """What came of an order: the row that stands, or why not; and the record of it."""
        after: Mapping[str, object]
        end: Transaction | Exception
        try:
            end = await self._engine.order(xid, order)
        except Exception as error:
            end, outcome = error, REFUSED if isinstance(error, _NOTHING_CHANGED) else UNKNOWN
            after = {"error": getattr(error, "reason", type(error).__name__), "message": str(error)}
        else:
            outcome, after = DONE, snapshot(end)
        return end, outcome_row(asked, self._engine.store.now_ms(), outcome, after)

    async def _note(self, rows: list[AuditRow]) -> None:
        """Store what came of an action. It has happened: the caller is told so even if this cannot be stored."""
        try:
            await self._engine.store.add_audit(rows)
        except StoreError as error:
            _log.error("audit.outcome_not_stored", ids=[row.id.hex() for row in rows][:10], error=str(error))

    def _would_change(self, tx: Transaction, order: RetryOrder) -> bool:
        return order.obey(tx, self._engine.store.now_ms(), self._engine.policy) is not tx


async def _to_its_end(action: Coroutine[Any, Any, _T]) -> _T:
    """Whether the caller still waits changes nothing: what was asked for gets the record of its outcome."""
    acting = asyncio.get_running_loop().create_task(action)
    _acting.add(acting)
    acting.add_done_callback(_ended)
    try:
        return await asyncio.shield(acting)
    finally:
        del acting  # an error would hold this frame, and the frame the error, until the collector comes


_acting: set[asyncio.Task[Any]] = set()
"""The event loop holds its tasks weakly."""


def _ended(task: asyncio.Task[Any]) -> None:
    _acting.discard(task)
    if not task.cancelled():
        task.exception()  # else it would be told as one that nobody has seen


def _of_participant(name: str, states: Sequence[int]) -> Node:
    of_state = tuple(Term(Field.STATE, "=", state) for state in states)
    return And((Term(Field.PARTICIPANT, "=", name), Or(of_state) if len(of_state) > 1 else of_state[0]))
