"""A coordinator of the version before, for tests: row format 1, on the tables of revision 0001.

    python -m tests.chaos.older serve …the coordinator's own options…

It is this version, held back in what that one did not know: it reads and writes rows of format 1 only, knows one
address of each participant, which it keeps in the participant's own row, and names its sessions as that one did.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

import coordinator.model

coordinator.model.FORMAT = 1  # before anything else takes it from there

from coordinator.cli import main  # noqa: E402
from coordinator.store import postgres, registry, schema  # noqa: E402
from coordinator.store.rows import ParticipantRow  # noqa: E402

P = schema.participants


def read_all(connection: sa.Connection) -> Sequence[registry.KnownParticipant]:
    """All participants, by name."""
    return [
        registry.KnownParticipant(
            row.name, row.actions, row.withdrawn, (registry.Instance(row.address, row.actions),) if row.address else ()
        )
        for row in connection.execute(sa.select(P))
    ]


def register(
    connection: sa.Connection, row: ParticipantRow, now_ms: int, *, replace_fence: bool
) -> registry.Refused | None:
    """The last address that registers is the participant's."""
    values = {"address": row.address, "actions": dict(row.actions), "withdrawn": {}, "updated_ms": now_ms}
    if connection.execute(P.update().where(P.c.name == row.name).values(**values)).rowcount == 0:
        connection.execute(P.insert().values(name=row.name, **values))
    return None


def withdraw(connection: sa.Connection, name: str, address: str, now_ms: int) -> bool:
    """Its address is known no more."""
    mine = (P.c.name == name) & (P.c.address == address)
    return connection.execute(P.update().where(mine).values(address="", updated_ms=now_ms)).rowcount == 1


def uncounted(claim: str) -> str:
    """A claim as it was before claims were counted."""
    return claim.replace(f", {postgres._COUNTED}", "").replace(f"AND NOT {postgres._IN_VAIN}", "")


CLAIMS = {"_CLAIM": uncounted(postgres._CLAIM), "_CLAIM_ALONE": "SELECT %s::bigint, %s::bigint WHERE false"}


def hold_back() -> None:
    """Make this process a program of that version."""
    for module, held_back in (
        (schema, {"REVISIONS": ("0001",), "REVISION": "0001", "APPLICATION_NAME": "tricord"}),
        (postgres, CLAIMS),
        (registry, {"read_all": read_all, "register": register, "withdraw": withdraw}),
    ):
        for name, value in held_back.items():
            setattr(module, name, value)


if __name__ == "__main__":
    hold_back()
    main()
