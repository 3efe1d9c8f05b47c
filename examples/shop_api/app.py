"""The API. Every POST takes an Idempotency-Key: sent again, with the same key, it does nothing again and says the same.

POST /orders                    ATOMIC: the order and its answer are one local transaction, one COMMIT
POST /orders/{order}/labels     LEASED: slow work of our own first, then a short local transaction
POST /orders/{order}/payment    PHASED: what we know is committed before and after the call to the provider
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import uuid4

import httpx
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from participant_sdk.idempotency import (
    AsyncIdempotency,
    AsyncRetryTransport,
    AsyncRun,
    IdempotencyStatus,
    Idempotent,
    MemoryFront,
    Mode,
    Operation,
    RetriesExhausted,
    RetryPolicy,
    Statuses,
    StoreUnavailable,
    protect,
)

from .tables import Item, Label, Order, Payment, open_database, open_shop

WAIT_S = 5.0
"""How long a repeat waits for the run in progress, before it is told to come back."""
PAYMENT_S = 10.0
PRINTING_S = 0.05
STARTS = 240
START_PAUSE_S = 0.25


@dataclass(frozen=True)
class Settings:
    """Read from the environment."""

    database: str
    provider: str

    @classmethod
    def read(cls) -> Settings:
        """With the defaults of the quick start."""
        return cls(
            database=os.environ.get("SHOP_API_DATABASE", "sqlite+aiosqlite:///shop-api.db"),
            provider=os.environ.get("SHOP_API_PROVIDER", "http://127.0.0.1:8001"),
        )


class OrderIn(BaseModel):
    """What is ordered. `reference`: the customer's own."""

    sku: str = Field(max_length=40)
    quantity: int = Field(ge=1, le=100)
    reference: str = Field("", max_length=80)


class OrderOut(BaseModel):
    """An order; cents."""

    order: str
    sku: str
    quantity: int
    total: int
    paid: bool = False


class PaymentIn(BaseModel):
    """By which card, and how much the customer has seen."""

    card: str = Field(max_length=40)
    cents: int


def customer_of(scope: Any) -> str:
    """Whose request it is: the tenant of its key. A real shop checks a token here; an unknown one fails closed."""
    given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    name = given.removeprefix("Bearer secret-of-")
    return name if name != given and name.isidentifier() and len(name) <= 40 else ""


def customer(request: Request) -> str:
    """The same, as a dependency."""
    if not (name := customer_of(request.scope)):
        raise HTTPException(401, "who are you?")
    return name


FINAL = Statuses(final=frozenset({402, 404, 409}))
ordering = Idempotent(Operation(name="orders.create", wait_s=WAIT_S), tenant=customer_of, statuses=FINAL)
printing = Idempotent(
    Operation(name="labels.create", mode=Mode.LEASED, wait_s=WAIT_S, lease_s=5.0), tenant=customer_of, statuses=FINAL
)
paying = Idempotent(
    Operation(name="payments.create", mode=Mode.PHASED, wait_s=WAIT_S, lease_s=5.0), tenant=customer_of, statuses=FINAL
)

router = APIRouter()
Customer = Annotated[str, Depends(customer)]


@router.post("/orders", status_code=201)
async def order(wanted: OrderIn, customer: Customer, run: Annotated[AsyncRun, Depends(ordering)]) -> OrderOut:
    """Order something."""
    db = await run.connect()
    taken = await db.execute(
        update(Item)
        .where(Item.sku == wanted.sku, Item.available >= wanted.quantity)
        .values(available=Item.available - wanted.quantity)
    )
    price = await db.scalar(select(Item.price).where(Item.sku == wanted.sku))
    if price is None:
        raise HTTPException(404, f"there is no {wanted.sku}")
    if taken.rowcount != 1:
        raise HTTPException(409, f"there are not {wanted.quantity} of {wanted.sku} left")
    made = OrderOut(order=uuid4().hex, sku=wanted.sku, quantity=wanted.quantity, total=price * wanted.quantity)
    row = {"id": made.order, "customer": customer, "reference": wanted.reference, "total": made.total}
    await db.execute(insert(Order).values(**row, sku=wanted.sku, quantity=wanted.quantity))
    return made


@router.post("/orders/{order}/labels", status_code=201)
async def label(order: str, customer: Customer, run: Annotated[AsyncRun, Depends(printing)]) -> dict[str, str]:
    """Print a shipping label. While it is drawn, no local transaction is open."""
    await asyncio.sleep(PRINTING_S)  # drawing
    db = await run.connect()
    await _own(db, order, customer)
    made = {"id": uuid4().hex, "order_id": order, "text": f"to {customer}"}
    await db.execute(insert(Label).values(**made))
    return {"label": made["id"]}


@router.post("/orders/{order}/payment", status_code=201)
async def pay(
    order: str, wanted: PaymentIn, customer: Customer, request: Request, run: Annotated[AsyncRun, Depends(paying)]
) -> Any:
    """Pay an order by card. Whoever goes on after a crash skips the phases that are done; the charge has one key."""

    async def note(db: AsyncConnection) -> None:
        found = await _own(db, order, customer)
        if found.total != wanted.cents:
            raise HTTPException(409, f"the order costs {found.total}")
        if await db.scalar(select(Payment.order_id).where(Payment.order_id == order)):
            raise HTTPException(409, "the order is paid, or being paid, already")
        await db.execute(insert(Payment).values(order_id=order, charge=""))

    async def charge(key: str) -> str | None:
        return await _charge(request.app.state.provider, key, wanted)

    async def forget(db: AsyncConnection) -> None:
        await db.execute(delete(Payment).where(Payment.order_id == order))  # another card may be tried

    await run.phase("noted", note)
    charged = await run.foreign("charged", charge)
    if charged is None:
        await run.phase("declined", forget)
        return JSONResponse({"detail": "the card was declined"}, 402)
    db = await run.connect()
    await db.execute(update(Payment).where(Payment.order_id == order).values(charge=charged))
    return {"order": order, "charge": charged}


@router.get("/orders/{order}")
async def look(order: str, customer: Customer, request: Request) -> OrderOut:
    """An order as it is now."""
    engine: AsyncEngine = request.app.state.engine
    async with engine.connect() as db:
        found = await _own(db, order, customer)
        charge = await db.scalar(select(Payment.charge).where(Payment.order_id == order))
    return OrderOut(order=order, sku=found.sku, quantity=found.quantity, total=found.total, paid=bool(charge))


@router.get("/ready")
async def ready() -> str:
    """Whether requests are taken."""
    return "ready"


async def _own(db: AsyncConnection, order: str, customer: str) -> Any:
    """The customer's order; another's is not there for him."""
    found = (await db.execute(select(Order.__table__).where(Order.id == order, Order.customer == customer))).first()
    if found is None:
        raise HTTPException(404, f"there is no order {order}")
    return found


async def _charge(provider: httpx.AsyncClient, key: str, wanted: PaymentIn) -> str | None:
    """What the provider calls the charge; None: declined. The key is the same in each attempt of this payment."""
    try:
        answer = await provider.post("/charges", json=wanted.model_dump(), headers={"Idempotency-Key": key})
    except RetriesExhausted as error:
        raise HTTPException(503, "the provider does not answer", {"Retry-After": "1"}) from error
    if answer.status_code == 402:
        return None
    if answer.status_code != 201:
        raise HTTPException(503, f"the provider answers {answer.status_code}", {"Retry-After": "1"})
    return str(answer.json()["charge"])


async def _patiently(start: Callable[[], Awaitable[None]]) -> None:
    """Wait for a database that is away: a worker that gave up at its start would take the others with it."""
    for _ in range(STARTS):
        try:
            return await start()
        except (DBAPIError, StoreUnavailable):
            await asyncio.sleep(START_PAUSE_S)
    await start()


async def _away(request: Request, error: Exception) -> JSONResponse:
    """The database was lost in the middle of a run: nothing of it stays, and the customer may try again."""
    return JSONResponse({"detail": "the database is away"}, 503, {"Retry-After": "1"})


def create_app() -> FastAPI:
    """The application, for `uvicorn --factory`."""
    settings = Settings.read()
    engine = open_database(settings.database)
    idempotency = AsyncIdempotency(engine, fronts=[MemoryFront(16 << 20)])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        policy = RetryPolicy(total_s=PAYMENT_S, budget_share=1.0)
        inner = AsyncRetryTransport(httpx.AsyncHTTPTransport(), policy)
        try:
            await _patiently(lambda: open_shop(engine))
            await _patiently(idempotency.start)
            async with httpx.AsyncClient(base_url=settings.provider, transport=inner, timeout=PAYMENT_S) as provider:
                app.state.engine, app.state.provider = engine, provider
                yield
        finally:
            await idempotency.close()
            await engine.dispose()

    app = FastAPI(title="Shop API", lifespan=lifespan)
    app.add_exception_handler(DBAPIError, _away)
    app.include_router(router)
    routes = protect(app, idempotency)
    app.mount("/idempotency", IdempotencyStatus(idempotency, routes))
    return app
