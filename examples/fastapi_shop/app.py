"""The web service: an order is a transaction over the shop's own stock and the bank.

The shop's participant lives in the same process and event loop. It starts before the first request is taken, and ends
after the last one was answered: first no more calls, then those that run may end, then the database is closed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from examples.transfer.bank import Credit, Debit
from participant_sdk import (
    AsyncServing,
    AsyncTricordClient,
    BranchRefusal,
    IdempotencyKeyReused,
    InvalidRequest,
    OutcomeUnknown,
    Transaction,
    TransactionCancelled,
    TransactionNotFound,
    TricordError,
    UnknownParticipant,
    Wait,
    XidMiddleware,
    branch,
    current_xid,
)

from .stock import Item, Reserve, open_database, open_shop, stock_of

GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Settings:
    """Read from the environment; `patience` is how many seconds a customer waits for an answer."""

    database: str
    listen: str
    coordinator: str
    bank: str
    patience: float

    @classmethod
    def read(cls) -> Settings:
        """Raises ValueError."""
        return cls(
            database=os.environ.get("SHOP_DATABASE", "sqlite+aiosqlite:///shop.db"),
            listen=os.environ.get("SHOP_LISTEN", "127.0.0.1:7801"),
            coordinator=os.environ.get("SHOP_COORDINATOR", "127.0.0.1:7800"),
            bank=os.environ.get("SHOP_BANK", "bank-a"),
            patience=float(os.environ.get("SHOP_PATIENCE", "10")),
        )


@dataclass(frozen=True)
class Shop:
    """What the requests share."""

    settings: Settings
    engine: AsyncEngine
    client: AsyncTricordClient
    serving: AsyncServing


class Stock(BaseModel):
    """An item: its price in cents, and how many are free, held for orders, sold."""

    sku: str
    price: int
    available: int
    held: int
    sold: int


class Order(BaseModel):
    """What a customer orders, for the sum that he has seen, paid from an account of the bank."""

    sku: str
    quantity: int
    total: int
    account: str


class OrderState(BaseModel):
    """How far an order has come."""

    order: str
    state: str
    xid: str | None = None


def create_app() -> FastAPI:
    """The application, for `uvicorn --factory`."""
    _log_xids()
    app = FastAPI(title="Shop", lifespan=_lifespan)
    app.add_middleware(XidMiddleware)
    app.add_exception_handler(TricordError, _tell)
    app.include_router(router)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    settings = Settings.read()
    engine = open_database(settings.database)
    try:
        await open_shop(engine)
        serving = await stock_of(engine).start_async(settings.listen, coordinator=settings.coordinator)
        try:
            async with AsyncTricordClient(settings.coordinator) as client:
                app.state.shop = Shop(settings, engine, client, serving)
                yield
        finally:
            ended = await serving.stop(GRACE_SECONDS)
            logger.info("the participant has ended%s", "" if ended else ", although calls still ran")
    finally:
        await engine.dispose()


def _shop(request: Request) -> Shop:
    shop: Shop = request.app.state.shop
    return shop


TheShop = Annotated[Shop, Depends(_shop)]
Key = Annotated[str | None, Header(alias="Idempotency-Key", pattern=r"^[A-Za-z0-9._~-]{1,100}$")]

logger = logging.getLogger("shop.app")
router = APIRouter()


@router.get("/stock/{sku}")
async def stock(sku: str, shop: TheShop) -> Stock:
    """Of one item."""
    async with AsyncSession(shop.engine) as session:
        item = await session.get(Item, sku)
    if item is None:
        raise HTTPException(404, f"there is no {sku}")
    return Stock(sku=item.sku, price=item.price, available=item.available, held=item.held, sold=item.sold)


@router.post("/orders", status_code=201)
async def order(order: Order, shop: TheShop, response: Response, key: Key = None) -> OrderState:
    """Order something. With the same Idempotency-Key it is the same order, however often it is sent.

    201: it is decided, and will be carried out. 202: not known yet, see Location. 409: nothing happened, and why.
    """
    name = key or uuid4().hex
    response.headers["Location"] = f"/orders/{name}"
    bank = shop.settings.bank
    try:
        transaction = await shop.client.execute(
            branch("stock", "reserve", Reserve(sku=order.sku, quantity=order.quantity, total=order.total)),
            branch(bank, "debit", Debit(order.account, order.total)),
            branch(bank, "credit", Credit("shop", order.total)),
            idempotency_key=_key(name),
            wait=Wait.DECIDED,
            patience=shop.settings.patience,
        )
    except OutcomeUnknown as unknown:
        response.status_code = 202
        return _state(name, unknown.transaction)
    return _state(name, transaction)


@router.get("/orders/{name}")
async def order_state(name: str, shop: TheShop) -> OrderState:
    """How far an order has come. 404 means "not known yet": whoever is not sure sends the order again."""
    return _state(name, await shop.client.get(idempotency_key=_key(name), patience=shop.settings.patience))


@router.get("/ready")
async def ready(shop: TheShop) -> str:
    """Whether the coordinator knows the stock."""
    if not await shop.serving.wait_registered(0.1):
        raise HTTPException(503, "not registered at the coordinator yet")
    return "ready"


def _key(name: str) -> str:
    """Other initiators have orders, too."""
    return f"shop-order:{name}"


def _state(name: str, transaction: Transaction | None) -> OrderState:
    if transaction is None:
        return OrderState(order=name, state="UNKNOWN")
    return OrderState(order=name, state=transaction.state.value, xid=transaction.xid)


async def _tell(request: Request, error: Exception) -> JSONResponse:
    """What an error of the SDK means to the customer, as problem+json."""
    more: dict[str, Any] = {}
    match error:
        case TransactionCancelled(refusal=BranchRefusal() as refusal):
            status = 409
            more = {"reason": refusal.reason, "participant": refusal.participant, "detail": refusal.message}
        case TransactionCancelled():
            status = 503  # nobody refused: the time was up, and nothing happened
        case IdempotencyKeyReused():
            status = 422
        case TransactionNotFound():
            status = 404
        case UnknownParticipant() | OutcomeUnknown():
            status = 503
        case InvalidRequest():
            status = 400
        case _:
            status = 500
    body = {"type": "about:blank", "status": status, "detail": str(error), **more}
    return JSONResponse(body, status, media_type="application/problem+json")


def _log_xids() -> None:
    """Each line says which transaction it belongs to: a handler's by the SDK, a request's by XidMiddleware."""

    def add_xid(record: logging.LogRecord) -> bool:
        record.xid = current_xid() or "-"
        return True

    handler = logging.StreamHandler()
    handler.addFilter(add_xid)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(xid)s %(message)s", handlers=[handler])
