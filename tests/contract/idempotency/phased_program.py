"""A payment in phases, by a program that dies where it is told to.

python -m tests.contract.idempotency.phased_program STACK DATABASE FOREIGN DIE_AT PAYMENT_ID

STACK: sync or async, DATABASE: SQLAlchemy's address, FOREIGN: the address of somebody who charges. It prints what the
payment gave.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.request
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import Connection, create_engine
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from participant_sdk.idempotency.functions import idempotent
from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.runs import AsyncRun, Run
from tests.contract.idempotency.shop import PHASED, insert

POINTS: Final = (
    "in order",
    "after order",
    "before call",
    "in call",
    "after call",
    "after charge",
    "in paid",
    "after paid",
)
"""Where it can die. "in call": when the other side has done it and not answered yet, which then kills this process."""

Die = Callable[[str], None]


def payment(store: Idempotency, foreign: str, die: Die, operation: Operation = PHASED, **settings: Any) -> Any:
    """The function, for `def`."""

    @idempotent(store, operation, key="payment_id")
    def pay(payment_id: str, amount: int, *, run: Run) -> str:
        def order(db: Connection) -> int:
            insert(db, f"order {payment_id}")
            die("in order")
            return amount

        def charge(key: str) -> str:
            die("before call")
            said = ask(foreign, key, total)
            die("after call")
            return said

        def paid(db: Connection) -> None:
            insert(db, f"paid {payment_id} {charged}")
            die("in paid")

        total = run.phase("order", order)
        die("after order")
        charged = run.foreign("charge", charge, **settings)
        die("after charge")
        run.phase("paid", paid)
        die("after paid")
        return charged

    return pay


def payment_async(
    store: AsyncIdempotency, foreign: str, die: Die, operation: Operation = PHASED, **settings: Any
) -> Any:
    """The function, for `async def`."""

    @idempotent(store, operation, key="payment_id")
    async def pay(payment_id: str, amount: int, *, run: AsyncRun) -> str:
        async def order(db: AsyncConnection) -> int:
            await db.run_sync(insert, f"order {payment_id}")
            die("in order")
            return amount

        async def charge(key: str) -> str:
            die("before call")
            said = await asyncio.to_thread(ask, foreign, key, total)
            die("after call")
            return said

        async def paid(db: AsyncConnection) -> None:
            await db.run_sync(insert, f"paid {payment_id} {charged}")
            die("in paid")

        total = await run.phase("order", order)
        die("after order")
        charged = await run.foreign("charge", charge, **settings)
        die("after charge")
        await run.phase("paid", paid)
        die("after paid")
        return charged

    return pay


def ask(foreign: str, key: str, amount: int) -> str:
    """Have somebody else charge, under a key."""
    request = urllib.request.Request(foreign, data=f"{key} {amount} {os.getpid()}".encode(), method="POST")
    with urllib.request.urlopen(request, timeout=60) as response:
        said: str = response.read().decode()
        return said


def main(stack: str, database: str, foreign: str, die_at: str, payment_id: str) -> None:
    """See above."""

    def die(point: str) -> None:
        if point == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    async def run_async() -> str:
        async with AsyncIdempotency(create_async_engine(database)) as store:
            said: str = await payment_async(store, foreign, die)(payment_id, 5)
            return said

    if stack == "async":
        print(asyncio.run(run_async()))
        return
    with Idempotency(create_engine(database)) as store:
        print(payment(store, foreign, die)(payment_id, 5))


if __name__ == "__main__":
    main(*sys.argv[1:])
