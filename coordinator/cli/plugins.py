"""Commands of other packages, found by the entry-point group `tricord.commands`.

    [project.entry-points."tricord.commands"]
    fence = "participant_sdk.commands:fence"

They are looked for only when a command is not one of the coordinator's own, or when all are listed; so the coordinator
need not know who extends its command line.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Final

import click

GROUP: Final = "tricord.commands"


class PluggedGroup(click.Group):
    """A group that also has the commands of the entry-point group. Its own go first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See click."""
        return sorted({*super().list_commands(ctx), *_found()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See click."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        found = _found().get(cmd_name)
        return None if found is None else _load(found)


def _found() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=GROUP)}


def _load(found: EntryPoint) -> click.Command:
    """The command; in place of one that cannot be loaded, one that says so, since the others must go on working."""
    try:
        command = found.load()
        if isinstance(command, click.Command):
            return command
        why = f"{found.value} is not a click command"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"

    def broken() -> None:
        raise click.ClickException(f"the command {found.name!r} cannot be loaded: {why}")

    return click.Command(found.name, callback=broken, help=f"(cannot be loaded: {why})")
