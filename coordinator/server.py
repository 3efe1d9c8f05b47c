"""The gRPC services of the coordinator: what comes in, checked; what goes out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import structlog

from tricord.v1 import coordinator_pb2 as pb

from .engine import Engine, KeyReused
from .errors import InvalidRequest, NotFound, TooMuch, UnknownName, Violation
from .journal import Started
from .model import Transaction
from .participants import Participants
from .rpc import Context, answering, answering_stream
from .server_open import OpenTransactions, check_name, left_s, until_of
from .server_streams import CALLS_MAX, Streams
from .wire import Starting, read_key, read_xid, read_xids, transaction_message

_log = structlog.get_logger(__name__)

WATCH_S = 60.0
"""How long one wait for a change lasts at the most."""
STARTING_BYTES_MAX = 128 * 1024 * 1024
"""Requests whose participants are being looked for in the store, all together: they wait when it is away."""


class CoordinatorService(OpenTransactions):
    """What initiators call, and participants that are called directly."""

    def __init__(
        self,
        engine: Engine,
        participants: Participants,
        namespace: str,
        timeout_ms_default: int,
        stream_calls_max: int = CALLS_MAX,
    ) -> None:
        super().__init__(engine, participants)
        self._namespace = namespace
        self._timeout_ms_default = timeout_ms_default
        self._starting_bytes = 0
        self._streams = Streams(engine, self._read_execute, self._start, stream_calls_max)

    def stop_streams(self) -> None:
        """Take no more calls from ``ExecuteStream``; each stream ends when its calls are answered."""
        self._streams.stop()

    @answering
    async def Execute(self, request: pb.ExecuteRequest, context: Context) -> pb.ExecuteResponse:
        """Run a transaction, or find the one that the key names, and answer when it has come far enough."""
        started = await self._start(self._read_execute(request))
        tx = await self._engine.wait(started.tx, until_of(request.wait), left_s(context))
        return pb.ExecuteResponse(transaction=transaction_message(tx))

    @answering_stream
    async def ExecuteStream(
        self, request_iterator: AsyncIterator[pb.ExecuteStreamRequest], context: Context
    ) -> AsyncIterator[pb.ExecuteStreamResponse]:
        """Run many transactions, and answer each when it has come far enough."""
        yield pb.ExecuteStreamResponse()  # tells callers that this is no older coordinator, before they write
        async for response in self._streams.serve(request_iterator):
            yield response

    @answering
    async def Begin(self, request: pb.BeginRequest, context: Context) -> pb.BeginResponse:
        """Begin an interactive transaction, or find the one that the key names."""
        starting = Starting.of_begin(request, self._namespace, self._timeout_ms_default)
        started = await self._start(starting)
        return pb.BeginResponse(transaction=transaction_message(started.tx))

    @answering
    async def Get(self, request: pb.GetRequest, context: Context) -> pb.GetResponse:
        """Read one transaction."""
        return pb.GetResponse(transaction=transaction_message(await self._find(request)))

    @answering_stream
    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        """Send a transaction as it stands, and again as it changes, until it is finished."""
        tx = await self._find(request)
        yield pb.WatchResponse(transaction=transaction_message(tx))
        while not tx.state.finished:
            seen = tx
            tx = await self._engine.wait(seen, lambda now, seen=seen: _differs(now, seen), WATCH_S)  # type: ignore[misc]
            if _differs(tx, seen):
                yield pb.WatchResponse(transaction=transaction_message(tx))

    @answering
    async def LookUp(self, request: pb.LookUpRequest, context: Context) -> pb.LookUpResponse:
        """How far transactions have come, by what the store holds: never what only this process knows yet."""
        found = await self._engine.store.look_up(read_xids(request.xids))
        return pb.LookUpResponse(
            transactions=[
                pb.TransactionProgress(xid=xid.hex(), state=state)  # type: ignore[arg-type]  # the same numbers
                for xid, state in found.states.items()
            ],
            store_id=found.store_id,
            incarnation=found.incarnation,
        )

    async def _find(self, request: pb.GetRequest | pb.WatchRequest) -> Transaction:
        if request.WhichOneof("by") == "idempotency_key":
            wrong: list[Violation] = []
            key = read_key(request.idempotency_key, self._namespace, wrong)
            if wrong:
                raise InvalidRequest(*wrong)
            found = await self._engine.get(key=key)
            if found is None:
                raise NotFound("no transaction with this idempotency_key is known yet")
            return found
        return await self._engine.get_by_xid(read_xid(request.xid))

    def _read_execute(self, request: pb.ExecuteRequest) -> Starting:
        return Starting.of_execute(request, self._namespace, self._timeout_ms_default)

    def _start(self, starting: Starting) -> asyncio.Future[Started]:
        """Begin a transaction, as ``Engine.begin`` does. Raises Overloaded, FormatNotReady, TooMuch."""
        if all(self._participants.has(branch.participant, branch.action) for branch in starting.branches):
            return self._begin(starting)
        size = starting.size
        if self._starting_bytes + size > STARTING_BYTES_MAX:
            raise TooMuch(f"{self._starting_bytes} bytes of requests are being started; ask again", retry_s=1.0)
        self._starting_bytes += size
        return self._streams.spawn(self._look_up_and_begin(starting))

    async def _look_up_and_begin(self, starting: Starting) -> Started:
        try:
            for n, branch in enumerate(starting.branches):
                await check_name(self._participants, branch, f"branches[{n}]")
        except UnknownName:
            # What was begun before the name went away keeps its answer.
            found = await self._engine.get(key=starting.key) if starting.key else None
            if found is None:
                raise
            if found.spec.branches[: found.begun] != starting.branches or found.spec.ordered != starting.ordered:
                raise KeyReused(found.spec.xid) from None
            return Started(found, False)
        finally:
            self._starting_bytes -= starting.size
        return await self._begin(starting)

    def _begin(self, starting: Starting) -> asyncio.Future[Started]:
        return self._engine.begin(
            starting.key,
            starting.timeout_ms,
            starting.branches,
            starting.metadata,
            labels=starting.labels,
            interactive=starting.interactive,
            ordered=starting.ordered,
        )


def _differs(tx: Transaction, seen: Transaction) -> bool:
    """Whether there is something to tell: not for a lease that was renewed."""
    return tx.version > seen.version and (
        (tx.state, tx.attention, tx.steps, tx.deadline_ms) != (seen.state, seen.attention, seen.steps, seen.deadline_ms)
    )
