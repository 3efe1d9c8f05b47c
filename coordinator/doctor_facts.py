"""Gathers what the doctor judges: from the store, the settings and the participants, in bounded pages, with time-outs.

Nothing is locked and nothing changed; findings come as they are made, so that a long look shows its first results
early. A part that cannot be looked at is a finding too, never the end of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TypeAlias

from .codec import readable
from .config import Settings
from .delivery import PUT_OFF_MS_MAX
from .delivery_fence import FenceLink, FenceUnanswered, fence_link
from .doctor import (
    Answer,
    Finding,
    Limits,
    Overflow,
    Reach,
    Registered,
    not_compared,
    nowhere,
    of_answer,
    of_settings,
    of_store,
)
from .doctor_fence import is_suspect, of_row
from .doctor_holds import left_out, of_holds
from .doctor_open import OpenFacts, OpenTally, of_finished
from .ids import parse_xid
from .model import FORMAT, State
from .participants import Participants
from .store import examine, schema
from .store.registry import KnownParticipant
from .store.rows import Row
from .store.store import Store

ASKED_AT_ONCE = 16
OPEN_PAGES_MAX = 200
FENCE_PAGES_MAX = 500

Told: TypeAlias = Finding | str
"""A finding, or what is being done."""


class Examination:
    """One look at everything, or at one participant."""

    def __init__(
        self, store: Store, participants: Participants, settings: Settings, grace_ms: int, only: str = ""
    ) -> None:
        self._store = store
        self._participants = participants
        self._settings = settings
        self._grace_ms = grace_ms
        self._only = only
        self._overflow = Overflow()

    async def run(self) -> AsyncIterator[Told]:
        """Everything that is found. Raises StoreError."""
        await self._participants.refresh()
        everyone = self._participants.known
        known = {name: registered(each) for name, each in everyone.items()}
        mine = {name: each for name, each in known.items() if self._only in ("", name)}
        for part in (self._look_at_store(known), self._look_at_participants(mine), self._look_at_open(known)):
            async for told in part:
                if isinstance(told, str) or self._overflow.admits(told):
                    yield told
        for finding in self._overflow.rest():
            yield finding

    async def _look_at_store(self, known: Mapping[str, Registered]) -> AsyncIterator[Told]:
        if self._only:
            return
        yield "looking at the store and the settings"
        stand = await self._store.within(examine.stand)
        for finding in of_store(stand.revision, schema.REVISION, stand.format, FORMAT):
            yield finding
        for finding in of_settings(self._settings.call_timeouts_ms, known):
            yield finding

    # --- participants ---------------------------------------------------------------------------------------

    async def _look_at_participants(self, mine: Mapping[str, Registered]) -> AsyncIterator[Told]:
        gate = asyncio.Semaphore(ASKED_AT_ONCE)

        async def ask(name: str, address: str) -> Answer:
            async with gate, fence_link(name, address) as link:
                return await link.ask(self._store)

        places = [(name, address) for name, each in sorted(mine.items()) for address in each.addresses]
        yield f"asking all participants ({len(mine)}) at all addresses ({len(places)})"
        answers = await asyncio.gather(*(ask(name, address) for name, address in places))
        fences: dict[tuple[str, str], str] = {}
        for name in sorted(name for name, each in mine.items() if not each.addresses):
            yield nowhere(name)
        for answer in answers:
            if answer.reach is not Reach.SILENT:
                yield f"{answer.participant} at {answer.address} answered in {answer.took_ms} ms"
            for finding in of_answer(answer, mine[answer.participant], self._limits()):
                yield finding
            if answer.fence is not None:
                fences.setdefault((answer.participant, answer.fence.fence_id), answer.address)
        for (name, _), address in fences.items():
            async for told in self._look_at_fence(name, address):
                yield told
            async for told in self._look_at_holds(name, address):
                yield told

    async def _look_at_fence(self, name: str, address: str) -> AsyncIterator[Told]:
        yield f"comparing the fence rows of {name} at {address}"
        try:
            async with fence_link(name, address) as link:
                async for finding in self._compare(name, link):
                    yield finding
        except FenceUnanswered as error:
            yield not_compared(name, str(error))

    async def _compare(self, name: str, link: FenceLink) -> AsyncIterator[Finding]:
        async for rows in link.rows(self._grace_ms, FENCE_PAGES_MAX):
            named = [row for row in rows if parse_xid(row.xid) is not None]
            xids = sorted({bytes.fromhex(row.xid) for row in named})
            states: Mapping[bytes, int] = {}
            if xids:
                states = (await self._store.look_up(xids)).states
            for row in named:
                xid = bytes.fromhex(row.xid)
                if not is_suspect(row, states.get(xid)):
                    continue
                stored = await self._store.get(xid=xid) if xid in states else None
                tx = None if stored is None else readable(stored)
                if stored is not None and tx is None:
                    continue  # a newer program's: that one can judge it
                finding = of_row(name, row, tx, self._limits())
                if finding is not None:
                    yield finding

    async def _look_at_holds(self, name: str, address: str) -> AsyncIterator[Told]:
        async with fence_link(name, address) as link:
            facts = await link.holds()
        if facts.compared:
            yield f"{name} at {address}: {facts.compared}"
        for finding in of_holds(name, facts):
            yield finding
        for code, count in left_out(facts):
            self._overflow.leave_out(code, name, count)

    # --- transactions ---------------------------------------------------------------------------------------

    async def _look_at_open(self, known: Mapping[str, Registered]) -> AsyncIterator[Told]:
        yield "looking at the transactions that are not finished"
        tally = OpenTally(known, self._limits(), self._only)
        async for rows in self._open_pages():
            for row in rows:
                if not self._only or f",{self._only}," in row.participants:
                    for finding in tally.take(OpenFacts(row.xid.hex(), row.format, row.wake_ms or 0, readable(row))):
                        yield finding
        for finding in tally.together():
            yield finding
        finished = [int(state) for state in State if state.finished]
        for xid, names in await self._store.within(lambda c: examine.finished_with_attention(c, finished)):
            if not self._only or f",{self._only}," in names:
                yield of_finished(xid.hex())

    async def _open_pages(self) -> AsyncIterator[Sequence[Row]]:
        after, seen = examine.After(), set[bytes]()
        for _ in range(OPEN_PAGES_MAX):
            rows = await self._store.within(lambda c, after=after: examine.open_rows(c, after))  # type: ignore[misc]
            yield [row for row in rows if row.xid not in seen]  # one that was claimed meanwhile comes again
            seen.update(row.xid for row in rows)
            if len(rows) < examine.OPEN_ROWS:
                return
            after = examine.After(rows[-1].wake_ms or 0, rows[-1].xid)

    def _limits(self) -> Limits:
        settings = self._settings
        longest_ms = max(settings.lease_ms, settings.backoff_cap_ms, PUT_OFF_MS_MAX)
        far_ms = 2 * longest_ms  # other coordinators' may be longer
        return Limits(self._store.now_ms(), self._grace_ms, settings.lease_ms, far_ms, settings.retention_ms)


def registered(known: KnownParticipant) -> Registered:
    """What the doctor wants to know of a participant."""
    return Registered(
        frozenset(known.actions),
        frozenset(known.withdrawn),
        tuple(instance.address for instance in known.instances),
        frozenset(known.actions.values()) | frozenset(known.withdrawn.values()),
    )
