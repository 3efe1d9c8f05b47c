"""A shop over gRPC whose methods take idempotency keys, on a thread server or an asyncio one, on each database.

Its messages are Payloads: `content_type` tells its handlers what to do, `data` is what was ordered.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, Final

import grpc
from sqlalchemy import create_engine, func, select
from sqlalchemy.ext.asyncio import create_async_engine

from participant_sdk.idempotency.grpc_interceptors import AsyncIdempotencyInterceptor, IdempotencyInterceptor
from participant_sdk.idempotency.grpc_policy import GrpcOperation
from participant_sdk.idempotency.grpc_status import GrpcCodes
from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.tables import DEFAULT
from participant_sdk.service_idempotency import AsyncIdempotencyService, IdempotencyService
from tests.postgres import free_port
from tricord.v1 import types_pb2

from .keyed_shop_handlers import CALL_S, AsyncHandlers, Handlers, orders, orders_metadata

SERVICE: Final = "test.Shop"
METHODS: Final = {
    "Create": "unary_unary",
    "Upload": "stream_unary",
    "Watch": "unary_stream",
    "Chat": "stream_stream",
    "Change": "unary_unary",
    "Unlisted": "unary_unary",
}

Metadata = tuple[tuple[str, str | bytes], ...]


def tenant_of(context: Any) -> str | None:
    """The authenticated principal, here: what metadata says."""
    return dict(context.invocation_metadata()).get("tenant")


def policy(method: str = "Create", /, *, operation: dict[str, Any] | None = None, **settings: Any) -> GrpcOperation:
    """That method's, with `operation`'s and its own settings."""
    made = Operation(**{"name": f"shop.{method}", **(operation or {})})
    return GrpcOperation(**{"operation": made, "method": f"/{SERVICE}/{method}", "tenant": tenant_of, **settings})


class Gate:
    """Where a handler stops until it is let on; both from any thread."""

    def __init__(self) -> None:
        self.reached = threading.Semaphore(0)
        self.open = threading.Event()

    def wait_reached(self) -> None:
        assert self.reached.acquire(timeout=CALL_S)


class Shop:
    """A server of the shop that runs. `flavour`: "threads", "tasks", or "tasks-threads": plain functions there."""

    def __init__(
        self,
        flavour: str,
        urls: tuple[str, str],
        operations: Sequence[GrpcOperation],
        *,
        codes: GrpcCodes | None = None,
        outside: Sequence[Any] = (),
        inside: Sequence[Any] = (),
        more: Callable[[Any], None] = lambda server: None,
        workers: int = 8,
        address: str = "",
        **settings: Any,
    ) -> None:
        self.flavour, self.urls, self.operations, self.codes = flavour, urls, tuple(operations), codes
        self.outside, self.inside, self.more, self.workers, self.settings = outside, inside, more, workers, settings
        self.gate = Gate()
        self.runs = 0
        self.cancelled = 0
        self.mortal = False
        self.sessions: list[Any] = []
        self.address = address or f"127.0.0.1:{free_port()}"
        self._stopped: Future[None] = Future()
        self._handlers = Handlers(self) if flavour != "tasks" else AsyncHandlers(self)
        self.engine = create_engine(urls[0])

    def __enter__(self) -> Shop:
        orders_metadata.create_all(self.engine)
        if self.flavour == "threads":
            self._start_threads()
        else:
            started: Future[None] = Future()
            self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
            self._thread.start()
            started.result(CALL_S)
        self.channel = grpc.insecure_channel(self.address)
        return self

    def __exit__(self, *raised: object) -> None:
        self.gate.open.set()
        self.channel.close()
        if self.flavour == "threads":
            self._server.stop(5).wait(CALL_S)
            self._pool.shutdown()
            for session in self.sessions:
                session.close()
            self.idempotency.close()
        else:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CALL_S)
        self.engine.dispose()

    def _generic(self) -> grpc.GenericRpcHandler:
        made = {
            name: getattr(grpc, f"{kind}_rpc_method_handler")(
                getattr(self._handlers, name.lower()),
                request_deserializer=types_pb2.Payload.FromString,
                response_serializer=types_pb2.Payload.SerializeToString,
            )
            for name, kind in METHODS.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, made)

    def _start_threads(self) -> None:
        self.idempotency = Idempotency(self.engine, **self.settings)
        self.idempotency.start()
        ours = IdempotencyInterceptor(self.idempotency, self.operations, codes=self.codes)
        self._pool = ThreadPoolExecutor(self.workers)
        self._server = grpc.server(
            self._pool, [self._generic()], [*self.outside, ours, *self.inside], [("grpc.so_reuseport", 0)]
        )
        IdempotencyService(self.idempotency, self.operations, tenant=tenant_of).add_to(self._server)
        self.more(self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    async def _serve(self, started: Future[None]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        engine = self.async_engine = create_async_engine(self.urls[1])
        threads = Idempotency(self.engine, **self.settings) if self.flavour == "tasks-threads" else None
        try:
            if threads is not None:
                threads.start()
            async with AsyncIdempotency(engine, **self.settings) as idempotency:
                ours = AsyncIdempotencyInterceptor(idempotency, self.operations, codes=self.codes, threads=threads)
                server = grpc.aio.server(
                    ThreadPoolExecutor(self.workers),
                    [self._generic()],
                    [*self.outside, ours, *self.inside],
                    [("grpc.so_reuseport", 0)],
                )
                AsyncIdempotencyService(idempotency, self.operations, tenant=tenant_of).add_to(server)
                self.more(server)
                server.add_insecure_port(self.address)
                await server.start()
                started.set_result(None)
                await self._stop.wait()
                await server.stop(5)
                for session in self.sessions:
                    if (closed := session.close()) is not None:
                        await closed
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise
        finally:
            if threads is not None:
                threads.close()
            await engine.dispose()

    # What a test does.

    def call(
        self,
        method: str = "Create",
        key: str | None = "k1",
        item: bytes = b"tea",
        plan: str = "ok",
        *,
        tenant: str = "alice",
        metadata: Metadata = (),
        requests: Iterable[bytes] | None = None,
        timeout: float = CALL_S,
    ) -> Any:
        """A call under way; of a client's stream, with a message for each of `requests`."""
        kind = METHODS[method]
        stub = getattr(self.channel, kind)(
            f"/{SERVICE}/{method}",
            request_serializer=types_pb2.Payload.SerializeToString,
            response_deserializer=types_pb2.Payload.FromString,
        )
        sent = (*metadata, ("tenant", tenant), *((("idempotency-key", key),) if key is not None else ()))
        message: Any = types_pb2.Payload(data=item, content_type=plan)
        if kind.startswith("stream"):
            message = chain([message], (types_pb2.Payload(data=each) for each in requests or ()))
        if kind.endswith("stream"):
            return stub(message, metadata=sent, timeout=timeout)
        return stub.future(message, metadata=sent, timeout=timeout)

    def done(self, *arguments: Any, **settings: Any) -> Any:
        """A call that is over."""
        call = self.call(*arguments, **settings)
        call.code()
        return call

    def ask(self, *arguments: Any, **settings: Any) -> bytes:
        """The answer's data."""
        return bytes(self.call(*arguments, **settings).result().data)

    def refused(self, *arguments: Any, **settings: Any) -> grpc.StatusCode:
        """The status of a call that does not end well."""
        code: grpc.StatusCode = self.call(*arguments, **settings).code()
        return code

    def die_if(self, plan: str) -> None:
        """In the middle of the work, if the plan says so and this process is one that may."""
        if "die" in plan and self.mortal:
            os.kill(os.getpid(), signal.SIGKILL)

    def items(self) -> list[bytes]:
        """What was ordered, by the rows that stayed."""
        with self.engine.connect() as db:
            return [bytes(item) for item in db.execute(select(orders.c.item).order_by(orders.c.id)).scalars()]

    def bodies(self) -> list[bytes]:
        """What is stored of answers."""
        with self.engine.connect() as db:
            return [bytes(body) for body in db.execute(select(DEFAULT.records.c.body)).scalars() if body is not None]

    def records(self) -> int:
        """How many keys there is a record of."""
        with self.engine.connect() as db:
            there = select(func.count()).select_from(DEFAULT.records).where(DEFAULT.records.c.operation != "")
            return db.execute(there).scalar_one()
