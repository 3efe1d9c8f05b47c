"""The alert hook: a small JSON document is POSTed for each transaction that has come to need attention.

A thread of its own sends them, one after another, so that the engine never waits: neither for a hook that hangs nor for
one that is away. What it cannot get rid of is dropped, counted and logged; the store still shows it (``tricord list``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Any, NamedTuple
from urllib.parse import unquote

import structlog
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.response import HTTPResponse
from urllib3.util import make_headers, parse_url

from .model import WHY_STUCK, Attention, State, Transaction

_log = structlog.get_logger(__name__)

ERRORS_MAX = 10
"""How many branches' errors a document tells at the most."""
HISTORY_CHANGED = "the database's history has changed (a restore or a failover): decisions may be lost"
CONTRADICTED = "a late answer contradicts what is stored"


class Patience(NamedTuple):
    """How much is tried to get rid of an alert."""

    waiting_max: int = 1_000
    """Alerts that wait to be sent; further ones are dropped."""
    timeout_s: float = 5.0
    """For connecting, and then for the whole answer."""
    attempts_max: int = 8
    base_s: float = 0.5
    """Ceiling of the first pause before a retry; it doubles with each."""
    cap_s: float = 15.0
    give_up_s: float = 60.0
    """No attempt begins later than so long after the first."""


PATIENCE = Patience()


class Alert(NamedTuple):
    """One document on its way."""

    xid: str
    body: bytes


def document(tx: Transaction, branch: int | None, coordinator: str, now_s: float) -> dict[str, Any]:
    """What the hook is told, with the names that the log uses; ``branch`` is an index, None where no branch is why."""
    spec = None if branch is None else tx.spec.branches[branch]
    if branch is None:
        message = WHY_STUCK if tx.attention is Attention.STUCK else HISTORY_CHANGED
    else:
        message = tx.steps[branch].error or CONTRADICTED
    return {
        "event": "transaction.attention",
        "time": datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds"),
        "coordinator": coordinator,
        "xid": tx.spec.xid.hex(),
        "state": State(tx.state).name,
        "why": tx.attention.name,
        "branch": None if branch is None else branch + 1,
        "participant": None if spec is None else spec.participant,
        "action": None if spec is None else spec.action,
        "message": message,
        "errors": tx.errors()[:ERRORS_MAX],
    }


class Alerts:
    """Sends alerts to one URL."""

    def __init__(self, url: str, coordinator: str, patience: Patience = PATIENCE) -> None:
        self.sent = 0
        self.dropped = 0
        self._coordinator = coordinator
        self._patience = patience
        self._url = parse_url(url)
        self._headers = {"Content-Type": "application/json", "User-Agent": "tricord"}
        if self._url.auth:
            self._headers |= make_headers(basic_auth=unquote(self._url.auth))
        self._http = urllib3.PoolManager(timeout=patience.timeout_s, retries=False)
        self._http.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
        self._waiting: SimpleQueue[Alert | None] = SimpleQueue()
        self._giving_up = threading.Event()
        self._counting = threading.Lock()  # two threads drop
        # A daemon: a hook that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def tell(self, tx: Transaction, branch: int | None) -> None:
        """Have it sent, some time soon; or dropped, if too many wait. Never waits."""
        alert = Alert(tx.spec.xid.hex(), json.dumps(document(tx, branch, self._coordinator, time.time())).encode())
        if self._waiting.qsize() >= self._patience.waiting_max:
            self._drop(alert, f"{self._patience.waiting_max} alerts wait to be sent")
        else:
            self._waiting.put(alert)

    async def stop(self, wait_s: float) -> None:
        """Send what waits for up to ``wait_s`` seconds; the rest is dropped."""
        self._waiting.put(None)
        await asyncio.to_thread(self._thread.join, wait_s)
        if self._thread.is_alive():
            self._giving_up.set()
            unsent = self._waiting.qsize()  # the end's mark, which is no alert, makes up for the one that is being sent
            with self._counting:
                self.dropped += unsent
            _log.warning("alert.dropped", why="the coordinator stops", alerts=unsent, dropped=self.dropped)
        _log.info("alerts.stopped", sent=self.sent, dropped=self.dropped)

    # --- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (alert := self._waiting.get()) is not None and not self._giving_up.is_set():
            try:
                self._send(alert)
            except Exception as error:  # whatever it is, the next one must be sent
                _log.exception("alert.failed", xid=alert.xid)
                self._drop(alert, type(error).__name__)

    def _send(self, alert: Alert) -> None:
        patience = self._patience
        end_s = time.monotonic() + patience.give_up_s
        for attempt in range(patience.attempts_max):
            error = self._post(alert.body)
            if error is None:
                self.sent += 1
                return
            if self._giving_up.is_set():
                return  # ``stop`` has counted it
            pause_s = random.uniform(0, min(patience.cap_s, patience.base_s * 2**attempt))
            if attempt + 1 == patience.attempts_max or time.monotonic() + pause_s > end_s:
                self._drop(alert, error)
                return
            if attempt == 0:
                _log.warning("alert.not_sent", xid=alert.xid, error=error)
            if self._giving_up.wait(pause_s):
                return

    def _post(self, body: bytes) -> str | None:
        """One attempt; what went wrong with it. Only 2xx is well: a redirect is not followed."""
        try:
            answer = self._http.request(
                "POST", self._url.url, body=body, headers=self._headers, redirect=False, preload_content=False
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        answer.close()  # the body is nobody's business, and could be without end
        return None if 200 <= answer.status < 300 else f"it answered {answer.status}"

    def _drop(self, alert: Alert, why: str) -> None:
        with self._counting:
            self.dropped += 1
        _log.warning("alert.dropped", why=why, xid=alert.xid, dropped=self.dropped)


# --- an answer that comes byte by byte has no more time than another ---------------------------------------


class _Connection(HTTPConnection):
    def getresponse(self) -> HTTPResponse:  # type: ignore[override]  # as urllib3 has it
        with _in_time(self):
            return super().getresponse()


class _SecureConnection(HTTPSConnection):
    def getresponse(self) -> HTTPResponse:  # type: ignore[override]  # as urllib3 has it
        with _in_time(self):
            return super().getresponse()


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


@contextlib.contextmanager
def _in_time(connection: HTTPConnection) -> Iterator[None]:
    """Cut a connection that takes longer than its time-out, which begins anew with each byte that is read."""
    connected = connection.sock
    assert connected is not None
    assert connection.timeout is not None

    def cut() -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(connected, socket.SHUT_RDWR)  # of TCP alone: TLS is in use in another thread

    timer = threading.Timer(connection.timeout, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
