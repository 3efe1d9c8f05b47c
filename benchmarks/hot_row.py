"""One hot account: an action that runs what waits together, beside the same action without.

Each branch is tried and confirmed, by the published contract, on one stream with 64 calls in flight, as a coordinator
would call. The two actions have the same handlers and take turns in one run, on one participant process and one
account. What was answered is counted against the fence and the account that the database then holds.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Final, NamedTuple

import grpc.aio
import psycopg

from coordinator.ids import new_xid
from participant_sdk.fence import Status
from tricord.v1 import participant_pb2, participant_pb2_grpc, types_pb2

from .hot_account import ACCOUNT, ALONE, BATCHED, CREATE
from .load import percentiles_ms
from .postgres import commits, measured
from .processes import Process
from .report import Measure, progress

IN_FLIGHT: Final = 64
WARM_UP_S: Final = 2.0
TURN_S: Final = 3.0
TURNS: Final = 3
RATIO_GOAL: Final = 5.0
BALANCE: Final = 10**15
AMOUNT_MAX: Final = 10**6
TAKEN: Final = "taken"
"""Counted beside the actions: the sum of what was confirmed."""


class Turn(NamedTuple):
    """What one action did in its turn. A latency is that of one call."""

    calls: int
    seconds: float
    p50_ms: float
    p99_ms: float
    cpu_s: float
    commits: int


def run() -> list[Measure]:
    """Measure; the figures in the order in which they are shown."""
    with measured() as (server, folder), ExitStack() as stack:
        dsn = server.create_database()
        stack.callback(server.drop_database, dsn)
        with psycopg.connect(dsn) as connection:
            connection.execute(CREATE)
            connection.execute("INSERT INTO account VALUES (%s, %s, 0)", (ACCOUNT, BALANCE))
        url = dsn.replace("postgresql:", "postgresql+psycopg:", 1)
        bank = stack.enter_context(Process("benchmarks.hot_account", [url], folder / "bank.log"))
        turns, confirmed = asyncio.run(_turns(bank, bank.ready.split()[-1], dsn))
        _check(dsn, confirmed)
    return _measures(turns)


async def _turns(bank: Process, address: str, dsn: str) -> tuple[dict[str, list[Turn]], Counter[str]]:
    """The actions in turns; how many branches of each were confirmed."""
    turns: dict[str, list[Turn]] = {BATCHED: [], ALONE: []}
    confirmed: Counter[str] = Counter()
    progress(
        f"{IN_FLIGHT} calls in flight, {2 * TURNS} turns of {TURN_S:.0f} s, after {WARM_UP_S:.0f} s to warm up each"
    )
    for action in (ALONE, BATCHED):
        await _load(address, action, WARM_UP_S, confirmed)
    for number in range(TURNS):
        for action in (ALONE, BATCHED) if number % 2 else (BATCHED, ALONE):
            before_s, committed = bank.cpu_s(), _committed(dsn)
            latencies, seconds = await _load(address, action, TURN_S, confirmed)
            cpu_s, committed = bank.cpu_s() - before_s, _committed(dsn) - committed
            p50, p99 = percentiles_ms(latencies)
            turns[action].append(Turn(len(latencies), seconds, p50, p99, cpu_s, committed))
            progress(
                f"{action}: {len(latencies) / seconds:,.0f} calls/s, {committed / len(latencies):.3f} commits per call"
            )
    return turns, confirmed


async def _load(address: str, action: str, seconds: float, confirmed: Counter[str]) -> tuple[list[float], float]:
    """Try and Confirm branches of `action`; the latency of each call in s, and how long all took."""
    ready: list[participant_pb2.Call] = []
    changed = asyncio.Event()
    sent: dict[int, tuple[participant_pb2.Call, float]] = {}
    latencies: list[float] = []
    begun, start = 0, time.perf_counter()

    def send(phase: participant_pb2.Phase.ValueType, xid: str, payload: types_pb2.Payload) -> None:
        nonlocal begun
        begun += 1
        call = participant_pb2.Call(
            call_id=begun, phase=phase, xid=xid, branch_id=1, participant="bank", action=action,
            payload=payload, attempt=1,
        )  # fmt: skip
        call.timeout.FromSeconds(60)
        sent[begun] = call, time.perf_counter()
        ready.append(call)
        changed.set()

    def send_try() -> None:
        if time.perf_counter() - start < seconds:
            data = json.dumps({"account": ACCOUNT, "amount": random.randint(1, AMOUNT_MAX)}).encode()
            payload = types_pb2.Payload(data=data, content_type="application/json")
            send(participant_pb2.PHASE_TRY, new_xid(time.time_ns() // 1_000_000).hex(), payload)

    async def requests() -> AsyncIterator[participant_pb2.ExchangeRequest]:
        while sent:
            await changed.wait()
            changed.clear()
            calls, ready[:] = ready[:], []
            if calls:
                yield participant_pb2.ExchangeRequest(calls=calls)

    for _ in range(IN_FLIGHT):
        send_try()
    async with grpc.aio.insecure_channel(address) as channel:
        async for response in participant_pb2_grpc.ParticipantServiceStub(channel).Exchange(requests()):
            now = time.perf_counter()
            for reply in response.replies:
                call, since = sent.pop(reply.call_id)
                if reply.outcome != participant_pb2.OUTCOME_DONE:
                    raise RuntimeError(f"not done: {reply}")
                latencies.append(now - since)
                if call.phase == participant_pb2.PHASE_TRY:
                    send(participant_pb2.PHASE_CONFIRM, call.xid, call.payload)
                else:
                    confirmed[action] += 1
                    confirmed[TAKEN] += json.loads(call.payload.data)["amount"]
                    send_try()
            if not sent:
                changed.set()
    return latencies, time.perf_counter() - start


def _check(dsn: str, confirmed: Counter[str]) -> None:
    """What was answered done is what the fence and the account say, no more and no less."""
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT action, status, count(*) FROM tcc_fence_log GROUP BY 1, 2").fetchall()
        account = connection.execute("SELECT balance, held FROM account").fetchall()
    expected = {(action, int(Status.COMMITTED), confirmed[action]) for action in (ALONE, BATCHED)}
    if set(rows) != expected or account != [(BALANCE - confirmed[TAKEN], 0)]:
        raise RuntimeError(f"answered confirmed: {confirmed}; the database holds {rows} and the account {account}")
    branches = confirmed[ALONE] + confirmed[BATCHED]
    progress(f"counted against the database: {branches} branches confirmed, {confirmed[TAKEN]} taken")


def _committed(dsn: str) -> int:
    time.sleep(1.5)  # the server's counters are up to a second behind
    return commits(dsn)


def _measures(turns: dict[str, list[Turn]]) -> list[Measure]:
    rates = {action: sum(t.calls for t in of) / sum(t.seconds for t in of) for action, of in turns.items()}
    alone, ratio = rates[ALONE], rates[BATCHED] / rates[ALONE]
    measures = [
        Measure("hot_row_ratio", ratio, "batch ÷ not", None, None, f"≥ {RATIO_GOAL:.0f}", ratio >= RATIO_GOAL),
        Measure("hot_row_batched", rates[BATCHED], "calls/s", alone, ratio),
        Measure("hot_row_not_batched", alone, "calls/s"),
    ]
    for name, action in (("batched", BATCHED), ("not_batched", ALONE)):
        of = turns[action]
        calls = sum(turn.calls for turn in of)
        middle = sorted(of)[len(of) // 2]
        measures += [
            Measure(f"p50_ms_{name}", middle.p50_ms, "ms"),
            Measure(f"p99_ms_{name}", middle.p99_ms, "ms"),
            Measure(f"commits_per_call_{name}", sum(turn.commits for turn in of) / calls, "commits"),
            Measure(f"cpu_us_{name}", sum(turn.cpu_s for turn in of) / calls * 1e6, "µs/call"),
        ]
        measures += [
            Measure(f"hot_row.{name}.{number}", turn.calls / turn.seconds, "calls/s")
            for number, turn in enumerate(of, 1)
        ]
    return measures
