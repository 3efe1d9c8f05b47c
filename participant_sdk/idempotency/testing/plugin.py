"""Fixtures for pytest, for those who ask for them: `pytest_plugins = ["participant_sdk.idempotency.testing.plugin"]`.

In the conftest.py beside pytest's own configuration, or in a module of tests; `pytest -p` with this name does it too.

idempotency_url     the address of a fresh SQLite file, for an engine of yours, sync (`sqlite:///…`)
idempotency_store   an Idempotency on it, which has started; without a sweeper
crash_at            `crash_at`, as participant_sdk.idempotency.testing has it
lapse, expire       the same, for `idempotency_store`: `lapse(operation, key, tenant="")`
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from participant_sdk.idempotency import testing
from participant_sdk.idempotency.idempotency import Idempotency
from participant_sdk.idempotency.operation import Operation


@pytest.fixture
def idempotency_url(tmp_path: Path) -> str:
    """See the module."""
    return f"sqlite:///{tmp_path / 'idempotency.db'}"


@pytest.fixture
def idempotency_store(idempotency_url: str) -> Iterator[Idempotency]:
    """See the module."""
    engine = create_engine(idempotency_url)
    try:
        with Idempotency(engine, sweep=None) as store:
            yield store
    finally:
        engine.dispose()


@pytest.fixture
def crash_at() -> testing.CrashAt:
    """See the module."""
    return testing.crash_at


@pytest.fixture
def lapse(idempotency_store: Idempotency) -> testing.TimeGoesBy:
    """See the module."""

    def of(operation: Operation, key: str, tenant: str = "") -> None:
        testing.lapse(idempotency_store, operation, key, tenant)

    return of


@pytest.fixture
def expire(idempotency_store: Idempotency) -> testing.TimeGoesBy:
    """See the module."""

    def of(operation: Operation, key: str, tenant: str = "") -> None:
        testing.expire(idempotency_store, operation, key, tenant)

    return of
