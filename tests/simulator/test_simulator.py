"""The simulator passes seeds, is deterministic, and sees rules that are broken from outside."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import coordinator.flow
import coordinator.live
import coordinator.machine
import coordinator.model
import coordinator.orders
import participant_sdk.local_transaction
from coordinator.delivery import _Route
from coordinator.live import Live
from coordinator.machine import TRANSITIONS, Event
from coordinator.model import Attention, State, Transaction
from coordinator.store.rows import Row
from participant_sdk.background import Moves
from participant_sdk.fence import Phase, Progress, Status, Verdict, decide
from participant_sdk.transaction import TransactionState
from participant_sdk.upkeep_steps import Round
from tests.simulator.drawing import plan_of
from tests.simulator.loop import SimLoop, Stuck, World
from tests.simulator.plan import Plan, without
from tests.simulator.runner import MUST_HAPPEN, run_chunk
from tests.simulator.runner import Progress as RunProgress
from tests.simulator.seeded import Substitution
from tests.simulator.shrink import command, shrink
from tests.simulator.simulation import run_seed
from tests.simulator.store_rows import Database

ROOT = Path(__file__).parents[2]
SEEDS = 60


@pytest.mark.parametrize("start", range(0, SEEDS, 20))
def test_invariants_hold(start: int) -> None:
    tally = run_chunk(range(start, start + 20))
    assert not tally.failed
    assert tally.steps > 1_000


def test_a_seed_is_one_run() -> None:
    for seed in range(8):
        first, second = run_seed(seed), run_seed(seed, tracing=True)
        assert (first.hash, first.steps, first.counts) == (second.hash, second.steps, second.counts)
        assert second.lines


def test_a_seed_is_the_same_run_in_another_process() -> None:
    expected = [run_seed(seed).hash for seed in (3, 5)]
    code = "from tests.simulator.simulation import run_seed; print(*(run_seed(seed).hash for seed in (3, 5)))"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        told = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
        )
        assert told.stdout.split() == expected


# --- rules that are broken from outside -------------------------------------------------------------------------


async def _told_before_it_is_saved(self: Live, tx: Transaction) -> Transaction:
    """What ``Live.save`` must not do: go on before the row is durable."""
    saving = asyncio.ensure_future(self._host.journal.save(tx))
    saving.add_done_callback(lambda done: done.exception())
    before, self.tx = self.tx, tx
    self._host.moved(before, tx)
    return tx


def _without_compare_and_swap(self: Database, row: Row) -> Row | None:
    """What a store must not do: write over whatever stands there."""
    standing = self.rows[row.xid]
    self._put(standing, self.merged(standing, row))
    return None


def _empty_confirm_done(phase: Phase, status: Status | None, same: bool, progress: Progress | None = None) -> Verdict:
    """What a fence must not say: done, of a Confirm for which there is nothing."""
    if phase is Phase.CONFIRM and status is None:
        return Verdict.DONE
    return decide(phase, status, same) if progress is None else decide(phase, status, same, progress)


def _late_try_done(phase: Phase, status: Status | None, same: bool, progress: Progress | None = None) -> Verdict:
    """What a fence must not say: a Try that its Cancel has overtaken is done."""
    if phase is Phase.TRY and status is Status.SUSPENDED:
        return Verdict.REPLAY_RESULT
    return decide(phase, status, same) if progress is None else decide(phase, status, same, progress)


_event = coordinator.machine._event


def _any_deadline(tx: Transaction, now_ms: int) -> Event | None:
    """What a coordinator must not do: time out what is decided."""
    if tx.state is State.CONFIRMING and now_ms >= tx.deadline_ms:
        return Event.DEADLINE
    return _event(tx, now_ms)


def _all_named(tx: Transaction, branch_ids: Iterable[int]) -> set[int]:
    """What a coordinator must not take for seen: branches that nobody has named."""
    return set(range(1, len(tx.steps) + 1))


def _one_is_away(self: _Route) -> bool:
    """What must not make a participant away: one of its addresses."""
    return any(not link.breaker.closed for link in self.links)


_ask = Round.ask


def _presumed_cancelled(self: Round, xids: Iterable[str]) -> Moves[Mapping[str, TransactionState]]:
    """What a participant must not do: take a transaction of which there is no record for a cancelled one."""
    wanted = list(xids)
    states = yield from _ask(self, wanted)
    return dict.fromkeys(wanted, TransactionState.CANCELLED) | dict(states)


def _forgotten(self: Attention) -> Attention:
    """What must not become of attention: it goes with the next save."""
    return Attention.NONE


BROKEN: dict[str, tuple[tuple[Substitution, ...], set[int]]] = {
    "sent before it is saved": (((Live, "save", _told_before_it_is_saved),), {1, 2, 3, 6}),
    "no compare-and-swap": (
        ((Database, "_save", _without_compare_and_swap),), {1, 8, 9},
    ),
    "a decided transaction times out": (
        (
            (coordinator.machine, "_event", _any_deadline),
            (
                coordinator.machine,
                "TRANSITIONS",
                {**TRANSITIONS, (State.CONFIRMING, Event.DEADLINE): State.CANCELLING},
            ),
        ),
        {1, 2},
    ),
    "an empty Confirm is done": (((participant_sdk.local_transaction, "decide", _empty_confirm_done),), {6}),
    "a Try that was overtaken by its Cancel is done": (
        ((participant_sdk.local_transaction, "decide", _late_try_done),), {6},
    ),
    "another request under a key is the same": (
        ((coordinator.model.Transaction, "asks_the_same", lambda self, spec: True),), {7},
    ),
    "no record is taken for a cancelled one": (((Round, "ask", _presumed_cancelled),), {16}),
    "a restore's attention is forgotten": (((Attention, "lasting", property(_forgotten)),), {17}),
    "a branch below another counts, seen or not": (((coordinator.orders, "named", _all_named),), {14}),
    "one dead instance makes its participant away": (((_Route, "crowded", _one_is_away),), {12}),
}  # fmt: skip


NEEDS: dict[str, Callable[[Plan], bool]] = {
    "no record is taken for a cancelled one": lambda plan: plan.restore is not None and plan.restore.to_us is not None,
    "a restore's attention is forgotten": lambda plan: plan.restore is not None,
    "one dead instance makes its participant away": lambda plan: any(p.second for p in plan.participants),
}
"""What a seed's plan must have for the rule to matter: the others need not be run."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_seen(name: str) -> None:
    substitutions, numbers = BROKEN[name]
    needs: Callable[[Plan], bool] = NEEDS.get(name, bool)
    for seed in (seed for seed in range(400 if name not in NEEDS else 2_000) if needs(plan_of(seed))):
        result = run_seed(seed, substitutions=substitutions)
        if result.violations:
            assert result.violations[0].number in numbers, result.violations[0]
            return
    pytest.fail("not seen in 400 seeds")


# --- its parts ---------------------------------------------------------------------------------------------------


def test_a_failing_seed_is_made_small() -> None:
    substitutions, _ = BROKEN["no compare-and-swap"]
    seed = next(seed for seed in range(400) if run_seed(seed, substitutions=substitutions).violations)
    dropped = shrink(seed, substitutions)
    assert len(dropped) == len(set(dropped)) > 0
    assert run_seed(seed, dropped, substitutions=substitutions).violations
    assert len(list(without(plan_of(seed), dropped).parts())) < len(list(plan_of(seed).parts()))
    assert command(seed, dropped) == f"python -m tests.simulator --seed {seed} --drop {','.join(dropped)} --trace"


def test_a_run_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    progress = RunProgress(path, 7, 500)
    assert next(progress.chunks()) == range(7, 107)
    progress.add(run_chunk(range(7, 9)))
    again = RunProgress(path, 7, 500)
    assert again.next == 9
    assert again.steps == progress.steps
    assert again.counts == progress.counts
    with pytest.raises(SystemExit, match="--state"):
        RunProgress(path, 8, 500)


def test_what_must_happen_is_named_once() -> None:
    assert len(MUST_HAPPEN) == len(set(MUST_HAPPEN))


@pytest.fixture
def world() -> Iterator[World]:
    world = World(1)
    yield world
    world.close()


def test_a_crash_runs_nothing_more(world: World) -> None:
    loop = SimLoop(world, "a")
    told: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(1)
            told.append("woke")
            await asyncio.sleep(1)
        finally:
            told.append("finally")

    loop.arrive(lambda: loop.create_task(work()))
    world.at(1_500_000, loop.crash)
    world.run(lambda: False, 5_000_000, 1_000)
    assert told == ["woke"]


def test_a_pause_is_caught_up_with(world: World) -> None:
    loop = SimLoop(world, "a")
    told: list[float] = []

    async def work() -> None:
        await asyncio.sleep(1)
        told.append(loop.time())

    loop.arrive(lambda: loop.create_task(work()))
    world.at(500_000, loop.pause, 3_000_000)
    world.run(lambda: False, 5_000_000, 1_000)
    (at,) = told
    assert at == pytest.approx(3.5, abs=0.01)


def test_a_run_that_does_not_end_is_stuck(world: World) -> None:
    loop = SimLoop(world, "a")

    def work() -> None:
        loop.call_soon(work)

    loop.arrive(work)
    with pytest.raises(Stuck):
        world.run(lambda: False, 10_000_000, 1_000)
