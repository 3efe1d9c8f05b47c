"""The processes that a benchmark runs beside itself, and what they cost."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STOP_S = 30.0


class Process(AbstractContextManager["Process"]):
    """A Python process that says on its first line of standard output that it is ready."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        self._log: IO[bytes] = log.open("wb")
        self.log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self._process.stdout is not None
        self.ready = self._process.stdout.readline().strip()
        if not self.ready:
            self.close()
            raise RuntimeError(f"{module} did not start:\n{log.read_text()[-2000:]}")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def read_all(self) -> str:
        """Wait for its end; the rest of its standard output."""
        assert self._process.stdout is not None
        rest = self._process.stdout.read()
        if self._process.wait():
            raise RuntimeError(f"{self._process.args!r} failed:\n{self.log.read_text()[-2000:]}")
        return rest

    def cpu_s(self) -> float:
        """CPU seconds that it and its children have used so far, user and system."""
        ticks = sum(int(fields[11]) + int(fields[12]) for fields in self._family().values())
        return ticks / _TICKS_PER_S

    def rss_mb(self) -> float:
        """Resident memory of it and its children in MB (10⁶ bytes)."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self._family())
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def _family(self) -> dict[int, list[str]]:
        """It and those that it has started, by pid: the fields of ``/proc/PID/stat`` from the state on."""
        found = {int(path.name): fields for path in Path("/proc").glob("[0-9]*") if (fields := _stat(path))}
        family = {self.pid}
        while more := {pid for pid, fields in found.items() if int(fields[1]) in family} - family:
            family |= more
        return {pid: found[pid] for pid in family}

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """SIGTERM, then wait for its end."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_coordinator(stack: ExitStack, folder: Path, store: str, flags: Sequence[str] = ()) -> tuple[Process, str]:
    """A coordinator on a store, and its address; ``stack`` ends it."""
    arguments = ["serve", "--store", store, "--listen", "127.0.0.1:0", "--log-format", "json", *flags]
    coordinator = stack.enter_context(Process("coordinator", arguments, folder / "coordinator.log"))
    return coordinator, coordinator.ready.split()[-1]


def run_fast(work: Coroutine[Any, Any, None]) -> None:
    """Run it on uvloop, where that is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


def stopped_line(log: Path) -> dict[str, int]:
    """What a coordinator has counted, as it says last of all when it stops; the sums of its workers, if it has some."""
    for line in reversed(log.read_text().splitlines()):
        event: dict[str, int] = json.loads(line)
        if event.get("event") == "coordinator.stopped":  # type: ignore[comparison-overlap]
            return event
    raise RuntimeError(f"the coordinator did not say that it stopped: {log.read_text()[-2000:]}")


def _stat(folder: Path) -> list[str]:
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return []
