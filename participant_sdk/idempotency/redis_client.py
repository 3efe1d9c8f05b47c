"""The client of a front in Redis: one that gives up soon, so that a Redis that hangs keeps no request waiting."""

from __future__ import annotations

from typing import Any, Final

from participant_sdk.errors import ConfigurationError

TIMEOUT_S: Final = 0.1
TIMEOUT_MAX_S: Final = 1.0
NOT_INSTALLED: Final = "the client of Redis is not installed: pip install 'tricord[redis]'"


def client_of(kind: Any, retry: Any, url: str, timeout_s: float) -> Any:
    """A client of that kind, which tries nothing twice. Raises ConfigurationError."""
    from redis.backoff import NoBackoff

    if not 0 < timeout_s <= TIMEOUT_MAX_S:
        raise ConfigurationError(f"timeout_s {timeout_s} is not above 0 and at most {TIMEOUT_MAX_S} seconds")
    times = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    try:
        return kind.from_url(url, retry=retry(NoBackoff(), 0), **times)
    except ValueError as error:
        raise ConfigurationError(f"the address of Redis: {error}") from error


def check_client(client: Any, name: str) -> None:
    """Raises ConfigurationError, on behalf of `name`, for a client that would make requests wait, or decodes bytes."""
    pool = getattr(client, "connection_pool", None)
    settings = getattr(pool, "connection_kwargs", None)
    if settings is None:
        raise ConfigurationError(f"{name}: {type(client).__name__} is no client of Redis: see connect")
    if settings.get("decode_responses"):
        raise ConfigurationError(f"{name}: the client must not have decode_responses set: records are bytes")
    for setting in ("socket_timeout", "socket_connect_timeout"):
        seconds = settings.get(setting)
        if seconds is None or not 0 < seconds <= TIMEOUT_MAX_S:
            raise ConfigurationError(
                f"{name}: the client's {setting} {seconds} is not above 0 and at most {TIMEOUT_MAX_S} seconds, "
                "and so long would every request wait for a Redis that hangs; connect makes one that fits"
            )
    waits_s = getattr(pool, "timeout", 0)
    if waits_s is None or waits_s > TIMEOUT_MAX_S:
        raise ConfigurationError(
            f"{name}: the client's pool lets a call wait {waits_s} seconds for a connection, more than {TIMEOUT_MAX_S}"
        )
    retries = getattr(settings.get("retry"), "_retries", 0)
    if retries:
        raise ConfigurationError(
            f"{name}: the client tries again {retries} times; it must not (retry=Retry(NoBackoff(), 0)), "
            "since the database can answer; connect makes one that fits"
        )
