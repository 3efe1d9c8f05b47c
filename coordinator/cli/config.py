"""``tricord config``, and the flags that ``serve`` shares with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from .exits import USAGE, fail
from .forms import output_option, tell_one

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FLAGS = (
    ("store", "STORE", "SQLite file or postgresql://… URL.  [default: ./tricord.db]"),
    ("listen", "HOST:PORT", "Address for gRPC; port 0 takes a free one.  [default: 127.0.0.1:7800]"),
    ("key-namespace", "TEXT", "Keeps this coordinator's idempotency keys apart from others'."),
    ("participants", "JSON", "Those that do not register; see the README.  [default: none]"),
    ("timeout-ms", "MS", "A transaction's time-out when it names none.  [default: 30000]"),
    ("call-timeout-ms", "MS", "Time-out of one call to a participant.  [default: 5000]"),
    ("call-timeouts-ms", "NAME=MS,…", "Likewise of calls to some: bank.debit=3000,bank=8000."),
    ("lease-ms", "MS", "After this a silent coordinator's work is taken over.  [default: 10000]"),
    ("backoff-base-ms", "MS", "Ceiling of the first pause before a retry.  [default: 100]"),
    ("backoff-cap-ms", "MS", "Ceiling of every pause before a retry.  [default: 15000]"),
    ("attention-after", "N", "Attempts after which a person should look.  [default: 10]"),
    ("workers", "N", "Processes that share the address; more than 1 need PostgreSQL.  [default: 1]"),
    ("live-max", "N", "Transactions in flight, beyond which none may begin.  [default: 20000]"),
    ("stream-calls-max", "N", "Calls of one ExecuteStream in flight, before more are read.  [default: 4096]"),
    ("retention-ms", "MS", "How long finished transactions are kept; 0: for ever.  [default: 2592000000]"),
    ("purge-ms", "MS", "How often what is older is deleted.  [default: 60000]"),
    ("drain-ms", "MS", "How long a stop waits for what is running.  [default: 10000]"),
    ("alert-url", "URL", "Where what needs a person is POSTed to.  [default: nowhere]"),
    ("log-format", "console|json", "Format of the log on standard error.  [default: console]"),
    ("log-level", "LEVEL", "debug, info, warning or error.  [default: info]"),
)


def settings_flags(command: _Command) -> _Command:
    """Add a flag for every setting, and ``--config``."""
    for name, metavar, text in reversed(_FLAGS):
        command = click.option(f"--{name}", metavar=metavar, help=text)(command)
    allow = "Accept registrations also when not listening on loopback."
    command = click.option("--allow-registration", is_flag=True, default=None, help=allow)(command)
    where = "TOML file with settings (or TRICORD_CONFIG)."
    return click.option("--config", "config_path", metavar="FILE", help=where)(command)


@click.group()
def config() -> None:
    """Look at the coordinator's settings."""


@config.command("show")
@settings_flags
@output_option("table", "json", "jsonl")
def config_show(config_path: str | None, output: str, **flags: Any) -> None:
    """Print the effective settings and where each comes from; passwords are masked."""
    from ..config import ConfigError, load, shown

    try:
        settings, origins = load(flags, config_path)
    except ConfigError as error:
        fail(str(error), USAGE)
    values = shown(settings)

    def table() -> None:
        from .output import print_table

        rows = [(n, _text(v), origins[n]) for n, v in values.items()]
        print_table(("SETTING", "VALUE", "FROM"), rows, wraps=("VALUE", "FROM"))

    tell_one(output, {n: {"value": v, "from": origins[n]} for n, v in values.items()}, table)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        if "addresses" in value and "actions" in value:  # one of the participants, not a setting by name
            return f"{'+'.join(value['addresses'])} for {'+'.join(value['actions'])}"
        return ",".join(f"{name}={_text(of_name)}" for name, of_name in value.items())
    return str(value)
