"""One of several coordinator processes on one address; ``workers`` starts it and watches over it.

``python -m coordinator.worker`` reads one line of JSON, its number and its settings, from standard input, and writes
lines of JSON to standard output: that it is ready, what it has counted when it stops, or why it cannot start. Standard
input stays open as long as its parent lives: when it ends, so does the worker, whatever it is doing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

ORPHANED = 3
"""The exit code of a worker whose parent has died."""


class Start(NamedTuple):
    """What a worker is told when it starts."""

    number: int
    settings: Mapping[str, Any]

    def line(self) -> bytes:
        """As its first and only line of input."""
        return json.dumps(self._asdict()).encode() + b"\n"


def main() -> None:
    """Serve until SIGTERM or SIGINT, or the parent's death."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it starts, Ctrl-C is nothing to tell of in a traceback
    # What stands in the way on standard output is not of this protocol: so nothing else must come to write there.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = Start(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()

    from .config import RunError, Settings
    from .coordinator import run

    try:
        run(Settings(**start.settings), _Told(channel), start.number)
    except RunError as error:
        _tell(channel, failed=str(error), unreachable=error.unreachable)
        sys.exit(1)


def _end_with_parent() -> None:
    """At once: what it leaves undone, others take over, as after any death."""
    while os.read(0, 1_024):
        pass
    os.write(2, b"tricord: the process that has started this worker is gone; the worker ends\n")
    os._exit(ORPHANED)


class _Told:
    """What a worker tells its parent."""

    def __init__(self, channel: IO[str]) -> None:
        self._channel = channel

    def ready(self, address: str) -> None:
        _tell(self._channel, ready=address)

    def stopped(self, counts: Mapping[str, int]) -> None:
        _tell(self._channel, stopped=counts)


def _tell(channel: IO[str], **what: object) -> None:
    channel.write(json.dumps(what) + "\n")
    channel.flush()


if __name__ == "__main__":
    main()
