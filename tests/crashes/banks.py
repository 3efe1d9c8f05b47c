"""Three banks in one process, each on its own address and its own database; every call is written down.

    python -m tests.crashes.banks --folder FOLDER --coordinator HOST:PORT

Beside the example's actions they have what a crash needs: the account ``mute``, to whose owner no Try is ever
answered, though it is carried out; and the action ``stumble``, whose first Try fails.
"""

from __future__ import annotations

import argparse
import functools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from sqlalchemy import Connection

from examples.transfer import bank
from examples.transfer.processes import free_address
from participant_sdk import SERVER_OPTIONS, Call, Participant
from tests.chaos.counted import Calls, CountThreads
from tricord.v1 import participant_pb2 as pb

BANKS = ("bank-1", "bank-2", "bank-3")
MUTE, OPEN = "mute", "open"
OPENING: Mapping[str, int] = {OPEN: 1_000_000, MUTE: 1_000_000}
STREAMS_MAX = 8
WORKERS = 16
STOP_S = 1.0


class Mute(grpc.ServerInterceptor):
    """Keeps back what ``mute`` would answer."""

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """See grpc."""
        handler = continuation(handler_call_details)
        if handler is None:
            return handler
        coders = (handler.request_deserializer, handler.response_serializer)
        if handler.stream_stream is None:
            return grpc.unary_unary_rpc_method_handler(functools.partial(_alone, handler), *coders)
        return grpc.stream_stream_rpc_method_handler(functools.partial(_exchange, handler), *coders)


def _exchange(handler: Any, requests: Iterator[pb.ExchangeRequest], context: Any) -> Iterator[pb.ExchangeResponse]:
    kept_back: set[int] = set()

    def noted() -> Iterator[pb.ExchangeRequest]:
        for request in requests:
            kept_back.update(call.call_id for call in request.calls if is_mute(call))
            yield request

    for response in handler.stream_stream(noted(), context):
        replies = [reply for reply in response.replies if reply.call_id not in kept_back]
        if replies:
            yield pb.ExchangeResponse(replies=replies)


def _alone(handler: Any, request: Any, context: grpc.ServicerContext) -> Any:
    response = handler.unary_unary(request, context)
    if isinstance(request, pb.TryRequest) and is_mute(request.call):
        gone = threading.Event()
        if context.add_callback(gone.set):
            gone.wait()
    return response


def is_mute(call: pb.Call) -> bool:
    """Whether this call is never answered."""
    return call.phase == pb.PHASE_TRY and f'"{MUTE}"'.encode() in call.payload.data


def add_stumble(participant: Participant) -> None:
    """A credit whose first Try fails."""
    stumbled: set[str] = set()

    @participant.action("stumble")
    def stumble(call: Call[bank.Credit], db: Connection) -> None:
        if call.xid not in stumbled:
            stumbled.add(call.xid)
            raise RuntimeError("it stumbles")
        _add(db, call, incoming=call.payload.amount)

    @stumble.confirm
    def confirm(call: Call[bank.Credit], db: Connection) -> None:
        _add(db, call, incoming=-call.payload.amount, balance=call.payload.amount)

    @stumble.cancel
    def cancel(call: Call[bank.Credit], db: Connection) -> None:
        _add(db, call, incoming=-call.payload.amount)


def _add(db: Connection, call: Call[bank.Credit], **amounts: int) -> None:
    columns = {name: bank.accounts.c[name] + amount for name, amount in amounts.items()}
    db.execute(bank.accounts.update().where(bank.accounts.c.name == call.payload.account).values(columns))


def url_of(folder: Path, name: str) -> str:
    """The address of a bank's database."""
    return f"sqlite:///{folder / name}.db"


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.crashes.banks")
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--coordinator", required=True)
    options = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    ends = [_serve(name, options.folder, options.coordinator) for name in BANKS]
    print("banks: they serve", flush=True)
    while not stop.wait(1.0):  # a wait without end would keep the signal's handler from running
        pass
    for end in ends:
        end()


def _serve(name: str, folder: Path, coordinator: str) -> Callable[[], None]:
    """Serve one bank, registered; returns what ends it."""
    engine = bank.open_database(url_of(folder, name))
    bank.open_accounts(engine, OPENING)
    participant = Participant(name, engine)
    bank.add_actions(participant)
    add_stumble(participant)
    calls = Calls(folder / f"{name}.calls")
    server = grpc.server(
        ThreadPoolExecutor(WORKERS), interceptors=[CountThreads(calls), Mute()], options=SERVER_OPTIONS
    )
    attached = participant.add_to_server(server, streams_max=STREAMS_MAX)
    address = free_address()
    server.add_insecure_port(address)
    server.start()
    registration = attached.register(coordinator, address)
    while not registration.wait(1.0):
        pass

    def end() -> None:
        registration.stop()
        attached.drain(STOP_S)
        server.stop(STOP_S).wait()
        engine.dispose()
        calls.close()

    return end


if __name__ == "__main__":
    main()
