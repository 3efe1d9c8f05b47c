"""A payment in phases, by a program that may be told by its environment to kill itself at one point of it.

python -m tests.contract.idempotency.phased_program STACK DATABASE FOREIGN PAYMENT_ID

STACK: sync or async, DATABASE: SQLAlchemy's address, FOREIGN: the address of somebody who charges. It prints what the
payment gave.
"""

from __future__ import annotations

import asyncio
import os
import sys
import urllib.request
from typing import Any, Final

from sqlalchemy import Connection, create_engine
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from participant_sdk.idempotency.functions import idempotent
from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.runs import AsyncRun, Run
from tests.contract.idempotency.shop import PHASED, insert

COMMITS: Final = ("order", "charge", "paid")
"""What is committed, in that order, before the end."""
IN_CALL: Final = "in call"
"""The other side has done it and not answered yet; it kills this process then."""
POINTS: Final = (*(f"{when}_business_commit:{hit}" for hit in (1, 2, 3) for when in ("before", "after")), IN_CALL)
"""Where it can die."""


def payment(store: Idempotency, foreign: str, operation: Operation = PHASED, **settings: Any) -> Any:
    """The function, for `def`."""

    @idempotent(store, operation, key="payment_id")
    def pay(payment_id: str, amount: int, *, run: Run) -> str:
        def order(db: Connection) -> int:
            insert(db, f"order {payment_id}")
            return amount

        def charge(key: str) -> str:
            return ask(foreign, key, total)

        def paid(db: Connection) -> None:
            insert(db, f"paid {payment_id} {charged}")

        total = run.phase("order", order)
        charged = run.foreign("charge", charge, **settings)
        run.phase("paid", paid)
        return charged

    return pay


def payment_async(store: AsyncIdempotency, foreign: str, operation: Operation = PHASED, **settings: Any) -> Any:
    """The function, for `async def`."""

    @idempotent(store, operation, key="payment_id")
    async def pay(payment_id: str, amount: int, *, run: AsyncRun) -> str:
        async def order(db: AsyncConnection) -> int:
            await db.run_sync(insert, f"order {payment_id}")
            return amount

        async def charge(key: str) -> str:
            return await asyncio.to_thread(ask, foreign, key, total)

        async def paid(db: AsyncConnection) -> None:
            await db.run_sync(insert, f"paid {payment_id} {charged}")

        total = await run.phase("order", order)
        charged = await run.foreign("charge", charge, **settings)
        await run.phase("paid", paid)
        return charged

    return pay


def ask(foreign: str, key: str, amount: int) -> str:
    """Have somebody else charge, under a key."""
    request = urllib.request.Request(foreign, data=f"{key} {amount} {os.getpid()}".encode(), method="POST")
    with urllib.request.urlopen(request, timeout=60) as response:
        said: str = response.read().decode()
        return said


def main(stack: str, database: str, foreign: str, payment_id: str) -> None:
    """See above."""

    async def run_async() -> str:
        async with AsyncIdempotency(create_async_engine(database)) as store:
            said: str = await payment_async(store, foreign)(payment_id, 5)
            return said

    if stack == "async":
        print(asyncio.run(run_async()))
        return
    with Idempotency(create_engine(database)) as store:
        print(payment(store, foreign)(payment_id, 5))


if __name__ == "__main__":
    main(*sys.argv[1:])
