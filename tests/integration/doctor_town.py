"""A coordinator and a participant in which a test puts what does not fit, and `tricord doctor` run on them."""

import asyncio
import json
import secrets
from typing import Any

import psycopg

from coordinator.codec import new_row
from coordinator.model import BranchSpec, BranchStatus, Payload, Spec, State, Step, Transaction
from coordinator.store.rows import Batch
from coordinator.store.store import Store, backend_for
from participant_sdk.payload import encode
from tests.contract.participant.records import xid_ms
from tests.contract.participant.world import Debit, World
from tests.coordinators import CoordinatorProcess, tricord

FINDINGS = 6
"""The exit code when there are some."""

Found = set[tuple[str, str, str]]


class Town:
    """A coordinator on PostgreSQL, and a bank on SQLite; records and fence rows as a test wants them."""

    def __init__(self, dsn: str, coordinator: CoordinatorProcess, bank: World) -> None:
        self.dsn = dsn
        self.coordinator = coordinator
        self.bank = bank
        self.store = Store(backend_for(dsn, 10_000))

    async def put(
        self, xid: str, state: State, *, participant: str = "bank", action: str = "debit", **more: Any
    ) -> str:
        """Store a transaction of one branch as no coordinator would have left it; its xid."""
        payload = encode(Debit())
        specs = (BranchSpec(participant, action, Payload(payload.data, payload.content_type)),)
        facts: dict[str, Any] = {"wake_ms": None if state.finished else self.store.now_ms() + 60_000, **more}
        facts["decided_ms"] = facts.get("decided_ms", 0 if state is State.TRYING else xid_ms(xid))
        step = Step(BranchStatus.TRIED, error=facts.pop("error", ""))
        spec = Spec(bytes.fromhex(xid), b"", xid_ms(xid), 30_000, specs)
        tx = Transaction(spec, state, (step,), save_id=secrets.randbits(62), updated_ms=xid_ms(xid), **facts)
        assert await self.store.flush(Batch((new_row(tx),), ())) == [None]
        return xid

    async def sql(self, statement: str, *values: Any) -> None:
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
            await connection.execute(statement.encode(), values)

    async def examine(self, *flags: str) -> tuple[int, list[dict[str, Any]], str]:
        """The doctor's exit code, findings and messages."""
        command = ("doctor", "--endpoint", self.coordinator.endpoint, "-o", "json", *flags)
        ran = await asyncio.to_thread(tricord, *command)
        assert ran.stdout, ran.stderr
        return ran.returncode, json.loads(ran.stdout)["findings"], ran.stderr


def kinds(findings: list[dict[str, Any]]) -> Found:
    return {(each["code"], each["participant"], each["xid"]) for each in findings}
