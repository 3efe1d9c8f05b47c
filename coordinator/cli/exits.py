"""Exit codes, and errors as one line for people."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

ERROR = 1
USAGE = 2
NOT_FOUND = 3
CONFLICT = 4
UNAVAILABLE = 5
INTERRUPTED = 130
"""By Ctrl-C, as shells have it."""
FINDINGS = 6
"""The doctor has found errors or warnings, or a history violates an invariant."""


def fail(message: str, code: int = ERROR) -> NoReturn:
    """Say what is wrong on standard error, and end with this exit code."""
    click.echo(f"tricord: {message}", err=True)
    sys.exit(code)
