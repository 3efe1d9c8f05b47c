"""What the SDK adds to the `tricord` command, which finds it through the entry-point group `tricord.commands`."""

from __future__ import annotations

from typing import Final

import click

_DIALECTS: Final = ("postgresql", "mariadb", "mysql", "sqlite")


@click.group()
def fence() -> None:
    """Look at the fence's tables in a participant's database."""


@fence.command()
@click.option("--dialect", type=click.Choice(_DIALECTS), required=True, help="The participant's database.")
@click.option("--log-name", default=None, help="Another name for the table of branches (tcc_fence_log).")
@click.option("--info-name", default=None, help="Another name for the table with the fence's id (tcc_fence_info).")
@click.option("--schema", default=None, help="The schema that holds them; default: none is named.")
def ddl(dialect: str, log_name: str | None, info_name: str | None, schema: str | None) -> None:
    """Print the statements that create the fence's tables, for a migration of your own.

    The SDK creates them at start if they are missing, so this is for databases where programs may not create tables.
    """
    from sqlalchemy.engine import make_url

    from participant_sdk.errors import ConfigurationError
    from participant_sdk.fence_tables import INFO_NAME, LOG_NAME, FenceTables

    try:
        tables = FenceTables(log_name or LOG_NAME, info_name or INFO_NAME, schema)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    for statement in tables.ddl(make_url(f"{dialect}://").get_dialect()()):
        click.echo(f"{statement};\n")
