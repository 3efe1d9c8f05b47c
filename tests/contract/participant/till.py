"""A participant whose Try charges a payment provider, which lies outside its database and remembers every key."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from participant_sdk import Call, Participant
from tests.contract.participant.world import Debit, Gate, Held, World, effect

Key = tuple[str, int]


class Barred(Exception):
    """The provider has been told to void this payment, and will never authorise it."""


@dataclass
class Provider:
    """The outside world: payments by key. Asking again with the same key changes nothing."""

    authorised: dict[Key, int] = field(default_factory=dict)
    captured: set[Key] = field(default_factory=set)
    voided: set[Key] = field(default_factory=set)
    asked: list[tuple[str, Key]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def authorise(self, key: Key, amount: int) -> None:
        with self.lock:
            self.asked.append(("authorise", key))
            if key in self.voided:
                raise Barred(key)
            self.authorised[key] = amount

    def capture(self, key: Key) -> None:
        with self.lock:
            self.asked.append(("capture", key))
            assert key in self.authorised
            self.captured.add(key)

    def void(self, key: Key) -> None:
        with self.lock:
            self.asked.append(("void", key))
            self.voided.add(key)
            self.authorised.pop(key, None)

    def asked_for(self, xid: str) -> list[str]:
        """What it was asked about this transaction."""
        return [what for what, (of, _) in self.asked if of == xid]


@dataclass(frozen=True)
class Outside:
    """A step of a handler that does not need the database and may block."""

    do: Callable[[Call[Debit]], Any]


@dataclass(frozen=True)
class Inside:
    """A step of a handler with the connection, or the session, that it is lent."""

    do: Callable[[Any, Call[Debit]], Any]


Script = Sequence[Outside | Inside]


def key_of(call: Call[Any]) -> Key:
    return call.xid, call.branch_id


def write(what: str) -> Inside:
    return Inside(lambda db, call: effect(db, call, what))


def wait(gate: Gate) -> Outside:
    return Outside(lambda call: gate.pass_through())


def fail(error: Exception) -> Outside:
    def do(call: Call[Debit]) -> None:
        raise error

    return Outside(do)


class Till(World):
    """An instance of it. Its Try handler does the steps of `script`, which says when it charges."""

    def __init__(
        self, flavour: str, url: str, provider: Provider, lease: timedelta = timedelta(minutes=1), **settings: Any
    ) -> None:
        self.provider = provider
        self.lease = lease
        self.charge = Outside(lambda call: provider.authorise(key_of(call), call.payload.amount))
        self.script: Script = [self.charge]
        self.cancel_script: Script = []
        self.unstorable = False
        super().__init__(flavour, url, **settings)

    def make_participant(self) -> Participant:
        till = super().make_participant()
        self.define(till)
        return till

    def define(self, till: Participant) -> None:
        charging = till.action("charge", external=True, lease=self.lease)
        if self.is_async:

            async def charge_async(call: Call[Debit], db: AsyncConnection) -> Held:
                await self.run_async(self.script, call, db)
                return self.result(call)

            async def confirm_async(call: Call[Debit], db: AsyncConnection) -> None:
                await db.run_sync(self.confirm, call)

            async def cancel_async(call: Call[Debit], db: AsyncConnection) -> None:
                await self.run_async(self.cancel_script, call, db)
                await db.run_sync(self.cancel, call)

            charge_of_async = charging(charge_async)
            charge_of_async.confirm(confirm_async)
            charge_of_async.cancel(cancel_async)
        else:

            def charge(call: Call[Debit], db: Connection) -> Held:
                self.run(self.script, call, db)
                return self.result(call)

            def confirm(call: Call[Debit], db: Connection) -> None:
                self.confirm(db, call)

            def cancel(call: Call[Debit], db: Connection) -> None:
                self.run(self.cancel_script, call, db)
                self.cancel(db, call)

            charge_of = charging(charge)
            charge_of.confirm(confirm)
            charge_of.cancel(cancel)

    def run(self, script: Script, call: Call[Debit], db: Any) -> None:
        for step in script:
            if isinstance(step, Inside):
                step.do(db, call)
            else:
                step.do(call)

    async def run_async(self, script: Script, call: Call[Debit], db: Any) -> None:
        for step in script:
            if isinstance(step, Inside):
                await db.run_sync(step.do, call)
            else:
                await asyncio.to_thread(step.do, call)

    def result(self, call: Call[Debit]) -> Held:
        return cast(Held, {1, 2}) if self.unstorable else Held(f"{call.xid}#{call.branch_id}")

    def confirm(self, db: Connection, call: Call[Debit]) -> None:
        self.provider.capture(key_of(call))
        effect(db, call, f"confirm {call.result.hold if call.result else None}")

    def cancel(self, db: Connection, call: Call[Debit]) -> None:
        self.provider.void(key_of(call))
        effect(db, call, f"cancel {call.result.hold if call.result else None}")

    async def ask(self, phase: Any, xid: str, **changes: Any) -> Any:
        return await self.call(phase, xid, action="charge", **changes)

    def let_lease_lapse(self, xid: str) -> None:
        """As if its time had passed."""
        with self.auditor.begin() as db:
            statement = "UPDATE tcc_fence_log SET lease_until_ms = 1 WHERE xid = :xid AND lease_until_ms > 1"
            assert db.execute(text(statement), {"xid": xid}).rowcount == 1

    def intent(self, xid: str) -> tuple[Any, ...]:
        """The fence row's status, whether it is finished, and whether it has an intent."""
        columns = "status, finished_at IS NOT NULL, intent IS NOT NULL"
        ((status, finished, intent),) = self.query(f"SELECT {columns} FROM tcc_fence_log WHERE xid = :xid", xid=xid)
        return status, bool(finished), bool(intent)
