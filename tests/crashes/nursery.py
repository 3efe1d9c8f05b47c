"""Where coordinators A come from: each is forked from one process that has imported all that they need.

Each dies at a point, so there are hundreds of them, and importing costs more than all else that one does.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from examples.transfer.databases import eventually
from examples.transfer.processes import READY_S, ROOT, ProcessFailed
from tests.crashes import launcher

LISTENS: Final = "tricord: listening on "
_NEEDED: Final = ("coordinator.coordinator", "coordinator.store.postgres", "uvloop")
_PR_SET_PDEATHSIG: Final = 1


class Nursery:
    """The process that forks. One child at a time."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRICORD_")}
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.crashes.nursery"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us alone
        )

    def coordinator(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        """A coordinator that listens, or has died on its way there. Raises ProcessFailed."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        log.touch()
        begin = log.stat().st_size
        order = {"arguments": arguments, "environment": environment, "log": str(log)}
        self._popen.stdin.write(json.dumps(order) + "\n")
        self._popen.stdin.flush()
        child = Child(int(self._popen.stdout.readline()), self._popen)

        def listens() -> bool:
            return child.pid is None or LISTENS.encode() in log.read_bytes()[begin:]

        try:
            eventually("a coordinator listens", listens, READY_S)
        except TimeoutError as error:
            child.kill()
            raise ProcessFailed(str(error)) from error
        return child

    def close(self) -> None:
        """End it. A child that is left dies with it."""
        self._popen.kill()
        self._popen.communicate()


class Child:
    """A process that was forked."""

    def __init__(self, pid: int, nursery: subprocess.Popen[str]) -> None:
        self._pid = pid
        assert nursery.stdout is not None
        self._ends = nursery.stdout
        self._ended = False

    @property
    def pid(self) -> int | None:
        """Its id while it runs."""
        if not self._ended and select.select([self._ends], [], [], 0)[0]:
            self._see_end()
        return None if self._ended else self._pid

    def kill(self) -> None:
        """SIGKILL. Returns when it is gone."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._see_end()

    def _see_end(self) -> None:
        self._ends.readline()
        self._ended = True


def _fork_as_ordered() -> None:
    """In the nursery: a line of input is an order; a line of output says who was born, the next that it is gone."""
    _die_with_parent()
    for name in _NEEDED:
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _live(json.loads(line))
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)


def _live(order: Mapping[str, Any]) -> NoReturn:
    code = 1
    try:
        _die_with_parent()
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order["environment"])
        launcher.serve(order["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # never back into the nursery


def _die_with_parent() -> None:
    if sys.platform == "linux":  # elsewhere a killed test leaves it behind
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _fork_as_ordered()
