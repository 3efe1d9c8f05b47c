"""Judge the mutants; exit 1 if one survives that is not listed, or an entry of the list is wrong."""

from __future__ import annotations

import argparse
import sys
import time

from .equivalent import EQUIVALENT, unmatched
from .operators import Mutant
from .run import Court, Verdict, all_mutants


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only mutants whose description holds this text")
    parser.add_argument("--list", action="store_true", help="print the mutants and judge none")
    parser.add_argument("--killers", action="store_true", help="print who killed each")
    options = parser.parse_args(arguments)
    made = all_mutants()
    wrong = [f"this entry of equivalent.py matches no mutant: {entry}" for entry in unmatched(made)]
    wanted = [mutant for mutant in made if options.only in str(mutant)]
    if options.list:
        print(*wanted, sep="\n")
        return 0
    equivalent, survivors, false = judge(wanted, killers=options.killers)
    wrong += [f"this is listed as equivalent, and {killer} fails with it: {mutant}" for mutant, killer in false]
    wrong += [f"it survives: {mutant}" for mutant in survivors]
    print(*wrong, sep="\n")
    killed = len(wanted) - equivalent - len(survivors)
    print(f"mutants: {killed} killed, {equivalent} equivalent, {len(survivors)} survive")
    return 1 if wrong or not wanted else 0


def judge(wanted: list[Mutant], *, killers: bool) -> tuple[int, list[Mutant], list[tuple[Mutant, str]]]:
    """How many survive that may, those that may not, and those that were killed and should not have been."""
    listed = {entry.key for entry in EQUIVALENT}
    began_at = time.monotonic()
    killed: list[Mutant] = []
    equivalent: list[Mutant] = []
    survivors: list[Mutant] = []
    false: list[tuple[Mutant, str]] = []

    def told(verdict: Verdict) -> None:
        mutant, killer = verdict.mutant, verdict.killer
        if killer:
            killed.append(mutant)
            if mutant.key in listed:
                false.append((mutant, killer))
        else:
            (equivalent if mutant.key in listed else survivors).append(mutant)
        number = len(killed) + len(equivalent) + len(survivors)
        if killers:
            print(f"{mutant}\n    {killer or 'survives'}", flush=True)
        elif not number % 100:
            print(f"{number} of {len(wanted)} judged in {time.monotonic() - began_at:.0f} s", flush=True)

    Court().verdicts(wanted, told)
    return len(equivalent), survivors, false


if __name__ == "__main__":
    sys.exit(main())
