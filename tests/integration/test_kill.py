"""SIGKILL and SIGSTOP of real processes at points that are certain: a bank's handler stands before a gate meanwhile.

What must hold afterwards is read from the databases, never from what a process says of itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.model import Attention, State
from examples.transfer.bank import Credit, Debit
from examples.transfer.databases import BANKS, Account, eventually
from examples.transfer.gate import Gate
from participant_sdk import Transaction, TransactionCancelled, TransactionState, TricordClient, branch
from participant_sdk.fence import Status
from tests.chaos.load import Load
from tests.chaos.verdict import violations
from tests.postgres import PostgresServer, PostgresUnavailable
from tests.processes import OPENING, SHORT, Cast, fresh_databases, opening_accounts

CENTS = 1_000
RESULT_S = 60.0


class Scene:
    """Banks behind a gate, coordinators, and a client for each of these."""

    def __init__(self, cast: Cast, gate: Gate, clients: list[TricordClient], background: ThreadPoolExecutor) -> None:
        self.cast = cast
        self.gate = gate
        self.clients = clients
        self.databases = cast.databases
        self._background = background

    def transfer(self, key: str, *, timeout_s: float = 30.0, at: int = 0) -> Future[Transaction]:
        """Start to send money from alice to bob, through one of the coordinators."""
        return self._background.submit(
            self.clients[at].execute,
            branch("bank-a", "debit", Debit("alice", CENTS)),
            branch("bank-b", "credit", Credit("bob", CENTS)),
            idempotency_key=key,
            timeout=timeout_s,
        )

    def fences(self, xid: str) -> list[Status | None]:
        """What the two banks have stored about a transaction."""
        return [self.databases.fence_status(bank, xid) for bank in BANKS]

    def until_fence(self, bank: str, xid: str, status: Status) -> None:
        """Wait until a bank's fence row has a status."""
        eventually(f"{bank} is {status.name}", lambda: self.databases.fence_status(bank, xid) is status)

    def until_state(self, xid: str, state: State) -> None:
        """Wait until the coordinator's database has a state."""
        eventually(f"{xid} is {state.name}", lambda: self.databases.state(xid) is state)

    def check_rest(self, *transfers: State) -> None:
        """Everything is finished, these transfers and no others were stored, and the money is where it must be."""
        self.cast.settle()
        stored = self.databases.transactions()
        assert sorted(each.state for each in stored) == sorted(transfers)
        assert [each for each in stored if each.attention is Attention.VIOLATION] == []
        moved = CENTS * transfers.count(State.CONFIRMED)
        expected = opening_accounts()
        expected["alice@bank-a"] = Account(OPENING["bank-a"]["alice"] - moved)
        expected["bob@bank-b"] = Account(OPENING["bank-b"]["bob"] + moved)
        assert self.databases.accounts() == expected


@pytest.fixture(params=["sqlite", "postgres"])
def server(request: pytest.FixtureRequest) -> PostgresServer | None:
    """None for SQLite."""
    if request.param == "sqlite":
        return None
    found: PostgresServer = request.getfixturevalue("postgres_server")
    return found


@pytest.fixture
def parts() -> Iterator[ExitStack]:
    """Whatever a test starts."""
    with ExitStack() as stack:
        yield stack


def play(
    parts: ExitStack,
    folder: Path,
    server: PostgresServer | None,
    coordinators: int = 1,
    settings: Mapping[str, int] = SHORT,
) -> Scene:
    """Start everybody; all end with ``parts``."""
    databases = parts.enter_context(fresh_databases(folder, server))
    background = parts.enter_context(ThreadPoolExecutor(4))
    gate = parts.enter_context(Gate())
    cast = parts.enter_context(Cast(folder, databases, coordinators=coordinators, gate=gate.address, settings=settings))
    parts.callback(gate.release)  # before the processes end: a held handler would keep its bank from ending
    clients = [parts.enter_context(TricordClient(endpoint)) for endpoint in cast.endpoints]
    return Scene(cast, gate, clients, background)


def test_coordinator_killed_after_its_decision(parts: ExitStack, tmp_path: Path, server: PostgresServer | None) -> None:
    scene = play(parts, tmp_path, server)
    holds = [scene.gate.hold(bank, "CONFIRM") for bank in BANKS]
    transfer = scene.transfer("one")
    [xid] = {hold.wait().xid for hold in holds}
    scene.cast.coordinators[0].kill()
    assert scene.databases.state(xid) is State.CONFIRMING
    assert scene.fences(xid) == [Status.TRIED, Status.TRIED]
    for hold in holds:
        hold.release()
    for bank in BANKS:  # they carry out what they were asked, and have nobody to tell
        scene.until_fence(bank, xid, Status.COMMITTED)
    assert scene.databases.state(xid) is State.CONFIRMING
    scene.cast.coordinators[0].start()
    assert transfer.result(RESULT_S).xid == xid
    scene.check_rest(State.CONFIRMED)


def test_bank_killed_inside_confirm(parts: ExitStack, tmp_path: Path, server: PostgresServer | None) -> None:
    scene = play(parts, tmp_path, server)
    hold = scene.gate.hold("bank-b", "CONFIRM")
    transfer = scene.transfer("one")
    xid = hold.wait().xid
    scene.cast.banks["bank-b"].kill()
    hold.release()
    assert scene.databases.fence_status("bank-b", xid) is Status.TRIED
    assert scene.databases.accounts()["bob@bank-b"] == Account(OPENING["bank-b"]["bob"], incoming=CENTS)
    scene.until_fence("bank-a", xid, Status.COMMITTED)  # one dead branch holds up nobody else's
    assert not transfer.done()
    scene.cast.banks["bank-b"].start()
    assert transfer.result(RESULT_S).state is TransactionState.CONFIRMED
    assert scene.fences(xid) == [Status.COMMITTED, Status.COMMITTED]
    scene.check_rest(State.CONFIRMED)


def test_bank_killed_inside_try(parts: ExitStack, tmp_path: Path, server: PostgresServer | None) -> None:
    """A Try in doubt is repeated, so a bank that comes back before the deadline costs nothing but time."""
    scene = play(parts, tmp_path, server)
    hold = scene.gate.hold("bank-a", "TRY")
    transfer = scene.transfer("one")
    xid = hold.wait().xid
    scene.cast.banks["bank-a"].kill()
    hold.release()
    assert scene.databases.fence_status("bank-a", xid) is None
    scene.cast.banks["bank-a"].start()
    assert transfer.result(RESULT_S).xid == xid
    scene.check_rest(State.CONFIRMED)


def test_coordinator_killed_during_try(parts: ExitStack, tmp_path: Path, server: PostgresServer | None) -> None:
    """The deadline outlives the coordinator, and Cancel reaches a Try that is still running."""
    scene = play(parts, tmp_path, server)
    hold = scene.gate.hold("bank-b", "TRY")
    transfer = scene.transfer("one", timeout_s=2)
    xid = hold.wait().xid
    scene.until_fence("bank-a", xid, Status.TRIED)
    scene.cast.coordinators[0].kill()
    assert scene.databases.state(xid) is State.TRYING
    scene.cast.coordinators[0].start()
    scene.until_state(xid, State.CANCELLING)
    scene.until_fence("bank-a", xid, Status.ROLLBACKED)
    hold.release()
    with pytest.raises(TransactionCancelled) as cancelled:
        transfer.result(RESULT_S)
    assert cancelled.value.transaction.xid == xid
    assert cancelled.value.refusal is None
    assert scene.databases.fence_status("bank-b", xid) is Status.ROLLBACKED
    scene.check_rest(State.CANCELLED)


def test_another_coordinator_takes_over(parts: ExitStack, tmp_path: Path, postgres_server: PostgresServer) -> None:
    """The one that drives is killed and stays dead; a client of the other gets the answer under the same key."""
    scene = play(parts, tmp_path, postgres_server, coordinators=2)
    holds = [scene.gate.hold(bank, "CONFIRM") for bank in BANKS]
    lost = scene.transfer("one", at=0)
    [xid] = {hold.wait().xid for hold in holds}
    scene.cast.coordinators[0].kill()
    again = scene.transfer("one", at=1)
    for hold in holds:
        hold.release()
    # Ten times the lease for a slow machine; without take-over it would never end.
    assert again.result(10 * SHORT["lease_ms"] / 1_000).xid == xid
    scene.check_rest(State.CONFIRMED)
    scene.cast.coordinators[0].start()
    assert lost.result(RESULT_S).xid == xid
    scene.check_rest(State.CONFIRMED)


def test_sleeper_with_a_late_answer(parts: ExitStack, tmp_path: Path, postgres_server: PostgresServer) -> None:
    """A stopped coordinator is told "tried" by all branches of what another has cancelled meanwhile."""
    scene = play(parts, tmp_path, postgres_server, coordinators=2)
    hold = scene.gate.hold("bank-b", "TRY")
    asleep = scene.transfer("one", timeout_s=2, at=0)
    xid = hold.wait().xid
    scene.until_fence("bank-a", xid, Status.TRIED)
    scene.cast.coordinators[0].freeze()
    scene.until_state(xid, State.CANCELLING)  # the other has taken it over, and its deadline has come
    hold.release()  # now bank-b answers the sleeper: tried
    scene.until_state(xid, State.CANCELLED)
    assert scene.fences(xid) == [Status.ROLLBACKED, Status.ROLLBACKED]
    scene.cast.coordinators[0].thaw()
    with pytest.raises(TransactionCancelled) as cancelled:
        asleep.result(RESULT_S)
    assert cancelled.value.transaction.xid == xid
    assert scene.transfer("two", at=0).result(RESULT_S).state is TransactionState.CONFIRMED
    assert scene.fences(xid) == [Status.ROLLBACKED, Status.ROLLBACKED]
    scene.check_rest(State.CANCELLED, State.CONFIRMED)


def test_sleeper_that_would_cancel(parts: ExitStack, tmp_path: Path, postgres_server: PostgresServer) -> None:
    """A stopped coordinator wakes after the deadline of what another has confirmed: it must not turn it."""
    timeout_s = 8.0
    settings = {**SHORT, "call_timeout_ms": 500, "lease_ms": 1_000}
    scene = play(parts, tmp_path, postgres_server, coordinators=2, settings=settings)
    hold = scene.gate.hold("bank-b", "TRY")
    begun_s = time.monotonic()
    asleep = scene.transfer("one", timeout_s=timeout_s, at=0)
    xid = hold.wait().xid
    scene.cast.coordinators[0].freeze()
    hold.release()
    scene.until_state(xid, State.CONFIRMED)  # by the other, within the lease
    time.sleep(max(0.0, begun_s + timeout_s + 0.5 - time.monotonic()))  # the deadline itself is what is waited for
    scene.cast.coordinators[0].thaw()
    assert asleep.result(RESULT_S).xid == xid
    assert scene.transfer("two", at=0).result(RESULT_S).state is TransactionState.CONFIRMED
    assert scene.fences(xid) == [Status.COMMITTED, Status.COMMITTED]
    scene.check_rest(State.CONFIRMED, State.CONFIRMED)


@pytest.mark.database
def test_database_server_killed_under_load(parts: ExitStack, tmp_path: Path) -> None:
    """The server under the coordinator and both banks loses power, twice, and comes back."""
    try:
        server = parts.enter_context(PostgresServer())
    except PostgresUnavailable as unavailable:
        pytest.skip(f"no PostgreSQL: {unavailable}")
    databases = parts.enter_context(fresh_databases(tmp_path, server))
    cast = parts.enter_context(Cast(tmp_path, databases, coordinators=2))
    load = Load(cast.endpoints, opening_accounts(), seed=1)
    parts.callback(load.close)
    load.start()
    for _ in range(2):
        load.wait_for_answers(30)
        assert load.unanswered() > 0
        server.kill()
        server.start()
        load.wait_for_answers(30)
    load.stop()
    cast.settle()
    assert violations(tmp_path, databases, opening_accounts(), load) == []
