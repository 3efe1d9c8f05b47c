"""A shop that takes orders: bare, safe to repeat in each mode, and repeated."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Engine, text

from participant_sdk.idempotency.fronts import MemoryFront
from participant_sdk.idempotency.idempotency import Idempotency
from participant_sdk.idempotency.operation import Mode, Operation
from participant_sdk.idempotency.record import Answer, Codec, Fingerprint
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.request import KeyedRequest

BARE, ATOMIC, LEASED = "bare", "atomic", "leased"
REPLAY, REPLAY_LEASED, FRONT = "replay", "replay_leased", "replay_front"
VARIANTS: Final = (BARE, ATOMIC, LEASED, REPLAY, REPLAY_LEASED, FRONT)
ANSWER_BYTES: Final = 300
KEPT: Final = 100
"""Answers of each client that are asked for again, in turns."""

_OPERATIONS: Final = {
    mode: Operation(name=f"orders.{mode.value}", mode=mode, wait_s=60.0) for mode in (Mode.ATOMIC, Mode.LEASED)
}
_INSERT: Final = text("INSERT INTO orders (intent, amount) VALUES (:intent, :amount)")


class Shop:
    """Orders on an engine.

    What the load itself costs is next to nothing beside a replay, and the same in each variant: every client counts for
    itself, and what a replay gives is held against what is at hand.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._done: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._numbers = itertools.count(1)
        self._kept: dict[tuple[Mode, int], list[tuple[str, bytes]]] = {}
        self._store = Idempotency(engine)
        self._elsewhere = Idempotency(engine)
        self._with_front = Idempotency(engine, fronts=(MemoryFront(),))

    @contextmanager
    def opened(self) -> Iterator[Shop]:
        """With its tables made."""
        with self.engine.begin() as connection:
            connection.execute(
                text("CREATE TABLE orders (id bigserial PRIMARY KEY, intent varchar(40) NOT NULL, amount int NOT NULL)")
            )
        with self._store, self._elsewhere, self._with_front:
            yield self

    @property
    def done(self) -> Counter[str]:
        """What was answered, by variant."""
        return sum(self._done.values(), Counter())

    def request(self, variant: str, client: int) -> None:
        """One request of a client, to its answer."""
        if variant == BARE:
            intent = self._new()
            with self.engine.connect() as connection:
                connection.execute(_INSERT, {"intent": intent, "amount": 1})
                connection.commit()
            answer_to(intent)
        elif variant in (ATOMIC, LEASED):
            mode = Mode.ATOMIC if variant == ATOMIC else Mode.LEASED
            intent = self._new()
            answer = self._run(mode, intent)
            kept = self._kept.setdefault((mode, client), [])
            if len(kept) < KEPT:
                kept.append((intent, answer.body))
        else:
            mode = Mode.LEASED if variant == REPLAY_LEASED else Mode.ATOMIC
            kept = self._kept[mode, client]
            intent, body = kept[next(self._numbers) % len(kept)]
            store = self._store if variant != FRONT else self._with_front
            self._replayed(store, mode, intent, body)
        self._done[client][variant] += 1

    def replayed_elsewhere(self, client: int) -> None:
        """A repeat that comes to a process which has not seen its key."""
        intent, body = self._kept[Mode.ATOMIC, client][0]
        self._replayed(self._elsewhere, Mode.ATOMIC, intent, body)

    def _replayed(self, store: Idempotency, mode: Mode, intent: str, body: bytes) -> None:
        found = store.begin(_OPERATIONS[mode], request_of(intent))
        if not isinstance(found, Replay) or found.answer.body != body:
            raise RuntimeError(f"{intent} was answered {found}")

    def _run(self, mode: Mode, intent: str) -> Answer:
        run = self._store.begin(_OPERATIONS[mode], request_of(intent))
        if isinstance(run, Replay):
            raise RuntimeError(f"{intent} was answered before it was asked")
        answer = answer_to(intent)
        with run:
            run.connection.execute(_INSERT, {"intent": intent, "amount": 1})
            run.succeed(answer)
        return answer

    def count(self, variant: str, requests: int) -> None:
        """So many were answered that were not asked for by `request`."""
        self._done[-1][variant] += requests

    def _new(self) -> str:
        return f"intent-{next(self._numbers)}"

    def verify(self) -> None:
        """Raises RuntimeError unless the database holds what was answered, and only that."""
        with self.engine.connect() as connection:
            orders, intents = connection.execute(text("SELECT count(*), count(DISTINCT intent) FROM orders")).one()
            records = connection.execute(text("SELECT count(*) FROM tricord_idempotency WHERE state = 1")).scalar_one()
        done = self.done
        once = done[ATOMIC] + done[LEASED]
        if (orders, intents, records) != (once + done[BARE], orders, once):
            raise RuntimeError(
                f"answered: {dict(done)}; the database holds {orders} orders of {intents} intents, "
                f"and {records} records"
            )


def request_of(intent: str) -> KeyedRequest:
    """The intent is the key, and all of the request."""
    fingerprint = Fingerprint(1, hashlib.sha256(intent.encode()).digest())
    return KeyedRequest(intent, fingerprint, lambda version: None)


def answer_to(intent: str) -> Answer:
    """About 300 bytes, of HTTP."""
    body = b'{"order":"%s","note":"' % intent.encode()
    return Answer(
        Codec.HTTP, 201, ((b"content-type", b"application/json"),), body.ljust(ANSWER_BYTES - 2, b".") + b'"}'
    )


def identical(shop: Shop, store: Idempotency, count: int) -> tuple[int, int, int]:
    """So many identical requests at once: how many ran, how many were replays, and connections held by waiters."""
    intent, operation = "the same", _OPERATIONS[Mode.LEASED]
    asked = itertools.count(1)
    everybody, runs, replays = threading.Event(), Counter[str](), Counter[str]()
    held: list[int] = []

    def ask() -> None:
        if next(asked) == count:
            everybody.set()
        found = store.begin(operation, request_of(intent))
        if isinstance(found, Replay):
            replays[found.answer.body.decode()] += 1
            return
        with found:
            everybody.wait()
            found.connection.execute(_INSERT, {"intent": intent, "amount": 1})
            held.append(_settled_checkouts(shop.engine) - 1)
            found.succeed(answer_to(intent))
            runs[intent] += 1

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shop.count(LEASED, runs.total())
    return runs.total(), replays[answer_to(intent).body.decode()], max(held)


def _settled_checkouts(engine: Engine) -> int:
    """Connections out of the pool, when nobody is about to look any more: the least over two seconds."""
    end, least = time.monotonic() + 2.0, 1 << 30
    while time.monotonic() < end:
        least = min(least, engine.pool.checkedout())  # type: ignore[attr-defined]
        time.sleep(0.005)
    return least
