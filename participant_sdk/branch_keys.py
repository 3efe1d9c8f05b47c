"""Keys by which a branch is known again when the call that brought it about is repeated.

A service that is called directly enlists a branch of its own. If its answer is lost, the caller, or gRPC, sends the
request again; it must then find the same branch and not make a second one, which would reserve twice. So each call
carries a branch key beside the xid, and all branches that are enlisted within it derive their keys from that.

Where code is itself run again with the same key, in a Try or in a service that was called with one, the keys of its
own calls follow from it and from their order, so that the second run repeats the calls of the first. An initiator's
calls are made once: each gets a new key.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

from participant_sdk.context import Scope, current_calling, current_scope

_ENLISTED: Final = ""
"""The kind of position that enlisted branches take; those of calls are named by what is called."""


def handler_branch_key(branch_id: int) -> str:
    """The key of the scope in which a Try handler runs: the same in each of its runs."""
    return f"try:{branch_id}"


def outgoing_branch_key(target: str) -> str:
    """The key of a call that leaves now, to `target` (a method's name; "" where that is not known)."""
    if (pinned := current_calling().pinned_key) is not None:
        return pinned
    scope = current_scope()
    if scope.branch_key is None:
        return secrets.token_hex(16)
    kind = f"call {target}"
    text = f"{scope.branch_key}\n{kind}\n{scope.position(kind)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def enlisted_branch_key(scope: Scope) -> str | None:
    """The key of the branch that is enlisted next in `scope`; None if it was entered by a call without a key."""
    return None if scope.branch_key is None else f"{scope.branch_key}.{scope.position(_ENLISTED)}"
