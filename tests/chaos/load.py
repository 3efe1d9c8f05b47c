"""A load of concurrent transfers, each remembered with what its client was told."""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from coordinator.check.events import Asked
from coordinator.check.events import Told as ToldEvent
from coordinator.model import State
from examples.transfer.bank import Credit, Debit
from examples.transfer.databases import Account
from participant_sdk import TransactionCancelled, TricordClient, TricordError, branch

PATIENCE_S = 120.0
TIMEOUTS_S = (2.0, 30.0)
"""A transaction's time-outs: with the short one, some kills make the deadline decide."""
REFUSED_IN = 6
"""One transfer of so many asks for more than there is."""
MORE_THAN_THERE_IS = 100_000_000


class Part(NamedTuple):
    """One branch of what was asked for, and what it changes when it is confirmed."""

    participant: str
    name: str
    """Of the account, or of the item."""
    change: int


class Transfer(NamedTuple):
    """One transfer as it was asked for."""

    key: str
    source: str
    target: str
    cents: int

    @property
    def parts(self) -> Sequence[Part]:
        """Its two branches."""
        (payer, payers_bank), (payee, payees_bank) = self.source.split("@"), self.target.split("@")
        return Part(payers_bank, payer, -self.cents), Part(payees_bank, payee, self.cents)


class Told(NamedTuple):
    """What a client was told about its transfer; state None with an error: no outcome."""

    state: State | None
    xid: str = ""
    error: str = ""


def asked_event(key: str, parts: Sequence[Part]) -> Asked:
    """For the history: a client is about to ask."""
    return Asked(now_ms(), key, fingerprint=_fingerprint(parts), participants=tuple(part.participant for part in parts))


def told_event(key: str, parts: Sequence[Part], told: Told) -> ToldEvent:
    """For the history: a client was told."""
    state = "" if told.state is None else told.state.name
    return ToldEvent(now_ms(), key, told.xid, _fingerprint(parts), state, error=told.error)


def _fingerprint(parts: Sequence[Part]) -> str:
    return f"{zlib.crc32(repr([*parts]).encode()):08x}"


def now_ms() -> int:
    """The time of this machine's clock."""
    return time.time_ns() // 1_000_000


class Load:
    """Clients in threads that transfer money both ways until they are told to stop."""

    def __init__(self, endpoints: Sequence[str], accounts: dict[str, Account], seed: int, clients: int = 12) -> None:
        self.started: dict[str, Transfer] = {}
        self.told: dict[str, Told] = {}
        self.events: list[Asked | ToldEvent] = []
        """The same for the history."""
        self._accounts = sorted(accounts)
        self._changed = threading.Condition()
        self._stopping = False
        self._clients = [TricordClient(endpoint) for endpoint in endpoints]
        self._threads = [
            threading.Thread(target=self._run, args=(n, random.Random(f"{seed}-{n}")), name=f"load-{n}")
            for n in range(clients)
        ]

    def start(self) -> None:
        """Start the clients."""
        for thread in self._threads:
            thread.start()

    def unanswered(self) -> int:
        """How many transfers are started and not answered."""
        with self._changed:
            return len(self.started) - len(self.told)

    def wait_for_answers(self, more: int, seconds: float = 60.0) -> None:
        """Return when so many more transfers have been answered. Raises TimeoutError."""
        with self._changed:
            wanted = len(self.told) + more
            if not self._changed.wait_for(lambda: len(self.told) >= wanted, seconds):
                raise TimeoutError(f"fewer than {more} transfers were answered within {seconds:.0f} s")

    def ask(self, transfer: Transfer) -> None:
        """A client is about to ask for this."""
        with self._changed:
            self.started[transfer.key] = transfer
            self.events.append(asked_event(transfer.key, transfer.parts))

    def tell(self, transfer: Transfer, told: Told) -> None:
        """A client was told this."""
        with self._changed:
            self.told[transfer.key] = told
            self.events.append(told_event(transfer.key, transfer.parts, told))
            self._changed.notify_all()

    def stop(self) -> None:
        """Start no more transfers, and wait until the running ones are answered."""
        self._stopping = True
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self.close()

    def close(self) -> None:
        """Start no more, and end waiting for answers."""
        self._stopping = True
        for client in self._clients:
            client.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self, number: int, rng: random.Random) -> None:
        client = self._clients[number % len(self._clients)]
        count = 0
        while not self._stopping:
            count += 1
            source, target = rng.sample(self._accounts, 2)
            if source.split("@")[1] == target.split("@")[1]:
                continue
            cents = MORE_THAN_THERE_IS if rng.randrange(REFUSED_IN) == 0 else rng.randrange(1, 2_000)
            transfer = Transfer(f"{number}-{count}", source, target, cents)
            self.ask(transfer)
            self.tell(transfer, _execute(client, transfer, rng.choice(TIMEOUTS_S)))


def _execute(client: TricordClient, transfer: Transfer, timeout_s: float) -> Told:
    payer, payee = transfer.parts
    try:
        tx = client.execute(
            branch(payer.participant, "debit", Debit(payer.name, transfer.cents)),
            branch(payee.participant, "credit", Credit(payee.name, transfer.cents)),
            idempotency_key=transfer.key,
            timeout=timeout_s,
            patience=PATIENCE_S,
        )
    except TransactionCancelled as cancelled:
        return Told(State.CANCELLED, cancelled.transaction.xid)
    except TricordError as error:
        return Told(None, error=f"{type(error).__name__}: {error}")
    return Told(State.CONFIRMED, tx.xid)
