"""How an operator's action is carried out: with a record before it and a record after it (``operator_audit``)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

import structlog

from .engine import FormatNotReady, UnknownXid
from .journal import Overloaded
from .model import Transaction
from .operator_audit import DONE, REFUSED, UNKNOWN, Asker, asked_row, outcome_row, snapshot
from .operator_base import OperatorBase
from .orders import Denied, Order, Retry
from .store.audit import AuditRow
from .store.rows import RowRejected, StoreError

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")

AT_ONCE_MAX = 32
"""Transactions of one page that are acted on at the same time."""
_NOTHING_CHANGED = (Denied, Overloaded, RowRejected, UnknownXid, FormatNotReady)
_NO_FACTS: Mapping[str, object] = {}


class Bulk(NamedTuple):
    """One action on many transactions."""

    action: str
    """As the record of each names it; that of all together has "-many" behind it."""
    done: str
    """How many were acted on: by this name the last record tells it."""
    order: Order
    about: Mapping[str, object]
    """Which transactions were asked for."""


class OperatorActing(OperatorBase):
    """For the parts that act."""

    async def act(
        self,
        action: str,
        xid: bytes,
        order: Order,
        asker: Asker,
        *,
        facts: Mapping[str, object] = _NO_FACTS,
        refused: Denied | FormatNotReady | None = None,
    ) -> Transaction:
        """Have an order carried out; ``facts`` are written down with both records.

        Raises what ``Engine.order`` raises; and ``refused``, where it was refused before it could be carried out.
        """
        engine = self._engine
        before = await engine.get_by_xid(xid)
        asked = asked_row(engine.store.now_ms(), action, xid, asker, {**snapshot(before), **facts})
        await engine.store.add_audit([asked])  # if this fails, nothing is done
        end: Transaction | Exception
        if refused is not None:
            end, row = refused, self._refused(asked, refused, REFUSED)
        else:
            self._trust(order, [before])
            end, row = await self._carry_out(asked, xid, order)
        after = json.loads(row.after)
        await self._note([row._replace(after=json.dumps({**after, **facts}))])
        if isinstance(end, Exception):
            raise end
        return end

    async def act_on_many(self, found: list[Transaction], bulk: Bulk, asker: Asker) -> list[str]:
        """Have one order carried out on each of these; returns the xids of those on which it was not."""
        store = self._engine.store
        about = {**bulk.about, "xids": [tx.spec.xid.hex() for tx in found]}
        asked = asked_row(store.now_ms(), f"{bulk.action}-many", None, asker, about)
        await store.add_audit([asked])  # if this fails, nothing is done
        self._trust(bulk.order, found)
        slots = asyncio.Semaphore(AT_ONCE_MAX)

        async def one(before: Transaction) -> tuple[Transaction | Exception, AuditRow]:
            xid = before.spec.xid
            async with slots:
                tx, row = await self._carry_out(asked, xid, bulk.order)
            # A record of its own: so that the history of each transaction has it.
            return tx, row._replace(action=bulk.action, xid=xid, before=json.dumps(snapshot(before)))

        ends = await asyncio.gather(*map(one, found))
        failed = [tx.spec.xid.hex() for tx, (end, _) in zip(found, ends, strict=True) if isinstance(end, Exception)]
        rows = [row for _, row in ends]
        last_ms = max(store.now_ms(), *(row.time_ms + 1 for row in rows))
        last = outcome_row(asked, last_ms, DONE, {bulk.done: len(found) - len(failed), "failed_xids": failed})
        await self._note([*rows, last])
        return failed

    def _trust(self, order: Order, found: list[Transaction]) -> None:
        """What is retried by hand is called also where calls have failed lately."""
        if isinstance(order, Retry):
            everyone = {branch.participant for tx in found for branch in tx.spec.branches}
            self._engine.delivery.trust({order.participant} if order.participant else everyone)

    async def _carry_out(self, asked: AuditRow, xid: bytes, order: Order) -> tuple[Transaction | Exception, AuditRow]:
        """What came of an order: the row that stands, or why not; and the record of it."""
        try:
            end = await self._engine.order(xid, order)
        except Exception as error:
            return error, self._refused(asked, error, REFUSED if isinstance(error, _NOTHING_CHANGED) else UNKNOWN)
        return end, outcome_row(asked, self._engine.store.now_ms(), DONE, snapshot(end))

    def _refused(self, asked: AuditRow, error: Exception, outcome: str) -> AuditRow:
        after = {"error": getattr(error, "reason", type(error).__name__), "message": str(error)}
        return outcome_row(asked, self._engine.store.now_ms(), outcome, after)

    async def _note(self, rows: list[AuditRow]) -> None:
        """Store what came of an action. It has happened: the caller is told so even if this cannot be stored."""
        try:
            await self._engine.store.add_audit(rows)
        except StoreError as error:
            _log.error("audit.outcome_not_stored", ids=[row.id.hex() for row in rows][:10], error=str(error))


async def to_its_end(action: Coroutine[Any, Any, _T]) -> _T:
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
