"""Runs spin over ``tricord.pml``: the same protocol, written from docs/protocol.md and not from the code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

MODEL = Path(__file__).with_name("tricord.pml")
TIMEOUT_S = 600
"""Far more than any of them takes, also on a slow machine."""
MEMORY_MB = 1_024
TRACE_LINES_MAX = 400


class SpinFailed(Exception):
    """Spin could not be run, or did not explore everything: nothing is known."""


class Reading(NamedTuple):
    """One way to explore the Promela model."""

    name: str
    defines: tuple[str, ...]
    ends: bool = False
    """Whether a run that stops anywhere but at the transaction's end is an error."""
    cycles: bool = False
    """Whether a run that never stops is an error."""


class Result(NamedTuple):
    """What spin has found."""

    reading: Reading
    states: int
    transitions: int
    depth: int
    seconds: float
    violation: str
    trace: tuple[str, ...]


BOTH_TWO = ("NB=2", "NC=2", "KEEP")
TWO_FAULTS = ("NB=2", "NC=1", "MSGS=1", "LIVE=2")
READINGS = (
    Reading("spin, two coordinators, two branches", BOTH_TWO),
    Reading("spin, two coordinators, two branches, a database set back", (*BOTH_TWO, "FORGETS")),
    Reading("spin, two coordinators, one branch, two of each message", ("NB=1", "NC=2", "MSGS=2")),
    Reading("spin, two coordinators, one branch, three faults: ends", ("NB=1", "NC=2", "MSGS=1", "LIVE=3"), ends=True),
    Reading("spin, one coordinator, two branches, two faults: ends", TWO_FAULTS, ends=True),
    Reading("spin, one coordinator, two branches, two faults: stops", TWO_FAULTS, cycles=True),
)


def missing() -> str:
    """The program that is not there, or empty."""
    return next((name for name in ("spin", "gcc") if shutil.which(name) is None), "")


def required() -> bool:
    """Whether a missing spin is a failure: in CI."""
    return os.environ.get("CI") == "true"


def run(reading: Reading, broken: tuple[str, ...] = ()) -> Result:
    """Explore one reading, with these switches that break a rule. Raises SpinFailed."""
    started = time.monotonic()
    defines = [f"-D{define}" for define in (*reading.defines, *broken)]
    with tempfile.TemporaryDirectory(prefix="tricord-spin-") as directory:
        shutil.copy(MODEL, directory)
        _call(directory, "spin", *defines, "-a", MODEL.name)
        kind = "-DNP" if reading.cycles else "-DSAFETY"
        _call(directory, "gcc", "-O1", "-w", "-o", "pan", "pan.c", kind, "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MB}")
        options = ["-l"] if reading.cycles else [] if reading.ends else ["-E"]
        told = _call(directory, "./pan", "-m1000000", "-w20", *options)
        errors = _number(r"errors: (\d+)", told)
        if "error: max search depth" in told or ("Search not completed" in told and not errors):
            raise SpinFailed(f"{reading.name}: not everything was explored:\n{told}")
        trace: list[str] = []
        if errors:
            trace = _call(directory, "spin", *defines, "-t", "-p", "-g", MODEL.name).splitlines()
    found = re.search(r"^pan:\d*:? (.*)$", told, re.MULTILINE)
    return Result(
        reading,
        _number(r"(\d+) states, stored", told),
        _number(r"(\d+) transitions", told),
        _number(r"depth reached (\d+)", told),
        time.monotonic() - started,
        (found[1] if found else "error") if errors else "",
        tuple(trace[-TRACE_LINES_MAX:]),
    )


def _call(directory: str, *command: str) -> str:
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpinFailed(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise SpinFailed(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise SpinFailed(f"spin told no {pattern!r}:\n{text}")
    return int(found[1])
