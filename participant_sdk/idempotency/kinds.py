"""Settings are of the kind that they have to be, or an error at start: taken, a wrong one means something else."""

from __future__ import annotations

from types import NoneType
from typing import Final, TypeAlias

from participant_sdk.errors import ConfigurationError, printable

Kind: TypeAlias = type | tuple[type, ...]

NUMBER: Final = (int, float)
OPTIONAL_TEXT: Final = (str, NoneType)
_NAMES: Final = {int: "whole number", float: "number", str: "text", bool: "True or False", NoneType: "None"}


def check_kinds(what: str, of: object, **kinds: Kind) -> None:
    """Each named field of `of` is of its kind. Raises ConfigurationError, which begins with `what`, and names it."""
    for field, kind in kinds.items():
        value = getattr(of, field)
        wanted = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            names = " or ".join(_NAMES.get(each, each.__name__) for each in wanted)
            raise ConfigurationError(f"{what}: {field} {printable(repr(value), 100)} is not: {names}")
