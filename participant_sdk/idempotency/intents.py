"""One key per intent: what somebody wants done once, however often the request for it is sent.

    with intent("order-42"):            # a key of the caller's own, such as one that it has stored
        client.post("/orders", ...)
    with intent() as key:               # a new one, for a loop of the caller's own
        ...

Client side: no SQLAlchemy, no HTTP library, no gRPC.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final
from uuid import uuid4

from participant_sdk.idempotency.errors import KeyMalformed

KEY_CHARS_MAX: Final = 255
_KEY: Final = re.compile(r"[\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]{1,255}")
"""What every server takes as it stands: printable ASCII without spaces, quotes, commas, semicolons, backslashes."""

_current: ContextVar[str | None] = ContextVar("tricord_intent", default=None)


@contextmanager
def intent(key: str | None = None) -> Iterator[str]:
    """Every request that needs a key, and has none of its own, gets this one inside; None: a new one is made.

    One block is one intent: two requests to one operation in it are the same request to the server. Blocks nest, the
    innermost counts; tasks that are begun inside inherit it. Raises KeyMalformed.
    """
    token = _current.set(new_key() if key is None else checked_key(key, "intent's key"))
    try:
        yield _current.get() or ""
    finally:
        _current.reset(token)


def current_intent() -> str | None:
    """The key of the block that the running code is in; None: it is in none."""
    return _current.get()


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
