"""FastAPI with marked routes behind a real uvicorn: sessions of the run, joined sessions, threads, validation."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.middleware.gzip import GZipMiddleware
from pydantic import BaseModel
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from participant_sdk.asgi import Scope
from participant_sdk.idempotency.fastapi import Idempotent, protect
from participant_sdk.idempotency.http_headers import values
from participant_sdk.idempotency.http_status import IdempotencyStatus
from participant_sdk.idempotency.http_statuses import Statuses
from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.problems import Answering, Codes
from participant_sdk.idempotency.runs import AsyncRun, Run
from tests.contract.participant.world import postgres_url, sqlite_url
from tests.integration.idempotent_shop import INSERT, SQL, WAIT_S
from tests.integration.served_shop import serving

KEY = {"Idempotency-Key": "k"}
ORIGIN = {"Origin": "https://a.example"}


class Order(BaseModel):
    item: str


def account(scope: Scope) -> str | None:
    """The tenant."""
    found = values(scope["headers"], b"authorization")
    return found[0].decode("latin-1").removeprefix("Bearer ") if found else None


def make_app(url: str, sync_url: str) -> FastAPI:
    """A shop with a route of each way to work in the run's local transaction."""
    engine = create_async_engine(url)
    store = AsyncIdempotency(engine)
    sessions = async_sessionmaker(engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with store:
            yield
        await engine.dispose()

    app = FastAPI(lifespan=lifespan)
    calls = app.state.calls = {"orders": 0}

    def marked(name: str, **settings: Any) -> Any:
        mark = Idempotent(
            Operation(name=name, wait_s=10), tenant=account, statuses=Statuses(final=frozenset({404})), **settings
        )
        return Depends(mark)

    async def session_of_ours() -> AsyncIterator[AsyncSession]:
        async with sessions() as session:
            yield session
            await session.commit()  # as many do; too late, were the door not to commit before

    @app.post("/orders", status_code=201)
    async def create_order(request: Request, order: Order, run: Annotated[AsyncRun, marked("orders.create")]) -> Order:
        calls["orders"] += 1
        assert "accept-encoding" not in request.headers
        await (await run.session()).execute(INSERT, {"item": order.item})
        if order.item == "nothing":
            raise HTTPException(404, "no such thing")
        return order

    join = Idempotent(Operation(name="orders.joined", wait_s=10), tenant=account)

    @app.post("/joined", status_code=201)
    async def joined(
        order: Order,
        session: Annotated[AsyncSession, Depends(join.joining(session_of_ours))],
    ) -> Order:
        calls["orders"] += 1
        await session.execute(INSERT, {"item": order.item})
        return order

    @app.post("/optional", status_code=201)
    async def optional(order: Order, run: Annotated[AsyncRun | None, marked("orders.o", key_required=False)]) -> bool:
        return run is not None

    @app.post("/packed", status_code=201)
    async def packed(request: Request, run: Annotated[AsyncRun, marked("orders.packed", identity=False)]) -> Response:
        assert request.headers["accept-encoding"]
        return Response(b"packed", headers={"Content-Encoding": "x-own"})

    routes = protect(app, store, answering=Answering(status_path="/idempotency", age=True))
    app.mount("/idempotency", IdempotencyStatus(store, routes))

    @app.post("/forgotten")
    async def forgotten(run: Annotated[AsyncRun, marked("orders.forgotten")]) -> None: ...

    app.add_middleware(GZipMiddleware, minimum_size=1)
    app.add_middleware(CORSMiddleware, allow_origins=["https://a.example", "https://b.example"])
    return app


def make_threads_app(url: str, sync_url: str) -> FastAPI:
    """The same with plain functions, which FastAPI runs in threads."""
    engine = create_engine(sync_url)
    store = Idempotency(engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with store:
            yield
        engine.dispose()

    app = FastAPI(lifespan=lifespan)
    calls = app.state.calls = {"orders": 0}
    create = Idempotent(
        Operation(name="orders.create", wait_s=10), tenant=account, statuses=Statuses(final=frozenset({404}))
    )

    @app.post("/orders", status_code=201)
    def create_order(order: Order, run: Annotated[Run, Depends(create)]) -> Order:
        calls["orders"] += 1
        run.session().execute(INSERT, {"item": order.item})
        if order.item == "nothing":
            raise HTTPException(404, "no such thing")
        return order

    protect(app, store, answering=Answering(codes=Codes.STRIPE))
    return app


class Web:
    """A served app."""

    def __init__(self, app: FastAPI, client: httpx2.Client, engine: Engine) -> None:
        self.app, self.client, self.engine = app, client, engine

    def post(self, path: str, item: object = "tea", account: str = "acme", **headers: str) -> httpx2.Response:
        sent = {"Authorization": f"Bearer {account}", **KEY, **{n.replace("_", "-"): v for n, v in headers.items()}}
        return self.client.post(path, json={"item": item}, headers=sent)

    @property
    def placed(self) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(text("SELECT count(*) FROM placed")).scalar_one())


def served(make: Any, url: str, sync_url: str) -> Iterator[Web]:
    engine = create_engine(sync_url)
    with engine.begin() as connection:
        connection.execute(text(SQL))
    app = make(url, sync_url)
    with (
        serving(app) as address,
        httpx2.Client(
            base_url=address, timeout=WAIT_S, trust_env=False, headers={"Accept-Encoding": "identity"}
        ) as client,
    ):
        yield Web(app, client, engine)
    engine.dispose()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.database)])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    if request.param == "sqlite":
        return sqlite_url(tmp_path, asynchronous=True), sqlite_url(tmp_path)
    return (postgres_url(request.getfixturevalue("pg_database")),) * 2


@pytest.fixture
def web(urls: tuple[str, str]) -> Iterator[Web]:
    yield from served(make_app, *urls)


@pytest.fixture
def threads(urls: tuple[str, str]) -> Iterator[Web]:
    yield from served(make_threads_app, *urls)


@pytest.mark.parametrize("path", ["/orders", "/joined"])
def test_the_run_owns_the_local_transaction(web: Web, path: str) -> None:
    first, again = web.post(path), web.post(path)
    assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    assert int(again.headers["age"]) >= 0
    assert (web.placed, web.app.state.calls["orders"]) == (1, 1)
    assert web.post(path, "coffee").status_code == 422


def test_handlers_in_threads(threads: Web) -> None:
    first, again = threads.post("/orders"), threads.post("/orders")
    assert (first.status_code, again.content, again.headers["idempotent-replayed"]) == (201, first.content, "true")
    assert (threads.placed, threads.app.state.calls["orders"]) == (1, 1)
    reused = threads.post("/orders", "coffee")
    assert (reused.status_code, reused.json()["error"]["code"]) == (400, "idempotency_key_reused")
    no = [threads.post("/orders", "nothing", account="b") for _ in range(2)]
    assert [answer.status_code for answer in no] == [404, 404]
    assert (threads.placed, threads.app.state.calls["orders"]) == (1, 2)


def test_a_final_no_and_a_wrong_body(web: Web) -> None:
    no = [web.post("/orders", "nothing") for _ in range(2)]
    assert [answer.status_code for answer in no] == [404, 404]
    assert no[1].headers["idempotency-replayed"] == "true"
    wrong = [web.post("/orders", 7, Idempotency_Key="other") for _ in range(2)]
    assert [answer.status_code for answer in wrong] == [422, 422]
    assert "reason" not in wrong[1].json()  # FastAPI's own answer, both times
    assert (web.placed, web.app.state.calls["orders"]) == (0, 1)


def test_without_a_key_an_optional_route_has_no_run(web: Web) -> None:
    assert web.post("/optional").json() is True
    without = web.client.post("/optional", json={"item": "tea"})
    assert (without.status_code, without.json()) == (201, False)


def test_a_route_that_was_added_too_late_does_not_run_unprotected(web: Web) -> None:
    assert web.post("/forgotten", connection="close").status_code == 500


def test_case_42_cors_is_the_callers_own(web: Web) -> None:
    first = web.post("/orders", **ORIGIN)
    again = web.post("/orders", Origin="https://b.example")
    assert first.headers["access-control-allow-origin"] == "https://a.example"
    assert again.headers["access-control-allow-origin"] == "https://b.example"
    assert again.headers["idempotency-replayed"] == "true"


def test_who_takes_gzip_gets_it_and_nobody_else(web: Web) -> None:
    first = web.post("/orders", Accept_Encoding="gzip")
    again = web.post("/orders", Accept_Encoding="gzip")
    plain = web.post("/orders")
    assert first.headers["content-encoding"] == again.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert first.content == again.content == plain.content


def test_a_stored_encoding_is_refused_to_whom_does_not_read_it(web: Web) -> None:
    assert web.post("/packed", Accept_Encoding="x-own").status_code == 200
    assert web.post("/packed", Accept_Encoding="x-own").content == b"packed"
    refused = web.post("/packed", Accept_Encoding="gzip")
    assert (refused.status_code, refused.json()["reason"]) == (406, "IDEMPOTENCY_ANSWER_ENCODED")


def test_the_status_is_looked_up_with_the_callers_own_eyes(web: Web) -> None:
    web.post("/orders")
    mine = web.client.get("/idempotency/k", headers={"Authorization": "Bearer acme"})
    assert (mine.status_code, mine.json()["state"], mine.json()["operation"]) == (200, "succeeded", "orders.create")
    foreign = web.client.get("/idempotency/k", headers={"Authorization": "Bearer b"})
    unknown = web.client.get("/idempotency/u", headers={"Authorization": "Bearer acme"})
    assert (foreign.status_code, foreign.content) == (404, unknown.content)


def test_a_route_that_fails_open_has_no_run_while_the_store_is_down(tmp_path: Path) -> None:
    engine = create_async_engine(sqlite_url(tmp_path / "not there", asynchronous=True))
    app = FastAPI()
    marks = [
        Idempotent(Operation(name=f"orders.{name}"), tenant=account, fail_open=name == "open")
        for name in ("open", "closed")
    ]

    @app.post("/open")
    async def fails_open(order: Order, run: Annotated[AsyncRun | None, Depends(marks[0])]) -> bool:
        return run is None

    @app.post("/closed")
    async def fails_closed(order: Order, run: Annotated[AsyncRun, Depends(marks[1])]) -> bool:
        raise AssertionError(run)

    protect(app, AsyncIdempotency(engine))
    with serving(app) as address, httpx2.Client(base_url=address, timeout=WAIT_S, trust_env=False) as client:
        headers = {**KEY, "Authorization": "Bearer acme"}
        bypassed = client.post("/open", json={"item": "tea"}, headers=headers)
        assert (bypassed.json(), bypassed.headers["idempotency-status"]) == (True, "bypassed")
        assert client.post("/closed", json={"item": "tea"}, headers=headers).status_code == 503
