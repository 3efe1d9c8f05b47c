"""CompareHolds: the author's query and the fence in one local transaction, in a thread and in asyncio.

Whatever the query does, it ends as an answer or as an InspectionFailed. Its connection is thrown away if it failed. A
`def` query that computes, or waits, without asking the database or giving a hold cannot be stopped: the caller's own
time-out ends then, and others are told that a look is running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import grpc

from participant_sdk import session_guard
from participant_sdk.engines import AsyncEngineFence, SyncEngineFence
from participant_sdk.handler import lending
from participant_sdk.handling import told
from participant_sdk.holds import BadHold, HoldsQuery
from participant_sdk.holds_sql import HoldsSql, Owner, snapshot_of
from participant_sdk.holds_tally import MISMATCHES_DEFAULT, MISMATCHES_MAX, Key, Tally, plain
from participant_sdk.inspection_errors import InspectionFailed, failed, status_number, wrong
from participant_sdk.local_transaction import Fence
from participant_sdk.steps import run, run_async
from tricord.v1 import participant_pb2 as pb

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection

SECONDS_MAX: Final = 15.0
"""How long one comparison may take."""
_MARGIN_SECONDS: Final = 1.0
"""Left of the caller's time for the answer."""
_TRIED_SHARE: Final = 0.5
"""What of the time the fence may take."""
_BREATH: Final = 500
"""Holds after which an event loop may do something else."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared, and until when."""

    sql: HoldsSql
    query: HoldsQuery
    fence_id: str
    mismatches_max: int
    began: float
    deadline: float

    @property
    def tried_until(self) -> float:
        """When the fence has been looked at for long enough."""
        return self.began + (self.deadline - self.began) * _TRIED_SHARE

    def check_time(self, tally: Tally) -> None:
        """Raises InspectionFailed when the time is up."""
        if time.monotonic() > self.deadline:
            seconds = f"{self.deadline - self.began:.1f}"
            text = f"holds() had not ended after {seconds} s, and {tally.seen} holds"
            raise InspectionFailed(grpc.StatusCode.DEADLINE_EXCEEDED, text)

    def ended(self, error: BaseException, tally: Tally) -> NoReturn:
        """Raises InspectionFailed with what the query failed of."""
        if isinstance(error, InspectionFailed):
            raise error
        self.check_time(tally)  # then it is why the database ended the statement
        why = str(error) if isinstance(error, BadHold) else told(error)
        raise InspectionFailed(grpc.StatusCode.FAILED_PRECONDITION, f"holds(): {why}") from error


def comparison(
    query: HoldsQuery | None, fence: Fence, participant: str, request: pb.CompareHoldsRequest, seconds: float | None
) -> Comparison:
    """What is asked for. `seconds`: that the caller waits, None if it does not say. Raises InspectionFailed."""
    if query is None:
        raise InspectionFailed(grpc.StatusCode.UNIMPLEMENTED, f"participant {participant!r} declares no holds()")
    if request.mismatches_max > MISMATCHES_MAX:
        raise wrong(f"mismatches_max: is {request.mismatches_max}; the limit is {MISMATCHES_MAX}")
    now = time.monotonic()
    allowed = SECONDS_MAX if seconds is None else max(0.0, min(SECONDS_MAX, seconds - _MARGIN_SECONDS))
    sql, mismatches_max = HoldsSql(fence.database, participant), request.mismatches_max or MISMATCHES_DEFAULT
    return Comparison(sql, query, fence.fence_id, mismatches_max, now, now + allowed)


def compare(asked: Comparison, engine_fence: SyncEngineFence) -> pb.CompareHoldsResponse:
    """Carried out in the thread that calls. Raises InspectionFailed."""
    try:
        with snapshot_of(engine_fence.engine).connect() as connection:
            try:
                run(asked.sql.begin(asked.deadline), connection)
                tried = run(asked.sql.tried(asked.tried_until), connection)
                tally = Tally(tried, asked.query.actions, asked.mismatches_max)
                _take(asked, tally, connection)
                owners = run(asked.sql.owners(_keys(tally)), connection)
                run(asked.sql.end(), connection)
            except BaseException:
                if not connection.closed:
                    connection.invalidate()
                raise
            return _response(asked, tally, owners)
    except InspectionFailed:
        raise
    except Exception as error:
        raise failed(error) from error


def _take(asked: Comparison, tally: Tally, connection: Connection) -> None:
    try:
        with lending(connection) as loan:
            db: Any = connection
            if asked.query.session_class is not None:
                db = asked.query.session_class(bind=connection)
                session_guard.watch(db, connection, loan)
            with closing(asked.query.each(db)) as holds:
                for hold in holds:
                    tally.take(hold)
                    asked.check_time(tally)
            if db is not connection:
                db.expunge_all()
    except (Exception, SystemExit) as error:
        asked.ended(error, tally)
    asked.check_time(tally)


async def compare_async(asked: Comparison, engine_fence: AsyncEngineFence) -> pb.CompareHoldsResponse:
    """As `compare`, in the event loop."""
    try:
        async with snapshot_of(engine_fence.engine).connect() as connection:
            try:
                await run_async(asked.sql.begin(asked.deadline), connection)
                tried = await run_async(asked.sql.tried(asked.tried_until), connection)
                tally = Tally(tried, asked.query.actions, asked.mismatches_max)
                await _take_async(asked, tally, connection)
                owners = await run_async(asked.sql.owners(_keys(tally)), connection)
                await run_async(asked.sql.end(), connection)
            except BaseException:
                if not connection.closed:
                    await connection.invalidate()
                raise
            return _response(asked, tally, owners)
    except InspectionFailed:
        raise
    except Exception as error:
        raise failed(error) from error


async def _take_async(asked: Comparison, tally: Tally, connection: AsyncConnection) -> None:
    synchronous = cast("Connection", connection.sync_connection)
    left = asked.deadline - time.monotonic()
    try:
        with lending(synchronous) as loan:
            db: Any = connection
            if asked.query.session_class is not None:
                db = asked.query.session_class(bind=connection)
                session_guard.watch(db.sync_session, synchronous, loan)
            async with asyncio.timeout(left + _MARGIN_SECONDS / 2), aclosing(asked.query.each_async(db)) as holds:
                async for hold in holds:
                    tally.take(hold)
                    asked.check_time(tally)
                    if tally.seen % _BREATH == 0:
                        await asyncio.sleep(0)
            if db is not connection:
                db.expunge_all()
    except (Exception, SystemExit) as error:
        asked.ended(error, tally)
    asked.check_time(tally)


def _keys(tally: Tally) -> Sequence[Key]:
    return [(hold.xid, hold.branch_id) for hold in tally.leaks]


def _response(asked: Comparison, tally: Tally, owners: Mapping[Key, Owner]) -> pb.CompareHoldsResponse:
    response = pb.CompareHoldsResponse(
        fence_id=asked.fence_id,
        holds=tally.holds,
        tried=tally.tried,
        unfinished=tally.unfinished,
        leaked=tally.leaked,
        compared_until=tally.until or "",
        not_compared=tally.not_compared,
    )
    for unit, each in sorted(tally.sums.items()):
        response.sums.add(unit=unit, reserved=plain(each.reserved), tried=plain(each.tried))
    for hold in tally.leaks:
        owner = owners.get((hold.xid, hold.branch_id))
        mismatch = response.mismatches.add(
            kind=pb.HOLD_MISMATCH_KIND_LEAKED,
            xid=hold.xid,
            branch_id=hold.branch_id,
            amount=plain(Decimal(hold.amount)),
            unit=hold.unit,
        )
        if owner is not None:
            mismatch.action, mismatch.participant = owner.action, owner.participant
            mismatch.status = status_number(owner.status)
    for (xid, branch_id), tried in tally.missing():
        response.missing += 1
        if response.missing <= asked.mismatches_max:
            response.mismatches.add(
                kind=pb.HOLD_MISMATCH_KIND_MISSING,
                xid=xid,
                branch_id=branch_id,
                action=tried.action,
                status=pb.FENCE_STATUS_TRIED,
                participant=asked.sql.participant,
            )
    return response
