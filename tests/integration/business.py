"""Shops that sell over a business RPC of their own and enlist what they sell; and who buys there.

`/test.Shop/reserve` takes an Order as JSON. Its modes are one per shop of the chain: a shop that has more than one
calls the next shop within its Try, and passes the rest on.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from sqlalchemy import Connection, create_engine, text

from participant_sdk import Call, Participant, Refused, current_branch_id, current_xid
from participant_sdk.context import bound, collecting
from participant_sdk.enlist_errors import BranchUnknown, NotEnlisted
from participant_sdk.interceptors import XidClientInterceptor, XidServerInterceptor
from tests.coordinators import CALL_S, CoordinatorProcess
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import types_pb2

METHOD = "/test.Shop/reserve"
TABLE = "CREATE TABLE holds (xid TEXT, branch_id INTEGER, item TEXT, status TEXT)"
Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Order:
    """What is bought. Modes: plain, refuse, raise, swallow (errors of the next shop), once (fail after the first)."""

    modes: list[str] = field(default_factory=lambda: ["plain"])
    item: str = "tea"


@dataclass(frozen=True)
class Held:
    """What is held for it."""

    hold: str


def keep(db: Connection, call: Call[Order]) -> Held:
    """Reserve; a Try's own work."""
    values = {"xid": call.xid, "branch_id": call.branch_id, "item": call.payload.item}
    assert (current_xid(), current_branch_id()) == (call.xid, call.branch_id)
    db.execute(text("INSERT INTO holds VALUES (:xid, :branch_id, :item, 'held')"), values)
    if call.payload.modes[0] == "refuse":
        raise Refused("sold_out", f"no {call.payload.item}")
    if call.payload.modes[0] == "raise":
        raise RuntimeError("the shelf fell down")
    return Held(f"{call.payload.item}#{call.branch_id}")


def settle(db: Connection, call: Call[Order], status: str) -> None:
    """Confirm or cancel it."""
    values = {"xid": call.xid, "branch_id": call.branch_id, "status": status}
    changed = db.execute(text("UPDATE holds SET status = :status WHERE xid = :xid AND branch_id = :branch_id"), values)
    assert changed.rowcount == 1


def read_order(request: bytes) -> Order:
    """What is ordered."""
    return Order(**json.loads(request))


def generic_handlers(sell: Callable[..., Any]) -> grpc.GenericRpcHandler:
    """The business service, without protobuf."""
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(sell)
    return grpc.method_handlers_generic_handler("test.Shop", {"reserve": handler})


class Shop:
    """A participant with handlers in threads, and its business service."""

    def __init__(self, name: str, folder: Path, coordinator: str, onward: "Shop | None" = None) -> None:
        self.engine = create_engine(f"sqlite:///{folder / name}.db")
        with self.engine.begin() as db:
            db.execute(text(TABLE))
        self.address = ""
        self.ran = 0
        self.keys: list[str] = []
        """The branch keys of the business calls."""
        self.participant = Participant(name, self.engine)
        self.reserve = self._define(grpc.insecure_channel(onward.address) if onward is not None else None)
        self.serving = self.participant.start("127.0.0.1:0", coordinator=coordinator, upkeep=None)
        assert self.serving.wait_registered(CALL_S)
        self._pool = ThreadPoolExecutor(8)
        handlers = generic_handlers(self.sell)
        options = [("grpc.so_reuseport", 0)]
        self._server = grpc.server(self._pool, [handlers], [XidServerInterceptor()], options)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait(CALL_S)
        self._pool.shutdown()
        self.serving.stop(CALL_S)
        if self._onward is not None:
            self._onward.close()
        self.engine.dispose()

    def sell(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """The business RPC."""
        self.keys += [str(value) for key, value in context.invocation_metadata() if key == "tricord-branch-key"]
        try:
            held: Held = self.reserve.enlist(read_order(request))
            return held.hold.encode()
        except Refused as refused:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refused))
        except NotEnlisted as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{error.reason}: {error}")
        except BranchUnknown as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    def _define(self, onward: grpc.Channel | None) -> Any:
        self._onward = onward
        next_shop = grpc.intercept_channel(onward, XidClientInterceptor()) if onward is not None else None

        @self.participant.action("reserve")
        def reserve(call: Call[Order], db: Connection) -> Held:
            self.ran += 1
            held = keep(db, call)
            mode, *rest = call.payload.modes
            if rest and next_shop is not None:
                try:
                    buy(next_shop, Order(rest, call.payload.item))
                except grpc.RpcError as error:
                    if mode != "swallow":
                        raise Refused("no_supplier") from error
            if mode == "once" and self.ran == 1:
                raise RuntimeError("lost after its calls")
            return held

        @reserve.confirm
        def confirm(call: Call[Order], db: Connection) -> None:
            settle(db, call, "confirmed")

        @reserve.cancel
        def cancel(call: Call[Order], db: Connection) -> None:
            settle(db, call, "cancelled")

        return reserve

    def holds(self) -> list[tuple[int, str]]:
        """Branch ids and statuses of what is held, or was."""
        with self.engine.connect() as db:
            rows = db.execute(text("SELECT branch_id, status FROM holds ORDER BY branch_id"))
            return [(branch_id, status) for branch_id, status in rows]

    def fence_rows(self) -> int:
        """How many branches its fence knows."""
        with self.engine.connect() as db:
            return int(db.execute(text("SELECT count(*) FROM tcc_fence_log")).scalar_one())


def buy(channel: grpc.Channel, order: Order, metadata: Metadata = (), timeout: float = CALL_S) -> str:
    """Call a shop; raises grpc.RpcError."""
    call: Any = channel.unary_unary(METHOD)
    request = json.dumps({"modes": order.modes, "item": order.item}).encode()
    answer: bytes = call(request, timeout=timeout, metadata=metadata)
    return answer.decode()


class Buyer:
    """An initiator: an interactive transaction, and calls to shops that belong to it."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self.service = coordinator.coordinator_service()
        self.xid = self.service.Begin(pb.BeginRequest(), timeout=CALL_S).transaction.xid
        self.seen: set[int] = set()

    @contextmanager
    def shopping(self) -> Iterator[None]:
        """What is called in the block belongs to the transaction; what it sees tried is gathered."""
        with bound(self.xid), collecting() as seen:
            yield
        self.seen |= seen

    def buy(self, shop: Any, order: Order | None = None, metadata: Metadata = ()) -> str:
        """One call to a shop."""
        with (
            self.shopping(),
            grpc.insecure_channel(shop.address) as plain,
        ):
            channel = grpc.intercept_channel(plain, XidClientInterceptor())
            return buy(channel, order or Order(), metadata)

    def confirm(self, named: Sequence[int] | None = None) -> types_pb2.Transaction:
        """Confirm what was seen tried, or these, and wait for the end."""
        ids = sorted(self.seen) if named is None else named
        request = pb.CoordinatorServiceConfirmRequest(xid=self.xid, tried_branch_ids=ids)
        return self.service.Confirm(request, timeout=CALL_S).transaction

    def cancel(self) -> types_pb2.Transaction:
        """Cancel it, and wait for the end."""
        request = pb.CoordinatorServiceCancelRequest(xid=self.xid, reason="changed my mind")
        return self.service.Cancel(request, timeout=CALL_S).transaction

    def get(self) -> types_pb2.Transaction:
        """The transaction as it stands."""
        return self.service.Get(pb.GetRequest(xid=self.xid), timeout=CALL_S).transaction
