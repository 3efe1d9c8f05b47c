"""One key per intent: what somebody wants done once, however often the request for it is sent.

    with intent("order-42"):            # a key of the caller's own, such as one that it has stored
        client.post("/orders", ...)
    with intent() as key:               # a new one, for a loop of the caller's own
        ...
    with intent("order-42", began_s=stored.began_s):    # begun before, such as by a process that is gone
        ...

Client side: no SQLAlchemy, no HTTP library, no gRPC.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final
from uuid import uuid4

from participant_sdk.idempotency.errors import KeyMalformed

KEY_CHARS_MAX: Final = 255
_KEY: Final = re.compile(r"[\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]{1,255}")
"""What every server takes as it stands: printable ASCII without spaces, quotes, commas, semicolons, backslashes."""

_current: ContextVar[tuple[str, float] | None] = ContextVar("tricord_intent", default=None)


@contextmanager
def intent(key: str | None = None, *, began_s: float | None = None) -> Iterator[str]:
    """Every request that needs a key, and has none of its own, gets this one inside; None: a new one is made.

    One block is one intent: two requests to one operation in it are the same request to the server. Blocks nest, the
    innermost counts; tasks that are begun inside inherit it. `began_s`: when it was first sent, in seconds since 1970,
    for clients that say so (`first_sent`); None: now. Raises KeyMalformed, and ValueError for a time that is none.
    """
    began_s = time.time() if began_s is None else began_s
    if not (math.isfinite(began_s) and 0 <= began_s < 1e11):
        raise ValueError(f"intent: began_s {began_s} is not 0 to 99999999999 seconds since 1970")
    key = new_key() if key is None else checked_key(key, "intent's key")
    token = _current.set((key, began_s))
    try:
        yield key
    finally:
        _current.reset(token)


def current_intent() -> str | None:
    """The key of the block that the running code is in; None: it is in none."""
    found = _current.get()
    return None if found is None else found[0]


def first_sent_text(key: str, now_s: float) -> str:
    """When the intent of that key was first sent, as it is sent: as its block says, else `now_s`, since 1970."""
    found = _current.get()
    return f"@{int(found[1] if found is not None and found[0] == key else now_s)}"


def new_key() -> str:
    """A key that nobody has used and nobody can guess."""
    return str(uuid4())


def checked_key(key: str, where: str) -> str:
    """The key, if it can be sent as it stands. Raises KeyMalformed, which says where it was and the limit."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise KeyMalformed(
            f"{where}: a key is a string of 1 to {KEY_CHARS_MAX} printable ASCII characters"
            " without space, comma, semicolon, quotation mark and backslash"
        )
    return key
