"""The command ``tricord``.

Data goes to standard output, messages to standard error. Exit codes: 0 ok, 1 error, 2 wrong usage or setting,
3 not found, 4 contradicts what is stored, 5 the coordinator or its store cannot be reached, 6 the doctor has found
errors or warnings, or a history violates an invariant, 130 ended by Ctrl-C. Nothing heavy is imported until a command
needs it, so that ``--help`` and completion are quick.
"""

from __future__ import annotations

from importlib.metadata import version

import click

from .actions import cancel, retry
from .audit import audit
from .check import check
from .completion import completion
from .config import config
from .doctor import doctor
from .listing import list_transactions
from .migrate import migrate
from .participants import participants
from .plugins import PluggedGroup
from .query import show
from .resolve import resolve
from .serve import serve
from .stats import stats
from .watch import watch

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(
    cls=PluggedGroup,
    context_settings=CONTEXT,
    epilog="Exit codes: 0 ok, 1 error, 2 wrong usage or setting, 3 not found, 4 conflict, 5 cannot be reached, "
    "6 findings of doctor or check, 130 ended by Ctrl-C.",
)
@click.version_option(version("tricord"), prog_name="tricord", message="%(prog)s %(version)s")
def main() -> None:
    """Tricord: global transactions by Try, Confirm and Cancel, with nothing lost, doubled or left hanging."""


main.add_command(serve)
main.add_command(migrate)
main.add_command(config)
main.add_command(list_transactions)
main.add_command(show)
main.add_command(retry)
main.add_command(cancel)
main.add_command(resolve)
main.add_command(audit)
main.add_command(watch)
main.add_command(participants)
main.add_command(stats)
main.add_command(completion)
main.add_command(doctor)
main.add_command(check)
