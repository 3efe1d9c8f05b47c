"""Case "rolling restart": coordinators are replaced one after another under load, and nobody notices but by waiting."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.load import Load
from tests.chaos.recorded import program
from tests.chaos.verdict import violations
from tests.postgres import PostgresServer
from tests.processes import Cast, fresh_databases, opening_accounts

ANSWERS = 25


def test_rolling_restart_under_load(tmp_path: Path, postgres_server: PostgresServer) -> None:
    """Each coordinator in turn is asked to end while it drives transactions, and comes back."""
    with (
        fresh_databases(tmp_path, postgres_server) as databases,
        Cast(tmp_path, databases, coordinators=3, program=program) as cast,
    ):
        load = Load(cast.endpoints, opening_accounts(), seed=1)
        try:
            load.start()
            for coordinator in cast.coordinators:
                load.wait_for_answers(ANSWERS)
                assert load.unanswered() > 0
                assert coordinator.stop() == 0
                load.wait_for_answers(ANSWERS)  # through the others
                coordinator.start()
            load.wait_for_answers(ANSWERS)
            load.stop()
        finally:
            load.close()
        cast.settle()
        assert violations(tmp_path, databases, opening_accounts(), load) == []
