"""Break every cell of the fence's tables, in every way, and print who notices.

    python -m tests.races.mutate            # which races do, on SQLite: every cell with every other verdict
    python -m tests.races.mutate --suites   # which tests do, of the suites on SQLite: every cell once

Exit code 1 if something breaks and nobody notices. It takes minutes, so it is no part of the tests.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.races.bank import Bank
from tests.races.broken import SAME, VARIABLE, WORST, Broken, breaking, others
from tests.races.play import Round
from tests.races.stories import external_story, random_story
from tests.races.watch import watched

ROUNDS_MAX: Final = 400
SUITES: Final = (
    "tests/unit/test_fence_table.py",
    "tests/contract/participant/test_participant_table.py",
    "tests/contract/participant/test_participant_handlers.py",
    "tests/contract/participant/test_cases_p.py",
    "tests/contract/participant/test_external.py",
    "tests/contract/participant/test_external_handlers.py",
    "tests/races/test_races.py",
)
CHOSEN: Final = "test_fence_table or sqlite-sync or (test_races and sqlite and not tasks and not broken)"
NAMES_MAX: Final = 3
ROOT: Final = Path(__file__).resolve().parents[2]


def rounds_until_noticed(bank: Bank, broken: Broken, rounds_max: int) -> int | None:
    """How many rounds it takes until one fails that does not fail otherwise; None if none does."""
    story_of = external_story if broken.table == "EXTERNAL" else random_story
    for number in range(1, rounds_max + 1):
        story = story_of(bank.database, number)
        with breaking(broken):
            wrong = Round(bank, story).play().wrong
        if wrong and not Round(bank, story).play().wrong:
            return number
    return None


def failing_tests(broken: Broken | None) -> set[str]:
    """The tests of the suites that fail with a cell broken, or with none."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-k", CHOSEN]
    environment = dict(os.environ)
    if broken is not None:
        command += ["-p", "tests.races.broken"]
        environment[VARIABLE] = str(broken)
    ran = subprocess.run([*command, *SUITES], cwd=ROOT, env=environment, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) \S*?([^/\s]+\.py::\w+)", ran.stdout, re.MULTILINE)
    if ran.returncode and not failed:
        raise RuntimeError(ran.stdout + ran.stderr)
    return set(failed)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.races.mutate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--suites", action="store_true", help="run the suites of tests, and not the races")
    parser.add_argument("--rounds", type=int, default=ROUNDS_MAX, help="so many, at most, for each broken cell")
    options = parser.parse_args()
    unnoticed = by_suites() if options.suites else by_races(options.rounds)
    print(f"mutate: {len(unnoticed)} unnoticed" + "".join(f"\n  {broken}" for broken in unnoticed))
    return 1 if unnoticed else 0


def by_races(rounds_max: int) -> list[Broken]:
    """Every cell with every other verdict; those that no race notices."""
    unnoticed: list[Broken] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Bank("sqlite", "WAL", f"sqlite:///{folder}/bank.db") as bank,
        watched(),
    ):
        for broken in others():
            if broken.table == "UNFINISHED":
                continue  # a handler that commits by itself is no matter of order: see --suites
            if broken in SAME:
                print(f"mutate: {broken}: the same by another name", flush=True)
                continue
            began_at = time.monotonic()
            noticed = rounds_until_noticed(bank, broken, rounds_max)
            if noticed is None:
                unnoticed.append(broken)
            told = f"noticed by round {noticed}" if noticed else "NOT NOTICED"
            print(f"mutate: {broken}: {told} ({time.monotonic() - began_at:.1f} s)", flush=True)
    return unnoticed


def by_suites() -> list[Broken]:
    """Every cell once; those that no test notices."""
    unnoticed = []
    always = failing_tests(None)
    for broken in WORST:
        names = sorted(failing_tests(broken) - always)
        if not names:
            unnoticed.append(broken)
        print(f"mutate: {broken}: {_by_file(names) or 'NOT NOTICED'}", flush=True)
    return unnoticed


def _by_file(names: list[str]) -> str:
    files: dict[str, list[str]] = {}
    for name in names:
        file, _, test = name.partition("::")
        files.setdefault(file, []).append(test)
    return "; ".join(
        f"{file}: {', '.join(tests[:NAMES_MAX])}" + (f" and {len(tests) - NAMES_MAX} more" if tests[NAMES_MAX:] else "")
        for file, tests in files.items()
    )


if __name__ == "__main__":
    sys.exit(main())
