"""Makes a failing seed small: what can be dropped from its plan without its failure going away, is dropped."""

from __future__ import annotations

import string
from collections.abc import Callable

from .drawing import plan_of
from .plan import OF_TRANSACTIONS, Plan
from .seeded import Substitution
from .simulation import Result, run_seed

RUNS_MAX = 400


def shrink(
    seed: int, substitutions: tuple[Substitution, ...] = (), told: Callable[[str], None] = lambda text: None
) -> tuple[str, ...]:
    """The parts to drop from the plan of a seed that fails, so that it still breaks the same invariant."""
    numbers = {violation.number for violation in run_seed(seed, substitutions=substitutions).violations}
    dropped: tuple[str, ...] = ()
    runs = 0
    again = True
    while again and runs < RUNS_MAX:
        again = False
        for part in _left(plan_of(seed), dropped):
            if runs >= RUNS_MAX:
                break
            attempt = (*dropped, part)
            runs += 1
            if _fails(run_seed(seed, attempt, substitutions=substitutions), numbers):
                dropped = attempt
                again = True
                told(f"still fails without {part}")
    return dropped


def _left(plan: Plan, dropped: tuple[str, ...]) -> list[str]:
    """What may still be dropped: nothing of what has gone as a whole."""
    gone = {part.removeprefix("transaction") for part in dropped if part.startswith("transaction")}
    return [part for part in plan.parts() if part not in dropped and not _of(part, gone)]


def _of(part: str, transactions: set[str]) -> bool:
    return part.split(".")[0].lstrip(string.ascii_lowercase) in transactions and part.startswith(OF_TRANSACTIONS)


def _fails(result: Result, numbers: set[int]) -> bool:
    return any(violation.number in numbers for violation in result.violations)


def command(seed: int, dropped: tuple[str, ...]) -> str:
    """What replays it."""
    drop = f" --drop {','.join(dropped)}" if dropped else ""
    return f"python -m tests.simulator --seed {seed}{drop} --trace"
