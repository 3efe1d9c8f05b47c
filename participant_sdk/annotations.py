"""Reading what a handler's annotations say: its payload, its result, and what it wants to be lent.

Annotations may be text, may name things that are imported for type checkers only, and are evaluated only when asked
for from Python 3.14 on. So each is looked up by itself, and one that is not needed may stay unreadable.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Final

from sqlalchemy import Connection

from participant_sdk.errors import ConfigurationError

if sys.version_info >= (3, 14):
    import annotationlib

_NAMES: Final = {False: ("Connection", "Session"), True: ("AsyncConnection", "AsyncSession")}


class Unreadable(str):
    """The text of an annotation that cannot be looked up."""


def annotations_of(handler: Callable[..., Any]) -> tuple[Any, Any]:
    """The annotations of the first parameter and of the result, each None if there is none.

    A result's that cannot be looked up is taken for none. Raises ConfigurationError for such a parameter.
    """
    first, _, result = _read(handler)
    if isinstance(first, Unreadable):
        raise ConfigurationError(
            f"the annotation {str(first)!r} of {getattr(handler, '__qualname__', handler)} cannot be looked up; the "
            "payload type must be a global of its module"
        )
    return first, None if isinstance(result, Unreadable) else result


def second_argument(who: str, handler: Callable[..., Any], *, asynchronous: bool) -> Any:
    """The class of the ORM session that the handler wants, None if it wants the connection (or does not say).

    Raises ConfigurationError if its second parameter is annotated as anything else.
    """
    _, annotation, _ = _read(handler)
    return lent_as(f"{who} has a second parameter", who, annotation, asynchronous)


def only_argument(who: str, function: Callable[..., Any], *, asynchronous: bool) -> Any:
    """As `second_argument`, of a function that has no other parameter."""
    annotation, _, _ = _read(function)
    return lent_as(f"{who} has a parameter", who, annotation, asynchronous)


def lent_as(what: str, who: str, annotation: Any, asynchronous: bool) -> Any:
    """As `second_argument`, of an annotation. `what`: how an error begins."""
    if annotation is None or annotation is Any:
        return None
    annotation = without_none(annotation)
    name = str(annotation).rpartition(".")[2] if isinstance(annotation, Unreadable) else type_name(annotation)
    if isinstance(annotation, type):
        if asynchronous:
            from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

            if issubclass(annotation, AsyncSession):
                return _with_bind(who, annotation)
            if annotation is AsyncConnection:
                return None
        else:
            from sqlalchemy.orm import Session

            if issubclass(annotation, Session):
                return _with_bind(who, annotation)
            if annotation is Connection:
                return None
    elif isinstance(annotation, Unreadable) and name in _NAMES[asynchronous]:
        return _named(name)
    lent = " or ".join(_NAMES[asynchronous])
    engine = "an AsyncEngine" if asynchronous else "an Engine"
    if isinstance(annotation, Unreadable):
        name = f"{str(annotation)!r}, which cannot be looked up; of one's own it must be a global of its module"
    raise ConfigurationError(f"{what} annotated {name}: with {engine} it is lent a {lent}; annotate it as one of them")


def without_none(annotation: Any) -> Any:
    """Of "Connection | None", as unit tests like it, the Connection."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    return members[0] if len(members) == 1 else annotation


def _with_bind(who: str, session_class: type) -> type:
    try:
        signature_of(session_class).bind(bind=None)
    except TypeError:
        raise ConfigurationError(
            f"{who} wants a {session_class.__name__}, which is lent as {session_class.__name__}(bind=...): let its "
            "constructor take that"
        ) from None
    return session_class


def _named(name: str) -> Any:
    if name == "Session":
        from sqlalchemy.orm import Session

        return Session
    if name == "AsyncSession":
        from sqlalchemy.ext.asyncio import AsyncSession

        return AsyncSession
    return None


def _read(handler: Callable[..., Any]) -> tuple[Any, Any, Any]:
    """The annotations of the first two parameters and of the result."""
    names = [parameter.name for parameter in signature_of(handler).parameters.values()]
    found = looked_up(handler, (*names[:2], "return"))
    return found[names[0]], found[names[1]] if len(names) > 1 else None, found["return"]


def looked_up(function: Callable[..., Any], names: Iterable[str]) -> dict[str, Any]:
    """The annotations of parameters by name, and of the result by "return": None where there is none."""
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    namespace = getattr(function, "__globals__", {})
    hints = _raw_annotations(function)

    def look_up(name: str) -> Any:
        annotation = hints.get(name)
        if not isinstance(annotation, str):
            return annotation
        try:
            return eval(annotation, namespace)
        except Exception:
            return Unreadable(annotation)

    return {name: look_up(name) for name in names}


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature, also where its annotations cannot be evaluated."""
    if sys.version_info >= (3, 14):  # where annotations are evaluated only when asked for
        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def _raw_annotations(function: Any) -> dict[str, Any]:
    if sys.version_info >= (3, 14):
        found = annotationlib.get_annotations(function, format=annotationlib.Format.FORWARDREF)
        return {name: _text_of(annotation) for name, annotation in found.items()}
    return inspect.get_annotations(function)


def _text_of(annotation: Any) -> Any:
    """A forward reference as the text that it stands for."""
    return annotation.__forward_arg__ if isinstance(annotation, typing.ForwardRef) else annotation


def type_name(kind: Any) -> str:
    """How a type is called in an error."""
    return getattr(kind, "__name__", None) or str(kind)
