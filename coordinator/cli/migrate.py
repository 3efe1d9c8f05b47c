"""``tricord migrate``: bring a store up to this version, while older coordinators go on working."""

from __future__ import annotations

import json

import click

from .exits import ERROR, UNAVAILABLE, fail


@click.command()
@click.option("--store", default="./tricord.db", show_default=True, envvar="TRICORD_STORE", help="As for serve.")
@click.option("--finish", is_flag=True, help="No older coordinator runs any more: use what only this version can read.")
@click.option("--dry-run", is_flag=True, help="Only tell how far the store is.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def migrate(store: str, finish: bool, dry_run: bool, output: str) -> None:
    """Bring the store up to this version.

    Run it before the first coordinator of a new version starts: older ones go on working. When the last of these has
    stopped, run it with --finish. Doing it again changes nothing.
    """
    import sqlalchemy as sa

    from ..store import schema
    from ..store.rows import StoreError, StoreUnreachable
    from ..store.store import backend_for

    try:
        backend = backend_for(store, 10_000)
        backend.prepare()
        try:
            engine = backend.engine()
            try:
                stand = schema.read_stand(engine) if dry_run else schema.migrate(engine, finish=finish)
            finally:
                engine.dispose()
        finally:
            backend.release()
    except StoreUnreachable as error:
        fail(str(error), UNAVAILABLE)
    except StoreError as error:
        fail(str(error), ERROR)
    except sa.exc.SQLAlchemyError as error:
        fail(f"the store cannot be migrated: {' '.join(str(error).split())[:500]}", ERROR)
    if output == "json":
        print(json.dumps({**stand._asdict(), "needed": schema.REVISION}))
    else:
        print(
            f"schema revision {stand.revision or '(no tables yet)'}, this version has {schema.REVISION}; "
            f"rows up to format {stand.format}, for programs from format {stand.oldest_program} on"
        )
