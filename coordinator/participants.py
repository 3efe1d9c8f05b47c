"""Which participants there are, and where: the configuration's and the store's, in memory and kept fresh.

Names and addresses live in the store, so that after a take-over another coordinator knows them too (protocol B7). A
name that is not known here makes its calls UNKNOWN, never anything final.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import structlog

from .config_participants import StaticParticipant
from .store.registry import ActionsDiffer, Instance, KnownParticipant, Refused, differing
from .store.rows import ParticipantRow, StoreError
from .store.store import Store

_log = structlog.get_logger(__name__)

REFRESH_S = 5.0
"""How old the list may get: another coordinator may have taken a registration."""
MISS_S = 0.2
"""Likewise for a name that is missing, or that is nowhere."""
DOUBT_S = 1.0
"""Likewise when calls do not get through: it may have moved."""


class Participants:
    """The participants, configured and registered."""

    def __init__(self, store: Store, static: Mapping[str, StaticParticipant] | None = None) -> None:
        self.generation = 0
        """Another number whenever anything of the list is another."""
        self._store = store
        self._static = {
            name: KnownParticipant(
                name,
                dict.fromkeys(configured.actions, ""),
                {},
                tuple(Instance(address, dict.fromkeys(configured.actions, "")) for address in configured.addresses),
            )
            for name, configured in (static or {}).items()
        }
        self._known: dict[str, KnownParticipant] = dict(self._static)
        self._read_s = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._next_reading: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Read the list from the store, in one read for all who ask before it begins. Raises StoreError."""
        await asyncio.shield(self._next_reading or self._read_next())

    @property
    def known(self) -> Mapping[str, KnownParticipant]:
        """All participants by name, as last heard."""
        return self._known

    def find(self, name: str) -> KnownParticipant | None:
        """A participant as last heard; looks again in the background when that is long ago, or the name missing."""
        known = self._known.get(name)
        self._read_if_older(REFRESH_S if known is not None and known.instances else MISS_S)
        return known

    def has(self, name: str, action: str) -> bool:
        """Whether a participant is known to have this action; ``look_up`` where it is not."""
        known = self._known.get(name)
        return known is not None and action in known.actions

    def doubt(self) -> None:
        """Calls do not get through to where a participant was last heard of: look again, in the background."""
        self._read_if_older(DOUBT_S)

    def is_configured(self, name: str, address: str) -> bool:
        """Whether the configuration names this instance."""
        configured = self._static.get(name)
        return configured is not None and any(instance.address == address for instance in configured.instances)

    def addresses(self) -> set[str]:
        """Where participants are, as last heard."""
        return {instance.address for known in self._known.values() for instance in known.instances}

    async def look_up(self, name: str, action: str) -> KnownParticipant | None:
        """A participant, for somebody who wants this action of it.

        What is missing here is looked for in the store before it is said to be missing: another coordinator may have
        taken the registration. Raises StoreError.
        """
        if not self.has(name, action):
            await self.refresh()
        return self._known.get(name)

    async def register(self, row: ParticipantRow, *, replace_fence: bool) -> Refused | None:
        """Store an instance, or that it was heard of; or nothing, and what stands in the way. Raises StoreError."""
        refused = self._differs_from_static(row) or await self._store.register(row, replace_fence=replace_fence)
        if refused is None and Instance(row.address, row.actions) not in self._instances(row.name):
            await self.refresh()
            _log.info("participant.registered", participant=row.name, address=row.address, actions=sorted(row.actions))
        return refused

    async def withdraw(self, name: str, address: str) -> None:
        """Forget an instance; the configuration's stay. Raises StoreError."""
        withdrawn = await self._store.withdraw(name, address)
        if withdrawn or any(instance.address == address for instance in self._instances(name)):
            await self.refresh()
        if withdrawn:
            _log.info("participant.withdrawn", participant=name, address=address)

    def _instances(self, name: str) -> tuple[Instance, ...]:
        known = self._known.get(name)
        return () if known is None else known.instances

    def _differs_from_static(self, row: ParticipantRow) -> ActionsDiffer | None:
        configured = self._static.get(row.name)
        return None if configured is None else differing(configured.instances[0], row.actions)

    def _read_if_older(self, age_s: float) -> None:
        now_s = time.monotonic()
        if now_s - self._read_s > age_s and self._next_reading is None:
            self._read_s = now_s
            self._read_next().add_done_callback(_log_failure)

    def _read_next(self) -> asyncio.Task[None]:
        """Begin a read as soon as the one under way has ended."""
        self._next_reading = asyncio.get_running_loop().create_task(self._read(self._reading))
        return self._next_reading

    async def _read(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.wait([previous])
        self._reading, self._next_reading = self._next_reading, None
        known = dict(self._static)
        for registered in await self._store.participants():
            configured = known.get(registered.name)
            known[registered.name] = registered if configured is None else _merged(configured, registered)
        if known != self._known:
            self._known = known
            self.generation += 1
        self._read_s = time.monotonic()


def _merged(configured: KnownParticipant, registered: KnownParticipant) -> KnownParticipant:
    """Both together; of an address that both name, what its own registration said."""
    own = {instance.address for instance in registered.instances}
    again = {action: fence_id for action, fence_id in registered.withdrawn.items() if action in configured.actions}
    return KnownParticipant(
        configured.name,
        {**configured.actions, **again, **registered.actions},
        {action: fence_id for action, fence_id in registered.withdrawn.items() if action not in configured.actions},
        (*registered.instances, *(instance for instance in configured.instances if instance.address not in own)),
    )


def _log_failure(reading: asyncio.Task[None]) -> None:
    if not reading.cancelled() and isinstance(error := reading.exception(), StoreError):
        _log.warning("participants.refresh_failed", error=str(error))
