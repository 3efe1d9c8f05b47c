"""What operators do to one transaction, and the audit of it. See ``operator_audit`` for what is written down when."""

from __future__ import annotations

import structlog

from tricord.v1 import operator_pb2 as pb

from .errors import InvalidRequest, Violation
from .model import Transaction
from .operator_acting import OperatorActing, to_its_end
from .operator_audit import read_asker, record_message
from .operator_history import HISTORY_RECORDS_MAX, history
from .operator_pages import key_of, make_token
from .orders import OperatorCancel
from .orders import Retry as RetryOrder
from .rpc import Context, answering
from .store.audit import AuditFilter, AuditRow
from .store.rows import StoreError
from .wire import duration_ms, read_xid, transaction_message
from .wire_open import raise_wrong, xid_of

_log = structlog.get_logger(__name__)

AUDIT_PAGE_DEFAULT, AUDIT_PAGE_MAX = 50, 1_000
AGE_DAYS_MAX = 36_500


class OperatorActions(OperatorActing):
    """Retry, Cancel and ListAudit."""

    @answering
    async def Retry(self, request: pb.RetryRequest, context: Context) -> pb.RetryResponse:
        """Make due what waits for its next attempt."""
        wrong: list[Violation] = []
        xid = xid_of(request.xid, wrong)
        asker = read_asker(request.actor, request.reason, context.peer(), wrong)
        raise_wrong(wrong)
        tx = await to_its_end(self.act("retry", xid, RetryOrder(), asker))
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
        tx = await to_its_end(self.act("cancel", xid, OperatorCancel(asker.actor, asker.reason), asker))
        return pb.OperatorServiceCancelResponse(transaction=transaction_message(tx))

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
