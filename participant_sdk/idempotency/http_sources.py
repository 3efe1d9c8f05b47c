"""Where an HTTP request's key stands, and whose request it is."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any, Final, TypeAlias

from participant_sdk.asgi import Scope
from participant_sdk.idempotency.errors import ScopeMissing
from participant_sdk.idempotency.operation import TENANT_BYTES_MAX

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeaderKey:
    """The key stands in a request header, as a String of structured fields or bare."""

    name: str = "Idempotency-Key"


@dataclass(frozen=True, slots=True)
class BodyKey:
    """The key is a text in the JSON body, at this JSON pointer (RFC 6901), such as "/idempotency_key"."""

    pointer: str


@dataclass(frozen=True, slots=True)
class CallableKey:
    """The key is what `function` gives for a request's scope; None: it has none."""

    function: Callable[[Scope], str | None]


KeySource: TypeAlias = HeaderKey | BodyKey | CallableKey


IN_HEADER: Final = HeaderKey()


@unique
class OneTenant(Enum):
    """The type of ONE_TENANT."""

    ONE_TENANT = "one tenant"


ONE_TENANT: Final = OneTenant.ONE_TENANT
"""`tenant` of a program whose callers may all know each other's answers."""

Tenant: TypeAlias = Callable[[Scope], str | None] | Callable[[Scope], Awaitable[str | None]] | OneTenant


def is_async(function: object) -> bool:
    """Whether it is a function that has to be awaited, as far as it says so."""
    called = type(function).__call__ if callable(function) else None
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


async def tenant_of(tenant: Tenant, scope: Scope, what: str) -> str:
    """Whose request it is. Raises ScopeMissing for whatever is not a name of 1 to 200 bytes, errors included."""
    if isinstance(tenant, OneTenant):
        return ""
    try:
        found = tenant(scope)
        return checked(await found if inspect.isawaitable(found) else found)
    except Exception as error:  # whatever it is, nothing may run
        raise _not_told(error, what) from error


def tenant_at_once(tenant: Tenant, scope: Scope, what: str) -> str:
    """As `tenant_of`, where nothing can be awaited."""
    if isinstance(tenant, OneTenant):
        return ""
    try:
        found = tenant(scope)
        if inspect.iscoroutine(found):
            found.close()
            raise TypeError("tenant has given a coroutine, which nobody awaits here")
        return checked(found)
    except Exception as error:
        raise _not_told(error, what) from error


def checked(tenant: Any) -> str:
    """A tenant's name. Raises ScopeMissing for what is none."""
    if not isinstance(tenant, str) or not tenant:
        raise ScopeMissing("whose request it is could not be told")
    if "\0" in tenant or len(tenant.encode("utf-8", "replace")) > TENANT_BYTES_MAX or not _encodable(tenant):
        raise ScopeMissing(f"the tenant is not 1 to {TENANT_BYTES_MAX} bytes of text without NUL")
    return tenant


def _not_told(error: Exception, what: str) -> ScopeMissing:
    if isinstance(error, ScopeMissing):
        return error
    _log.warning("%s: the tenant could not be told", what, exc_info=error)
    return ScopeMissing("whose request it is could not be told")


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
