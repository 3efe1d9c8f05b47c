"""Processes that die at a point of a request: simulated in this process, or this process in earnest.

    with crash_at("after_business_commit"):
        make_transfer("t-1", "alice", "bob", 500)   # dies there; the block ends
    assert make_transfer("t-1", "alice", "bob", 500) == ...

Nothing of it is in the way of a program that is not tested: what happens at a point is put there when a crash is
armed, and taken away after it. Only code, and the environment that a process is started with, can arm one.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, TypeAlias, cast

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.setup import CRASH_VARIABLE
from participant_sdk.idempotency.testing.crash import Crash
from participant_sdk.idempotency.testing.points import Crashed, Point, point_of, read_point
from participant_sdk.idempotency.testing.seams import put

logger = logging.getLogger("tricord.idempotency")

CrashAt: TypeAlias = "Callable[..., AbstractContextManager[Crash, bool]]"
"""The type of `crash_at`, where it is a fixture."""
_arming: Final = threading.Lock()
_armed: list[Crash] = []


def crash_at(point: Point | str, *, hit: int = 1, operation: str = "") -> AbstractContextManager[Crash, bool]:
    """Simulate that this process dies at `point`, at its `hit`-th hit, if `operation` is named: one of its requests.

    At that point Crashed, a BaseException, is raised. Until the block ends the process is dead for all stores in it:
    connections of open runs are dropped, nothing is written, no lease is renewed, every use raises Crashed. The block
    swallows Crashed; after it the process has been started anew: of what was in memory (such as a MemoryFront's
    records) nothing is left, and what is in the database is as it was left.

    Raises AssertionError if the block is left and the point was not hit: such a test would have shown nothing. Raises
    ConfigurationError for a point that there is not, a second crash at the same time, and `during_commit` with a
    driver whose COMMIT cannot be cut (all of SQLite's, asyncmy).
    """
    made: Any = _dying(Crash(point_of(point, hit), hit, operation, _raise))
    return cast("AbstractContextManager[Crash, bool]", made)  # type checkers are to know that it swallows


@contextmanager
def _dying(crash: Crash) -> Iterator[Crash]:
    with _armed_with(crash):
        try:
            yield crash
        except Crashed:
            pass
        except BaseExceptionGroup as group:  # as a TaskGroup, or an event loop's framework, hands it on
            if (others := group.split(Crashed)[1]) is not None:
                raise others from None
    crash.forget()
    if not crash.fired:
        raise AssertionError(f"crash_at({crash.point.value!r}): hit {crash.seen} times, and not {crash.hit}")


def arm_from_environment() -> None:
    """Have this process kill itself (SIGKILL) at the point that the environment names. Called as a store is made."""
    with _arming:
        if _armed:
            return
        try:
            point, hit = read_point(os.environ[CRASH_VARIABLE])
        except ConfigurationError as error:
            raise ConfigurationError(f"{CRASH_VARIABLE}: {error}") from error
        logger.warning("%s: this process will kill itself at %s, hit %d", CRASH_VARIABLE, point.value, hit)
        crash = Crash(point, hit, "", lambda point: os.kill(os.getpid(), signal.SIGKILL))
        _armed.append(crash)
    put(crash)


def _raise(point: Point) -> None:
    raise Crashed(point)


@contextmanager
def _armed_with(crash: Crash) -> Iterator[None]:
    with _arming:
        if _armed:
            raise ConfigurationError(f"a crash is armed already, at {_armed[0].point.value}")
        _armed.append(crash)
    take_away = put(crash)
    try:
        yield
    finally:
        take_away()
        _armed.remove(crash)
