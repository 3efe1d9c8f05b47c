"""A coordinator that writes down its crash points, and dies at one of them.

    TRICORD_CRASH_LOG=FILE TRICORD_CRASH_CALLS=FOLDER [TRICORD_CRASH_AT='before save CONFIRMING'] \\
        python -m tests.crashes.launcher serve …the coordinator's own options…

It is the product, wrapped from outside where it touches the world:

begin, save STATE       a flush: before its statement is sent, and after its COMMIT, before anybody uses the result
claim                   after rows were claimed, before anybody sees them
send PHASE BRANCH       before a call is given to delivery, and after it has left, which its participant has seen
reply PHASE BRANCH      before a reply is given to the driver

A point is named by what happens and, from the second time on, by its number: ``after save TRYING #2``. The names are
those of one transaction: whoever starts this process lets it have no other.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from coordinator.cli import main
from coordinator.delivery import Delivery
from coordinator.delivery_link import Link, OnReply
from coordinator.model import Call, Phase, Reply, Spec, State
from coordinator.store.postgres import PostgresBackend
from coordinator.store.rows import Batch, Claim, Row
from tests.chaos.counted import Called, read
from tests.crashes import broken
from tricord.v1 import participant_pb2 as pb

LOG, CALLS, AT = "TRICORD_CRASH_LOG", "TRICORD_CRASH_CALLS", "TRICORD_CRASH_AT"
ARRIVES_S: Final = 20.0


class Points:
    """The points of this process so far, and the one to die at."""

    def __init__(self, log: Path, calls: Path, at: str) -> None:
        self._file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._calls = calls
        self._at = at
        self._counts: Counter[str] = Counter()
        self._changed = threading.Condition()  # flushes, claims and calls have threads of their own

    def reach(self, point: str, leaving: Called | None = None) -> None:
        """This point has come: write it down, and die if it is the one."""
        with self._changed:
            nth = self._counts[point] + 1
            name = point if nth == 1 else f"{point} #{nth}"
            if leaving is not None:
                self._see_arrive(leaving, nth)
            os.write(self._file, f"{name}\n".encode())
            if name == self._at:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(ARRIVES_S)  # it does not come back from there
            self._counts[point] = nth
            self._changed.notify_all()

    def come(self, points: Iterable[str]) -> None:
        """Block until all these have come."""
        wanted = list(points)
        with self._changed:
            self._changed.wait_for(lambda: all(self._counts[point] for point in wanted), ARRIVES_S)

    def _see_arrive(self, called: Called, times: int) -> None:
        """gRPC has taken the call; that it has left this process, its participant knows."""
        end_s = time.monotonic() + ARRIVES_S
        while sum(read(path)[called] for path in self._calls.glob("*.calls")) < times:
            if time.monotonic() > end_s:
                os.write(self._file, f"lost: {called}\n".encode())
                return
            time.sleep(0.001)


def wrap_store(points: Points) -> None:
    """Flushes and claims of PostgreSQL."""
    flush, claim = PostgresBackend.flush, PostgresBackend.claim

    @functools.wraps(flush)
    def flush_between(self: PostgresBackend, batch: Batch) -> list[Row | None]:
        names = ["begin" for _ in batch.begins] + [f"save {State(row.state).name}" for row in batch.saves]
        for name in names:
            points.reach(f"before {name}")
        standing = flush(self, batch)
        for name in names:
            points.reach(f"after {name}")
        return standing

    @functools.wraps(claim)
    def claim_before(self: PostgresBackend, *arguments: Any, **named: Any) -> Claim:
        claimed = claim(self, *arguments, **named)
        for _ in claimed.rows:
            points.reach("after claim")
        return claimed

    broken.put(PostgresBackend, flush=flush_between, claim=claim_before)


def wrap_calls(points: Points) -> None:
    """Calls and their replies."""
    send, write = Delivery.send, Link._write

    @functools.wraps(send)
    def send_after(self: Delivery, xid: str, spec: Spec, call: Call, on_reply: OnReply) -> None:
        name = f"{call.phase.name} {call.branch + 1}"
        points.reach(f"before send {name}")

        def replied(reply: Reply) -> None:
            points.reach(f"before reply {name}")
            on_reply(reply)

        send(self, xid, spec, call, replied)

    @functools.wraps(write)
    async def write_seen(self: Link, stream: Any, reader: Any) -> None:
        await write(self, Written(stream, points), reader)

    broken.put(Delivery, send=send_after)
    broken.put(Link, _write=write_seen)


class Written:
    """A stream to a participant that tells what was written."""

    def __init__(self, stream: Any, points: Points) -> None:
        self._stream = stream
        self._points = points

    async def write(self, request: pb.ExchangeRequest) -> None:
        """Write, then tell."""
        await self._stream.write(request)
        for call in request.calls:
            called = Called(call.xid, call.branch_id, pb.Phase.Name(call.phase))
            self._points.reach(f"after send {Phase(call.phase).name} {call.branch_id}", called)


if __name__ == "__main__":
    # Taken out of the environment: the coordinator would ask what settings these are.
    reached = Points(Path(os.environ.pop(LOG)), Path(os.environ.pop(CALLS)), os.environ.pop(AT, ""))
    broken.break_as_named(reached.come)
    wrap_store(reached)
    wrap_calls(reached)
    main()
