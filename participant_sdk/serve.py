"""Serving a participant: attach it to a gRPC server, register it, and end without cutting anything off.

Ending has an order: first no call is taken any more (it is answered "unknown, stopping" and will be repeated
elsewhere or later) and the address is withdrawn at the coordinator, then the handlers that run may end and their
replies leave, then the streams and the server end.
A server that stopped first would cut off the replies of what it has just committed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import grpc

from participant_sdk.errors import ConfigurationError
from participant_sdk.registration import TaskRegistration, ThreadRegistration
from participant_sdk.serve_attached import AsyncAttached, Attached
from participant_sdk.service_messages import MESSAGE_BYTES_MAX
from participant_sdk.upkeep import Upkeep, UpkeepState

if TYPE_CHECKING:
    from participant_sdk.participant import Participant

logger = logging.getLogger("tricord.participant")

UNARY_WORKERS: Final = 32
LAST_REPLIES_SECONDS: Final = 2.0

SERVER_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.so_reuseport", 0),  # else a second process shares the port silently
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


class Serving:
    """A participant that serves. `address` is "host:port" with the real port."""

    def __init__(
        self, address: str, attached: Attached, server: grpc.Server, registration: ThreadRegistration | None
    ) -> None:
        self.address = address
        self.fence_id = attached.fence_id
        self._attached = attached
        self._server = server
        self._registration = registration

    def wait_registered(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` s until the coordinator has accepted the registration; False if the time is up.

        Raises ConfigurationError if it has refused it. True at once without a coordinator.
        """
        return self._registration is None or self._registration.wait(timeout)

    @property
    def upkeep(self) -> UpkeepState | None:
        """What purge and resolver have done so far; None if they are off, or there is no coordinator."""
        return self._attached.upkeep

    def stop(self, grace: float = 0.0) -> bool:
        """Take no more calls, give those that run `grace` seconds, end; whether all of them ended."""
        if self._registration is not None:
            self._registration.leave()  # other instances get the calls while this one ends
        ended = self._attached.drain(grace)
        if self._registration is not None:
            self._registration.stop()
        self._server.stop(LAST_REPLIES_SECONDS).wait()
        return _told_about(self._attached.name, ended)


class AsyncServing:
    """As `Serving`, for an AsyncEngine."""

    def __init__(
        self, address: str, attached: AsyncAttached, server: grpc.aio.Server, registration: TaskRegistration | None
    ) -> None:
        self.address = address
        self.fence_id = attached.fence_id
        self._attached = attached
        self._server = server
        self._registration = registration

    async def wait_registered(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - as in Serving
        """As `Serving.wait_registered`."""
        if self._registration is not None:
            try:
                await asyncio.wait_for(self._registration.wait(), timeout)
            except TimeoutError:
                return False
        return True

    @property
    def upkeep(self) -> UpkeepState | None:
        """As `Serving.upkeep`."""
        return self._attached.upkeep

    async def stop(self, grace: float = 0.0) -> bool:
        """As `Serving.stop`."""
        if self._registration is not None:
            self._registration.leave()
        ended = await self._attached.drain(grace)
        if self._registration is not None:
            await self._registration.stop()
        await self._server.stop(LAST_REPLIES_SECONDS)
        return _told_about(self._attached.name, ended)


def _told_about(name: str, ended: bool) -> bool:
    if not ended:
        logger.warning("participant %s ends although calls still run; what they do not commit will be repeated", name)
    return ended


def start(
    participant: Participant,
    listen: str,
    coordinator: str | None,
    advertise: str | None,
    upkeep: Upkeep | None,
    streams_max: int,
) -> Serving:
    """See `Participant.start`."""
    host, _ = split_address(listen)
    address_known(host, coordinator, advertise)
    workers = ThreadPoolExecutor(streams_max + UNARY_WORKERS, thread_name_prefix="tricord-grpc")
    server = grpc.server(workers, options=SERVER_OPTIONS)
    attached = participant.add_to_server(server, streams_max=streams_max)
    address = f"{host}:{_bind(server, listen)}"
    server.start()
    registration = attached.register(coordinator, advertise or address) if coordinator else None
    if coordinator and upkeep is not None and not upkeep.is_off:
        attached.start_upkeep(coordinator, upkeep)
    return Serving(address, attached, server, registration)


async def start_async(
    participant: Participant, listen: str, coordinator: str | None, advertise: str | None, upkeep: Upkeep | None
) -> AsyncServing:
    """See `Participant.start_async`."""
    host, _ = split_address(listen)
    address_known(host, coordinator, advertise)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    attached = await participant.add_to_server_async(server)
    address = f"{host}:{_bind(server, listen)}"
    await server.start()
    registration = attached.register(coordinator, advertise or address) if coordinator else None
    if coordinator and upkeep is not None and not upkeep.is_off:
        attached.start_upkeep(coordinator, upkeep)
    return AsyncServing(address, attached, server, registration)


def serve(
    participant: Participant,
    listen: str,
    coordinator: str | None,
    advertise: str | None,
    upkeep: Upkeep | None,
    streams_max: int,
    grace: float,
) -> None:
    """See `Participant.serve`."""
    with _signals() as wait_for_signal:
        serving = start(participant, listen, coordinator, advertise, upkeep, streams_max)
        try:
            while not serving.wait_registered(0.1):
                if wait_for_signal(0):
                    return
            _announce(participant.name, serving.address, coordinator, advertise)
            wait_for_signal(None)
        finally:
            serving.stop(grace)


async def serve_async(
    participant: Participant,
    listen: str,
    coordinator: str | None,
    advertise: str | None,
    upkeep: Upkeep | None,
    grace: float,
) -> None:
    """See `Participant.serve_async`."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    with _task_signals(told):
        serving = await start_async(participant, listen, coordinator, advertise, upkeep)
        waits = [loop.create_task(told.wait()), loop.create_task(serving.wait_registered())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not told.is_set():
                await waits[1]
                _announce(participant.name, serving.address, coordinator, advertise)
                await told.wait()
        finally:
            for wait in waits:
                wait.cancel()
            await serving.stop(grace)


@contextmanager
def _task_signals(told: asyncio.Event) -> Iterator[None]:
    """Sets `told` at the first SIGTERM or SIGINT; then the old handlers are back, as in `_signals`."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("serve_async ends at a signal, which only the main thread gets: use start_async here")
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        while before:
            number, handler = before.popitem()
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def on_signal() -> None:
        restore()
        told.set()

    for number in before:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        restore()


def _announce(name: str, address: str, coordinator: str | None, advertise: str | None) -> None:
    place = f" (registered at {coordinator} as {advertise or address})" if coordinator else ""
    print(f"participant {name} serves on {address}{place}", flush=True)


@contextmanager
def _signals() -> Iterator[Any]:
    """Gives a function that waits up to so many seconds (None: for ever) for SIGTERM or SIGINT.

    The handler only takes a note: anything with a lock in it could meet the lock held by the very thread that it
    interrupts. Python runs it in the main thread alone, and that one may sleep in select() while the system hands the
    signal to another thread: so it is the interpreter itself that writes to the pipe (`set_wakeup_fd`). After the
    first signal the old handlers are back, so that a second one ends the process at once.
    """
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    told = False
    in_main_thread = threading.current_thread() is threading.main_thread()
    before: dict[int, Any] = {}

    def restore() -> None:
        while before:
            number, handler = before.popitem()
            signal.signal(number, handler)

    def on_signal(number: int, frame: Any) -> None:
        nonlocal told
        told = True
        restore()

    def wait_for_signal(seconds: float | None) -> bool:
        while not told and select.select([readable], [], [], seconds)[0]:
            with suppress(BlockingIOError):
                os.read(readable, 100)  # another signal's: the program may have handlers of its own
        return told

    wakeup_fd = signal.set_wakeup_fd(writable, warn_on_full_buffer=False) if in_main_thread else -1
    if in_main_thread:
        before.update({number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)})
    try:
        yield wait_for_signal
    finally:
        if in_main_thread:
            restore()
            signal.set_wakeup_fd(wakeup_fd)
        os.close(readable)
        os.close(writable)


def split_address(listen: str) -> tuple[str, int]:
    """Host and port of "host:port"; raises ConfigurationError."""
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"{listen!r} is not an address of the form host:port")
    return host, int(port)


def address_known(host: str, coordinator: str | None, advertise: str | None) -> None:
    """Raises ConfigurationError if there is no address under which the coordinator could call back."""
    if advertise is not None:
        split_address(advertise)
    if coordinator is not None:
        split_address(coordinator)
        if advertise is None and host in ("0.0.0.0", "[::]", "*"):
            raise ConfigurationError(
                f"it listens on every address ({host}): say with advertise='host:port' where the coordinator reaches it"
            )


def _bind(server: grpc.Server | grpc.aio.Server, listen: str) -> int:
    port = 0
    with suppress(RuntimeError):
        port = server.add_insecure_port(listen)
    if port == 0:
        raise ConfigurationError(f"cannot listen on {listen}: the port is in use, or the address is not of this host")
    return port
