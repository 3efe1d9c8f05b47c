"""The store's conformance suite runs on every store."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.store.store import Store

from .rows import open_store


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'tricord.db'}"
    return str(request.getfixturevalue("pg_database"))


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    """An open, empty store."""
    store = await open_store(store_url)
    try:
        yield store
    finally:
        await store.close()
