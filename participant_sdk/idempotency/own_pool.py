"""The user's engine with a pool of its own: the background must not wait for a connection that the work has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Engine

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


def own_pool(engine: Engine) -> Engine:
    """It connects as `engine` does, listeners of the pool included. Dispose of it in the end."""
    return Engine(engine.pool.recreate(), engine.dialect, engine.url, execution_options=engine.get_execution_options())


def own_pool_async(engine: AsyncEngine) -> AsyncEngine:
    """As `own_pool`."""
    from sqlalchemy.ext.asyncio import AsyncEngine

    return AsyncEngine(own_pool(engine.sync_engine))
