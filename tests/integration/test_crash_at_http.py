"""A simulated death behind the HTTP door: whoever asked is told nothing, and the repeat is given what is durable."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from participant_sdk.idempotency import (
    ONE_TENANT,
    AsyncIdempotency,
    AsyncRun,
    HttpOperation,
    Idempotency,
    IdempotencyMiddleware,
    Mode,
    Operation,
    current_run,
)
from participant_sdk.idempotency.testing import Point, async_lapse, crash_at, lapse

WRITE = text("INSERT INTO orders VALUES (:point)")
POINTS = [point for point in Point if point is not Point.DURING_COMMIT]
COMMITTED = (Point.AFTER_BUSINESS_COMMIT, Point.BEFORE_ANSWER)


async def shop(scope: Any, receive: Any, send: Any) -> None:
    """An application that writes one row, in the run's local transaction."""
    run, point = current_run(), (await receive())["body"].decode()
    if isinstance(run, AsyncRun):
        await (await run.connect()).execute(WRITE, {"point": point})
    else:
        assert run is not None
        await asyncio.to_thread(run.connection.execute, WRITE, {"point": point})
    await send({"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": f"ordered {point}".encode()})


@pytest.mark.parametrize("mode", [Mode.ATOMIC, Mode.LEASED])
@pytest.mark.parametrize("kind", [Idempotency, AsyncIdempotency])
async def test_at_each_point(tmp_path: Path, kind: Any, mode: Mode) -> None:
    operation = Operation(name="orders.create", mode=mode)
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    with engine.begin() as db:
        db.execute(text("CREATE TABLE orders (point varchar(50))"))
    asynchronous = kind is AsyncIdempotency
    own: Any = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}") if asynchronous else engine
    store: Any = kind(own, sweep=None)
    started = store.start()
    if asynchronous:
        await started
    app: Any = IdempotencyMiddleware(
        shop, store, [HttpOperation(operation=operation, path="/orders", tenant=ONE_TENANT)]
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        for point in POINTS:
            headers = {"Idempotency-Key": point.value}
            with crash_at(point):
                await client.post("/orders", content=point.value, headers=headers)
                pytest.fail("it was answered")
            if mode is Mode.LEASED and point in (Point.AFTER_CLAIM, Point.BEFORE_BUSINESS_COMMIT):
                assert (await client.post("/orders", content=point.value, headers=headers)).status_code == 409
                if asynchronous:
                    await async_lapse(store, operation, point.value)
                else:
                    await asyncio.to_thread(lapse, store, operation, point.value)
            answer = await client.post("/orders", content=point.value, headers=headers)
            assert (answer.status_code, answer.text) == (201, f"ordered {point.value}")
            assert answer.headers["Idempotency-Status"] == ("replayed" if point in COMMITTED else "executed")
    with engine.connect() as db:
        assert sorted(db.scalars(text("SELECT point FROM orders"))) == sorted(POINTS)
    if asynchronous:
        await store.close()
        await own.dispose()
    else:
        store.close()
    engine.dispose()
