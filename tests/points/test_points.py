"""Some of the points are held, and rules that are broken from outside are seen: some by pairs of kills alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import participant_sdk.local_transaction
from participant_sdk.fence import Phase, Progress, Status, Verdict, decide
from tests.points.play import play
from tests.points.points import KINDS, kind_of
from tests.points.run import Run, missing, run_all, show, table, total
from tests.points.scenarios import ALL, ALONE, BESIDE, Scenario
from tests.simulator.seeded import Substitution
from tests.simulator.store import SimStore
from tests.simulator.test_simulator import BROKEN

ONE, LATE = Scenario(1, "commit"), Scenario(2, "late")


def test_every_point_of_one_branch_is_held_singly_and_in_pairs() -> None:
    scenarios = [ONE, Scenario(2, "late", 2)]
    counts, failed = run_all(scenarios, 2)
    assert failed == []
    assert list(missing(scenarios, counts)) == []
    lines = list(table(scenarios, counts))
    assert len(lines) == 1 + len(KINDS) + 1
    assert total(counts, "points") == len(play(ONE).points) + len(play(LATE).points)
    assert total(counts, "pairs from") == total(counts, "pairs to") > total(counts, "points")
    assert total(counts, "confirmed") + total(counts, "cancelled") == total(counts, "points") + total(
        counts, "pairs from"
    )


@pytest.mark.parametrize("scenario", ALL, ids=str)
def test_each_scenario_has_its_points(scenario: Scenario) -> None:
    seen = play(scenario)
    assert seen.wrong == []
    assert len(set(seen.points)) == len(seen.points)
    kinds = Counter(map(kind_of, seen.points))
    assert all(kinds[kind] > 0 for kind in KINDS if kind != "claim")
    assert {point.split()[1] for point in seen.points} == {"before", "after"}


def test_one_run_is_always_the_same() -> None:
    kills = ("c1 after save CONFIRMING", "p2 before commit CONFIRM 2")
    first, second = play(LATE, kills, tracing=True), play(LATE, kills, tracing=True)
    assert first == second
    assert first.wrong == []
    assert len([line for line in first.lines if "is killed there" in line]) == 2


@pytest.mark.parametrize(
    ("point", "reached"),
    [
        ("c1 before begin", (0, 0, 0)),
        ("c1 after begin", (1, 0, 0)),
        ("c1 before send TRY 1", (1, 0, 0)),
        ("c1 after send TRY 1", (1, 1, 1)),
        ("c1 before send TRY 2", (1, 1, 1)),
        ("c1 after send TRY 2", (1, 2, 2)),
        ("c1 before save CONFIRMING", (1, 2, 2)),
        ("c1 after save CONFIRMING", (2, 2, 2)),
        ("p1 before commit TRY 1", (2, 2, 1)),  # its progress is stored once more
        ("p1 after commit TRY 1", (2, 2, 2)),
        ("p1 before reply TRY 1", (2, 2, 2)),
        ("p1 after reply TRY 1", (3, 4, 3)),
    ],
)
def test_whoever_is_killed_reaches_nobody(point: str, reached: tuple[int, int, int]) -> None:
    """How much is stored, sent, and committed by participants, before anybody is started again."""
    lines = play(Scenario(2, "commit"), (point,), tracing=True).lines
    until = next(n for n, line in enumerate(lines) if line.endswith("is started again"))
    text = "\n".join(lines[:until])
    assert (text.count("store   "), text.count("  sends "), text.count("  effect of ")) == reached


def test_a_point_to_which_nobody_comes_is_wrong() -> None:
    assert play(ONE, ("c1 after save CANCELLING",)).wrong == ["nobody came to c1 after save CANCELLING"]


def test_what_must_be_there_is_missed() -> None:
    absent = list(missing(ALL, Counter()))
    assert len(absent) > 5 * len(ALL)
    assert "1 commit, claim: no pairs to" in absent
    assert "3 late: none cancelled" in absent


def test_a_failure_is_replayed_by_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(ONE, ("c1 after claim", "p1 before commit TRY 1 #2"))
    assert run.command == (
        "python -m tests.points --scenario '1 commit' --kill 'c1 after claim' --kill 'p1 before commit TRY 1 #2'"
    )
    assert [Scenario.read(str(scenario)) for scenario in (*ALONE, *BESIDE)] == ALL
    assert show(ONE, ("c1 after begin",)) == 0
    told = capsys.readouterr().out
    assert "c1          is killed there" in told
    assert told.endswith("points: 1 commit ended CONFIRMED, 0 violations\n")


# --- rules that are broken from outside -------------------------------------------------------------------------


def _confirm_again(phase: Phase, status: Status | None, same: bool, progress: Progress = Progress.FINISHED) -> Verdict:
    """What a fence must not say: that a Confirm runs once more."""
    if phase is Phase.CONFIRM and status is Status.COMMITTED:
        return Verdict.RUN_CONFIRM
    return decide(phase, status, same, progress)


def _for_ever(real: Callable[..., Any]) -> Callable[..., Any]:
    async def claim(store: SimStore, limit: int, lease_ms: int, put_off: Any = None, **named: Any) -> Any:
        return await real(store, limit, 1_000 * lease_ms, put_off, **named)

    return claim


CASES: dict[str, tuple[Scenario, tuple[Substitution, ...], int, str]] = {
    "sent before it is saved": (ONE, BROKEN["sent before it is saved"][0], 0, "invariant 1 "),
    "a Confirm runs again": (ONE, ((participant_sdk.local_transaction, "decide", _confirm_again),), 1, "invariant 3 "),
    "a decided transaction times out": (LATE, BROKEN["a decided transaction times out"][0], 1, "invariant "),
    "a claim is for ever": (ONE, ((SimStore, "claim", _for_ever(SimStore.claim)),), 2, "invariant 11 "),
}
"""The scenario, what is broken, how many kills it takes, and how it is seen."""


def wrongs(scenario: Scenario, kills: int, broken: tuple[Substitution, ...]) -> Iterator[str]:
    """What is wrong in the runs with so many kills."""
    runs = [Run(scenario)]
    for _ in range(kills):
        runs = [following for run in runs for following in run.made(broken).following]
    for run in runs:
        yield from run.made(broken).seen.wrong


@pytest.mark.parametrize("name", CASES)
def test_a_broken_rule_is_seen_with_so_many_kills_and_not_with_fewer(name: str) -> None:
    scenario, broken, kills, why = CASES[name]
    for fewer in range(kills):
        assert list(wrongs(scenario, fewer, broken)) == []
    assert next(wrongs(scenario, kills, broken)).startswith(why)
