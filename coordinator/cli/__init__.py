"""The command ``tricord``.

Data goes to standard output, messages to standard error. Exit codes: 0 ok, 1 error, 2 wrong usage or setting,
3 not found, 4 contradicts what is stored, 5 the coordinator or its store cannot be reached. Nothing heavy is imported
until a command needs it, so that ``--help`` and completion are quick.
"""

from __future__ import annotations

from importlib.metadata import version

import click

from .config import config
from .migrate import migrate
from .plugins import PluggedGroup
from .query import list_transactions, show
from .serve import serve

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(
    cls=PluggedGroup,
    context_settings=CONTEXT,
    epilog="Exit codes: 0 ok, 1 error, 2 wrong usage or setting, 3 not found, 4 conflict, 5 cannot be reached.",
)
@click.version_option(version("tricord"), prog_name="tricord", message="%(prog)s %(version)s")
def main() -> None:
    """Tricord: global transactions by Try, Confirm and Cancel, with nothing lost, doubled or left hanging."""


main.add_command(serve)
main.add_command(migrate)
main.add_command(config)
main.add_command(list_transactions)
main.add_command(show)
