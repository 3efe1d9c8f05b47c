"""The benchmarks' scene, with real processes: answers are counted against the store, and a wrong count is an error."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from benchmarks import aged
from benchmarks.scene import KEYED, STEADY, STREAM, UNARY, on_postgres, on_sqlite
from coordinator.codec import transaction
from coordinator.model import State
from coordinator.store.rows import Row, read_row
from tests.postgres import PostgresServer


def test_answers_are_held_against_the_rows(tmp_path: Path) -> None:
    with on_sqlite(tmp_path) as scene:
        unary = scene.load(UNARY, 4, 0.3)
        stream = scene.load((*STREAM, "--streams", "3", "--keys"), 32, 0.3)
        steady = scene.load(STEADY, 50.0, 0.5)
        assert unary.answers >= 4
        assert stream.answers >= 32
        assert steady.answers == 25  # as many as the rate makes, however slow the answers
        assert scene.statistics().confirmed == unary.answers + stream.answers + steady.answers
        assert scene.coordinator.cpu_s() > 0
        scene.stop()


def test_a_row_too_few_is_an_error(tmp_path: Path) -> None:
    with on_sqlite(tmp_path) as scene:
        scene.load(UNARY, 1, 0.1)
        with pytest.raises(RuntimeError, match="of which 1 were there before"):
            scene.stop(stored_before=1)


@pytest.mark.database
def test_old_rows_lie_where_the_load_writes(postgres_server: PostgresServer, tmp_path: Path) -> None:
    """Their keys lie among those of the load, their xids before: else the log would not show what old rows cost."""
    with on_postgres(postgres_server, tmp_path) as scene:
        aged.store(scene.store, 200)
        loaded = scene.load(KEYED, 16, 0.3)
        scene.stop(stored_before=200)
        with psycopg.connect(scene.store) as connection:
            found = connection.execute(f"SELECT {', '.join(Row._fields)} FROM tricord_transaction ORDER BY created_ms")
            stored = [read_row(values) for values in found.fetchall()]
    assert len({row.xid for row in stored}) == len(stored) == 200 + loaded.answers
    assert all(transaction(row).state is State.CONFIRMED for row in stored)
    old, new = stored[:200], stored[200:]
    assert max(row.xid for row in old) < min(row.xid for row in new)
    made = old[1:]  # all but the one that the others are made of
    assert {(len(row.key), row.key[:1]) for row in made} == {(len(row.key), row.key[:1]) for row in new}
    assert min(row.key for row in made) < max(row.key for row in new)
    assert min(row.key for row in new) < max(row.key for row in made)
