"""Where runs take place, one after another: a PostgreSQL database, three banks, and coordinator B, who is always there.

Each run has a coordinator A of its own (``launcher``), which dies at a point; a transaction of its own; and an
initiator who asks A, and then B. Several stages may be at work at the same time: they share nothing but the server.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import grpc

from coordinator.model import Attention, State
from examples.transfer.databases import Account, Databases, Stored, eventually
from examples.transfer.processes import Process, free_address
from participant_sdk.fence import Status
from tests.chaos.counted import Called, read
from tests.crashes import launcher
from tests.crashes.banks import BANKS, url_of
from tests.crashes.broken import VARIABLE
from tests.crashes.scenario import Initiator, Scenario, Told
from tests.postgres import PostgresServer
from tests.processes import ForkedProcesses

SETTINGS: Mapping[str, int] = {"call_timeout_ms": 700, "lease_ms": 1_000, "backoff_cap_ms": 200}
ENDS_S = 60.0
ASKED_AGAIN = 2
LAST = {f"after save {state.name}" for state in State if state.finished}


class Seen(NamedTuple):
    """What a run has left, and what was told in it."""

    scenario: Scenario
    point: str
    """Empty: nobody dies."""
    reached: Sequence[str]
    """The points that A came to."""
    died: bool
    at_death: State | None
    """What was stored just after A's death."""
    called_by_a: Counter[Called]
    """Calls that had reached participants before that."""
    stored: Sequence[Stored]
    """What is stored under the key at the end."""
    fences: Mapping[str, Status | None]
    before: Mapping[str, Account]
    after: Mapping[str, Account]
    calls: Counter[Called]
    told: Sequence[Told]
    """By A, if it lived to tell, and twice by B."""

    @property
    def missing(self) -> Sequence[str]:
        """Points that should have come and have not."""
        wanted = [self.point] if self.point else self.scenario.must_have
        return [point for point in wanted if point not in self.reached]

    @property
    def came(self) -> bool:
        """Whether it was the run that it should be."""
        return not self.missing and self.died == bool(self.point)

    @property
    def finished(self) -> bool:
        """Whether it came to its end. If not, who drives it may disturb the stage's next runs."""
        return all(stored.state.finished for stored in self.stored)


class Stage(ForkedProcesses):
    """The processes of one stage. Leaving the ``with`` block ends them, and drops the database."""

    def __init__(self, folder: Path, server: PostgresServer, settings: Mapping[str, int] = SETTINGS) -> None:
        super().__init__(folder)
        self._server = server
        self._settings = settings
        self._store = server.create_database()
        self._databases = Databases(self._store, {name: url_of(folder, name) for name in BANKS})
        self._b_endpoint = free_address()
        self._b = self.coordinator(self._store, self._b_endpoint, settings, "b")
        command = [sys.executable, "-m", "tests.crashes.banks", "--folder", str(folder)]
        self._banks = self._add("banks", [*command, "--coordinator", self._b_endpoint], "banks: they serve")

    def __enter__(self) -> Self:
        try:
            self._b.start()
            self._banks.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.tails())
        self.close()
        self._server.drop_database(self._store)

    def run(self, scenario: Scenario, point: str = "", broken: str = "") -> Seen:
        """One transaction whose coordinator dies at this point, or lives. Raises ProcessFailed, TimeoutError."""
        key = uuid.uuid4().hex
        log = self.folder / f"{key}.points"
        endpoint = free_address()
        a = self._coordinator_a(endpoint, log, point, broken)
        earlier, before = self._all_calls(), self._databases.accounts()
        with ThreadPoolExecutor(1) as pool, Initiator(scenario, key) as initiator:
            try:
                if scenario.forsaken_at:
                    self._forsake(scenario.forsaken_at, pool, initiator)
                a.start()
                asking = pool.submit(initiator.ask, endpoint)
                died = self._ended(a, point, log, asking)
                by_a = self._new_calls(earlier)  # before the row is read: what has left must be stored by then
                at_death = next((each.state for each in self._of(key)), None)
            finally:
                a.kill()
                self._b.thaw()
            told = [*_told(asking), *self._asked_again(pool, initiator, key)]
        points = log.read_text().splitlines()
        log.unlink()
        self._all.remove(a)
        stored = self._of(key)
        xid = stored[0].xid if stored else ""
        return Seen(
            scenario, point, points, died, at_death, by_a, stored,
            {name: self._databases.fence_status(name, xid) for name in scenario.participants},
            before, self._databases.accounts(), self._new_calls(earlier), told,
        )  # fmt: skip

    def _forsake(self, point: str, pool: ThreadPoolExecutor, initiator: Initiator) -> None:
        """Have another coordinator begin it and die, and B stand still, so that it is A who takes it over."""
        endpoint, log = free_address(), self.folder / "forsaken.points"
        first = self._coordinator_a(endpoint, log, point, "")
        first.start()
        self._b.freeze()
        asking = pool.submit(initiator.ask, endpoint)
        try:
            eventually("the first coordinator has died", lambda: first.pid is None, ENDS_S)
        finally:
            first.kill()
        _told(asking)
        log.unlink()
        self._all.remove(first)

    def _coordinator_a(self, endpoint: str, log: Path, point: str, broken: str) -> Process:
        command = [sys.executable, "-m", "tests.crashes.launcher", "serve", "--listen", endpoint]
        for flag, value in self._settings.items():
            command += [f"--{flag.replace('_', '-')}", str(value)]
        environment = {
            "TRICORD_STORE": self._store,
            launcher.LOG: str(log),
            launcher.CALLS: str(self.folder),
            launcher.AT: point,
            VARIABLE: broken,
        }
        return self._add("a", command, "tricord: listening on ", environment)

    def _ended(self, a: Process, point: str, log: Path, asking: Future[Told]) -> bool:
        """Wait until A has died, or finished its transaction and lives all the same; whether it died."""

        def finished() -> bool:
            points = set(log.read_text().splitlines()) if log.exists() else set()
            return asking.done() and not LAST.isdisjoint(points) and point not in points

        eventually("A has finished, or died", lambda: a.pid is None or finished(), ENDS_S)
        return a.pid is None

    def _asked_again(self, pool: ThreadPoolExecutor, initiator: Initiator, key: str) -> Sequence[Told]:
        """What B tells, twice, and all is done then; less if it never comes to its end."""
        told: list[Told] = []
        for _ in range(ASKED_AGAIN):
            asking = pool.submit(initiator.ask, self._b_endpoint)
            if not self._soon(key, asking.done):
                return told
            told += _told(asking)
        self._soon(key, lambda: self._finished(key))
        return told

    def _soon(self, key: str, done: Callable[[], bool]) -> bool:
        """Wait until it is done; False if that will not be."""
        with contextlib.suppress(TimeoutError):
            eventually("it is done", lambda: done() or self._contradicted(key), ENDS_S)
        return done()

    def _contradicted(self, key: str) -> bool:
        return any(each.attention is Attention.VIOLATION for each in self._of(key))

    def _of(self, key: str) -> list[Stored]:
        return [each for each in self._databases.transactions() if each.key == key]

    def _finished(self, key: str) -> bool:
        return any(each.state.finished for each in self._of(key))

    def _all_calls(self) -> Counter[Called]:
        """All that ever reached a participant here."""
        return sum((read(self.folder / f"{name}.calls") for name in BANKS), Counter())

    def _new_calls(self, earlier: Counter[Called]) -> Counter[Called]:
        """Those of transactions that were not called for before."""
        known = {called.xid for called in earlier}
        return Counter({called: n for called, n in self._all_calls().items() if called.xid not in known})


def _told(asking: Future[Told]) -> Sequence[Told]:
    try:
        return [asking.result()]
    except grpc.RpcError:  # it died before it could tell
        return []
