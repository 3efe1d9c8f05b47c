"""The show: transfers between two banks, with processes killed at the worst moments.

    python -m examples.transfer.demo

Starts a coordinator and two banks as real processes with a database each, and kills some of them with SIGKILL. Which
moment that is, is certain: the bank's handlers stop before a gate (``gate.py``) until the demo lets them go on. At the
end everything is read back from the databases; only if every account, every fence row and every transaction is as it
must be, the exit code is 0.

    DEMO_DIR=folder                keep databases and logs there
    TRICORD_STORE=postgresql://…   use fresh databases on that server, dropped at the end, in place of SQLite files
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from coordinator.model import State
from participant_sdk import Transaction, TransactionCancelled, TricordClient, TricordError, branch
from participant_sdk.fence import Status

from .bank import Credit, Debit
from .databases import BANKS, Account, Databases, eventually, postgres_databases, sqlite_databases
from .gate import Gate
from .processes import ROOT, Processes, ProcessFailed, free_address

OPENING = {"bank-a": {"alice": 100_000, "carol": 50_000}, "bank-b": {"bob": 80_000, "dave": 20_000}}
CONCURRENT = 200
# A killed coordinator's transactions are free for the next one when its longest call would be over; the demo waits
# for that once, so it is kept short. Everything else is as by default.
SETTINGS = {"call_timeout_ms": 2_000, "lease_ms": 3_000}
MARK = "tricord-demo.txt"


class DemoFailed(Exception):
    """Something is not as it must be."""


FORESEEN = (DemoFailed, ProcessFailed, TimeoutError, TricordError, SQLAlchemyError)


def check(holds: bool, what: str) -> None:
    """Raises DemoFailed unless it holds."""
    if not holds:
        raise DemoFailed(what)


def money(cents: int) -> str:
    """123456 as 1,234.56."""
    return f"{cents / 100:,.2f}"


def say(text: str = "") -> None:
    """A line of the narration."""
    print(f"   {text}" if text else "", flush=True)


def title(text: str) -> None:
    """A scene begins."""
    print(f"\n{text}", flush=True)


class Demo:
    """The processes, the client, and what the accounts must hold after all that has happened so far."""

    def __init__(self, processes: Processes, databases: Databases, gate: Gate) -> None:
        self.databases = databases
        self.gate = gate
        self.endpoint = free_address()
        self.coordinator = processes.coordinator(databases.store, self.endpoint, SETTINGS)
        self.banks = {
            bank: processes.bank(bank, free_address(), url, self.endpoint, OPENING[bank], gate.address)
            for bank, url in databases.banks.items()
        }
        self.client = TricordClient(self.endpoint)
        self.background = ThreadPoolExecutor(CONCURRENT, thread_name_prefix="client")
        self.expected = {
            f"{name}@{bank}": Account(cents) for bank, accounts in OPENING.items() for name, cents in accounts.items()
        }
        self.ended: dict[str, State] = {}
        """What the client was told, by xid."""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start all processes."""
        self.coordinator.start()
        for bank in self.banks.values():
            bank.start()
        for process in (self.coordinator, *self.banks.values()):
            say(f"{process.name:<12} process {process.pid}")

    def close(self) -> None:
        """Close what this process holds."""
        self.client.close()
        self.background.shutdown(wait=False, cancel_futures=True)

    def total(self) -> int:
        """All money there is: free or held."""
        return sum(account.balance + account.held for account in self.databases.accounts().values())

    def transfer(self, source: str, target: str, cents: int, key: str) -> Transaction:
        """Send money between accounts such as ``alice@bank-a``. Raises TransactionCancelled."""
        (payer, payers_bank), (payee, payees_bank) = source.split("@"), target.split("@")
        try:
            tx = self.client.execute(
                branch(payers_bank, "debit", Debit(payer, cents)),
                branch(payees_bank, "credit", Credit(payee, cents)),
                idempotency_key=key,
                timeout=60,
            )
        except TransactionCancelled as cancelled:
            with self._lock:
                self.ended[cancelled.transaction.xid] = State.CANCELLED
            raise
        with self._lock:
            self.ended[tx.xid] = State.CONFIRMED
            for account, change in ((source, -cents), (target, cents)):
                self.expected[account] = Account(self.expected[account].balance + change)
        return tx

    def transfer_in_background(self, source: str, target: str, cents: int, key: str) -> Future[Transaction]:
        """Likewise, from a thread of its own."""
        return self.background.submit(self.transfer, source, target, cents, key)

    def settle(self) -> None:
        """All that was started is finished in the coordinator's database, and every account holds what it must."""
        eventually("every transaction is finished", lambda: not self.databases.transactions(unfinished=True))
        found = self.databases.accounts()
        check(found == self.expected, f"the accounts hold {found}, but must hold {self.expected}")

    def until_confirmed_at(self, bank: str, xid: str) -> None:
        """Wait until a bank has confirmed its branch, whoever may or may not have heard of it."""
        eventually(f"{bank} has confirmed", lambda: self.databases.fence_status(bank, xid) is Status.COMMITTED)

    def say_accounts(self) -> None:
        """A table of all accounts."""
        say(f"{'account':<14}{'balance':>12}{'held':>10}{'incoming':>10}")
        for name, account in self.databases.accounts().items():
            say(f"{name:<14}{money(account.balance):>12}{money(account.held):>10}{money(account.incoming):>10}")

    def say_branches(self, xid: str) -> None:
        """What each bank's fence and the coordinator have stored about a transaction."""
        fences = [f"{bank} {_name(self.databases.fence_status(bank, xid))}" for bank in BANKS]
        say(f"stored now: coordinator {_name(self.databases.state(xid))}, fence rows {', '.join(fences)}")


def _name(stored: State | Status | None) -> str:
    return "nothing" if stored is None else stored.name


# --- the scenes -------------------------------------------------------------------------------------------


def confirms(demo: Demo) -> None:
    """A transfer that confirms."""
    tx = demo.transfer("alice@bank-a", "bob@bank-b", 2_500, "rent-november")
    say(f"alice@bank-a sends 25.00 to bob@bank-b: CONFIRMED (xid {tx.xid})")
    demo.settle()
    demo.say_branches(tx.xid)
    again = demo.client.execute(
        branch("bank-a", "debit", Debit("alice", 2_500)),
        branch("bank-b", "credit", Credit("bob", 2_500)),
        idempotency_key="rent-november",
    )
    check(again.xid == tx.xid, "the same idempotency key made a second transaction")
    say("the same request with the same idempotency key again: the same transaction, and no money moves")
    demo.settle()


def refused(demo: Demo) -> None:
    """A transfer that is refused for lack of funds, and cancels."""
    try:
        demo.transfer("dave@bank-b", "carol@bank-a", 99_999_00, "too-much")
    except TransactionCancelled as cancelled:
        refusal, xid = cancelled.refusal, cancelled.transaction.xid
        check(refusal is not None and refusal.reason == "insufficient_funds", f"refused because of {refusal}")
        say("dave@bank-b sends 99,999.00 to carol@bank-a: CANCELLED")
        say(f"because {refusal}")
        demo.settle()
        demo.say_branches(xid)
    else:
        raise DemoFailed("a transfer of more money than there is was confirmed")


def bank_killed(demo: Demo) -> None:
    """A bank is killed between Try and Confirm, and comes back."""
    bank = demo.banks["bank-b"]
    with _holding(demo.gate, "bank-b", "CONFIRM") as hold:
        transfer = demo.transfer_in_background("alice@bank-a", "bob@bank-b", 1_000, "bank-killed")
        say("alice@bank-a sends 10.00 to bob@bank-b; both banks have tried it, bank-b is about to confirm")
        xid = hold.wait().xid
        say(f"kill -9 {bank.pid} (bank-b)")
        bank.kill()
    check(demo.databases.fence_status("bank-b", xid) is Status.TRIED, "bank-b has not stayed between Try and Confirm")
    incoming = demo.databases.accounts()["bob@bank-b"].incoming
    check(incoming == 1_000, f"bob has {incoming} incoming, and must have 1000")
    check(not transfer.done(), "the client was answered while bank-b was dead")
    demo.say_branches(xid)
    say("bank-b is dead and holds 10.00 for bob; the decision stands, the coordinator goes on asking")
    bank.start()
    say(f"bank-b is back as process {bank.pid}")
    tx = transfer.result(60)
    check(tx.xid == xid, "the client was told another transaction's outcome")
    say("the client, which has waited all the time: CONFIRMED")
    demo.settle()
    demo.say_branches(xid)


def coordinator_killed(demo: Demo) -> None:
    """The coordinator is killed right after its decision, and comes back."""
    coordinator = demo.coordinator
    with _holding(demo.gate, "bank-a", "CONFIRM") as at_a, _holding(demo.gate, "bank-b", "CONFIRM") as at_b:
        transfer = demo.transfer_in_background("bob@bank-b", "alice@bank-a", 700, "coordinator-killed")
        say("bob@bank-b sends 7.00 to alice@bank-a; it is decided, and no bank has confirmed yet")
        xid = at_a.wait().xid
        at_b.wait()
        say(f"kill -9 {coordinator.pid} (the coordinator)")
        coordinator.kill()
        check(demo.databases.state(xid) is State.CONFIRMING, "the decision was not stored before it was sent")
        for bank in BANKS:
            check(demo.databases.fence_status(bank, xid) is Status.TRIED, f"{bank} confirmed before it was let")
        demo.say_branches(xid)
    say("both banks now confirm what they were asked to, and have nobody left to tell")
    for bank in BANKS:
        demo.until_confirmed_at(bank, xid)
    check(demo.databases.state(xid) is State.CONFIRMING, "somebody has changed a dead coordinator's record")
    coordinator.start()
    say(f"the coordinator is back as process {coordinator.pid}, reads its decision and asks both banks again")
    tx = transfer.result(60)
    check(tx.xid == xid, "the client got another transaction")
    say("the client has found it again by its idempotency key: CONFIRMED, once")
    demo.settle()
    demo.say_branches(xid)


def concurrent(demo: Demo) -> None:
    """Two hundred transfers at once; every tenth asks for more than there is."""
    pairs = [("alice@bank-a", "bob@bank-b"), ("bob@bank-b", "carol@bank-a"), ("carol@bank-a", "dave@bank-b")]
    before = time.monotonic()
    transfers = []
    for n in range(CONCURRENT):
        source, target = pairs[n % len(pairs)]
        cents = 10_000_00 if n % 10 == 9 else 1 + n
        transfers.append(demo.transfer_in_background(source, target, cents, f"concurrent-{n}"))
    errors = [transfer.exception(120) for transfer in transfers]
    seconds = time.monotonic() - before
    confirmed, cancelled = errors.count(None), sum(isinstance(error, TransactionCancelled) for error in errors)
    others = [error for error in errors if error is not None and not isinstance(error, TransactionCancelled)]
    check(not others, f"{len(others)} transfers have no outcome; the first: {others[:1]}")
    check(cancelled == CONCURRENT // 10, f"{cancelled} transfers were cancelled, and must be {CONCURRENT // 10}")
    say(f"{confirmed} CONFIRMED, {cancelled} CANCELLED for lack of funds, in {seconds:.1f} s")
    demo.settle()


SCENES: list[tuple[str, Callable[[Demo], None]]] = [
    ("A transfer that confirms", confirms),
    ("A transfer that is refused, and cancels", refused),
    ("A bank is killed between Try and Confirm", bank_killed),
    ("The coordinator is killed right after its decision", coordinator_killed),
    (f"{CONCURRENT} transfers at once", concurrent),
]


# --- the end: everything, from the databases --------------------------------------------------------------


def read_back(demo: Demo, total_before: int) -> None:
    """Show and check what the databases hold."""
    demo.say_accounts()
    total = demo.total()
    say(f"all money before: {money(total_before)}, after: {money(total)}")
    check(total == total_before, "money was lost or made")
    demo.settle()
    say()
    states = [State.CONFIRMED if state is State.CONFIRMED else State.CANCELLED for state in demo.ended.values()]
    confirmed, cancelled = states.count(State.CONFIRMED), states.count(State.CANCELLED)
    for bank, counts in demo.databases.fence_counts().items():
        say(f"fence rows of {bank}: " + ", ".join(f"{status.name} {counts[status.name]}" for status in Status))
        check(counts["TRIED"] == 0, f"{bank} still holds a reservation")
        check(counts["COMMITTED"] == confirmed, f"{bank} has confirmed {counts['COMMITTED']} of {confirmed}")
        undone = counts["ROLLBACKED"] + counts["SUSPENDED"]
        check(undone == cancelled, f"{bank} has undone {undone} of {cancelled}")
    stored = {each.xid: each.state for each in demo.databases.transactions()}
    check(stored == demo.ended, f"stored and told differ: {set(stored.items()) ^ set(demo.ended.items())}")
    say(
        f"transactions: {len(stored)}, each stored as the client was told: CONFIRMED {confirmed}, CANCELLED {cancelled}"
    )
    say()
    _tricord_list(demo.endpoint, "--limit", "8")
    _tricord_list(demo.endpoint, "--state", "TRYING", "--state", "CONFIRMING", "--state", "CANCELLING")


def _tricord_list(endpoint: str, *options: str) -> None:
    command = [sys.executable, "-m", "coordinator", "list", "--endpoint", endpoint, *options]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    check(listed.returncode == 0, f"tricord list failed: {listed.stderr.strip()}")
    say(f"$ tricord list {' '.join(options)}")
    for line in listed.stdout.splitlines():
        say(line.rstrip())


# --- putting it together ----------------------------------------------------------------------------------


@contextmanager
def _holding(gate: Gate, bank: str, phase: str) -> Iterator[Any]:
    hold = gate.hold(bank, phase)
    try:
        yield hold
    finally:
        hold.release()


def play(processes: Processes, databases: Databases) -> None:
    """All scenes, then the reading back. Raises whatever goes wrong."""
    with ExitStack() as parts:
        gate = parts.enter_context(Gate())
        demo = Demo(processes, databases, gate)
        parts.callback(demo.close)
        title("Starting")
        demo.start()
        total_before = demo.total()
        demo.say_accounts()
        for number, (name, scene) in enumerate(SCENES, 1):
            title(f"{number}. {name}")
            scene(demo)
        title("What the databases hold")
        read_back(demo, total_before)
        for process in (*demo.banks.values(), demo.coordinator):
            code = process.stop()
            check(code == 0, f"{process.name} ended with code {code} when it was asked to end")


@contextmanager
def _folder() -> Iterator[Path]:
    """DEMO_DIR, which stays, or a temporary folder, which does not."""
    named = os.environ.get("DEMO_DIR")
    if not named:
        with tempfile.TemporaryDirectory(prefix="tricord-demo-") as temporary:
            yield Path(temporary)
        return
    folder = Path(named).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        if not (folder / MARK).exists():
            sys.exit(f"demo: DEMO_DIR {folder} holds other files; name a new or empty folder")
        for pattern in ("*.db*", "*.log"):
            for old in folder.glob(pattern):
                old.unlink()
    (folder / MARK).write_text("Files of the Tricord demo: the next run with this DEMO_DIR replaces them.\n")
    yield folder


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(folder: Path, server: str) -> int:
    where = ExitStack()
    with where, Processes(folder) as processes:
        kept = f"logs and files: {folder}" if os.environ.get("DEMO_DIR") else "DEMO_DIR=folder keeps logs and files"
        try:
            databases = where.enter_context(postgres_databases(server)) if server else sqlite_databases(folder)
            print(f"Two banks and a coordinator on {'PostgreSQL' if server else 'SQLite'} ({kept})")
            play(processes, databases)
        except Exception as error:
            if not isinstance(error, FORESEEN):
                traceback.print_exc()
            print(f"\n{processes.tails()}\n\ndemo: failed: {error}\ndemo: {kept}", file=sys.stderr)
            return 1
    return 0


def main() -> int:
    """Play the demo; the exit code."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    server = os.environ.get("TRICORD_STORE", "")
    if not server.startswith(("postgresql://", "postgres://", "postgresql+psycopg://")):
        if server:
            say(f"TRICORD_STORE ({server.partition(':')[0]}) names no PostgreSQL server: using SQLite files of its own")
        server = ""
    before = time.monotonic()
    try:
        with _folder() as folder:
            code = _run(folder, server)
    except KeyboardInterrupt:
        print("\ndemo: interrupted; all its processes are ended", file=sys.stderr)
        return 130
    if code == 0:
        print(f"\n(took {time.monotonic() - before:.0f} s)\ndemo: all good", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
