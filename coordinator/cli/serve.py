"""``tricord serve``: where the coordinator's parts meet."""

from __future__ import annotations

from typing import Any

import click

from .config import settings_flags
from .exits import ERROR, UNAVAILABLE, USAGE, fail


@click.command()
@settings_flags
def serve(config_path: str | None, **flags: Any) -> None:
    """Run a coordinator until SIGTERM or SIGINT; then it drains. A second signal ends it at once.

    Each flag has an environment variable: --lease-ms is TRICORD_LEASE_MS, and so on. Flags come before the
    environment, the environment before the file, the file before the defaults.
    """
    from ..config import ConfigError, RunError, load

    try:
        settings, _ = load(flags, config_path)
    except ConfigError as error:
        fail(str(error), USAGE)
    try:
        if settings.workers > 1:
            from ..workers import run_workers

            run_workers(settings)
        else:
            from ..coordinator import run

            run(settings)
    except RunError as error:
        fail(str(error), UNAVAILABLE if error.unreachable else ERROR)
