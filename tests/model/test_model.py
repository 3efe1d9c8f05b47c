"""The model holds, comes to what it should come to, and finds each planted fault with a trace."""

from __future__ import annotations

import pytest

from tests.model import __main__ as command
from tests.model import spin
from tests.model.configurations import INTERACTIVE, TWO_COORDINATORS_ONE_BRANCH
from tests.model.explore import Found, canonical, explore
from tests.model.planted import PLANTED, Planted
from tests.model.state import Setup
from tests.model.values import PRODUCT, spec
from tests.model.world import World

pytestmark = pytest.mark.timeout(600)  # seconds of pure Python, on a busy machine minutes

LATE_TRY = """\
   0  c1 begins the transaction
   1  c1 runs its statement again and saves [TRYING 1:pending]
        row: TRYING 1:pending
   2  c1 sends what is due
   3  c1 finds that the deadline has passed and saves [CANCELLING 1:pending]
        row: CANCELLING 1:pending
   4  c1 sends what is due
   5  branch 1: CANCEL arrives and commits: insert SUSPENDED, run nothing: done
        fence 1: SUSPENDED, effects of Try 0, Confirm 0, Cancel 0
   6  branch 1: TRY arrives and commits: insert TRIED and run the Try handler
        fence 1: TRIED, effects of Try 1, Confirm 0, Cancel 0"""

TINY = Setup("two coordinators, nothing lost", spec(1), 2, 1, lost=0)


@pytest.mark.parametrize("setup", [TWO_COORDINATORS_ONE_BRANCH, INTERACTIVE], ids=lambda setup: setup.name)
def test_product_holds(setup: Setup) -> None:
    found = explore(setup)
    assert not found.violation, "\n".join(found.trace)
    assert found.states > 10_000


def test_everything_happens() -> None:
    """A model in which something cannot happen proves nothing about it."""
    world = World(TWO_COORDINATORS_ONE_BRANCH, PRODUCT)
    states = {canonical(world.first())}
    waiting = list(states)
    rows, told = set(), set()
    while waiting:
        state = waiting.pop()
        rows.add(world.values.text(state.row))
        for label, after in world.steps(state):
            told.add(label.text)
            after = canonical(after)
            if after not in states:
                states.add(after)
                waiting.append(after)
    assert rows == {
        "nothing",
        "TRYING 1:pending",
        "CONFIRMING 1:tried",
        "CONFIRMED 1:confirmed",
        "CANCELLING 1:pending",
        "CANCELLING 1:refused",
        "CANCELLED 1:cancelled",
    }
    for text in (
        "crashes",
        "claims the row",
        "sends what is due",
        "finds that the deadline has passed and saves",
        "finds that the deadline has passed and meets another row",
        "hears DONE of TRY 1 and saves",
        "hears DONE of TRY 1 and meets another row",
        "hears DONE of TRY 1, and its COMMIT is lost",
        "runs its statement again and finds that row saved",
        "runs its statement again and meets another row",
        "renews its lease or notes an attempt and saves",
        "its lost COMMIT lands",
        "a lost COMMIT lands",
        "a lost COMMIT comes to nothing",
        "the network loses all that it holds",
        "branch 1: local transaction its lost COMMIT lands",
        "branch 1: local transaction its lost COMMIT has come to nothing",
        "branch 1: local transaction its handler refuses",
        "branch 1: TRY arrives and answers REFUSED: refuse: Cancel came before this Try",
    ):
        assert text in told


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_planted_fault_is_found(planted: Planted) -> None:
    found = explore(planted.setup, planted.rules)
    assert found.violation in planted.broken, found.violation or "nothing was found"
    assert found.trace[0].endswith("begins the transaction")
    assert len(found.trace) > 2


def test_trace_is_the_shortest_way() -> None:
    planted = next(p for p in PLANTED if p.name == "late Try runs after the cancel mark")
    assert "\n".join(explore(TINY, planted.rules).trace) == LATE_TRY


def test_command_tells_what_it_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SMALL", (TINY,))
    monkeypatch.setattr(spin, "READINGS", ())
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"model: {explore(TINY).states} states, 0 violations"
    broken = Found(TINY, 2, 1, 1, 0.0, "a rule", ("first", "second"))
    monkeypatch.setattr(command, "explore", lambda setup: broken)
    assert command.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4:] == ["  VIOLATION: a rule", "  first", "  second", "model: 2 states, 1 violations"]


def test_command_refuses_a_name_that_no_configuration_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "three coordinators"])
    assert "--only: no configuration has 'three coordinators' in its name" in capsys.readouterr().err
