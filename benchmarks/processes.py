"""The processes that a benchmark runs beside itself, and what they cost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import IO

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
        """CPU seconds that it has used so far, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def rss_mb(self) -> float:
        """Resident memory in MB (10⁶ bytes)."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

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
