"""For the tests of programs that use participant_sdk.idempotency: crashes, time that goes by, and a suite for fronts.

points, crashes            `crash_at`, and the points of a request at which a process may die
crash, seams, cutting      how it is done
times                      `lapse` and `expire`, for leases and answers that are over
front_suite                what every Front has to pass, sync or async
plugin                     fixtures for pytest: `pytest_plugins = ["participant_sdk.idempotency.testing.plugin"]`

Nothing here is loaded by a program that does not ask for it; pytest is loaded by the plugin alone.
"""

from participant_sdk.idempotency.setup import CRASH_VARIABLE
from participant_sdk.idempotency.testing.crash import Crash
from participant_sdk.idempotency.testing.crashes import CrashAt, crash_at
from participant_sdk.idempotency.testing.front_suite import FrontSuite
from participant_sdk.idempotency.testing.points import Crashed, Point
from participant_sdk.idempotency.testing.times import (
    TimeGoesBy,
    async_expire,
    async_lapse,
    expire,
    expire_row,
    lapse,
    lapse_row,
)

__all__ = [
    "CRASH_VARIABLE",
    "Crash",
    "CrashAt",
    "Crashed",
    "FrontSuite",
    "Point",
    "TimeGoesBy",
    "async_expire",
    "async_lapse",
    "crash_at",
    "expire",
    "expire_row",
    "lapse",
    "lapse_row",
]
