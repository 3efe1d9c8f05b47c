"""A program on a machine whose clock is wrong, for tests; everything else about it is the real one.

python -m tests.wrong_clock SECONDS MODULE …the module's own arguments…
"""

from __future__ import annotations

import runpy
import sys
import time


def set_clock(wrong_by_s: int) -> None:
    """From now on this process's clock is wrong by so much; the monotonic one is right, as always.

    gRPC sees the right one: its core reads the machine's, which is not wrong, and the two of them must agree.
    """
    right, right_ns = time.time, time.time_ns

    def wrong() -> float:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        return right() if caller.startswith("grpc") else right() + wrong_by_s

    time.time = wrong
    time.time_ns = lambda: right_ns() + wrong_by_s * 1_000_000_000


if __name__ == "__main__":
    _, seconds, module, *sys.argv[1:] = sys.argv
    set_clock(int(seconds))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
