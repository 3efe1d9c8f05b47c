"""The participants as the store holds them: which there are, where their instances are, what each can do.

A participant is a name. Each of its instances is an address with the actions that it offers; it repeats its
registration as a heartbeat, and whoever hears one drops the instances of that name that have long been silent. So the
last one is never dropped: a dead address is better than none. A name, and what it could ever do and in which fence
database, stay known when all instances have gone: open transactions wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from . import schema
from .rows import ParticipantRow

HEARTBEAT_MS = 10_000
"""How often an instance registers at least."""
SILENT_MS = 3 * HEARTBEAT_MS + 5_000
"""An instance that was not heard of for so long is dropped when another one of its name is heard of."""
_FRESH_MS = HEARTBEAT_MS // 3
"""A heartbeat so soon after the last one is not written."""


class Instance(NamedTuple):
    """One address of a participant."""

    address: str
    actions: Mapping[str, str]
    """Action name -> id of the database that holds its fence rows; empty if that was never told."""


class KnownParticipant(NamedTuple):
    """All that is known of one name."""

    name: str
    actions: Mapping[str, str]
    """What its instances can do; what the last of them could, if there is none at the moment."""
    withdrawn: Mapping[str, str]
    """Likewise for actions that it offered before: transactions may still be open, and their database stands."""
    instances: tuple[Instance, ...]

    def fence_id(self, action: str) -> str:
        """The database that must answer for an action; empty if it was never told."""
        return self.actions.get(action) or self.withdrawn.get(action, "")

    def addresses(self, action: str) -> list[str]:
        """Where calls of an action go: to the instances that have it; to all if none has it (any more).

        One of those then says so, and can still cancel what was never tried.
        """
        having = [instance.address for instance in self.instances if action in instance.actions]
        return having or [instance.address for instance in self.instances]


class FenceChanged(NamedTuple):
    """A registration names another fence database than the one that holds the action's fence rows."""

    action: str
    stored: str
    given: str


class ActionsDiffer(NamedTuple):
    """Another live instance of the name has an action that the new one lacks, and lacks one that it has."""

    address: str
    only_there: tuple[str, ...]
    only_here: tuple[str, ...]


Refused = FenceChanged | ActionsDiffer


def differing(instance: Instance, actions: Mapping[str, str]) -> ActionsDiffer | None:
    """What keeps two instances from sharing a name: neither can do all that the other can.

    One that can do more is a newer or older build of the same participant: a rolling deployment first adds actions,
    and removes others later.
    """
    only_there = tuple(sorted(instance.actions.keys() - actions.keys()))
    only_here = tuple(sorted(actions.keys() - instance.actions.keys()))
    return ActionsDiffer(instance.address, only_there, only_here) if only_there and only_here else None


# --- in one local transaction -----------------------------------------------------------------------------

_P, _A = schema.participants, schema.participant_addresses


class _Stored(NamedTuple):
    """The rows of one name."""

    address: str
    actions: dict[str, str]
    withdrawn: dict[str, str]
    instances: dict[str, dict[str, str]]
    seen_ms: dict[str, int]


def read_all(connection: sa.Connection) -> Sequence[KnownParticipant]:
    """All participants, by name."""
    instances: dict[str, list[Instance]] = {}
    for found in connection.execute(sa.select(_A.c.name, _A.c.address, _A.c.actions).order_by(_A.c.name, _A.c.address)):
        instances.setdefault(found.name, []).append(Instance(found.address, found.actions))
    participants = []
    for row in connection.execute(sa.select(_P.c.name, _P.c.address, _P.c.actions, _P.c.withdrawn).order_by(_P.c.name)):
        mine = instances.get(row.name, [])
        if row.address and all(instance.address != row.address for instance in mine):
            mine.append(Instance(row.address, row.actions))  # registered by a program that knows one address only
        participants.append(KnownParticipant(row.name, row.actions, row.withdrawn, tuple(mine)))
    return participants


def read_heard(connection: sa.Connection) -> Mapping[tuple[str, str], int]:
    """When each registered instance, by name and address, was last heard of."""
    return {
        (row.name, row.address): row.seen_ms
        for row in connection.execute(sa.select(_A.c.name, _A.c.address, _A.c.seen_ms))
    }


def register(connection: sa.Connection, row: ParticipantRow, now_ms: int, *, replace_fence: bool) -> Refused | None:
    """Store an instance, or that it was heard of; or nothing, and what stands in the way."""
    stored = _read(connection, row.name)
    if stored is not None and _only_heard_of(connection, stored, row, now_ms):
        return None
    _lock(connection, row.name)
    stored = _read(connection, row.name)
    if stored is None:
        stored = _Stored("", {}, {}, {}, {})
        connection.execute(
            _P.insert().values(name=row.name, address=row.address, actions={}, withdrawn={}, updated_ms=now_ms)
        )
    known = {**stored.withdrawn, **stored.actions}
    changed = {a: fence_id for a, fence_id in row.actions.items() if known.get(a) not in (None, fence_id)}
    if changed and not replace_fence:
        action, fence_id = next(iter(changed.items()))
        return FenceChanged(action, known[action], fence_id)
    for address, actions in stored.instances.items():
        live = stored.seen_ms[address] > now_ms - SILENT_MS
        if address != row.address and live:
            difference = differing(Instance(address, actions), row.actions)
            if difference is not None:
                return difference
    dropped = _silent(stored, row.address)
    dropped += [  # they stand on a database that was replaced
        address
        for address, actions in stored.instances.items()
        if address != row.address and any(actions.get(a) not in (None, fence_id) for a, fence_id in changed.items())
    ]
    _drop(connection, row.name, dropped)
    if row.address in stored.instances:
        mine = (_A.c.name == row.name) & (_A.c.address == row.address)
        connection.execute(_A.update().where(mine).values(actions=dict(row.actions), seen_ms=now_ms))
    else:
        values = {"name": row.name, "address": row.address, "actions": dict(row.actions), "seen_ms": now_ms}
        connection.execute(_A.insert().values(**values))
    instances = {a: actions for a, actions in stored.instances.items() if a not in dropped}
    instances[row.address] = dict(row.actions)
    _save_union(connection, row.name, row.address, {**known, **row.actions}, instances, now_ms)
    return None


def withdraw(connection: sa.Connection, name: str, address: str, now_ms: int) -> bool:
    """Forget an instance; whether it was known. Its participant, and what the last instance could do, stay known."""
    _lock(connection, name)
    stored = _read(connection, name)
    if stored is None or address not in (*stored.instances, stored.address):
        return False
    _drop(connection, name, [address])
    instances = {a: actions for a, actions in stored.instances.items() if a != address}
    if instances:
        known = {**stored.withdrawn, **stored.actions}
        left = stored.address if stored.address in instances else next(iter(instances))
        _save_union(connection, name, left, known, instances, now_ms)
    else:
        # No address at all, for older programs too: at the old one another service may answer by and by.
        connection.execute(_P.update().where(_P.c.name == name).values(address="", updated_ms=now_ms))
    return True


def _only_heard_of(connection: sa.Connection, stored: _Stored, row: ParticipantRow, now_ms: int) -> bool:
    """Whether nothing is new but that the instance lives; that is then noted."""
    if stored.instances.get(row.address) != row.actions or _silent(stored, row.address):
        return False
    if any(stored.actions.get(action) != fence_id for action, fence_id in row.actions.items()):
        return False
    if now_ms - stored.seen_ms[row.address] < _FRESH_MS:
        return True
    mine = (_A.c.name == row.name) & (_A.c.address == row.address)
    return connection.execute(_A.update().where(mine).values(seen_ms=now_ms)).rowcount == 1


def _silent(stored: _Stored, heard_of: str) -> list[str]:
    """The instances that have been silent while others of their name were heard of.

    Compared with the others' last heartbeats before this one, not with the clock: while the store or all coordinators
    were away nobody could be heard of, and nobody is to be dropped for it.
    """
    newest_ms = max(stored.seen_ms.values(), default=0)
    return [a for a, seen_ms in stored.seen_ms.items() if a != heard_of and seen_ms < newest_ms - SILENT_MS]


def _read(connection: sa.Connection, name: str) -> _Stored | None:
    found = connection.execute(
        sa.select(_P.c.address, _P.c.actions, _P.c.withdrawn).where(_P.c.name == name)
    ).one_or_none()
    if found is None:
        return None
    rows = connection.execute(sa.select(_A.c.address, _A.c.actions, _A.c.seen_ms).where(_A.c.name == name)).all()
    instances = {row.address: row.actions for row in rows}
    return _Stored(*found, instances, {row.address: row.seen_ms for row in rows})


def _lock(connection: sa.Connection, name: str) -> None:
    """Let one registration of a name come after the other: by writing, which on SQLite alone begins to lock."""
    connection.execute(_P.update().where(_P.c.name == name).values(updated_ms=_P.c.updated_ms))


def _drop(connection: sa.Connection, name: str, addresses: Sequence[str]) -> None:
    if addresses:
        connection.execute(_A.delete().where((_A.c.name == name) & _A.c.address.in_(addresses)))


def _save_union(
    connection: sa.Connection,
    name: str,
    address: str,
    known: Mapping[str, str],
    instances: Mapping[str, Mapping[str, str]],
    now_ms: int,
) -> None:
    """Note what the instances can do together, and what nobody can any more."""
    can = {action for actions in instances.values() for action in actions}
    values = {
        "address": address,
        "actions": {action: fence_id for action, fence_id in known.items() if action in can},
        "withdrawn": {action: fence_id for action, fence_id in known.items() if action not in can},
        "updated_ms": now_ms,
    }
    connection.execute(_P.update().where(_P.c.name == name).values(**values))
