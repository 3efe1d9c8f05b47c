"""Has the catcher of a bug look for it, and the same catcher at the unchanged product."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .bugs import Bug, Seeds, Suite
from .tree import command, environment, planted

SEEDS_MAX = 1_000
RUN_SECONDS_MAX = 900
"""A run in a copy that takes longer hangs."""
_OUTPUT_LINES = 15


class Caught(NamedTuple):
    """What came of it."""

    by: str
    """Who has noticed, and what; empty: nobody."""
    seeds: int
    """After so many seeds; 0 where a suite has."""
    seconds: float


class Failed(Exception):
    """The catcher itself did not run as it should."""


def catch(bug: Bug, seeds_max: int = SEEDS_MAX) -> Caught:
    """Plant it and have it looked for. Raises NoLongerApplies, Failed."""
    began_at = time.monotonic()
    with planted(bug.edits) as folder:
        if isinstance(bug.catcher, Suite):
            by, seeds = failing_test(bug.catcher, folder), 0
        else:
            by, seeds = violation(bug.catcher, range(seeds_max), folder)
    return Caught(by, seeds, time.monotonic() - began_at)


def violation(catcher: Seeds, seeds: range, folder: Path) -> tuple[str, int]:
    """What the first seed that fails breaks, and how many it took; of none an empty text. Raises Failed."""
    options = ["--unexpected"] if catcher.unexpected else []
    ran = _run(["tests.planted.seeds", catcher.simulator, str(seeds.start), str(seeds.stop), *options], folder)
    if ran.returncode:
        raise Failed(_tail(ran))
    found = json.loads(ran.stdout.splitlines()[-1])
    return (found["what"], found["seed"] - seeds.start + 1) if found else ("", len(seeds))


def failing_test(suite: Suite, folder: Path) -> str:
    """The first test of a suite that fails; of none an empty text. Raises Failed."""
    chosen = ["-k", suite.chosen] if suite.chosen else []
    ran = _run(["pytest", "-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *chosen, *suite.files], folder)
    if ran.returncode == 0:
        if not re.search(r"\b\d+ passed", ran.stdout):
            raise Failed(f"no test of the suite was run\n{_tail(ran)}")
        return ""
    failed = re.search(r"^FAILED (\S+)", ran.stdout, re.MULTILINE)
    if ran.returncode != 1 or failed is None:  # an error outside of a test proves nothing
        raise Failed(_tail(ran))
    return failed[1].removeprefix("tests/")


def _run(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command(*arguments),
            cwd=folder,
            env=environment(folder),
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"not at its end after {RUN_SECONDS_MAX} s") from error


def _tail(ran: subprocess.CompletedProcess[str]) -> str:
    lines = (ran.stdout + ran.stderr).splitlines()
    return "\n".join(lines[-_OUTPUT_LINES:])
