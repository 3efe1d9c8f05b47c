"""The gRPC services of the coordinator: what comes in, checked; what goes out."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog
from grpc_status import rpc_status

from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import coordinator_pb2_grpc as pb_grpc
from tricord.v1 import registry_pb2, registry_pb2_grpc

from .engine import Engine, KeyReused, Started, Until
from .errors import (
    Conflict,
    InvalidRequest,
    NotAllowed,
    NotFound,
    RpcError,
    TooMuch,
    Unavailable,
    UnknownName,
    Violation,
)
from .journal import Overloaded
from .model import BranchSpec, Transaction
from .participants import Participants
from .store.rows import RowRejected, StoreError
from .wire import Starting, error_status, read_key, read_registration, read_xid, read_xids, transaction_message

_log = structlog.get_logger(__name__)

ANSWER_MARGIN_SHARE, ANSWER_MARGIN_S_MAX = 0.1, 0.25
"""How long before the caller's deadline it is told the state of that moment, rather than nothing."""

NAMES_TOLD_MAX = 10
STARTING_BYTES_MAX = 128 * 1024 * 1024
"""Requests whose beginning is not stored yet, all together: they wait when the store is away."""

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
Context = grpc.aio.ServicerContext[Any, Any]
Method = Callable[[Any, _Request, Context], Awaitable[_Response]]


def answering(method: Method[_Request, _Response]) -> Method[_Request, _Response]:
    """Answer errors as google.rpc.Status with a reason; what nobody foresaw is logged, and told as INTERNAL."""

    @functools.wraps(method)
    async def call(self: Any, request: _Request, context: Context) -> _Response:
        # What is kept of an error is its status: the error itself would keep its frames, and with them the request.
        try:
            return await method(self, request, context)
        except RpcError as error:
            status = error_status(error)
        except Overloaded as error:
            status = error_status(TooMuch(f"the coordinator has too much to do: {error}; ask again", retry_s=1.0))
        except StoreError as error:
            _log.warning("rpc.store_error", method=method.__qualname__, error=str(error))
            status = error_status(Unavailable("the coordinator's store does not answer; ask again", retry_s=1.0))
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            _log.exception("rpc.failed", method=method.__qualname__)
            status = error_status(RpcError(f"the coordinator failed: {type(error).__name__}; its log has more"))
        del request  # gRPC keeps the error that ends the call, and it this frame, until the collector comes
        await context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError("unreachable")

    return call


class CoordinatorService(pb_grpc.CoordinatorServiceServicer):
    """What initiators call."""

    def __init__(self, engine: Engine, participants: Participants, namespace: str, timeout_ms_default: int) -> None:
        self._engine = engine
        self._participants = participants
        self._namespace = namespace
        self._timeout_ms_default = timeout_ms_default
        self._starting_bytes = 0

    @answering
    async def Execute(self, request: pb.ExecuteRequest, context: Context) -> pb.ExecuteResponse:
        """Run a transaction, or find the one that the key names, and answer when it has come far enough."""
        starting = Starting(request, self._namespace, self._timeout_ms_default)
        size = request.ByteSize()
        if self._starting_bytes + size > STARTING_BYTES_MAX:
            raise TooMuch(f"{self._starting_bytes} bytes of requests are being started; ask again", retry_s=1.0)
        self._starting_bytes += size
        try:
            started = await self._start(starting)
        except KeyReused as error:
            raise Conflict(
                f"idempotency_key: {error}",
                reason="IDEMPOTENCY_KEY_REUSED",
                violations=(Violation("idempotency_key", str(error)),),
                metadata={"xid": error.xid.hex()},
            ) from error
        except RowRejected as error:
            raise RpcError(str(error), reason="ROW_REJECTED") from error
        finally:
            self._starting_bytes -= size
        until = Until.DECIDED if request.wait == pb.WAIT_DECIDED else Until.FINISHED
        tx = await self._engine.wait(started.tx, until, _left_s(context))
        return pb.ExecuteResponse(transaction=transaction_message(tx))

    @answering
    async def Get(self, request: pb.GetRequest, context: Context) -> pb.GetResponse:
        """Read one transaction."""
        if request.WhichOneof("by") == "idempotency_key":
            wrong: list[Violation] = []
            key = read_key(request.idempotency_key, self._namespace, wrong)
            if wrong:
                raise InvalidRequest(*wrong)
            found = await self._engine.get(key=key)
            if found is None:
                raise NotFound("no transaction with this idempotency_key is known yet")
            return pb.GetResponse(transaction=transaction_message(found))
        return pb.GetResponse(transaction=transaction_message(await get_by_xid(self._engine, request.xid)))

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

    async def _start(self, starting: Starting) -> Started:
        try:
            await self._check_names(starting.branches)
        except UnknownName:
            # What was begun before the name went away keeps its answer.
            found = await self._engine.get(key=starting.key) if starting.key else None
            if found is None:
                raise
            if found.spec.branches != starting.branches:
                raise KeyReused(found.spec.xid) from None
            return Started(found, False)
        return await self._engine.begin(starting.key, starting.timeout_ms, starting.branches, starting.metadata)

    async def _check_names(self, branches: tuple[BranchSpec, ...]) -> None:
        """Refuse what no participant has registered, before anything is stored."""
        for n, branch in enumerate(branches):
            row = await self._participants.look_up(branch.participant, branch.action)
            if row is None:
                text = (
                    f"no participant {branch.participant} is registered; start it with --coordinator, or mend the name"
                )
                raise UnknownName(text, violations=(Violation(f"branches[{n}].participant", text),))
            if branch.action not in row.actions:
                known = ", ".join(sorted(row.actions)[:NAMES_TOLD_MAX])
                text = f"participant {branch.participant} has no action {branch.action}; it has {known}"
                violations = (Violation(f"branches[{n}].action", text),)
                raise UnknownName(text, reason="UNKNOWN_ACTION", violations=violations)


class RegistryService(registry_pb2_grpc.RegistryServiceServicer):
    """Where participants make themselves known."""

    def __init__(self, participants: Participants, *, allowed: bool) -> None:
        self._participants = participants
        self._allowed = allowed

    @answering
    async def RegisterParticipant(
        self, request: registry_pb2.RegisterParticipantRequest, context: Context
    ) -> registry_pb2.RegisterParticipantResponse:
        """Store where a participant is, what it can do, and in which database it keeps its fence."""
        if not self._allowed:
            raise NotAllowed("this coordinator takes no registrations: it was started without --allow-registration")
        row = read_registration(request)
        clashes = await self._participants.register(row, replace_fence=request.replace_fence)
        if clashes:
            action, (stored, given) = next(iter(clashes.items()))
            text = (
                f"participant {row.name}, action {action}: registered with fence database {stored}, this instance has "
                f"{given}: two instances of a participant must share one database. If it was replaced on purpose, "
                "register once with replace_fence"
            )
            raise Conflict(text, reason="FENCE_DATABASE_CHANGED", metadata={"stored": stored, "given": given})
        return registry_pb2.RegisterParticipantResponse()


async def get_by_xid(engine: Engine, text: str) -> Transaction:
    """A transaction by its xid as text. Raises InvalidRequest, NotFound, StoreError."""
    xid = read_xid(text)
    found = await engine.get(xid=xid)
    if found is None:
        raise NotFound(f"there is no transaction {xid.hex()}", metadata={"xid": xid.hex()})
    return found


def _left_s(context: Context) -> float | None:
    left_s = context.time_remaining()
    return None if left_s is None else left_s - min(left_s * ANSWER_MARGIN_SHARE, ANSWER_MARGIN_S_MAX)
