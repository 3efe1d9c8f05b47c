"""Participants under all faults, seed by seed; and the same seeds with a rule broken, which must be noticed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

import pytest

from participant_sdk import fence, local_transaction, upkeep_purge
from participant_sdk.call import Refusal, Reply
from participant_sdk.fence import Phase, Progress, Status, Verdict
from participant_sdk.fence_row import FenceRow
from participant_sdk.local_transaction import Fence
from participant_sdk.transaction import TransactionState
from participant_sdk.upkeep_sql import OldRow
from tests.simulator import participant_upkeep, test_participants
from tests.simulator.branch_scene import MARGIN_MS, BranchScene
from tests.simulator.branch_watch import Broken
from tests.simulator.sdk_clock import simulated_sdk

SEEDS = 1_000
PART = 250
BROKEN_SEEDS_MAX = 1_000

Patch = pytest.MonkeyPatch


def play(seed: int, *, calm: bool = False, branches: int = 6) -> tuple[Counter[str], str]:
    """Play one seed; what has happened, and the hash of its trace."""
    with simulated_sdk(random.Random(seed), clock_margin_ms=MARGIN_MS):
        scene = BranchScene(seed, calm=calm, branches=branches)
        return scene.play(), scene.world.hash.hexdigest()


def play_until_broken() -> None:
    for seed in range(BROKEN_SEEDS_MAX):
        play(seed)


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_all_rules_hold_under_all_faults(first: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(first, first + PART):
        total += play(seed)[0]
    for what in (
        *("lost_before", "lost_after", "lost_after_commit", "lands_later", "late_commit", "conflict", "slow", "away"),
        *("conflict_at_commit", "lock_wait", "lock_timeout", "crash", "pause", "skew", "said_error"),
        *("TRY DONE", "TRY REFUSED", "TRY UNKNOWN", "CONFIRM DONE", "CONFIRM VIOLATION", "CANCEL DONE", "purged"),
        *("SETTLE_CONFIRMED DONE", "SETTLE_CANCELLED DONE", "TRY VIOLATION", "CANCEL VIOLATION", "resolved"),
        "batches",
    ):
        assert total[what] > 0, f"{what} has never happened: {total}"


def test_a_seed_is_played_the_same_each_time() -> None:
    assert [play(seed) for seed in range(20)] == [play(seed) for seed in range(20)]
    assert len({play(seed)[1] for seed in range(20)}) == 20


def test_a_seed_is_played_the_same_in_another_process() -> None:
    program = "from tests.simulator.test_participants import play; print(*(play(seed)[1] for seed in range(20)))"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [play(seed)[1] for seed in range(20)]


def deciding(instead: dict[tuple[Phase, Status | None], Verdict]) -> Callable[[Patch], None]:
    """Another verdict in some cells."""

    def decide(phase: Phase, status: Status | None, same_call: bool, progress: Progress = Progress.FINISHED) -> Verdict:
        verdict = instead.get((phase, status)) if progress is Progress.FINISHED else None
        return verdict or fence.decide(phase, status, same_call, progress)

    return lambda patch: patch.setattr(local_transaction, "decide", decide)


def purge_by_age_alone(patch: Patch) -> None:
    """The coordinator's record is not looked at, nor is the row's status."""
    everything = frozenset(Status)
    patch.setattr(upkeep_purge, "_ENDS", dict.fromkeys(TransactionState, everything))
    patch.setattr(TransactionState, "finished", True)
    patch.setattr(OldRow, "settled", True)
    patch.setattr(participant_upkeep, "_SETTLED", everything)


BREAKS: dict[str, Callable[[Patch], None]] = {
    "an empty Confirm is acknowledged": deciding({(Phase.CONFIRM, None): Verdict.DONE}),
    "Confirm runs again": deciding({(Phase.CONFIRM, Status.COMMITTED): Verdict.RUN_CONFIRM}),
    "Cancel runs again": deciding({(Phase.CANCEL, Status.ROLLBACKED): Verdict.RUN_CANCEL}),
    "an empty Cancel leaves no mark": deciding({(Phase.CANCEL, None): Verdict.DONE}),
    "a late Try is reported as a success": deciding({(Phase.TRY, Status.SUSPENDED): Verdict.DONE}),
    "a refusal is replayed as a success": deciding({(Phase.TRY, Status.ROLLBACKED): Verdict.REPLAY_RESULT}),
    "Cancel of a tried branch only marks it": deciding({(Phase.CANCEL, Status.TRIED): Verdict.SETTLE_ROLLBACKED}),
    "Confirm of a cancelled branch runs": deciding({(Phase.CONFIRM, Status.TRIED): Verdict.SETTLE_COMMITTED}),
    "purge by age alone": purge_by_age_alone,
    "another call with the same key runs": lambda patch: patch.setattr(FenceRow, "holds", lambda *_: True),
    "a lost connection is made a refusal of": lambda patch: patch.setattr(
        Reply, "unknown", lambda *_, **__: Reply.refused(Refusal("no"))
    ),
    "the purge has no margin for clocks": lambda patch: patch.setattr(test_participants, "MARGIN_MS", 0),
    "a Try of any age runs": lambda patch: patch.setattr(Fence, "try_age_max_ms", 10**12),
    "a transient error is stored as a refusal": lambda patch: patch.setattr(
        local_transaction, "is_transient", lambda *_: False
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_rule_is_noticed(name: str, monkeypatch: Patch) -> None:
    BREAKS[name](monkeypatch)
    with pytest.raises(Broken):
        play_until_broken()


def test_the_life_of_a_branch_is_cheap() -> None:
    branches = 300
    began = time.process_time()
    counts, _ = play(1, calm=True, branches=branches)
    each_ms = (time.process_time() - began) / branches * 1000
    assert counts["TRY DONE"] == branches - counts["TRY REFUSED"]
    assert each_ms < 15, "ten times what it costs on a quick machine"
