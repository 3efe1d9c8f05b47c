"""Participants that write down every call that reaches them, whatever their fences then make of it.

    python -m tests.chaos.counted bank --calls FILE …the bank's own options…
    python -m tests.chaos.counted shop --calls FILE --name shop --listen HOST:PORT --database URL …

A repeated call is harmless, so nothing that a participant has stored tells of it. That three coordinators do not send
every call three times can only be seen on the wire: here. A line is written before its call runs, by one write to the
end of the file, so that SIGKILL loses none.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
from sqlalchemy.exc import SQLAlchemyError

from examples.transfer import bank
from participant_sdk import SERVER_OPTIONS, ConfigurationError, Participant
from tests.chaos import shop
from tricord.v1 import participant_pb2 as pb

STREAMS_MAX = 16
WORKERS = 32
GRACE_S = 5.0
LAST_REPLIES_S = 1.0


class Called(NamedTuple):
    """One thing that a participant can be asked to do."""

    xid: str
    branch_id: int
    phase: str


def read(path: Path) -> Counter[Called]:
    """How often each was asked for; empty if the participant was never called."""
    counts: Counter[Called] = Counter()
    if path.exists():
        for line in path.read_text().splitlines():
            xid, branch_id, phase = line.split()
            counts[Called(xid, int(branch_id), phase)] += 1
    return counts


class Calls:
    """The file of one participant's calls."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(self, calls: Iterable[pb.Call], phase: pb.Phase.ValueType | None = None) -> None:
        """Write down calls; ``phase`` is that of the unary method, which stands above the call's own."""
        names = pb.Phase.Name
        lines = [f"{call.xid} {call.branch_id} {names(phase or call.phase)}\n" for call in calls]
        os.write(self._file, "".join(lines).encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


_UNARY: Mapping[str, pb.Phase.ValueType] = {
    "Try": pb.PHASE_TRY,
    "Confirm": pb.PHASE_CONFIRM,
    "Cancel": pb.PHASE_CANCEL,
}


class CountThreads(grpc.ServerInterceptor):
    """Counts the calls that a ``grpc.server`` takes."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """See grpc."""
        handler = continuation(handler_call_details)
        method = handler_call_details.method.rpartition("/")[2]

        def counted(requests: Iterator[pb.ExchangeRequest]) -> Iterator[pb.ExchangeRequest]:
            for request in requests:
                self._calls.add(request.calls)
                yield request

        def exchange(requests: Iterator[pb.ExchangeRequest], context: Any) -> Iterator[pb.ExchangeResponse]:
            yield from handler.stream_stream(counted(requests), context)

        def unary(request: Any, context: Any) -> Any:
            self._calls.add([request.call], _UNARY[method])
            return handler.unary_unary(request, context)

        return _handler(handler, exchange, unary)


class CountTasks(grpc.aio.ServerInterceptor):
    """Counts the calls that a ``grpc.aio.server`` takes."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """See grpc."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.rpartition("/")[2]

        async def counted(requests: AsyncIterator[pb.ExchangeRequest]) -> AsyncIterator[pb.ExchangeRequest]:
            async for request in requests:
                self._calls.add(request.calls)
                yield request

        async def exchange(
            requests: AsyncIterator[pb.ExchangeRequest], context: Any
        ) -> AsyncIterator[pb.ExchangeResponse]:
            async for response in handler.stream_stream(counted(requests), context):
                yield response

        async def unary(request: Any, context: Any) -> Any:
            self._calls.add([request.call], _UNARY[method])
            return await handler.unary_unary(request, context)

        return _handler(handler, exchange, unary)


def _handler(handler: Any, exchange: Callable[[Any, Any], Any], unary: Callable[[Any, Any], Any]) -> Any:
    """A method's handler with another behaviour."""
    coders = (handler.request_deserializer, handler.response_serializer)
    if handler.stream_stream is not None:
        return grpc.stream_stream_rpc_method_handler(exchange, *coders)
    return grpc.unary_unary_rpc_method_handler(unary, *coders)


class CountedBank(Participant):
    """A participant on threads that counts."""

    calls: Calls

    def serve(self, listen: str, **options: Any) -> None:
        """Serve until SIGTERM."""
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
        workers = ThreadPoolExecutor(WORKERS)
        server = grpc.server(workers, interceptors=[CountThreads(self.calls)], options=SERVER_OPTIONS)
        attached = self.add_to_server(server, streams_max=STREAMS_MAX)
        server.add_insecure_port(listen)
        server.start()
        registration = attached.register(options["coordinator"], listen)
        attached.start_upkeep(options["coordinator"])
        try:
            while not (stop.is_set() or registration.wait(0.1)):
                pass
            print(f"participant {self.name} serves on {listen}", flush=True)
            while not stop.wait(1.0):  # a wait without end would keep the signal's handler from running
                pass
        finally:
            registration.stop()
            attached.drain(GRACE_S)
            server.stop(LAST_REPLIES_S).wait()


async def serve_tasks(participant: Participant, listen: str, coordinator: str, calls: Calls) -> None:
    """Serve a participant of an AsyncEngine until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = grpc.aio.server(interceptors=[CountTasks(calls)], options=SERVER_OPTIONS)
    attached = await participant.add_to_server_async(server)
    server.add_insecure_port(listen)
    await server.start()
    registration = attached.register(coordinator, listen)
    attached.start_upkeep(coordinator)
    stopping, registered = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(registration.wait())
    try:
        await asyncio.wait([stopping, registered], return_when=asyncio.FIRST_COMPLETED)
        print(f"participant {participant.name} serves on {listen}", flush=True)
        await stopping
    finally:
        registered.cancel()
        await registration.stop()
        await attached.drain(GRACE_S)
        await server.stop(LAST_REPLIES_S)


def main(arguments: Sequence[str]) -> None:
    """Run a bank or a shop."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("kind", choices=("bank", "shop"))
    parser.add_argument("--calls", required=True, type=Path)
    options, rest = parser.parse_known_args(arguments)
    calls = Calls(options.calls)
    try:
        if options.kind == "bank":
            CountedBank.calls = calls
            bank.main(rest, CountedBank)
        else:
            _run_shop(rest, calls)
    finally:
        calls.close()


def _run_shop(arguments: Sequence[str], calls: Calls) -> None:
    parser = argparse.ArgumentParser()
    for name in ("name", "listen", "database", "coordinator"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--stock", required=True, type=bank.read_accounts)
    options = parser.parse_args(arguments)

    async def run() -> None:
        engine = shop.open_database(options.database)
        try:
            await shop.open_stock(engine, options.stock)
            participant = Participant(options.name, engine)
            shop.add_actions(participant)
            await serve_tasks(participant, options.listen, options.coordinator, calls)
        finally:
            await engine.dispose()

    try:
        asyncio.run(run())
    except (ConfigurationError, SQLAlchemyError) as error:
        sys.exit(f"shop {options.name}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
