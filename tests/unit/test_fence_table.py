"""The fence's table, cell by cell, and that the module which holds it is pure."""

import subprocess
import sys

import pytest

from participant_sdk.fence import EXTERNAL, SETTLES, TABLE, UNFINISHED, Phase, Progress, Status, Verdict, decide
from tricord.v1 import participant_pb2

TRY, CONFIRM, CANCEL = Phase.TRY, Phase.CONFIRM, Phase.CANCEL
SETTLE_CONFIRMED, SETTLE_CANCELLED = Phase.SETTLE_CONFIRMED, Phase.SETTLE_CANCELLED
TRIED, COMMITTED, ROLLBACKED, SUSPENDED = Status.TRIED, Status.COMMITTED, Status.ROLLBACKED, Status.SUSPENDED

CELLS = [
    (TRY, None, Verdict.RUN_TRY),
    (TRY, TRIED, Verdict.REPLAY_RESULT),
    (TRY, COMMITTED, Verdict.REPLAY_RESULT),
    (TRY, ROLLBACKED, Verdict.REPLAY_REFUSAL),
    (TRY, SUSPENDED, Verdict.REFUSE_SUSPENDED),
    (CONFIRM, None, Verdict.EMPTY_CONFIRM),
    (CONFIRM, TRIED, Verdict.RUN_CONFIRM),
    (CONFIRM, COMMITTED, Verdict.DONE),
    (CONFIRM, ROLLBACKED, Verdict.CONFIRM_AFTER_CANCEL),
    (CONFIRM, SUSPENDED, Verdict.CONFIRM_SUSPENDED),
    (CANCEL, None, Verdict.SUSPEND),
    (CANCEL, TRIED, Verdict.RUN_CANCEL),
    (CANCEL, COMMITTED, Verdict.CANCEL_AFTER_CONFIRM),
    (CANCEL, ROLLBACKED, Verdict.DONE),
    (CANCEL, SUSPENDED, Verdict.DONE),
    (SETTLE_CONFIRMED, None, Verdict.SUSPEND),
    (SETTLE_CONFIRMED, TRIED, Verdict.SETTLE_COMMITTED),
    (SETTLE_CONFIRMED, COMMITTED, Verdict.DONE),
    (SETTLE_CONFIRMED, ROLLBACKED, Verdict.SETTLED_OTHERWISE),
    (SETTLE_CONFIRMED, SUSPENDED, Verdict.DONE),
    (SETTLE_CANCELLED, None, Verdict.SUSPEND),
    (SETTLE_CANCELLED, TRIED, Verdict.SETTLE_ROLLBACKED),
    (SETTLE_CANCELLED, COMMITTED, Verdict.SETTLED_OTHERWISE),
    (SETTLE_CANCELLED, ROLLBACKED, Verdict.DONE),
    (SETTLE_CANCELLED, SUSPENDED, Verdict.DONE),
]


@pytest.mark.parametrize(("phase", "status", "verdict"), CELLS)
def test_cell(phase: Phase, status: Status | None, verdict: Verdict) -> None:
    assert decide(phase, status, True) is verdict


UNFINISHED_CELLS = [
    (TRY, TRIED, Verdict.HALF_DONE),
    (CONFIRM, TRIED, Verdict.HALF_DONE),
    (CANCEL, TRIED, Verdict.RUN_CANCEL),
    (CONFIRM, COMMITTED, Verdict.HALF_DONE),
    (CANCEL, ROLLBACKED, Verdict.HALF_DONE),
    (SETTLE_CONFIRMED, COMMITTED, Verdict.SETTLE_COMMITTED),
    (SETTLE_CANCELLED, ROLLBACKED, Verdict.SETTLE_ROLLBACKED),
]


@pytest.mark.parametrize(("phase", "status", "verdict"), UNFINISHED_CELLS)
def test_unfinished_cell(phase: Phase, status: Status, verdict: Verdict) -> None:
    assert decide(phase, status, True, Progress.UNFINISHED) is verdict
    assert decide(phase, status, False, Progress.UNFINISHED) is Verdict.OTHER_CALL


def test_there_are_no_other_unfinished_cells() -> None:
    assert set(UNFINISHED) == {(phase, status) for phase, status, _ in UNFINISHED_CELLS}
    for key in set(TABLE) - set(UNFINISHED):
        assert decide(*key, True, Progress.UNFINISHED) is TABLE[key]


def test_nothing_unfinished_is_ever_answered_done_by_the_call_that_left_it() -> None:
    left_by = {(TRY, TRIED), (CONFIRM, COMMITTED), (CANCEL, ROLLBACKED)}
    assert {decide(*key, True, Progress.UNFINISHED) for key in left_by} == {Verdict.HALF_DONE}


LEASED, LAPSED = Progress.LEASED, Progress.LAPSED

EXTERNAL_CELLS = [
    (TRY, LEASED, Verdict.TRY_RUNS),
    (TRY, LAPSED, Verdict.RUN_TRY_AGAIN),
    (CONFIRM, LEASED, Verdict.CONFIRM_UNTRIED),
    (CONFIRM, LAPSED, Verdict.CONFIRM_UNTRIED),
    (CANCEL, LEASED, Verdict.TRY_RUNS),
    (CANCEL, LAPSED, Verdict.RUN_CANCEL),
    (SETTLE_CONFIRMED, LEASED, Verdict.TRY_RUNS),
    (SETTLE_CONFIRMED, LAPSED, Verdict.SETTLE_COMMITTED),
    (SETTLE_CANCELLED, LEASED, Verdict.TRY_RUNS),
    (SETTLE_CANCELLED, LAPSED, Verdict.SETTLE_ROLLBACKED),
]


@pytest.mark.parametrize(("phase", "progress", "verdict"), EXTERNAL_CELLS)
def test_cell_of_an_external_try(phase: Phase, progress: Progress, verdict: Verdict) -> None:
    assert decide(phase, TRIED, True, progress) is verdict
    assert decide(phase, TRIED, False, progress) is Verdict.OTHER_CALL


def test_there_are_no_other_external_cells() -> None:
    assert set(EXTERNAL) == {(phase, progress) for phase, progress, _ in EXTERNAL_CELLS}
    assert len(EXTERNAL_CELLS) == len(Phase) * 2


def test_there_are_no_other_cells() -> None:
    assert set(TABLE) == {(phase, status) for phase, status, _ in CELLS}
    assert len(CELLS) == len(Phase) * (len(Status) + 1)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("status", Status)
def test_another_payload_is_a_violation_in_every_cell(phase: Phase, status: Status) -> None:
    assert decide(phase, status, False) is Verdict.OTHER_CALL


@pytest.mark.parametrize("phase", Phase)
def test_without_a_row_there_is_nothing_to_differ_from(phase: Phase) -> None:
    assert decide(phase, None, False) is decide(phase, None, True)


def test_violations() -> None:
    violations = {verdict for verdict in Verdict if verdict.value.startswith("violation: ")}
    assert {verdict for verdict in Verdict if verdict.is_violation} == violations


def test_a_handler_runs_only_where_nothing_of_its_kind_has_happened() -> None:
    running = {verdict: status for (_, status), verdict in TABLE.items() if verdict.name.startswith("RUN_")}
    assert running == {Verdict.RUN_TRY: None, Verdict.RUN_CONFIRM: TRIED, Verdict.RUN_CANCEL: TRIED}


def test_the_stored_numbers() -> None:
    assert {status.name: int(status) for status in Status} == {
        "TRIED": 1,
        "COMMITTED": 2,
        "ROLLBACKED": 3,
        "SUSPENDED": 4,
    }


def test_the_fence_is_pure() -> None:
    """In a fresh interpreter, by what was loaded."""
    code = (
        "import sys, participant_sdk.fence\n"
        "impure = {'asyncio', 'datetime', 'random', 'logging', 'grpc', 'google', 'sqlalchemy', 'psycopg', 'sqlite3'}\n"
        "print(sorted(impure & {name.partition('.')[0] for name in sys.modules}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_phases_have_the_numbers_of_the_contract() -> None:
    numbers = {f"PHASE_{phase.name}": int(phase) for phase in Phase}
    assert {"PHASE_UNSPECIFIED": 0, **numbers} == dict(participant_pb2.Phase.items())


def test_what_is_done_by_hand_is_settled() -> None:
    assert {phase for phase in Phase if phase.name.startswith("SETTLE_")} == SETTLES
