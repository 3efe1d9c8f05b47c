"""Settings: flags over environment (``TRICORD_…``) over a TOML file over defaults."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from .config_alerts import AlertUrl, masked_path
from .config_participants import StaticParticipant, StaticParticipants
from .model import Policy
from .store.rows import POSTGRES
from .wire import ADDRESS, TIMEOUT_MS_MAX

ENV_PREFIX = "TRICORD_"
CONFIG_ENV = "TRICORD_CONFIG"

RETENTION_MS_MIN = 26 * 3_600_000
"""A participant asks about a transaction until its xid is 25 h and 60 s old; what it asks about must still be there."""

COMPLAINTS_TOLD_MAX = 10

CallTimeouts = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,129}$")], Annotated[int, Field(ge=10, le=3_600_000)]
]


class ConfigError(Exception):
    """A setting is wrong: names it, its limit, and where it came from."""


class RunError(Exception):
    """The coordinator cannot start, or has not stopped in order: what is wrong, and what to do."""

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable
        """Whether it is the store that does not answer."""


class Settings(BaseSettings):
    """The coordinator's settings. Times are milliseconds."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, str_strip_whitespace=True)

    store: str = Field("./tricord.db", min_length=1, description="a SQLite file, or postgresql://user@host/database")
    listen: str = Field("127.0.0.1:7800", min_length=1, description="host:port for gRPC; port 0 takes a free one")
    allow_registration: bool = Field(False, description="accept registrations when not listening on loopback")
    participants: StaticParticipants = Field({}, description="those that do not register: addresses and actions")
    key_namespace: str = Field("", max_length=64, pattern=r"^[\x20-\x7e]*$", description="keeps idempotency keys apart")
    timeout_ms: int = Field(30_000, gt=0, le=TIMEOUT_MS_MAX, description="a transaction's, when it names none")
    call_timeout_ms: int = Field(5_000, ge=10, le=3_600_000, description="for one call to a participant")
    call_timeouts_ms: CallTimeouts = Field(
        {}, description='for calls to some: by "participant.action", or by "participant" for all of its others'
    )
    lease_ms: int = Field(10_000, ge=100, le=7_200_000, description="after which a silent coordinator is taken over")
    backoff_base_ms: int = Field(100, ge=1, le=60_000, description="ceiling of the first pause before a retry")
    backoff_cap_ms: int = Field(15_000, ge=1, le=3_600_000, description="ceiling of every pause before a retry")
    attention_after: int = Field(10, ge=1, le=1_000_000, description="attempts after which a person should look")
    workers: int = Field(1, ge=1, le=64, description="processes that share the address; more than 1 need PostgreSQL")
    live_max: int = Field(20_000, ge=1, le=1_000_000, description="transactions in flight, beyond which none may begin")
    stream_calls_max: int = Field(
        4_096, ge=1, le=100_000, description="calls of one ExecuteStream in flight, beyond which none is read from it"
    )
    retention_ms: int = Field(
        30 * 86_400_000, ge=0, le=36_500 * 86_400_000, description="finished transactions are kept so long; 0: for ever"
    )
    purge_ms: int = Field(60_000, ge=100, le=86_400_000, description="how often what is older is deleted")
    drain_ms: int = Field(10_000, ge=0, le=600_000, description="how long a stop waits for what is running")
    alert_url: AlertUrl = Field("", description="http or https URL that is told what needs a person; empty: nobody")
    log_format: Literal["console", "json"] = Field("console", description="of the log on standard error")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags and environment only: the file comes in below them through ``load``."""
        return (init_settings,)

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, listen: str) -> str:
        match = ADDRESS.match(listen)
        if match is None:
            raise ValueError("must be host:port, such as 127.0.0.1:7800 or [::1]:7800")
        if int(match[2]) > 65535:
            raise ValueError("must have a port of at most 65535")
        return listen

    @field_validator("call_timeouts_ms", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        """A TOML table, a JSON object, or ``bank.debit=3000,bank=8000``."""
        timeouts = _named(given) if isinstance(given, str) else given
        if not isinstance(timeouts, dict):
            return timeouts
        flat: dict[Any, Any] = {}
        for name, value in timeouts.items():  # in TOML, bank.debit without quotes is a table in a table
            flat.update(
                {f"{name}.{action}": ms for action, ms in value.items()} if isinstance(value, dict) else {name: value}
            )
        return flat

    @model_validator(mode="after")
    def _relations(self) -> Settings:
        margin_ms = self.lease_margin_ms
        call_timeouts = {"call_timeout_ms": self.call_timeout_ms}
        call_timeouts |= {f"call_timeouts_ms of {name}": ms for name, ms in self.call_timeouts_ms.items()}
        for name, ms in call_timeouts.items():
            if ms + margin_ms > self.lease_ms:
                raise ValueError(
                    f"lease_ms ({self.lease_ms}) must be at least {name} ({ms}) + {margin_ms}: "
                    "else a transaction is taken over while its calls are still out"
                )
            if ms + self.backoff_base_ms > self.timeout_ms:
                raise ValueError(
                    f"timeout_ms ({self.timeout_ms}) must be at least {name} ({ms}) + backoff_base_ms "
                    f"({self.backoff_base_ms}): else a transaction is over before a call that got lost can be repeated"
                )
        if 0 < self.retention_ms < RETENTION_MS_MIN:
            raise ValueError(
                f"retention_ms ({self.retention_ms}) must be 0 (for ever) or at least {RETENTION_MS_MIN} (26 h): "
                "participants ask for 25 h and 60 s what became of a transaction"
            )
        if self.backoff_base_ms > self.backoff_cap_ms:
            raise ValueError(
                f"backoff_base_ms ({self.backoff_base_ms}) must not be above backoff_cap_ms ({self.backoff_cap_ms})"
            )
        if self.workers > 1 and not self.store.startswith(POSTGRES):
            raise ValueError(
                f"workers ({self.workers}) must be 1 on store {masked_url(self.store)}: a SQLite file is locked for "
                "one process; for more name a database with --store postgresql://…"
            )
        return self

    @property
    def lease_margin_ms(self) -> int:
        """How much longer than the longest call a lease must last."""
        return min(1_000, self.lease_ms // 5)

    def policy(self) -> Policy:
        """The part that the pure core goes by."""
        return Policy(
            call_timeout_ms=self.call_timeout_ms,
            lease_ms=self.lease_ms,
            lease_margin_ms=self.lease_margin_ms,
            backoff_base_ms=self.backoff_base_ms,
            backoff_cap_ms=self.backoff_cap_ms,
            attention_after=self.attention_after,
            call_timeouts_ms=self.call_timeouts_ms or None,
        )


def load(flags: dict[str, Any], config_path: str | None) -> tuple[Settings, dict[str, str]]:
    """The effective settings, and where each came from. Raises ConfigError."""
    path = config_path or os.environ.get(CONFIG_ENV)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(Settings.model_fields, "default")
    if path:
        for name, value in _read_file(Path(path)).items():
            values[name] = value
            origins[name] = f"file {path}"
    for name in Settings.model_fields:
        text = os.environ.get(ENV_PREFIX + name.upper())
        if text is not None:
            values[name] = text
            origins[name] = f"environment {ENV_PREFIX}{name.upper()}"
    for name, value in flags.items():
        if value is not None:
            values[name] = value
            origins[name] = f"flag --{name.replace('_', '-')}"
    try:
        return Settings(**values), origins
    except ValidationError as error:
        # Wrong items do not count, so that a list of nothing else is also said to be too short: once is enough.
        wrong = [detail for detail in error.errors() if detail["type"] != "too_short" or not detail["input"]]
        told = [_complaint(detail, origins) for detail in wrong[:COMPLAINTS_TOLD_MAX]]
        if len(wrong) > COMPLAINTS_TOLD_MAX:
            told.append(f"and {len(wrong) - COMPLAINTS_TOLD_MAX} more")
        raise ConfigError("; ".join(told)) from error


def shown(settings: Settings) -> dict[str, Any]:
    """The settings with passwords masked, and the path of ``alert_url``, which often is one."""
    values = settings.model_dump()
    values["store"] = masked_url(settings.store)
    values["alert_url"] = masked_path(masked_url(settings.alert_url))
    return values


def masked_url(url: str) -> str:
    """A store's URL without its password, wherever in it that stands."""
    masked = re.sub(r"(?<=://)([^/@:?#]*):[^/?#]*(?=@)", r"\1:***", url)
    return re.sub(r"(?i)([?&](?:ssl)?password=)[^&#]*", r"\1***", masked)


def _named(text: str) -> Any:
    """The mapping that a flag or a variable of the environment writes as text."""
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"is not valid JSON ({error})") from error
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError("must be name=ms,name=ms or a JSON object")
    return {name.strip(): ms.strip() for name, _, ms in pairs}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: is not valid TOML: {error}") from error
    unknown = sorted(set(values) - set(Settings.model_fields))
    if unknown:
        known = ", ".join(sorted(Settings.model_fields))
        raise ConfigError(f"config file {path}: unknown setting {', '.join(unknown)}; known are {known}")
    return values


def _complaint(detail: Any, origins: dict[str, str]) -> str:
    name = ".".join(str(part) for part in detail["loc"] if part != "[key]")
    message = str(detail["msg"]).removeprefix("Value error, ")
    if not name:
        return message
    setting = str(detail["loc"][0])
    where = f"{name} ({origins.get(setting, 'given')})"
    if detail["type"] == "extra_forbidden":  # below a setting: unknown settings never come so far
        return f"{where}: is unknown; known are {', '.join(StaticParticipant.model_fields)}"
    given = masked_url(str(detail["input"]))
    if setting == "alert_url":
        given = masked_path(given)
    return f"{where}: {message}, not {given[:80]!r}"
