"""A coordinator that writes down what it knows to be durable, and what it sends: ``saved`` and ``called`` of a history.

    python -m tests.chaos.recorded --events FOLDER/NAME [--broken HOW] serve …the coordinator's own options…

It is the product, wrapped from outside where it touches store and participants. A version is written down by everybody
who learns that it stands, before anything is made of it: who has saved it when its COMMIT has returned, and who has
read it. So SIGKILL loses no version that anybody has acted on: one whose line its killer has cut off is either read by
the next, or nobody has acted on it. A call is written down before it leaves.

Each start has a file of its own, and each write is one to its end, so only the last line of a file can be cut off.
docs/histories.md says why the order across coordinators comes out right.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from coordinator.check.events import Called, Event, Saved, to_json_line
from coordinator.check.reading import event_of
from coordinator.cli import main
from coordinator.delivery import Delivery
from coordinator.delivery_link import OnReply
from coordinator.model import Call, Spec, State
from coordinator.store.postgres import PostgresBackend
from coordinator.store.rows import Batch, Claim, Row
from coordinator.store.sqlite import SqliteBackend
from coordinator.store.store import Store
from tests.crashes import broken

SUFFIX = ".events"


def program(folder: Path, name: str) -> Sequence[str]:
    """What to start in place of ``coordinator``; its files lie in the folder."""
    return ("tests.chaos.recorded", "--events", str(folder / name))


def files(folder: Path) -> Sequence[Path]:
    """One for each start of a coordinator that has written down anything, or could have."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def merge(folder: Path) -> Iterator[Event]:
    """What all of them have written down."""
    for path in files(folder):
        yield from read(path)


def read(path: Path) -> list[Event]:
    """The events of one start. Raises HistoryError for a line that is none, unless it is the last and cut off."""
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        del lines[-1]
    return [event_of(line, number) for number, line in enumerate(lines, 1)]


class Recorder:
    """The file of this process."""

    def __init__(self, path: Path) -> None:
        name = f"{path.name}.{time.time_ns()}{SUFFIX}"
        self._file = os.open(path.with_name(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)

    def stand(self, rows: Iterable[Row]) -> None:
        """These versions are durable. Who saved one is told by its save_id, whoever writes this line."""
        at = _now_ms()
        self._write(
            Saved(at, row.xid.hex(), State(row.state).name, row.version, f"{row.save_id:x}")
            for row in rows
            if row.state  # else it stands for a row that is missing
        )

    def call(self, xid: str, spec: Spec, call: Call) -> None:
        """This call is about to leave."""
        participant = spec.branches[call.branch].participant
        self._write([Called(_now_ms(), xid, call.branch + 1, participant, call.phase.name)])

    def _write(self, events: Iterable[Event]) -> None:
        lines = "".join(map(to_json_line, events)).encode()
        if os.write(self._file, lines) != len(lines):
            raise OSError("the file of events takes no more")


def wrap(recorder: Recorder) -> None:
    """Have this process write down what it does."""
    for backend in (PostgresBackend, SqliteBackend):
        _wrap_backend(backend, recorder)
    get, send = Store.get, Delivery.send

    @functools.wraps(get)
    async def get_seen(self: Store, *, xid: bytes = b"", key: bytes = b"") -> Row | None:
        row = await get(self, xid=xid, key=key)
        if row is not None:
            recorder.stand([row])
        return row

    @functools.wraps(send)
    def send_seen(self: Delivery, xid: str, spec: Spec, call: Call, on_reply: OnReply) -> None:
        recorder.call(xid, spec, call)
        send(self, xid, spec, call, on_reply)

    broken.put(Store, get=get_seen)
    broken.put(Delivery, send=send_seen)


def _wrap_backend(backend: type[PostgresBackend] | type[SqliteBackend], recorder: Recorder) -> None:
    flush, claim = backend.flush, backend.claim

    @functools.wraps(flush)
    def flush_seen(self: Any, batch: Batch) -> list[Row | None]:
        standing = flush(self, batch)
        mine = (*batch.begins, *batch.saves)
        recorder.stand(row if other is None else other for row, other in zip(mine, standing, strict=True))
        return standing

    @functools.wraps(claim)
    def claim_seen(self: Any, *arguments: Any, **named: Any) -> Claim:
        claimed = claim(self, *arguments, **named)
        recorder.stand(claimed.rows)
        return claimed

    broken.put(backend, flush=flush_seen, claim=claim_seen)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def run(arguments: Sequence[str]) -> None:
    """Run the coordinator."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--events", required=True, type=Path)
    parser.add_argument("--broken", choices=broken.BROKEN, help="to see that the checker notices")
    options, rest = parser.parse_known_args(arguments)
    if options.broken:
        broken.BROKEN[options.broken](lambda points: None)  # it need not wait: each call is written down as it leaves
    wrap(Recorder(options.events))
    sys.argv[1:] = rest
    main()


if __name__ == "__main__":
    run(sys.argv[1:])
