"""Explore the protocol: ``python -m tests.model [--full] [--only TEXT]``; exit 1 if a rule does not hold."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.model import spin
from tests.model.configurations import FULL, SMALL
from tests.model.explore import TRAP, Found, explore
from tests.model.invariants import RULES


def _show(name: str, found: Found | spin.Result) -> None:
    rate = f"{found.states} states, {found.transitions} transitions, depth {found.depth}, {found.seconds:.1f} s"
    print(f"{name}: {rate}", flush=True)
    if found.violation:
        print(f"  VIOLATION: {found.violation}\n" + "\n".join(f"  {line}" for line in found.trace), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Explore, and print what was found; 1 if a rule does not hold, or spin is missing in CI."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--full", action="store_true", help="also the large configurations")
    parser.add_argument("--only", default="", metavar="TEXT", help="only configurations whose name holds this text")
    options = parser.parse_args(arguments)
    setups = [s for s in (FULL if options.full or options.only else SMALL) if options.only in s.name]
    readings = [reading for reading in spin.READINGS if options.only in reading.name]
    if not setups and not readings:
        parser.error(f"--only: no configuration has {options.only!r} in its name")
    print("checked in every state and at every step:\n" + "".join(f"  - {rule}\n" for rule in (*RULES, TRAP)))
    results: list[Found | spin.Result] = []
    missing = spin.missing() if readings else ""
    with ThreadPoolExecutor(1) as beside:  # spin is another process, for another core
        read = beside.map(spin.run, [] if missing else readings)
        for setup in setups:
            results.append(explore(setup))
            _show(setup.name, results[-1])
        for reading, found in zip(readings, read, strict=False):
            results.append(found)
            _show(reading.name, found)
    if missing:
        print(f"{missing} is not installed: tricord.pml was not explored (`make servers` installs it)")
    violations = sum(1 for result in results if result.violation)
    print(f"model: {sum(result.states for result in results)} states, {violations} violations")
    return 1 if violations or (missing and spin.required()) else 0


if __name__ == "__main__":
    sys.exit(main())
