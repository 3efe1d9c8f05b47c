"""`protect` on FastAPI: what it finds, what it refuses at start, and what it tells OpenAPI."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import StreamingResponse
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.fastapi import Idempotent, protect
from participant_sdk.idempotency.http_policy import ONE_TENANT, BodyKey, HeaderKey, Streaming
from participant_sdk.idempotency.idempotency import AsyncIdempotency
from participant_sdk.idempotency.keys import KeyRules
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.problems import Answering, Codes

create = Idempotent(Operation(name="orders.create"), tenant=ONE_TENANT)
change = Idempotent(Operation(name="orders.change"), tenant=ONE_TENANT, key_required=False)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncIdempotency]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/never.db")
    yield AsyncIdempotency(engine)
    await engine.dispose()


def http(path: str, method: str = "POST", root: str = "") -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "root_path": root}


def test_marked_routes_are_found_where_the_router_finds_them(store: AsyncIdempotency) -> None:
    app, router = FastAPI(), APIRouter()

    @app.post("/orders/search")
    async def search() -> None: ...

    app.mount("/orders/archive", FastAPI())

    @app.post("/orders/{name:path}")
    async def create_order(run: Annotated[Any, Depends(create)]) -> None: ...

    @router.patch("/orders/{name}", dependencies=[Depends(change)])
    async def change_order() -> None: ...

    app.include_router(router, prefix="/v2")
    routes = protect(app, store)
    assert [found.operation.name for found in routes.operations] == ["orders.create", "orders.change"]

    def name(scope: dict[str, Any]) -> str | None:
        found = routes.find(scope)
        return None if found is None else found.operation.name

    assert name(http("/orders/7")) == "orders.create"
    assert name(http("/orders/search")) is None  # the router gives it to the route before
    assert name(http("/orders/archive/7")) is None
    assert name(http("/orders/archived")) == "orders.create"
    assert name(http("/v2/orders/7", "PATCH")) == "orders.change"
    assert name(http("/orders/7", "PATCH")) is None
    assert name(http("/openapi.json", "GET")) is None


def test_without_a_marked_route_there_is_nothing_to_protect(store: AsyncIdempotency) -> None:
    with pytest.raises(ConfigurationError, match="after the routes"):
        protect(FastAPI(), store)


def test_a_route_is_one_operation(store: AsyncIdempotency) -> None:
    app = FastAPI()

    @app.post("/orders", dependencies=[Depends(create), Depends(change)])
    async def create_order() -> None: ...

    with pytest.raises(ConfigurationError, match=r"/orders: .*orders\.create and orders\.change"):
        protect(app, store)


def test_settings_are_checked_where_they_are_made() -> None:
    with pytest.raises(ConfigurationError, match=r"orders: colour"):
        Idempotent(Operation(name="orders"), tenant=ONE_TENANT, colour="red")
    with pytest.raises(ConfigurationError, match=r"orders: path"):
        Idempotent(Operation(name="orders"), tenant=ONE_TENANT, path="/orders")
    with pytest.raises(ConfigurationError, match="set-cookie"):
        Idempotent(Operation(name="orders"), tenant=ONE_TENANT, headers=("set-cookie",))


async def late_session() -> AsyncIterator[AsyncSession]:
    yield AsyncSession()


def late_session_in_a_thread() -> Iterator[Session]:
    yield Session()


async def late_session_in_time(
    session: Annotated[AsyncSession, Depends(late_session, scope="function")],
) -> AsyncSession:
    return session


async def other() -> AsyncIterator[str]:
    yield "no session"


def wraps(session: Annotated[AsyncSession, Depends(late_session)]) -> AsyncSession:
    return session


@pytest.mark.parametrize(
    "dependency",
    [
        Depends(late_session),
        Depends(late_session_in_a_thread),
        Depends(wraps),
        Depends(late_session, scope="function"),
        Depends(create.joining(late_session_in_time)),
    ],
)
def test_a_commit_apart_from_the_answer_is_refused(store: AsyncIdempotency, dependency: Any) -> None:
    app = FastAPI()

    @app.post("/orders", dependencies=[Depends(create)])
    async def create_order(session: Any = dependency) -> None: ...

    with pytest.raises(ConfigurationError, match=r"/orders: the session of late_session.* is not committed with"):
        protect(app, store)


@pytest.mark.parametrize("dependency", [Depends(create.joining(late_session)), Depends(other)])
def test_a_session_that_is_joined_is_taken(store: AsyncIdempotency, dependency: Any) -> None:
    app = FastAPI()

    @app.post("/orders", dependencies=[Depends(create)])
    async def create_order(session: Any = dependency) -> None: ...

    @app.post("/unmarked")
    async def unmarked(session: Annotated[AsyncSession, Depends(late_session)]) -> None: ...

    assert len(protect(app, store).operations) == 1


def test_a_session_apart_is_taken_where_that_is_said(store: AsyncIdempotency) -> None:
    app = FastAPI()
    said = Idempotent(Operation(name="said"), tenant=ONE_TENANT, sessions_apart=True)

    @app.post("/orders", dependencies=[Depends(said), Depends(late_session)])
    async def create_order() -> None: ...

    assert len(protect(app, store).operations) == 1


def test_a_stream_where_none_is_taken_is_refused(store: AsyncIdempotency) -> None:
    whole = Idempotent(Operation(name="whole"), tenant=ONE_TENANT, streaming=Streaming.REJECT)
    app = FastAPI()

    @app.post("/orders", dependencies=[Depends(whole)], response_class=StreamingResponse)
    async def create_order() -> None: ...

    with pytest.raises(ConfigurationError, match="/orders: it answers with a stream"):
        protect(app, store)


@pytest.mark.parametrize("codes", Codes)
def test_openapi_shows_the_key_and_the_refusals(store: AsyncIdempotency, codes: Codes) -> None:
    keyed = Idempotent(
        Operation(name="keyed"),
        tenant=ONE_TENANT,
        key=HeaderKey("X-Key"),
        key_rules=KeyRules(field="X-Key", bytes_max=64),
    )
    app = FastAPI()

    @app.post("/orders/{name}", dependencies=[Depends(keyed)], responses={409: {"description": "sold out"}})
    async def create_order(name: str, colour: str) -> None: ...

    @app.patch("/orders/{name}", dependencies=[Depends(change)])
    async def change_order(name: str) -> None: ...

    @app.put("/orders", dependencies=[Depends(Idempotent(Operation(name="b"), tenant=ONE_TENANT, key=BodyKey("/key")))])
    async def put_order() -> None: ...

    @app.post("/unmarked")
    async def unmarked() -> None: ...

    app.openapi()  # made before: it is made anew
    protect(app, store, answering=Answering(codes=codes))
    paths = app.openapi()["paths"]
    created, changed = paths["/orders/{name}"]["post"], paths["/orders/{name}"]["patch"]
    headers = [found for found in created["parameters"] if found["in"] == "header"]
    assert [found["name"] for found in created["parameters"]] == ["name", "colour", "X-Key"]
    assert (headers[0]["required"], headers[0]["schema"]["maxLength"]) == (True, 64)
    assert changed["parameters"][-1]["name"] == "Idempotency-Key"
    assert changed["parameters"][-1]["required"] is False
    assert created["responses"]["409"]["description"] == "sold out"
    reused, kind = ("400", "application/json") if codes is Codes.STRIPE else ("422", "application/problem+json")
    assert list(changed["responses"]["409"]["content"]) == [kind]
    assert kind in changed["responses"][reused]["content"]
    assert "parameters" not in paths["/orders"]["put"]
    assert set(paths["/unmarked"]["post"]["responses"]) == {"200"}
