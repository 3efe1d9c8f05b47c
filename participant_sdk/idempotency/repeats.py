"""Which requests are likely repeats, so that their record is read before anything is begun.

The first request of a key begins its local transaction, bars the key and reads in one round trip. For a repeat those
are two, since what was begun for nothing has to be rolled back. A repeat that is expected is answered by one plain
SELECT, in one round trip; a request that was taken for a repeat, and is none, has paid that round trip more. So only
two things are taken for a sign: that this process knows the key's answer to be there, and, where it does not know the
key, that of late nearly all such requests were repeats, of what other processes had answered.
"""

from __future__ import annotations

from typing import Final

KEYS_MAX: Final = 4_096
"""Known keys of either generation: the younger one becomes the elder when it is full. Both take about 1 MB."""
FIRST_WEIGHS: Final = 3.0
"""One that is new against one that is a repeat: below three repeats in four, nothing is read before."""
TIDE_MAX: Final = 30.0


class Repeats:
    """Any thread may use it: what gets lost when two do at once is a hint."""

    def __init__(self) -> None:
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        self._tide = 0.0

    def __contains__(self, key_hash: bytes) -> bool:
        """Whether the key's answer is known to be there."""
        return key_hash in self._young or key_hash in self._old

    def prevail(self) -> bool:
        """Whether a key that is not known is likely to have its answer all the same."""
        return self._tide > 0

    def add(self, key_hash: bytes) -> None:
        """The key has its answer."""
        young = self._young
        young.add(key_hash)
        if len(young) >= KEYS_MAX:
            self._old, self._young = young, set()

    def met(self, key_hash: bytes, *, repeat: bool) -> None:
        """What a request has turned out to be whose key was not known."""
        if repeat:
            self.add(key_hash)
            self._tide = min(self._tide + 1.0, TIDE_MAX)
        else:
            self._tide = max(self._tide - FIRST_WEIGHS, -TIDE_MAX)
