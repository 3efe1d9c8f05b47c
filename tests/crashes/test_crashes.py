"""A handful of crash points (`make crashes` has all of them), and a judge who notices what is broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.model import Attention, State
from examples.transfer.databases import Account
from participant_sdk.fence import Status
from tests.chaos.counted import Called
from tests.crashes.judge import violations
from tests.crashes.run import ALL, SMALL, Verdict, judged, table
from tests.crashes.scenario import Scenario, Told
from tests.crashes.stage import Seen, Stage
from tests.postgres import PostgresServer

pytestmark = pytest.mark.database


@pytest.fixture(scope="module")
def stage(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("stage"), postgres_server) as made:
        yield made


@pytest.fixture
def another_stage(postgres_server: PostgresServer, tmp_path: Path) -> Iterator[Stage]:
    """For a run that may leave something undone."""
    with Stage(tmp_path, postgres_server) as made:
        yield made


@pytest.mark.parametrize(
    ("branches", "outcome", "point", "stored", "end"),
    [
        (2, "commit", "before begin", None, State.CONFIRMED),
        (1, "commit", "after begin", State.TRYING, State.CONFIRMED),
        (2, "commit", "before save CONFIRMING", State.TRYING, State.CONFIRMED),
        (3, "commit", "after save CONFIRMING", State.CONFIRMING, State.CONFIRMED),
        (2, "commit", "after send CONFIRM 2", State.CONFIRMING, State.CONFIRMED),
        (3, "refuse", "before reply TRY 3", State.TRYING, State.CANCELLED),
        (1, "refuse", "before save CANCELLED", State.CANCELLING, State.CANCELLED),
        (2, "silent", "after save CANCELLING", State.CANCELLING, State.CANCELLED),
        (2, "late", "before save CONFIRMING", State.TRYING, State.CANCELLED),
        (2, "stumble", "after claim", State.TRYING, State.CONFIRMED),
        (2, "takeover", "after claim", State.TRYING, State.CONFIRMED),
        (2, "interactive", "before reply TRY 2", State.TRYING, State.CONFIRMED),
    ],
)
def test_what_a_dead_coordinator_leaves_is_brought_to_its_end(
    stage: Stage, branches: int, outcome: str, point: str, stored: State | None, end: State
) -> None:
    seen, wrong = judged(stage, Scenario(branches, outcome), point)
    assert wrong == []
    assert (seen.at_death, [each.state for each in seen.stored]) == (stored, [end])


def test_calls_that_leave_before_their_decision_is_stored_are_noticed(another_stage: Stage) -> None:
    scenario = Scenario(2, "late")
    seen, wrong = judged(another_stage, scenario, "before save CONFIRMING", "decide_then_save")
    assert seen.at_death is State.TRYING
    assert "PHASE_CONFIRM of branch 1 has left, with TRYING stored" in wrong
    assert "it never ends: it is CANCELLING" in wrong
    assert "a participant contradicted the protocol" in wrong
    assert "participants were called for both ends" in wrong
    assert "VIOLATED" in table([Verdict(seen, wrong)])


def test_trys_that_leave_before_their_transaction_is_stored_are_noticed(another_stage: Stage) -> None:
    seen, wrong = judged(another_stage, Scenario(2, "commit"), "before begin", "try_then_begin")
    assert seen.at_death is None
    assert any("which is not stored" in why for why in wrong)
    assert any("open@bank-1 holds" in why for why in wrong)


def test_a_point_that_never_comes_is_a_failure(stage: Stage) -> None:
    seen, wrong = judged(stage, Scenario(1, "commit"), "after save CANCELLING")
    assert not seen.died
    assert [why.split(" came,")[0] for why in wrong] == ["after save CANCELLING never"]


# --- the judge, by values -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(stage: Stage) -> Seen:
    """A run in which all is well."""
    seen, wrong = judged(stage, Scenario(2, "commit"), "after save CONFIRMING")
    assert wrong == []
    return seen


def spoiled(good: Seen, what: str) -> Seen:
    """The same run with one thing that must not be."""
    (end,) = good.stored
    twice = good.after["open@bank-2"].balance + 10
    changed: dict[str, dict[str, Any]] = {
        "no row": {"stored": []},
        "two rows": {"stored": [end, end]},
        "turned": {"stored": [end._replace(state=State.CANCELLED)]},
        "unfinished": {"stored": [end._replace(state=State.CONFIRMING)]},
        "violation": {"stored": [end._replace(attention=Attention.VIOLATION)]},
        "fence": {"fences": {**good.fences, "bank-1": Status.TRIED}},
        "no fence": {"fences": {**good.fences, "bank-1": None}},
        "twice": {"after": {**good.after, "open@bank-2": Account(twice)}},
        "reserved": {"after": {**good.after, "mute@bank-1": Account(1_000_000 - 1, 1)}},
        "both ends": {"calls": good.calls + type(good.calls)([Called(end.xid, 1, "PHASE_CANCEL")])},
        "strange": {"calls": good.calls + type(good.calls)([Called("strange", 1, "PHASE_TRY")])},
        "early": {"called_by_a": type(good.calls)([Called(end.xid, 1, "PHASE_CANCEL")])},
        "told": {"told": [*good.told, Told(end.xid, State.CANCELLED)]},
        "another": {"told": [*good.told, Told("another", State.CONFIRMED)]},
        "untold": {"told": good.told[:1]},
        "lost": {"reached": [*good.reached, "lost: after send TRY 1"]},
        "alive": {"died": False},
        "no claim": {"scenario": Scenario(2, "stumble"), "point": "", "died": False},
    }
    return good._replace(**changed[what])


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("no row", "0 transactions have"),
        ("two rows", "2 transactions have"),
        ("turned", "it ended CANCELLED, with CONFIRMING stored"),
        ("unfinished", "it never ends"),
        ("violation", "contradicted"),
        ("fence", "the fence of bank-1 says TRIED"),
        ("no fence", "the fence of bank-1 says nothing"),
        ("twice", "open@bank-2 holds"),
        ("reserved", "mute@bank-1 holds"),
        ("both ends", "both ends"),
        ("strange", "strange, which is not stored"),
        ("early", "PHASE_CANCEL of branch 1 has left"),
        ("told", "told Told"),
        ("another", "told Told"),
        ("untold", "never told"),
        ("lost", "lost"),
        ("alive", "its coordinator lives"),
        ("no claim", "after claim, before send TRY 2 #2 never came"),
    ],
)
def test_the_judge_notices(good: Seen, what: str, why: str) -> None:
    assert violations(good) == []
    assert any(why in each for each in violations(spoiled(good, what)))


def test_each_scenario_says_what_may_become_of_it() -> None:
    assert set(SMALL) <= set(ALL)
    for scenario in ALL:
        for state in (State.CONFIRMING, State.CONFIRMED):
            assert scenario.may_end(state) == {State.CONFIRMED}
        for state in (State.CANCELLING, State.CANCELLED):
            assert scenario.may_end(state) == {State.CANCELLED}
        assert scenario.may_end(None) == {scenario.undisturbed()}
        assert len(scenario.requests()) == scenario.branches
