"""The SDK's real purge and resolver on the simulated database: its statements, and the hands that carry it out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

from participant_sdk.call import IncomingCall, Reply
from participant_sdk.databases.database import Script
from participant_sdk.engines import AsyncEngineFence
from participant_sdk.fence import Status
from participant_sdk.transaction import LookedUp, Transaction
from participant_sdk.upkeep_hands import TaskHands
from participant_sdk.upkeep_sql import Key as BranchKey
from participant_sdk.upkeep_sql import OldRow, Page, UpkeepSql, unhurried
from participant_sdk.upkeep_steps import Job
from tests.simulator.database import Request, SimDatabase, fence_id
from tests.simulator.database_client import roll_back
from tests.simulator.database_server import Session
from tests.simulator.transactions import StoredRow

_SETTLED: Final = frozenset((Status.COMMITTED, Status.ROLLBACKED, Status.SUSPENDED))


class Records(Protocol):
    """What the coordinator's store says, asked over the network; raises TricordError where it does not answer."""

    async def look_up(self, xids: Sequence[str]) -> LookedUp:
        """How far these transactions have come."""

    async def fetch(self, xid: str) -> Transaction | None:
        """A whole one."""


class SimHands(TaskHands):
    """The SDK's hands, with the simulated engine and records."""

    def __init__(
        self,
        records: Records,
        engine_fence: AsyncEngineFence,
        database: SimDatabase,
        execute: Callable[[IncomingCall], Awaitable[Reply]],
    ) -> None:
        self._engine = engine_fence.engine
        self._turn = engine_fence.turn if database.one_writer else None
        self._execute = execute
        self._lookup = cast(Any, records)
        self._stopping = asyncio.Event()


class SimJob(Job):
    """A Job whose statements are the simulated database's."""

    @property
    def sql(self) -> UpkeepSql:
        """See Job."""
        return _UpkeepStatements(cast(SimDatabase, self.fence.database), self.participant)


class _UpkeepStatements(UpkeepSql):
    """What ``UpkeepSql`` has said in SQL. ``page`` and ``again`` read what is committed, a page at a time."""

    def __init__(self, database: SimDatabase, participant: str) -> None:
        self._simulated = database
        self._participant = participant

    def clock(self) -> Script[int]:
        """See UpkeepSql."""
        now_ms, found = yield Request((_clock, fence_id))
        self._simulated.check_fence_id(found)
        return int(now_ms)

    def page(self, after: str, below: str, rows: int, status: Status | None = None) -> Script[Page]:
        """See UpkeepSql."""
        found: list[OldRow] = (yield Request((partial(self._old_rows, after, below, status), roll_back)))[0]
        if len(found) <= rows:
            return Page(found, None)
        end = found[rows - 1].xid
        return Page([row for row in found if row.xid <= end], end)

    def again(self, keys: Sequence[BranchKey], status: Status) -> Script[list[OldRow]]:
        """See UpkeepSql."""
        wanted = set(keys)
        found: list[OldRow] = (yield Request((partial(self._old_rows, "", "~", status), roll_back)))[0]
        return [row for row in found if row.key in wanted]

    def delete(self, keys: Sequence[BranchKey]) -> Script[tuple[int, int]]:
        """See UpkeepSql."""
        yield from self._simulated.begin(unhurried())
        deleted = 0
        for number, key in enumerate(keys, 1):
            if not (yield Request((partial(self._delete_row, key),)))[0]:
                break
            deleted = number
        yield from self._simulated.commit()
        return deleted, number

    def _old_rows(self, after: str, below: str, status: Status | None, session: Session) -> list[OldRow]:
        now_ms = session.server.now_ms
        found = [
            OldRow(
                key[1], key[2], row.status, row.finished, now_ms - row.modified_ms, (row.lease_until_ms or 0) - now_ms
            )
            for key, row in session.server.rows("fence").items()
            if after < key[1] < below
            and row.participant == self._participant
            and (status is None or row.status == status)
        ]
        return sorted(found, key=lambda row: row.key)

    def _delete_row(self, key: BranchKey, session: Session) -> bool:
        local = session.begun()
        row: StoredRow | None = local.lock(("fence", *key))
        if row is None or row.participant != self._participant:
            return False
        if row.status not in _SETTLED or not (row.finished or row.status == Status.SUSPENDED):
            return False
        local.write(("fence", *key), None)
        return True


def _clock(session: Session) -> int:
    return session.server.now_ms
