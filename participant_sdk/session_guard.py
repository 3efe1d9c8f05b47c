"""What an ORM session may do that a handler is lent.

A session has more ways to end a local transaction than a connection has: `close()`, a `with` block, and its own
rollback when a flush fails. That one must not reach the database, since the fence row would go with it; what the flush
has left is undone when the call ends, and until then the session can do nothing more.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sqlalchemy import Connection, event

from participant_sdk.steps import CallFailed

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, SessionTransaction

    from participant_sdk.handler import Loan


def watch(session: Session, connection: Connection, loan: Loan) -> None:
    """Have `session` tell `loan` what its handler does with it: all it may use is `connection`."""

    def before_commit(session: Session) -> None:
        if not session.in_nested_transaction():
            loan.refuse("called commit()")

    def after_begin(session: Session, transaction: SessionTransaction, used: Connection) -> None:
        if used is not connection:
            used.close()
            loan.refuse("used another connection through its session")

    def created(session: Session, transaction: SessionTransaction) -> None:
        loan.flushes += _is_flush(transaction)

    def ended(session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is not None:
            loan.flushes -= _is_flush(transaction)
            if not session.is_active:
                loan.flush_error = sys.exception()
        else:
            loan.refuse("rolled back or closed its session")

    event.listen(session, "before_commit", before_commit)
    event.listen(session, "after_begin", after_begin)
    event.listen(session, "after_transaction_create", created)
    event.listen(session, "after_transaction_end", ended)


def check_whole(session: Session, loan: Loan) -> None:
    """Raises CallFailed if a flush has failed: its handler went on without what it should have written."""
    if not session.is_active:
        raise CallFailed(
            "a flush of the handler's session failed, and the handler went on: raise, or flush within begin_nested()",
            attention=True,
        ) from loan.flush_error


def _is_flush(transaction: SessionTransaction) -> bool:
    """Of its own accord a session begins one within another only to write, neither the first nor a savepoint."""
    return transaction.parent is not None and not transaction.nested
