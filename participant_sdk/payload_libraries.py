"""Which library a payload type comes from: pydantic, msgspec, or none.

Neither is a dependency. A class can only come from a library that the program has loaded, so a look at what is loaded
is enough, and nothing is imported for a program that uses neither.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Protocol

Part = tuple[Any, Any, tuple[str | int, ...]]
"""A part of a value, the JSON that stands for it, and the steps from the whole's JSON to it."""


class Library(Protocol):
    """What each of the two modules that know a library offers."""

    def decoder(self, kind: Any) -> Callable[[Any, str], Any]:
        """The strict decoder of `kind`, from parsed JSON at a path; raises UnsupportedType."""

    def plain(self, value: Any, path: str) -> Any:
        """`value` as dicts, lists and scalars; raises TypeError or ValueError naming the path."""

    def parts(self, value: Any, tree: Any, *, writing: bool) -> Iterable[Part]:
        """The fields of `value`, each with its JSON in `tree`, under the names for writing or those for reading."""


def library_of(kind: Any) -> Library | None:
    """The library of a model, Struct, or generic one with its arguments; None for every other type."""
    kind = typing.get_origin(kind) or kind
    return _library_of_class(kind) if isinstance(kind, type) else None


@lru_cache(maxsize=1024)
def _library_of_class(kind: type) -> Library | None:
    if _is_from("msgspec", "Struct", kind):
        from participant_sdk import payload_msgspec

        return payload_msgspec
    if _is_from("pydantic.main", "BaseModel", kind) or "__pydantic_validator__" in vars(kind):
        from participant_sdk import payload_pydantic

        return payload_pydantic
    return None


def _is_from(module: str, name: str, kind: type) -> bool:
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and issubclass(kind, found)
