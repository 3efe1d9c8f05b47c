"""The short cut past ``apply``: which replies plainly decide and flag nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.flow import leave_open
from coordinator.machine import apply, begin
from coordinator.model import Outcome, Phase, Reply

from .test_machine import BRANCHES, POLICY, TIMEOUT_MS, done, lived, replies, rounds, spec


@settings(max_examples=400, deadline=None)
@given(rounds, st.lists(replies, max_size=3), st.sampled_from((0, 1_000, TIMEOUT_MS)))
def test_what_plainly_leaves_it_open_neither_decides_nor_flags(
    rounds: list[tuple[list[Reply], int]], said: list[Reply], passed_ms: int
) -> None:
    tx, now_ms = lived(rounds)[-1]
    if leave_open(tx, said, now_ms + passed_ms):
        after = apply(tx, said, now_ms + passed_ms, POLICY)
        assert (after.state, after.attention) == (tx.state, tx.attention)


@pytest.mark.parametrize("phase", [Phase.TRY, Phase.CONFIRM])
def test_all_but_the_last_good_answer_plainly_leave_it_open(phase: Phase) -> None:
    tx = begin(spec(BRANCHES), 0, POLICY)
    if phase is Phase.CONFIRM:
        tx = apply(tx, [done(n, Phase.TRY) for n in range(BRANCHES)], 0, POLICY)
    said = [done(n, phase) for n in range(BRANCHES)]
    assert all(leave_open(tx, said[:count], 1) for count in range(BRANCHES))
    assert not leave_open(tx, said, 1)
    assert leave_open(tx, said[:1] * BRANCHES, 1)
    assert not leave_open(tx, [said[0]._replace(outcome=Outcome.UNKNOWN)], 1)


def test_a_good_answer_of_another_fence_does_not_leave_it_open() -> None:
    tried = [done(n, Phase.TRY, "db-1") for n in range(BRANCHES)]
    tx = apply(begin(spec(BRANCHES), 0, POLICY), tried, 0, POLICY)
    assert leave_open(tx, [done(0, Phase.CONFIRM, "db-1")], 1)
    assert not leave_open(tx, [done(0, Phase.CONFIRM, "db-2")], 1)
