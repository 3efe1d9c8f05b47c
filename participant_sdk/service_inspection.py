"""What operators ask a participant about its fence: requests read, answers written, one look at a time.

It reads on a connection of its own out of the participant's engine, takes no lane, and waits for nobody's lock.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from participant_sdk.background import view_of
from participant_sdk.context import XID_FORM, is_xid
from participant_sdk.databases.database import Script
from participant_sdk.databases.mariadb import MariaDb
from participant_sdk.databases.sqlite import Sqlite
from participant_sdk.engines import AsyncEngineFence, SyncEngineFence
from participant_sdk.fence import Status
from participant_sdk.holds import HoldsQuery
from participant_sdk.inspection_errors import InspectionFailed, failed, status_number, wrong
from participant_sdk.inspection_sql import COUNTED_MAX, Branch, InspectionSql
from participant_sdk.local_transaction import Fence
from participant_sdk.service_holds import compare, compare_async, comparison
from participant_sdk.steps import run, run_async
from participant_sdk.upkeep_sql import FIRST
from participant_sdk.upkeep_steps import floor_of
from tricord.v1 import participant_pb2

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

R = TypeVar("R")

PAGE_SIZE_MAX: Final = 1_000
PAGE_SIZE_DEFAULT: Final = 100
MIN_AGE_SECONDS_MAX: Final = 3_650 * 86_400
BRANCH_ID_MAX: Final = 2**31 - 1
_LAST: Final = "g"
"""Sorts behind every xid."""


class Inspection:
    """The answers about one participant, as scripts."""

    def __init__(self, participant: str, fence: Fence) -> None:
        self._sql = InspectionSql(fence.database, participant)
        self.participant = participant
        self.of_fence = fence

    def fence(self) -> Script[participant_pb2.GetFenceResponse]:
        """What there is to know of the fence as a whole."""
        now_ms = yield from self._sql.clock()
        counts, has_more_rows = yield from self._sql.counts()
        response = participant_pb2.GetFenceResponse(
            fence_id=self.of_fence.fence_id,
            database=_name_of(self.of_fence.database),
            rows_counted_max=COUNTED_MAX,
            has_more_rows=has_more_rows,
        )
        response.now.FromMilliseconds(now_ms)
        response.retention.FromMilliseconds(self.of_fence.retention_ms)
        for each in counts:
            finished = each.finished or each.status == Status.SUSPENDED
            response.counts.add(status=status_number(each.status), finished=finished, rows=each.rows)
        return response

    def branches(self, request: participant_pb2.ListBranchesRequest) -> Script[participant_pb2.ListBranchesResponse]:
        """A page of fence rows; raises InspectionFailed at once for a request that cannot be answered."""
        size = request.page_size or PAGE_SIZE_DEFAULT
        if size > PAGE_SIZE_MAX:
            raise wrong(f"page_size: is {size}; the limit is {PAGE_SIZE_MAX}")
        if request.page_token and not is_xid(request.page_token):
            raise wrong(f"page_token: is not {XID_FORM}, as a page before has returned it")
        status = None
        if request.status:
            if request.status not in {int(status) for status in Status}:
                raise wrong(f"status: is {request.status}, which is no status")
            status = Status(request.status)
        seconds = request.min_age.seconds + request.min_age.nanos / 1e9
        if not 0 <= seconds <= MIN_AGE_SECONDS_MAX:
            raise wrong(f"min_age: must be 0 to {MIN_AGE_SECONDS_MAX} s")
        return self._branches(request.page_token or FIRST, size, status, int(seconds * 1000))

    def branch(self, request: participant_pb2.GetBranchRequest) -> Script[participant_pb2.GetBranchResponse]:
        """One fence row; raises InspectionFailed at once for a request that cannot be answered."""
        if not is_xid(request.xid):
            raise wrong(f"xid: is not {XID_FORM}")
        if not 0 < request.branch_id <= BRANCH_ID_MAX:
            raise wrong(f"branch_id: is {request.branch_id}; it must be 1 to {BRANCH_ID_MAX}")
        return self._branch(request.xid, request.branch_id)

    def _branch(self, xid: str, branch_id: int) -> Script[participant_pb2.GetBranchResponse]:
        now_ms = yield from self._sql.clock()
        row = yield from self._sql.branch(xid, branch_id)
        response = participant_pb2.GetBranchResponse(fence_id=self.of_fence.fence_id)
        response.now.FromMilliseconds(now_ms)
        if row is not None:
            _write(response.branch, row, now_ms)
        return response

    def _branches(
        self, after: str, size: int, status: Status | None, age_ms: int
    ) -> Script[participant_pb2.ListBranchesResponse]:
        now_ms = yield from self._sql.clock()
        below = floor_of(now_ms - age_ms) if age_ms else _LAST
        page = yield from self._sql.branches(after, below, size, status, age_ms)
        response = participant_pb2.ListBranchesResponse(next_page_token=page.end or "", fence_id=self.of_fence.fence_id)
        response.now.FromMilliseconds(now_ms)
        for row in page.rows:
            _write(response.branches.add(), row, now_ms)
        return response


def _write(message: participant_pb2.FenceBranch, row: Branch, now_ms: int) -> None:
    message.xid, message.branch_id, message.action = row.xid, row.branch_id, row.action
    message.status = status_number(row.status)
    message.finished = row.finished or row.status == Status.SUSPENDED
    if row.lease_left_ms is not None and not message.finished:
        message.external = True
        message.running = row.lease_left_ms > 0
    _tell(message.create_time, now_ms - row.created_age_ms)
    _tell(message.update_time, now_ms - row.age_ms)


def _tell(message: Timestamp, milliseconds: int) -> None:
    message.FromMilliseconds(max(0, milliseconds))


def _name_of(database: object) -> str:
    if isinstance(database, Sqlite):
        return "sqlite"
    return "mysql" if isinstance(database, MariaDb) else "postgresql"


_BUSY: Final = InspectionFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, "another look at the fence is running; ask again")


class ThreadInspection:
    """Looks at a participant's fence through an Engine, in the thread that calls."""

    def __init__(self, inspection: Inspection, engine_fence: SyncEngineFence, holds: HoldsQuery | None) -> None:
        self.inspection = inspection
        self._engine_fence = engine_fence
        self._holds = holds
        self._engine = view_of(engine_fence.engine)
        self._lock, self._lock_of_one = threading.Lock(), threading.Lock()

    def look(self, script: Script[R]) -> R:
        """What the script returns. Raises InspectionFailed."""
        return self._look(script, self._lock)

    def look_at_one(self, script: Script[R]) -> R:
        """Likewise for a single row: also while pages are read."""
        return self._look(script, self._lock_of_one)

    def _look(self, script: Script[R], lock: threading.Lock) -> R:
        if not lock.acquire(blocking=False):
            raise _BUSY
        try:
            with self._engine.connect() as connection:
                return run(script, connection)
        except Exception as error:
            raise failed(error) from error
        finally:
            lock.release()

    def compare_holds(
        self, request: participant_pb2.CompareHoldsRequest, seconds: float | None
    ) -> participant_pb2.CompareHoldsResponse:
        """The author's holds against the fence, within `seconds` if not None. Raises InspectionFailed."""
        if not self._lock.acquire(blocking=False):
            raise _BUSY
        try:
            asked = comparison(self._holds, self.inspection.of_fence, self.inspection.participant, request, seconds)
            return compare(asked, self._engine_fence)
        finally:
            self._lock.release()


class TaskInspection:
    """As `ThreadInspection`, through an AsyncEngine."""

    def __init__(self, inspection: Inspection, engine_fence: AsyncEngineFence, holds: HoldsQuery | None) -> None:
        self.inspection = inspection
        self._engine_fence = engine_fence
        self._holds = holds
        self._engine = view_of(engine_fence.engine)
        self._lock, self._lock_of_one = asyncio.Lock(), asyncio.Lock()

    async def look(self, script: Script[R]) -> R:
        """As `ThreadInspection.look`."""
        return await self._look(script, self._lock)

    async def look_at_one(self, script: Script[R]) -> R:
        """As `ThreadInspection.look_at_one`."""
        return await self._look(script, self._lock_of_one)

    async def _look(self, script: Script[R], lock: asyncio.Lock) -> R:
        if lock.locked():
            raise _BUSY
        async with lock:
            try:
                async with self._engine.connect() as connection:
                    return await run_async(script, connection)
            except Exception as error:
                raise failed(error) from error

    async def compare_holds(
        self, request: participant_pb2.CompareHoldsRequest, seconds: float | None
    ) -> participant_pb2.CompareHoldsResponse:
        """As `ThreadInspection.compare_holds`."""
        if self._lock.locked():
            raise _BUSY
        async with self._lock:
            asked = comparison(self._holds, self.inspection.of_fence, self.inspection.participant, request, seconds)
            return await compare_async(asked, self._engine_fence)
