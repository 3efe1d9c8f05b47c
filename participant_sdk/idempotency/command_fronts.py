"""Which front in Redis a command is to reach, beside the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from participant_sdk.idempotency.redis_client import TIMEOUT_MAX_S
from participant_sdk.idempotency.telling import Text, errors_as_exits

if TYPE_CHECKING:
    from participant_sdk.idempotency.redis_front import RedisFront

_Command = TypeVar("_Command", bound=Callable[..., Any])


def fronts_options(command: _Command) -> _Command:
    """The front in Redis."""
    url = click.option(
        "--redis", default=None, envvar="TRICORD_IDEMPOTENCY_REDIS", show_envvar=True, metavar="URL",
        help="The services' front in Redis, which is to forget the answers too, such as redis://cache/0.",
    )  # fmt: skip
    prefix = click.option("--redis-prefix", default=None, type=Text(), metavar="TEXT", help="Its prefix, if another.")
    return url(prefix(command))


@contextmanager
def fronts_of(redis: str | None, prefix: str | None) -> Iterator[list[RedisFront]]:
    """The fronts that the options name. Raises ConfigurationError."""
    from participant_sdk.idempotency.redis_front import PREFIX, RedisFront

    if redis is None:
        yield []
        return
    with errors_as_exits():
        front = RedisFront.connect(redis, timeout_s=TIMEOUT_MAX_S, prefix=prefix or PREFIX)
    try:
        yield [front]
    finally:
        front.close()
