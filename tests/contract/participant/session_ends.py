"""Every way in which a handler could end the local transaction through the session that it is lent, in both stacks."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from participant_sdk import Call
from tests.contract.participant.shop import AsyncWork, Order, Work, add, add_and_flush
from tests.contract.participant.world import Debit


def commit(session: Session, call: Call[Debit]) -> None:
    add_and_flush(session, call)
    session.commit()


async def commit_async(session: AsyncSession, call: Call[Debit]) -> None:
    session.add(Order(xid=call.xid))
    await session.commit()


def commit_unused(session: Session, call: Call[Debit]) -> None:
    session.commit()


async def commit_unused_async(session: AsyncSession, call: Call[Debit]) -> None:
    await session.commit()


def commit_swallowed(session: Session, call: Call[Debit]) -> None:
    try:
        commit(session, call)
    except Exception:
        return


async def commit_swallowed_async(session: AsyncSession, call: Call[Debit]) -> None:
    try:
        await commit_async(session, call)
    except Exception:
        return


def commit_from_savepoint(session: Session, call: Call[Debit]) -> None:
    session.begin_nested()
    add_and_flush(session, call)
    session.commit()  # of SQLAlchemy 2: everything, not the savepoint alone


async def commit_from_savepoint_async(session: AsyncSession, call: Call[Debit]) -> None:
    await session.begin_nested()
    session.add(Order(xid=call.xid))
    await session.commit()


def rollback(session: Session, call: Call[Debit]) -> None:
    add_and_flush(session, call)
    session.rollback()


async def rollback_async(session: AsyncSession, call: Call[Debit]) -> None:
    session.add(Order(xid=call.xid))
    await session.flush()
    await session.rollback()


def rollback_unflushed(session: Session, call: Call[Debit]) -> None:
    add(session, call)
    session.rollback()


async def rollback_unflushed_async(session: AsyncSession, call: Call[Debit]) -> None:
    session.add(Order(xid=call.xid))
    await session.rollback()


def begin(session: Session, call: Call[Debit]) -> None:
    with session.begin():
        add(session, call)


async def begin_async(session: AsyncSession, call: Call[Debit]) -> None:
    async with session.begin():
        session.add(Order(xid=call.xid))


def close(session: Session, call: Call[Debit]) -> None:
    add(session, call)
    session.close()


async def close_async(session: AsyncSession, call: Call[Debit]) -> None:
    session.add(Order(xid=call.xid))
    await session.close()


def as_context(session: Session, call: Call[Debit]) -> None:
    with session:
        add_and_flush(session, call)


async def as_context_async(session: AsyncSession, call: Call[Debit]) -> None:
    async with session:
        session.add(Order(xid=call.xid))
        await session.flush()


def connection(session: Session, call: Call[Debit]) -> None:
    add_and_flush(session, call)
    session.connection().commit()


async def connection_async(session: AsyncSession, call: Call[Debit]) -> None:
    session.add(Order(xid=call.xid))
    await (await session.connection()).commit()


def statement(session: Session, call: Call[Debit]) -> None:
    add_and_flush(session, call)
    session.execute(text("COMMIT"))


async def statement_async(session: AsyncSession, call: Call[Debit]) -> None:
    session.add(Order(xid=call.xid))
    await session.execute(text("COMMIT"))


WAYS: dict[str, tuple[Work, AsyncWork]] = {
    "commit": (commit, commit_async),
    "commit of an unused session": (commit_unused, commit_unused_async),
    "commit, swallowed": (commit_swallowed, commit_swallowed_async),
    "commit inside begin_nested": (commit_from_savepoint, commit_from_savepoint_async),
    "rollback": (rollback, rollback_async),
    "rollback of what was not flushed": (rollback_unflushed, rollback_unflushed_async),
    "with session.begin()": (begin, begin_async),
    "close": (close, close_async),
    "with session": (as_context, as_context_async),
    "session.connection().commit()": (connection, connection_async),
    "COMMIT as a statement": (statement, statement_async),
}
