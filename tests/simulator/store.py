"""A coordinator's store on the coordinators' database.

A connection may be lost at any point of a flush, and the coordinator then does not know which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from coordinator.store.registry import KnownParticipant
from coordinator.store.rows import Batch, Claim, LookedUp, PutOff, Row, RowRejected, StoreError
from coordinator.store.store import StoreClosed

from .loop import SimLoop
from .store_rows import Database

_T = TypeVar("_T")

UNREADABLE = 1_000_000
"""The format that a row seems to have, to a program that is too old for it."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.02, 1.0
CLOCK_READ_S_MAX = 0.25
FORMAT_S = 5.0


class Lost(Exception):
    """The connection is gone."""


class StoreRates(NamedTuple):
    """How often what happens to a statement."""

    slow: float = 0.0
    lost_before: float = 0.0
    """The connection is lost before the statement arrives."""
    lost_after: float = 0.0
    """It is lost when the COMMIT has gone through."""
    lands_later: float = 0.0
    """It is lost while the COMMIT is on its way; it goes through, up to seconds later."""
    again: float = 0.0
    """The database rolls it back: serialization failure, deadlock."""
    error: float = 0.0
    """Reads and claims fail; a claim may have happened."""


class SimStore:
    """What ``coordinator.store.store.Store`` offers the engine, for one process on the simulated database."""

    def __init__(self, database: Database, loop: SimLoop, rates: Callable[[], StoreRates], program: int) -> None:
        self._database = database
        self._loop = loop
        self._world = database.world
        self._rates = rates
        self.program = program
        """The highest row format that this process's program knows."""
        self.format = min(database.format, program)
        self.flagged, database.flagged = database.flagged, ()
        self.store_id = "store"
        self._format_read_s = loop.time()
        self._closing = False
        self._offset_ms = 0.0
        self._clock_read = False
        # The first read counts even if it was slow, and is then wrong by up to half of its time.
        self._read_clock(self._world.random.choice((0, -300, 300)) if rates().slow else 0)

    def _read_clock(self, wrong_ms: int) -> None:
        self._offset_ms = self._database.now_ms() - self._loop.time() * 1000 + wrong_ms

    def now_ms(self) -> int:
        """The store's clock, as last heard, carried on by this process's monotonic one."""
        return int(self._loop.time() * 1000 + self._offset_ms)

    def stop_waiting(self) -> None:
        """Give up what waits for the database."""
        self._closing = True

    # --- the hot path --------------------------------------------------------------------------------------

    def flush(self, batch: Batch) -> asyncio.Future[list[Row | RowRejected | None]]:
        """Write a batch until its outcome is known; a task beside the engine, as the writer's thread is."""
        return self._loop.create_task(self._flush(batch))

    async def _flush(self, batch: Batch) -> list[Row | RowRejected | None]:
        pause_s = PAUSE_S_MIN
        while True:
            if self._closing and pause_s > PAUSE_S_MIN:
                raise StoreClosed("the store was closed before the outcome of its last flush was known")
            try:
                standing = await self._statement(batch)
                return [None if row is None else self._read(row) for row in standing]
            except Lost:
                pass
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, PAUSE_S_MAX)

    def _statement(self, batch: Batch) -> asyncio.Future[list[Row | None]]:
        """One run of a flush on one connection. Raises Lost, also when it was rolled back: it is run again."""
        world, rates, database = self._world, self._rates(), self._database
        answer: asyncio.Future[list[Row | None]] = self._loop.create_future()
        if database.down or world.chance(rates.lost_before):
            world.counts["COMMIT lost, not applied"] += 1
            self._later(answer, Lost())
            return answer
        lands_later = world.chance(rates.lands_later)
        lost_after = not lands_later and world.chance(rates.lost_after)
        rolled_back = not lands_later and not lost_after and world.chance(rates.again)
        if lands_later:
            world.counts["COMMIT lost, applied later"] += 1
            commit_us = world.random.randint(1_000, world.random.choice((20_000, 300_000, 3_000_000)))
        else:
            commit_us = self._delay_us()

        history = database.incarnation

        def arrives() -> None:
            if database.incarnation == history:
                database.lock(batch, locked)

        def locked() -> None:
            world.at(commit_us, committed)
            if lands_later:
                self._later(answer, Lost())

        def committed() -> None:
            if database.incarnation != history:
                return  # that server is no more
            if rolled_back:
                world.counts["COMMIT rolled back (40001)"] += 1
                database.unlock(batch)
                self._later(answer, Lost())
                return
            standing = database.commit(batch, self._loop)
            database.unlock(batch)
            if lost_after:
                world.counts["COMMIT lost, applied"] += 1
                self._later(answer, Lost())
            elif not lands_later:
                self._later(answer, standing)

        world.at(self._delay_us(), arrives)
        return answer

    async def claim(self, limit: int, lease_ms: int, put_off: PutOff | None = None, *, alone: bool = True) -> Claim:
        """See ``Store.claim``."""
        if self._loop.time() - self._format_read_s > FORMAT_S:
            self._format_read_s = self._loop.time()
            self.format = min(self._database.format, self.program)
        before_s = self._loop.time()
        claim = await self._ask(lambda: self._database.claim(limit, lease_ms, put_off, self.program), "claim")
        after_s = self._loop.time()
        if not claim.rows and not claim.put_off and (after_s - before_s < CLOCK_READ_S_MAX or not self._clock_read):
            self._offset_ms = claim.now_ms - (before_s + after_s) * 500
            self._clock_read = True
        for row in claim.rows:
            self._world.counts["claims"] += 1
            before = self._database.writers.get(row.xid)
            if before is not self._loop:
                self._world.counts["take-overs"] += 1
                if before is not None and before.name != self._loop.name and before.alive:
                    self._world.counts["take-overs from one that is alive"] += 1
        return claim

    # --- everything else -----------------------------------------------------------------------------------

    async def get(self, *, xid: bytes = b"", key: bytes = b"") -> Row | None:
        """The committed row: one that an open flush is about to write is read as it was."""
        row = await self._ask(lambda: self._database.rows.get(xid or self._database.keys.get(key, b"")), "read")
        return None if row is None else self._read(row)

    async def look_up(self, xids: Sequence[bytes]) -> LookedUp:
        """How far transactions have come."""

        def read() -> LookedUp:
            rows = self._database.rows
            states = {xid: rows[xid].state for xid in xids if xid in rows}
            return LookedUp(states, self.store_id, self._database.incarnation)

        return await self._ask(read, "look-up")

    async def participants(self) -> Sequence[KnownParticipant]:
        """All participants."""
        return await self._ask(self._database.registered, "list of participants")

    def _read(self, row: Row) -> Row:
        return row if row.format <= self.program else row._replace(format=UNREADABLE)

    async def _ask(self, read: Callable[[], _T], what: str) -> _T:
        """One statement that is not a flush. Raises StoreError; it may have been carried out all the same."""
        world, database = self._world, self._database
        answer: asyncio.Future[_T] = self._loop.create_future()
        fails = database.down or world.chance(self._rates().error)
        happens = not database.down and (not fails or world.chance(0.5))
        history = database.incarnation

        def run() -> None:
            end: _T | Exception = StoreError("the store did not answer")
            if happens and database.incarnation == history:
                done = read()
                end = end if fails else done
            world.at(self._delay_us(), self._loop.arrive, _settle, answer, end)

        if fails:
            world.counts["store errors"] += 1
        world.at(self._delay_us(), run)
        return await answer

    def _later(self, answer: asyncio.Future[list[Row | None]], end: list[Row | None] | Exception) -> None:
        self._world.at(self._delay_us(), self._loop.arrive, _settle, answer, end)

    def _delay_us(self) -> int:
        source = self._world.random
        if self._world.chance(self._rates().slow):
            self._world.counts["store slow"] += 1
            return source.randint(50_000, 1_500_000)
        return source.randint(100, 3_000)


def _settle(answer: asyncio.Future[Any], end: object) -> None:
    if answer.done():
        return
    if isinstance(end, Exception):
        answer.set_exception(end)
    else:
        answer.set_result(end)
