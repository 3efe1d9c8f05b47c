"""Whether a million finished transactions slow down what is done beside them.

Two databases on one server: one with the finished rows, one without; everything else in them is the same. Whatever is
measured is measured on both in turn, so that what the machine does meanwhile meets both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import grpc

from coordinator.model import Attention, State, Transaction
from coordinator.store.postgres import PostgresBackend
from tests.postgres import PostgresServer
from tricord.v1 import operator_pb2, operator_pb2_grpc

from . import rows
from .postgres import measured
from .processes import Process
from .recovery_scene import DEAD, LIVE, Scene
from .report import Measure, progress

FAR_MS = 3_600_000
BETWEEN_MS = 100
"""From one transaction to the next, in the history."""
ALIKE = 200
"""Finished rows that both have: a page of the newest is full in both."""
CLAIMED = 100
LEASE_MS = 10_000
PAGE = 50
RARE = 10
"""Transactions of a participant that hardly ever takes part."""
SLOW = ("rare_participant",)
"""Not held to the goal: no index can find them that every database has."""
LIST_S = 60.0
WARM_UP_S = 2.0
END_S = 30.0
LIMIT = 1.2
SIDES = ("empty", "full")


class Sizes(NamedTuple):
    """How much is measured."""

    finished: int = 1_000_000
    open: int = 1_000
    rounds: int = 100
    loads: int = 3
    load_s: float = 6.0
    clients: int = 64


SMALL = Sizes(finished=20_000, open=100, rounds=10, loads=1, load_s=1.5, clients=8)


def run(small: bool = False) -> list[Measure]:
    """Measure; the figures in the order in which they are shown."""
    sizes = SMALL if small else Sizes()
    with measured() as (server, folder), ExitStack() as stack:
        scenes = {side: _scene(server, folder / side, stack, side, sizes) for side in SIDES}
        dsns = {side: scene.dsn for side, scene in scenes.items()}
        progress("the look for due work, on both in turn")
        uncount = {side: _uncount(stack, dsn) for side, dsn in dsns.items()}
        due = _in_turn({side: _claims(stack, dsns[side]) for side in SIDES}, sizes.rounds, uncount)
        addresses = {side: scene.start(stack)[1] for side, scene in scenes.items()}
        progress("lists, on both in turn")
        lists = _list(stack, addresses, sizes.rounds)
        loads = _loads(folder, dsns, addresses, sizes)
    return _measures(due, lists, loads)


def _scene(server: PostgresServer, folder: Path, stack: ExitStack, side: str, sizes: Sizes) -> Scene:
    folder.mkdir()
    scene = Scene(server, folder, stack)
    before_s = time.perf_counter()
    rows.store(scene.dsn, _stored(sizes, with_history=side == "full"))
    stored = rows.counts(scene.dsn)
    progress(f"{side}: {sum(stored.values())} rows stored after {time.perf_counter() - before_s:.0f} s")
    return scene


def _stored(sizes: Sizes, *, with_history: bool) -> Iterator[Transaction]:
    """In the order of time: old open rows among the finished ones, then what is newest. All but history is in both."""
    now_ms = int(time.time() * 1000)
    begun_ms = now_ms - sizes.finished * BETWEEN_MS - FAR_MS
    every = sizes.finished // sizes.open
    for number in range(sizes.finished):
        created_ms = begun_ms + number * BETWEEN_MS
        if number % every == 0:
            tx = rows.made(number, created_ms, LIVE)
            yield rows.confirming(tx, now_ms + FAR_MS)._replace(attention=Attention.RETRYING)
        elif with_history:
            yield rows.confirmed(rows.made(number, created_ms, LIVE))
    for number in range(ALIKE):
        yield rows.confirmed(rows.made(number, now_ms - FAR_MS + number, LIVE))
    for number in range(RARE):
        yield rows.confirmed(rows.made(number, begun_ms + number, (*LIVE, DEAD)))
    for number in range(CLAIMED):
        yield rows.confirming(rows.made(number, now_ms - 1, LIVE), now_ms - 1)


class _InTurn(NamedTuple):
    """Median seconds on each side."""

    empty: float
    full: float

    @property
    def ratio(self) -> float:
        return self.full / self.empty


def _in_turn(
    work: Mapping[str, Callable[[], object]], rounds: int, after: Mapping[str, Callable[[], object]] | None = None
) -> _InTurn:
    """Times of what is measured; what comes ``after`` each is not."""
    took: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds + 2):
        for side in SIDES if number % 2 else reversed(SIDES):
            before_s = time.perf_counter()
            work[side]()
            if number >= 2:  # plans and caches come first
                took[side].append(time.perf_counter() - before_s)
            if after is not None:
                after[side]()
    return _InTurn(median(took["empty"]), median(took["full"]))


# --- what is measured -------------------------------------------------------------------------------------


def _claims(stack: ExitStack, dsn: str) -> Callable[[], object]:
    """The look for due work, as a coordinator does it: the same rows each time, taken for a lease of no time."""
    backend = PostgresBackend(dsn, LEASE_MS)
    stack.callback(backend.close_reader)

    def claim() -> None:
        found = len(backend.claim(CLAIMED, 0).rows)
        if found != CLAIMED:
            raise RuntimeError(f"{CLAIMED} rows are due, {found} were claimed")

    return claim


def _uncount(stack: ExitStack, dsn: str) -> Callable[[], object]:
    """As a save would: what was claimed three times in vain is claimed alone, which is not measured here."""
    connection = stack.enter_context(rows.reading(dsn))
    return lambda: connection.execute(
        "UPDATE tricord_transaction SET claims = 0 WHERE wake_ms IS NOT NULL AND claims > 0"
    )


RARELY = f"participant = {DEAD}"
LISTS: Mapping[str, operator_pb2.ListRequest] = {
    "newest": operator_pb2.ListRequest(page_size=PAGE),
    "open": operator_pb2.ListRequest(
        page_size=PAGE, filter="state = TRYING OR state = CONFIRMING OR state = CANCELLING"
    ),
    "participant": operator_pb2.ListRequest(page_size=PAGE, filter=f"participant = {LIVE[0]}"),
    "rare_participant": operator_pb2.ListRequest(page_size=PAGE, filter=RARELY),
}


def _list(stack: ExitStack, addresses: Mapping[str, str], rounds: int) -> dict[str, _InTurn]:
    stubs = {}
    for side, address in addresses.items():
        channel = stack.enter_context(grpc.insecure_channel(address))
        stubs[side] = operator_pb2_grpc.OperatorServiceStub(channel)

    def page(side: str, request: operator_pb2.ListRequest) -> Callable[[], object]:
        def read() -> None:
            found = len(stubs[side].List(request, timeout=LIST_S).transactions)
            if found != min(PAGE, RARE if request.filter == RARELY else PAGE):
                raise RuntimeError(f"a page has {found} transactions: {request}")

        return read

    return {
        name: _in_turn({side: page(side, request) for side in SIDES}, rounds if name not in SLOW else rounds // 10)
        for name, request in LISTS.items()
    }


def _loads(folder: Path, dsns: Mapping[str, str], addresses: Mapping[str, str], sizes: Sizes) -> _InTurn:
    """Transactions per second on each side."""
    progress(f"{sizes.loads} loads of {sizes.load_s:.0f} s with {sizes.clients} clients on each, in turn")
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(sizes.loads + 1):
        for side in SIDES if number % 2 else reversed(SIDES):
            before = rows.counts(dsns[side])[State.CONFIRMED]
            arguments = [addresses[side], str(sizes.clients), str(sizes.load_s if number else WARM_UP_S)]
            with Process("benchmarks.load", arguments, folder / "load.log") as load:
                seen: dict[str, float] = json.loads(load.read_all())
            _check_confirmed(dsns[side], before + int(seen["answers"]))
            if number:
                rates[side].append(seen["answers"] / seen["seconds"])
    return _InTurn(median(rates["empty"]), median(rates["full"]))


def _check_confirmed(dsn: str, expected: int) -> None:
    """What was answered CONFIRMED is so in the database: the last save follows its answer within moments."""
    gives_up_s = time.monotonic() + END_S
    while (found := rows.counts(dsn)[State.CONFIRMED]) != expected:
        if time.monotonic() > gives_up_s:
            raise RuntimeError(f"{expected} transactions are CONFIRMED by their answers, {found} in the database")
        time.sleep(0.1)


def _measures(due: _InTurn, lists: Mapping[str, _InTurn], loads: _InTurn) -> list[Measure]:
    worst = max((found for name, found in lists.items() if name not in SLOW), key=lambda found: found.ratio)
    measures = [
        _compared("history_due_ratio", due, due.ratio <= LIMIT),
        _compared("history_list_ratio", worst, worst.ratio <= LIMIT),
        Measure(
            "history_throughput_ratio", loads.full, "transactions/s", loads.empty, loads.ratio,
            f">= {1 / LIMIT:.2f}", loads.ratio >= round(1 / LIMIT, 2),
        ),
    ]  # fmt: skip
    return measures + [_compared(f"list_{name}", found) for name, found in lists.items()]


def _compared(name: str, found: _InTurn, met: bool | None = None) -> Measure:
    goal = None if met is None else f"<= {LIMIT}"
    return Measure(name, found.full * 1000, "ms", found.empty * 1000, found.ratio, goal, met)
