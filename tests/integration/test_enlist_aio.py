"""Services on asyncio that are called directly: over gRPC, and over HTTP through the middleware."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import httpx2
import pytest
from fastapi import FastAPI, HTTPException
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from participant_sdk import (
    Call,
    Participant,
    Refused,
    async_xid_client_interceptors,
    outgoing_headers,
)
from participant_sdk.asgi import XidMiddleware
from participant_sdk.context import bound, collecting
from participant_sdk.context_headers import collect_tried
from participant_sdk.interceptors import AsyncXidServerInterceptor
from tests.coordinators import CALL_S, CoordinatorProcess, states
from tests.integration.business import METHOD, TABLE, Buyer, Held, Order, generic_handlers, keep, read_order, settle

ORDER: Final = {"modes": ["plain"], "item": "tea"}


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator that repeats soon."""
    with CoordinatorProcess(store=tmp_path / "tricord.db", backoff_base_ms=20, backoff_cap_ms=100) as process:
        yield process


class AsyncShop:
    """A participant with `async def` handlers, whose Try calls the next one."""

    def __init__(self, name: str, engine: AsyncEngine, onward: str = "") -> None:
        self.engine = engine
        self.onward = onward
        self.participant = Participant(name, engine)
        self.address = ""
        self.reserve = self.define()

    def define(self) -> Any:
        @self.participant.action("reserve")
        async def reserve(call: Call[Order], db: AsyncConnection) -> Held:
            held = await db.run_sync(keep, call)
            mode, *rest = call.payload.modes
            if rest:
                try:
                    await buy(self.onward, Order(rest))
                except grpc.aio.AioRpcError as error:
                    if mode != "swallow":
                        raise Refused("no_supplier") from error
            return held

        @reserve.confirm
        async def confirm(call: Call[Order], db: AsyncConnection) -> None:
            await db.run_sync(settle, call, "confirmed")

        @reserve.cancel
        async def cancel(call: Call[Order], db: AsyncConnection) -> None:
            await db.run_sync(settle, call, "cancelled")

        return reserve

    async def sell(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        """The business RPC, which has trailing metadata of its own."""
        context.set_trailing_metadata((("own", "x"),))
        held: Held = await self.reserve.enlist(read_order(request))
        return held.hold.encode()

    def app(self) -> FastAPI:
        """The same over HTTP."""
        app = FastAPI()
        app.add_middleware(XidMiddleware)

        @app.post("/reserve")
        async def reserve(order: dict[str, Any]) -> str:
            try:
                held: Held = await self.reserve.enlist(Order(**order))
            except Refused as refused:
                raise HTTPException(409, refused.reason) from refused
            return held.hold

        return app

    async def holds(self) -> list[tuple[int, str]]:
        """Branch ids and statuses."""
        async with self.engine.connect() as db:
            rows = await db.execute(text("SELECT branch_id, status FROM holds ORDER BY branch_id"))
            return [(branch_id, status) for branch_id, status in rows]


@asynccontextmanager
async def serving(name: str, folder: Path, coordinator: str, onward: str = "") -> AsyncIterator[AsyncShop]:
    """A shop that serves gRPC for the coordinator, and gRPC for its customers."""
    await asyncio.to_thread(make_table, folder / f"{name}.db")
    engine = create_async_engine(f"sqlite+aiosqlite:///{folder / name}.db")
    shop = AsyncShop(name, engine, onward)
    serving = await shop.participant.start_async("127.0.0.1:0", coordinator=coordinator, upkeep=None)
    assert await serving.wait_registered(CALL_S)
    server = grpc.aio.server(handlers=[generic_handlers(shop.sell)], interceptors=[AsyncXidServerInterceptor()])
    shop.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield shop
    finally:
        await server.stop(None)
        await serving.stop(CALL_S)
        await engine.dispose()


def make_table(path: Path) -> None:
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as db:
        made: Connection = db
        made.execute(text(TABLE))
    engine.dispose()


async def buy(address: str, order: Order) -> str:
    """Call a shop; raises grpc.aio.AioRpcError."""
    async with grpc.aio.insecure_channel(address, interceptors=async_xid_client_interceptors()) as channel:
        call: Any = channel.unary_unary(METHOD)
        answer: bytes = await call(json.dumps({"modes": order.modes, "item": order.item}).encode(), timeout=CALL_S)
        return answer.decode()


@pytest.mark.parametrize("modes", [["plain"], ["plain", "plain"]])
async def test_b3_over_grpc(coordinator: CoordinatorProcess, tmp_path: Path, modes: list[str]) -> None:
    """A calls B, and B, in its Try, C."""
    async with (
        serving("supplier", tmp_path, coordinator.endpoint) as supplier,
        serving("shop", tmp_path, coordinator.endpoint, supplier.address) as shop,
    ):
        buyer = await asyncio.to_thread(Buyer, coordinator)
        with bound(buyer.xid), collecting() as seen:
            assert await buy(shop.address, Order(modes)) == "tea#1"
        assert seen == set(range(1, len(modes) + 1))
        tx = await asyncio.to_thread(buyer.confirm, sorted(seen))
        assert states(tx) == ["CONFIRMED"] * (1 + len(modes))
        assert await shop.holds() == [(1, "confirmed")]
        assert await supplier.holds() == [(2, "confirmed")] * (len(modes) - 1)


async def test_case_14_an_error_that_is_swallowed_cancels_all(coordinator: CoordinatorProcess, tmp_path: Path) -> None:
    async with (
        serving("supplier", tmp_path, coordinator.endpoint) as supplier,
        serving("shop", tmp_path, coordinator.endpoint, supplier.address) as shop,
    ):
        buyer = await asyncio.to_thread(Buyer, coordinator)
        with bound(buyer.xid), collecting() as seen:
            assert await buy(shop.address, Order(["swallow", "raise"])) == "tea#1"
        assert seen == {1}
        with pytest.raises(grpc.RpcError, match="branch"):
            await asyncio.to_thread(buyer.confirm, sorted(seen))
        assert states(await asyncio.to_thread(buyer.cancel)) == ["CANCELLED"] * 3
        assert (await shop.holds(), await supplier.holds()) == ([(1, "cancelled")], [])


async def test_b3_over_http(coordinator: CoordinatorProcess, tmp_path: Path) -> None:
    async with serving("shop", tmp_path, coordinator.endpoint) as shop:
        buyer = await asyncio.to_thread(Buyer, coordinator)
        transport = httpx2.ASGITransport(app=shop.app())
        async with httpx2.AsyncClient(transport=transport, base_url="http://shop") as client:
            with bound(buyer.xid), collecting() as seen:
                headers = outgoing_headers()
                answer = await client.post("/reserve", json=ORDER, headers=headers)
                assert (answer.status_code, answer.json(), seen) == (200, "tea#1", set())
                collect_tried(answer.headers)
                assert seen == {1}
                again = await client.post("/reserve", json=ORDER, headers=headers)  # B2: the same request
                assert (again.json(), again.headers["tricord-tried"]) == ("tea#1", "1")
                other = await client.post("/reserve", json=ORDER, headers=outgoing_headers())
                collect_tried(other.headers)
        assert seen == {1, 2}
        tx = await asyncio.to_thread(buyer.confirm, sorted(seen))
        assert states(tx) == ["CONFIRMED"] * 3
        assert await shop.holds() == [(1, "confirmed"), (2, "confirmed")]


async def test_b3_a_refusal_over_http_names_nothing(coordinator: CoordinatorProcess, tmp_path: Path) -> None:
    async with serving("shop", tmp_path, coordinator.endpoint) as shop:
        buyer = await asyncio.to_thread(Buyer, coordinator)
        transport = httpx2.ASGITransport(app=shop.app())
        async with httpx2.AsyncClient(transport=transport, base_url="http://shop") as client:
            with bound(buyer.xid):
                answer = await client.post("/reserve", json={**ORDER, "modes": ["refuse"]}, headers=outgoing_headers())
        assert (answer.status_code, answer.json()) == (409, {"detail": "sold_out"})
        assert "tricord-tried" not in answer.headers
