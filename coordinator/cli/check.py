"""``tricord check``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from .exits import FINDINGS, USAGE, fail
from .forms import output_option, tell_one

if TYPE_CHECKING:
    from ..check.invariants import Violation
    from ..check.judge import Verdict

VIOLATIONS_MAX = 1_000
"""So many are told; the rest is counted."""


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@output_option("table", "json", "jsonl")
def check(file: str, output: str) -> None:
    """Judge a history of transactions by the invariants.

    FILE has an event a line, as docs/histories.md says; - is standard input. Tells for each invariant how much could be
    judged, and what does not hold with the lines that contradict each other. It asks no coordinator. Exit code 0: all
    that could be judged holds; 6: something does not; 2: it is no history, and the line and field are named.
    """
    from ..check.judge import judge
    from ..check.reading import HistoryError, events

    found: list[Violation] = []

    def tell(violation: Violation) -> None:
        if len(found) < VIOLATIONS_MAX:
            found.append(violation)
            if output == "table":
                click.echo(f"VIOLATED: {violation.text}")

    try:
        if file == "-":
            verdict = judge(events(sys.stdin.buffer), tell)
        else:
            with open(file, "rb") as opened:
                verdict = judge(events(opened), tell)
    except HistoryError as error:
        fail(f"{'standard input' if file == '-' else file}: {error}", USAGE)
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}", USAGE)
    tell_one(output, as_json(verdict, found), lambda: _print(verdict))
    click.echo(_summary(verdict, len(found)), err=True)
    if verdict.violations:
        sys.exit(FINDINGS)


def as_json(verdict: Verdict, found: list[Violation]) -> dict[str, Any]:
    """The verdict for machines."""
    return {
        "events": verdict.events,
        "transactions": verdict.transactions,
        "ended": verdict.ended,
        "invariants": [each._asdict() for each in verdict.invariants],
        "violations": [{**each._asdict(), "lines": list(each.lines)} for each in found],
        "not_told": verdict.violations - len(found),
    }


def _print(verdict: Verdict) -> None:
    from .output import print_table

    print_table(
        ("NO", "INVARIANT", "JUDGED", "VIOLATED", "NOT JUDGED"),
        [
            (str(each.number), each.words, str(each.judged), str(each.violations), each.not_judged)
            for each in verdict.invariants
        ],
        wraps=("INVARIANT", "NOT JUDGED"),
    )


def _summary(verdict: Verdict, told: int) -> str:
    judged = sum(not each.not_judged for each in verdict.invariants)
    rest = f", {verdict.violations - told} of them not told" if verdict.violations > told else ""
    end = "" if verdict.ended else "; without an end, so that what is missing is not judged"
    return (
        f"events: {verdict.events}, transactions: {verdict.transactions}{end}; invariants judged: {judged} of "
        f"{len(verdict.invariants)}; violations: {verdict.violations}{rest}"
    )
