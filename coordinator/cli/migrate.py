"""``tricord migrate``: bring a store up to this version, while older coordinators go on working."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .exits import ERROR, UNAVAILABLE, USAGE, fail
from .forms import output_option, tell_one

if TYPE_CHECKING:
    from ..store.schema import Stand

_LEASE_MS = 10_000
"""Bounds each statement on PostgreSQL."""


@click.command()
@click.option("--store", metavar="STORE", help="As for serve.  [default: ./tricord.db]")
@click.option(
    "--config", "config_path", metavar="FILE", help="TOML file with settings (or TRICORD_CONFIG), as for serve."
)
@click.option("--finish", is_flag=True, help="No older coordinator runs any more: use what only this version can read.")
@click.option("--dry-run", is_flag=True, help="Only tell how far the store is; nothing is written, or made.")
@output_option("table", "json", "jsonl")
def migrate(store: str | None, config_path: str | None, finish: bool, dry_run: bool, output: str) -> None:
    """Bring the store up to this version.

    Run it before the first coordinator of a new version starts: older ones go on working. When the last of these has
    stopped, run it with --finish. Doing it again changes nothing. The store is the one that serve would use with the
    same flags, environment and file.
    """
    import sqlalchemy as sa

    from ..config import ConfigError, load, shown
    from ..store import schema
    from ..store.rows import StoreError, StoreUnreachable

    try:
        settings, _ = load({"store": store}, config_path)
    except ConfigError as error:
        fail(str(error), USAGE)
    try:
        stand = _look(settings.store) if dry_run else _migrate(settings.store, finish=finish)
    except StoreUnreachable as error:
        fail(str(error), UNAVAILABLE)
    except StoreError as error:
        fail(str(error), ERROR)
    except sa.exc.SQLAlchemyError as error:
        what = "looked at" if dry_run else "migrated"
        fail(f"the store cannot be {what}: {' '.join(str(error).split())[:500]}", ERROR)
    name = shown(settings)["store"]
    text = (
        f"{name}: schema revision {stand.revision or '(no tables yet)'}, this version has {schema.REVISION}; "
        f"rows up to format {stand.format}, for programs from format {stand.oldest_program} on"
    )
    tell_one(output, {"store": name, **stand._asdict(), "needed": schema.REVISION}, lambda: click.echo(text))


def _look(store: str) -> Stand:
    """How far it is. Raises StoreError, SQLAlchemyError."""
    from ..store import schema
    from ..store.store import backend_for

    engine = backend_for(store, _LEASE_MS).reading_engine()
    if engine is None:
        return schema.Stand("")
    try:
        return schema.read_stand(engine)
    finally:
        engine.dispose()


def _migrate(store: str, *, finish: bool) -> Stand:
    """Bring it up to date; how far it is then. Raises StoreError, SQLAlchemyError."""
    from ..store import schema
    from ..store.store import usable_engine

    with usable_engine(store, _LEASE_MS) as engine:
        return schema.migrate(engine, finish=finish)
