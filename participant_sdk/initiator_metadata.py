"""What an initiator may send along with a transaction for its participants, and how much of it.

The initiator's side is strict, so that a wrong entry is told before anything is sent. The participant's side only
bounds the size: by then the coordinator has stored the transaction, and a call that is not taken is repeated for ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

ENTRIES_MAX: Final = 16
KEY_LENGTH_MAX: Final = 64
VALUE_LENGTH_MAX: Final = 256

_KEY: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{KEY_LENGTH_MAX}}}")


def metadata_faults(metadata: object) -> dict[str, str]:
    """What is wrong with an initiator's metadata, by field path such as `metadata["tenant"]`; empty if nothing is."""
    if not isinstance(metadata, Mapping):
        return {"metadata": f"is {type(metadata).__name__} and not a mapping of strings to strings"}
    if len(metadata) > ENTRIES_MAX:
        return {"metadata": f"has {len(metadata)} entries; the limit is {ENTRIES_MAX}"}
    faults: dict[str, str] = {}
    for key, value in metadata.items():
        if fault := _key_fault(key) or _value_fault(value):
            shown = json.dumps(key[:KEY_LENGTH_MAX]) if isinstance(key, str) else repr(key)[:KEY_LENGTH_MAX]
            faults[f"metadata[{shown}]"] = fault
    return faults


def _key_fault(key: object) -> str:
    if isinstance(key, str) and _KEY.fullmatch(key):
        return ""
    return f"a key is 1 to {KEY_LENGTH_MAX} characters of A-Z a-z 0-9 . _ -"


def _value_fault(value: object) -> str:
    if not isinstance(value, str):
        return f"is {type(value).__name__} and not a string"
    if len(value) > VALUE_LENGTH_MAX:
        return f"has {len(value)} characters; the limit is {VALUE_LENGTH_MAX}"
    return "" if value.isprintable() else "has control or other unprintable characters"


def metadata_excess(metadata: Mapping[str, str]) -> str:
    """What in a call's metadata is beyond its limit; empty if nothing is."""
    if len(metadata) > ENTRIES_MAX:
        return f"the metadata has {len(metadata)} entries; the limit is {ENTRIES_MAX}"
    for key, value in metadata.items():
        if len(key) > KEY_LENGTH_MAX:
            return f"a key of the metadata has {len(key)} characters; the limit is {KEY_LENGTH_MAX}"
        if len(value) > VALUE_LENGTH_MAX:
            return f"a value of the metadata has {len(value)} characters; the limit is {VALUE_LENGTH_MAX}"
    return ""
