"""One coordinator process, from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Protocol

import structlog

from . import logs
from .alerts import Alerts
from .config import RunError, Settings, masked_url
from .delivery import Delivery
from .engine import Engine
from .health import Health
from .participants import Participants
from .purge import Purge
from .server_grpc import bind, make_server
from .store.rows import StoreError, StoreUnreachable
from .store.store import Store, backend_for

_log = structlog.get_logger(__name__)

SWITCH_S = 0.001
"""For so long the loop goes on when the thread of a flush wants to: it needs a few turns a flush, microseconds each."""


STOP_S = 1.0
"""How long live transactions that nobody waits for any more may go on when the process stops."""
ALERTS_STOP_S = 2.0
"""How long alerts that wait may then still be sent."""


class Told(Protocol):
    """Who is told how a coordinator fares."""

    def ready(self, address: str) -> None:
        """It serves."""

    def stopped(self, counts: Mapping[str, int]) -> None:
        """It has stopped in order, after so many transactions and flushes."""


class _Printed:
    """On standard output, for whoever has started it."""

    def ready(self, address: str) -> None:
        print(f"tricord: listening on {address}", flush=True)

    def stopped(self, counts: Mapping[str, int]) -> None:
        pass  # the log says it


def run(settings: Settings, told: Told | None = None, worker: int = 0) -> None:
    """Run a coordinator until SIGTERM or SIGINT; as that one of several workers, if numbered. Raises RunError."""
    logs.configure(settings.log_format, settings.log_level, worker)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(Coordinator(settings, told or _Printed(), worker).run())


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # an extra: a sixth less CPU per call
    except ImportError:
        return None
    return uvloop.Loop


class Coordinator:
    """The parts of one coordinator, put together."""

    def __init__(self, settings: Settings, told: Told, worker: int) -> None:
        self._settings = settings
        self._told = told
        self._worker = worker

    def _on_signals(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        """The first one stops, the second ends at once: whatever is left is as after a crash.

        A worker ends in order however many it gets: a terminal's Ctrl-C reaches it as well as its parent, which then
        sends its own.
        """
        numbers = (signal.SIGTERM, signal.SIGINT)

        def on_signal() -> None:
            stop.set()
            if not self._worker:
                for number in numbers:
                    loop.remove_signal_handler(number)
                    signal.signal(number, signal.SIG_DFL)

        for number in numbers:
            loop.add_signal_handler(number, on_signal)

    async def run(self) -> None:
        """Start, serve until a signal, drain, stop."""
        settings = self._settings
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._on_signals(loop, stop)
        try:
            store = Store(backend_for(settings.store, settings.lease_ms))
            opening = loop.create_task(store.open())
            stopping = loop.create_task(stop.wait())
            await asyncio.wait([opening, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                store.stop_waiting()
            await opening
        except StoreError as error:
            raise RunError(str(error), unreachable=isinstance(error, StoreUnreachable)) from error
        async with contextlib.AsyncExitStack() as parts:
            parts.push_async_callback(store.close)
            participants = Participants(store, settings.participants)
            try:
                await participants.refresh()
            except StoreError as error:
                raise RunError(str(error), unreachable=True) from error
            delivery = Delivery(participants, pause_ms_max=settings.backoff_cap_ms)
            parts.push_async_callback(delivery.close)
            engine = Engine(store, delivery, settings.policy(), settings.live_max)
            server, service, servicer = await make_server(engine, participants, settings)
            health = Health(store, servicer)
            parts.push_async_callback(health.stop)
            purge = Purge(store, settings.retention_ms, settings.purge_ms)
            parts.push_async_callback(purge.stop)
            try:
                port = bind(server, settings.listen)
            except OSError as error:
                raise RunError(str(error)) from error
            if settings.alert_url:
                alerts = Alerts(settings.alert_url, f"{socket.gethostname()}:{port}")
                engine.on_attention = alerts.tell
                alerts.start()
                parts.push_async_callback(alerts.stop, ALERTS_STOP_S)
            parts.push_async_callback(engine.stop, STOP_S)
            await engine.start()
            if self._worker <= 1:  # one of them is enough
                purge.start()
            health.start()
            await server.start()
            # What has been made so far stays; collecting it again and again would cost more than the rest.
            gc.collect()
            gc.freeze()
            gc.set_threshold(20_000, 20, 50)
            sys.setswitchinterval(SWITCH_S)
            address = f"{settings.listen.rpartition(':')[0]}:{port}"
            _log.info("coordinator.ready", listen=address, store=masked_url(settings.store), store_id=store.store_id)
            self._told.ready(address)
            await stop.wait()
            _log.info("coordinator.draining", live=engine.live)
            await health.stop()
            await servicer.enter_graceful_shutdown()
            engine.stop_claiming()
            service.stop_streams()
            await server.stop(settings.drain_ms / 1000)
            await engine.stop(STOP_S)
            counts = {"flushes": store.flushes, **engine.counts}
            _log.info("coordinator.stopped", **counts)
            self._told.stopped(counts)
