"""docs/operators-idempotency.md: its commands are run as printed, one after another, on the records it tells of."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from participant_sdk.idempotency.keys import key_hash
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.tables import DEFAULT
from tests.contract.idempotency.rows import HOUR_MS, Shelf
from tests.contract.participant.world import postgres_url
from tests.coordinators import tricord

from .test_operators_guide import shape

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operators-idempotency.md").read_text(encoding="utf-8")
SETTING = "export TRICORD_IDEMPOTENCY_DATABASE="
MINUTE_MS = 60_000


def shown() -> list[tuple[str, str]]:
    """The page's commands, each with the output that follows it; empty where none does."""
    pairs: list[tuple[str, str]] = []
    for language, text in re.findall(r"^```(sh|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        if language == "sh":
            pairs += [(command, "") for command in text.splitlines()]
        else:
            pairs[-1] = (pairs[-1][0], text)
    return pairs


def put(shelf: Shelf, number: int, state: State, tenant: str = "acme", **columns: Any) -> None:
    """The record of an order."""
    under = key_hash("default", tenant, "orders.create", f"order-{number}")
    fence = 1_796_000_000_000_000 + number
    shelf.put(number, state, key_hash=under, tenant=tenant, owner="shop-1", fence=fence, **columns)


def stock(shelf: Shelf) -> None:
    """The records that the page tells of."""
    put(shelf, 40, State.SUCCEEDED, left_ms=-5 * MINUTE_MS, age_ms=24 * HOUR_MS)
    put(shelf, 41, State.SUCCEEDED, left_ms=21 * HOUR_MS, age_ms=3 * HOUR_MS)
    reason = "the bank did not answer within 30 seconds"
    put(shelf, 42, State.UNKNOWN, age_ms=2 * HOUR_MS, reason=reason)
    put(shelf, 43, State.PROCESSING, lease_left_ms=20_000 * MINUTE_MS, age_ms=5_000)
    put(shelf, 44, State.PROCESSING, lease_left_ms=-40 * MINUTE_MS, age_ms=41 * MINUTE_MS)
    put(shelf, 45, State.FAILED_RETRYABLE, left_ms=23 * HOUR_MS, age_ms=HOUR_MS, reason="no seat was free")
    put(shelf, 46, State.UNKNOWN, age_ms=90 * MINUTE_MS, reason=reason)
    put(shelf, 47, State.SUCCEEDED, tenant="umbrella", left_ms=20 * HOUR_MS, age_ms=4 * HOUR_MS)
    put(shelf, 48, State.FAILED_FINAL, tenant="umbrella", left_ms=20 * HOUR_MS, age_ms=4 * HOUR_MS)


@pytest.fixture
def shelf(pg_database: str) -> Shelf:
    engine = create_engine(postgres_url(pg_database))
    DEFAULT.metadata.create_all(engine)
    shelf = Shelf(pg_database, pg_database, engine, DEFAULT)
    stock(shelf)
    engine.dispose()
    return shelf


def test_every_command_prints_what_the_page_says(shelf: Shelf) -> None:
    env = {"TRICORD_IDEMPOTENCY_DATABASE": shelf.url}
    commands = 0
    for command, output in shown():
        if command.startswith(SETTING):
            continue
        words = shlex.split(command)
        assert words[:2] == ["tricord", "idempotency"], command
        run = tricord(*words[1:], env=env)
        assert (run.returncode, run.stderr) == (0, ""), command
        if output:
            assert shape(run.stdout) == shape(output), f"{command}\n{run.stdout}"
        commands += 1
    assert commands == PAGE.count("```sh") - 1 > 10


def test_every_command_is_on_the_page() -> None:
    from participant_sdk.idempotency.commands import idempotency

    on_the_page = {shlex.split(command)[2] for command, _ in shown() if not command.startswith(SETTING)}
    assert on_the_page == set(idempotency.commands)
