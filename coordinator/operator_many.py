"""What operators do to many transactions: page by page, with a dry run that only counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tricord.v1 import operator_pb2 as pb

from . import filters
from .codec import readable
from .errors import Violation
from .filters_tree import And, Field, Node, Or, Term, printed
from .model import State, Transaction
from .operator_acting import Bulk, OperatorActing, to_its_end
from .operator_audit import Asker, read_asker
from .operator_list import Listing, find_page
from .operator_pages import key_of
from .orders import Denied, OperatorCancel, Order, Retry
from .rpc import Context, answering
from .store.rows import Row
from .wire import check_name
from .wire_open import raise_wrong

PAGE_DEFAULT, PAGE_MAX = 100, 500
OPEN_STATES = frozenset(int(state) for state in State if not state.finished)


class _Request(Protocol):
    """What requests for many have in common."""

    page_size: int
    page_token: str
    dry_run: bool
    filter: str


class _Done(NamedTuple):
    """What came of a page."""

    acted_on: int
    failed_xids: Sequence[str]
    next_page_token: str
    left_alone: int


class OperatorMany(OperatorActing):
    """RetryMany and CancelMany."""

    @answering
    async def RetryMany(self, request: pb.RetryManyRequest, context: Context) -> pb.RetryManyResponse:
        """Retry for one page of the unfinished transactions that a participant or a filter names."""
        wrong: list[Violation] = []
        matching = _read(request, wrong)
        if len(request.states) > len(State):
            wrong.append(Violation("states", f"has {len(request.states)} states; the limit is {len(State)}"))
        elif not {*map(int, request.states)} <= OPEN_STATES:
            names = ", ".join(State(state).name for state in sorted(OPEN_STATES))
            wrong.append(Violation("states", f"only what is unfinished can be retried: {names}"))
        asker = read_asker(request.actor, request.reason, context.peer(), wrong)
        raise_wrong(wrong)
        if request.participant or matching is None:
            check_name("participant", request.participant)
        states = sorted({*map(int, request.states)} or OPEN_STATES)
        of_state = tuple(Term(Field.STATE, "=", state) for state in states)
        parts: list[Node] = [Term(Field.PARTICIPANT, "=", request.participant)] if request.participant else []
        parts.append(Or(of_state) if len(of_state) > 1 else of_state[0])
        parts += [matching] if matching is not None else []
        about: dict[str, object] = {"participant": request.participant} if request.participant else {}
        about |= {"filter": request.filter} if matching is not None else {}
        bulk = Bulk("retry", "retried", Retry(request.participant), about)
        done = await self._one_page(bulk, And(tuple(parts)) if len(parts) > 1 else parts[0], request, asker)
        return pb.RetryManyResponse(
            count=done.acted_on, failed_xids=done.failed_xids, next_page_token=done.next_page_token
        )

    @answering
    async def CancelMany(self, request: pb.CancelManyRequest, context: Context) -> pb.CancelManyResponse:
        """Cancel for one page of the transactions that a filter finds; those that are decided are left alone."""
        wrong: list[Violation] = []
        matching = _read(request, wrong)
        if matching is None and not wrong:
            wrong.append(Violation("filter", "is needed: it says which transactions are cancelled"))
        asker = read_asker(request.actor, request.reason, context.peer(), wrong, needs_reason=not request.dry_run)
        raise_wrong(wrong)
        assert matching is not None
        order = OperatorCancel(asker.actor, asker.reason)
        done = await self._one_page(
            Bulk("cancel", "cancelled", order, {"filter": request.filter}), matching, request, asker
        )
        return pb.CancelManyResponse(
            count=done.acted_on,
            failed_xids=done.failed_xids,
            next_page_token=done.next_page_token,
            left_alone=done.left_alone,
        )

    async def _one_page(self, bulk: Bulk, matching: Node, request: _Request, asker: Asker) -> _Done:
        """Raises InvalidRequest for a token of another list, and StoreError."""
        text = f"{bulk.action}|{printed(matching)}"
        beyond_xid = key_of(request.page_token, text) if request.page_token else None
        listing = Listing(matching, False, beyond_xid, request.page_size or PAGE_DEFAULT, text)
        page = await find_page(self._engine.store, listing)
        found, left_alone = self._sorted(page.rows, bulk.order)
        failed: list[str] = []
        if found and not request.dry_run:
            failed = await to_its_end(self.act_on_many(found, bulk, asker))
        return _Done(len(found) - len(failed), failed, page.next_page_token, left_alone)

    def _sorted(self, rows: Sequence[Row], order: Order) -> tuple[list[Transaction], int]:
        """Those that an order would change, and how many refuse it; what nobody here can read is neither."""
        found: list[Transaction] = []
        left_alone = 0
        now_ms, policy = self._engine.store.now_ms(), self._engine.policy
        for tx in map(readable, rows):
            try:
                if tx is not None and order.obey(tx, now_ms, policy) is not tx:
                    found.append(tx)
            except Denied:
                left_alone += 1
        return found, left_alone


def _read(request: _Request, wrong: list[Violation]) -> Node | None:
    """The filter, None where there is none; what is wrong with it, or with the page, is added to ``wrong``."""
    if request.page_size > PAGE_MAX:
        wrong.append(Violation("page_size", f"is {request.page_size}; the limit is {PAGE_MAX}"))
    try:
        return filters.parse(request.filter)
    except filters.FilterError as error:
        wrong.append(Violation("filter", str(error)))
        return None
