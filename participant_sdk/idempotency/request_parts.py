"""What a door knows of a request before it is compared with another: where it went, its headers and its body."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HashedBody:
    """A body that is not in memory: its SHA-256, and how to read all of it once more."""

    sha256: bytes
    read: Callable[[], bytes]


class BodyHasher:
    """Hashes a body as it arrives. `size`: bytes so far."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.size = 0

    def add(self, chunk: bytes) -> None:
        """The next bytes of it."""
        self._hash.update(chunk)
        self.size += len(chunk)

    def done(self, read: Callable[[], bytes]) -> HashedBody:
        """It is whole. `read` gives all of it, as often as it is called."""
        return HashedBody(self._hash.digest(), read)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParts:
    """What a door knows of a request. `route`: what it was sent to, such as method, path and query, as the door says.

    `headers`: all lines, in their order; only those that an algorithm names are looked at.
    """

    route: tuple[str | bytes, ...] = ()
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes | HashedBody = b""

    @property
    def sha256(self) -> bytes:
        """Of the body's bytes."""
        return self.body.sha256 if isinstance(self.body, HashedBody) else hashlib.sha256(self.body).digest()

    def read(self) -> bytes:
        """All of the body."""
        return self.body.read() if isinstance(self.body, HashedBody) else self.body

    def header(self, name: str) -> list[bytes]:
        """The values of all lines of that name (in lower case), without the space around them."""
        wanted = name.encode()
        return [value.strip(b" \t") for given, value in self.headers if given.lower() == wanted]
