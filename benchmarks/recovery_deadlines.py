"""How late deadlines are, while many other transactions wait and clients make load.

Of the others, half wait for a far deadline, and half for the next call to a participant that is dead: these come again
and again. The deadlines are those of transactions that were found in the database, and of some that clients begin.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from coordinator.codec import transaction
from coordinator.model import BranchStatus, State, Step, Transaction
from coordinator.store.rows import Row
from tests.postgres import PostgresServer
from tricord.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2

from . import rows
from .load import PAYLOAD
from .noop_participant import FENCE_ID
from .processes import Process
from .recovery_scene import DEAD, LIVE, Scene
from .report import progress

LEAD_S = 8.0
"""From the making of the rows to the first deadline: they must be stored, and a coordinator started, by then."""
TIMEOUT_S = 2.0
"""Of the transactions that clients begin, and that only their deadline can end."""
FAR_MS = 3_600_000
END_S = 60.0
POLL_S = 0.1
ATTEMPTS = 8
"""Made before: the back-off has grown to its cap."""
TRYING_FAILED = "participant noop-3 cannot be reached"


class Waiting(NamedTuple):
    """How much is measured."""

    others: int = 10_000
    due: int = 2_000
    due_s: float = 10.0
    clients: int = 16
    initiators: int = 32


class Late(NamedTuple):
    """How much later than its deadline each was decided, in ms, in order."""

    stored: Sequence[float]
    """By the time in the row."""
    answered: Sequence[float]
    """By the time at which its client was told, less the time-out, counted from its request."""
    load_per_s: float


def deadlines(server: PostgresServer, folder: Path, sizes: Waiting) -> Late:
    """Measure."""
    with ExitStack() as stack:
        scene = Scene(server, folder, stack, [DEAD])
        progress(f"{sizes.due} deadlines in {sizes.due_s:.0f} s, {sizes.others} others wait, {sizes.clients} clients")
        base_ms = int((time.time() + LEAD_S) * 1000)
        due = [_due(n, base_ms + int(n * sizes.due_s * 1000 / sizes.due)) for n in range(sizes.due)]
        rows.store(scene.dsn, [*(_other(n, base_ms, sizes.others) for n in range(sizes.others)), *due])
        coordinator, address = scene.start(stack)
        if time.time() * 1000 > base_ms:
            raise RuntimeError(f"it took more than {LEAD_S:.0f} s to store the rows and to start")
        left_s = base_ms / 1000 + sizes.due_s - time.time()
        arguments = [address, str(sizes.clients), str(left_s)]
        with Process("benchmarks.load", arguments, folder / "load.log") as load:
            answered = asyncio.run(_initiate(address, sizes.initiators, left_s - TIMEOUT_S))
            seen: dict[str, float] = json.loads(load.read_all())
        found = _decided(scene.dsn, due)
        coordinator.close()
        stored = rows.counts(scene.dsn)
        if stored.get(State.CONFIRMED) != seen["answers"]:
            raise RuntimeError(f"{seen['answers']:.0f} were answered CONFIRMED, the database holds {stored}")
        if stored.get(State.CANCELLING) != len(due) + len(answered):
            raise RuntimeError(f"{len(due)} and {len(answered)} had to be cancelled, the database holds {stored}")
    late = [found[tx.spec.xid] - tx.spec.created_ms - tx.spec.timeout_ms for tx in due]
    return Late(sorted(late), sorted(answered), seen["answers"] / seen["seconds"])


def _failed(status: BranchStatus, next_ms: int) -> Step:
    fence_id = FENCE_ID if status is BranchStatus.TRIED else ""
    return Step(status, ATTEMPTS, next_ms, TRYING_FAILED, fence_id)


def _other(number: int, base_ms: int, count: int) -> Transaction:
    """One that waits: for a far deadline, or for its turn with the dead participant."""
    created_ms = base_ms - int(LEAD_S * 1000)
    tx = rows.made(number, created_ms, (LIVE[0], DEAD), timeout_ms=2 * FAR_MS)
    if number % 2:
        tried = Step(BranchStatus.TRIED, fence_id=FENCE_ID)
        wake_ms = base_ms + FAR_MS
        return tx._replace(steps=(tried, _failed(BranchStatus.PENDING, wake_ms)), version=2, wake_ms=wake_ms)
    wake_ms = base_ms + number * rows.POLICY.backoff_cap_ms // count
    done = Step(BranchStatus.CONFIRMED, fence_id=FENCE_ID)
    return rows.confirming(tx, wake_ms, [done, _failed(BranchStatus.TRIED, wake_ms)])


def _due(number: int, deadline_ms: int) -> Transaction:
    """One whose deadline comes before the next attempt of its Try."""
    timeout_ms = int(LEAD_S * 1000)
    tx = rows.made(number, deadline_ms - timeout_ms, (LIVE[0], DEAD), timeout_ms)
    tried = Step(BranchStatus.TRIED, fence_id=FENCE_ID)
    return tx._replace(
        steps=(tried, _failed(BranchStatus.PENDING, deadline_ms + FAR_MS)), version=2, wake_ms=deadline_ms
    )


def _decided(dsn: str, due: Sequence[Transaction]) -> Mapping[bytes, int]:
    """When each of them was decided, by its row. Returns when all are. Raises RuntimeError."""
    query = f"SELECT {rows.COLUMNS} FROM tricord_transaction WHERE xid = ANY(%s)"
    xids = [tx.spec.xid for tx in due]
    gives_up_s = time.time() + END_S
    with rows.reading(dsn) as connection:
        while time.time() < gives_up_s:
            found = [transaction(Row._make(row)) for row in connection.execute(query, (xids,)).fetchall()]
            if all(tx.state is not State.TRYING for tx in found):
                return {tx.spec.xid: tx.decided_ms for tx in found}
            time.sleep(POLL_S)
    raise RuntimeError(f"{sum(tx.state is State.TRYING for tx in found)} deadlines have not come after {END_S:.0f} s")


async def _initiate(address: str, initiators: int, seconds: float) -> list[float]:
    """Begin transactions that cannot be tried, and wait until they are decided; how late each was, in ms."""
    branches = [
        coordinator_pb2.BranchRequest(
            participant=name,
            action="noop",
            payload=types_pb2.Payload(data=PAYLOAD, content_type="application/json"),
        )
        for name in (LIVE[0], DEAD)
    ]
    timeout = Duration()
    timeout.FromMilliseconds(int(TIMEOUT_S * 1000))
    request = coordinator_pb2.ExecuteRequest(branches=branches, timeout=timeout, wait=coordinator_pb2.WAIT_DECIDED)
    late: list[float] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        start_s = time.perf_counter()

        async def initiator(number: int) -> None:
            await asyncio.sleep(number * TIMEOUT_S / initiators)  # not all deadlines at one moment
            while (before_s := time.perf_counter()) - start_s < seconds:
                response = await stub.Execute(request, timeout=END_S)
                if response.transaction.state != types_pb2.TRANSACTION_STATE_CANCELLING:
                    raise RuntimeError(f"its deadline had to cancel it: {response.transaction}")
                late.append((time.perf_counter() - before_s - TIMEOUT_S) * 1000)

        await asyncio.gather(*(initiator(number) for number in range(initiators)))
    return late
