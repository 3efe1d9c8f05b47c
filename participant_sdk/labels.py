"""The labels that an initiator gives a transaction, checked before anything is sent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

LABELS_MAX: Final = 16
NAME_LENGTH_MAX: Final = 63
VALUE_LENGTH_MAX: Final = 255

_NAME: Final = re.compile(rf"[a-z][a-z0-9_.-]{{0,{NAME_LENGTH_MAX - 1}}}")


def label_faults(labels: object) -> dict[str, str]:
    """What is wrong with a transaction's labels, by field path such as `labels["order"]`; empty if nothing is."""
    if not isinstance(labels, Mapping):
        return {"labels": f"is {type(labels).__name__} and not a mapping of strings to strings"}
    if len(labels) > LABELS_MAX:
        return {"labels": f"has {len(labels)} labels; the limit is {LABELS_MAX}"}
    faults: dict[str, str] = {}
    for name, value in labels.items():
        if fault := _name_fault(name) or _value_fault(value):
            shown = json.dumps(name[:NAME_LENGTH_MAX]) if isinstance(name, str) else repr(name)[:NAME_LENGTH_MAX]
            faults[f"labels[{shown}]"] = fault
    return faults


def _name_fault(name: object) -> str:
    if isinstance(name, str) and _NAME.fullmatch(name):
        return ""
    return f"a name is a letter a-z and up to {NAME_LENGTH_MAX - 1} more characters of a-z 0-9 _ . -"


def _value_fault(value: object) -> str:
    if not isinstance(value, str):
        return f"the value is {type(value).__name__} and not a string"
    if not 0 < len(value) <= VALUE_LENGTH_MAX:
        return f"the value has {len(value)} characters; it needs 1 to {VALUE_LENGTH_MAX}"
    return "" if value.isprintable() else "the value has control or other unprintable characters"
