"""Labels of a starting request, checked: what people will find the transaction by."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from .errors import Violation

LABELS_MAX = 16
LABEL_NAME_CHARS_MAX = 63
LABEL_VALUE_CHARS_MAX = 255
LABEL_NAME_FORM = f"a letter a-z and up to {LABEL_NAME_CHARS_MAX - 1} more characters of a-z 0-9 _ . -"
_NAME_SHOWN_MAX = 80
"""Of a name in an error's field, escaped: those within the limit are shown whole."""

_NAME = re.compile(rf"[a-z][a-z0-9_.-]{{0,{LABEL_NAME_CHARS_MAX - 1}}}\Z")


def read_labels(labels: Mapping[str, str], wrong: list[Violation]) -> tuple[tuple[str, str], ...]:
    """Sorted by name; what is wrong with them is added to ``wrong``."""
    if len(labels) > LABELS_MAX:
        wrong.append(Violation("labels", f"has {len(labels)} labels; the limit is {LABELS_MAX}"))
        return ()
    for name, value in sorted(labels.items()):
        fault = label_name_fault(name) or label_value_fault(value)
        if fault:
            shown = json.dumps(name[:LABEL_NAME_CHARS_MAX])[:_NAME_SHOWN_MAX]
            wrong.append(Violation(f"labels[{shown}]", fault))
    return tuple(sorted(labels.items()))


def label_name_fault(name: str) -> str:
    """What is wrong with a label's name; empty if nothing is."""
    if _NAME.match(name):
        return ""
    shown = f"the name has {len(name)} characters" if len(name) > LABEL_NAME_CHARS_MAX else f"the name is {name!a}"
    return f"{shown}; a name is {LABEL_NAME_FORM}"


def label_value_fault(value: str) -> str:
    """What is wrong with a label's value; empty if nothing is."""
    if not 0 < len(value) <= LABEL_VALUE_CHARS_MAX:
        return f"the value has {len(value)} characters; it needs 1 to {LABEL_VALUE_CHARS_MAX}"
    return "" if value.isprintable() else "the value has control or other unprintable characters"
