"""Which calls run together: those of one batch key that wait while the batch before them runs.

No timer: where nothing waits, a call starts at once and alone, and what comes meanwhile is the next batch. Pure
bookkeeping, without threads or tasks; its owner locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeAlias, TypeVar

from participant_sdk.call import IncomingCall, Reply

W = TypeVar("W")
Branch: TypeAlias = tuple[str, int]
KeyOf: TypeAlias = Callable[[IncomingCall], Hashable | None]
"""What calls have in common that run together; None: the call runs by itself."""

MEMBERS_MAX: Final = 50
"""More savepoints than some 64 would overflow PostgreSQL's cache of subtransactions, and slow its whole server."""
APART_MAX: Final = 1_000


def no_key(call: IncomingCall) -> None:
    """Nothing runs together."""
    return None


@dataclass(slots=True)
class Answers:
    """What came of calls that were to run together: replies by branch. One without is to be run by itself.

    `culprit`: the branch whose call was running when an error rolled everything back.
    """

    replies: Mapping[Branch, Reply] = field(default_factory=dict)
    culprit: Branch | None = None


class Line(Generic[W]):
    """What waits under one key. `Gathering` has it while any of its batches runs, or waits to run."""

    __slots__ = ("key", "waiting")

    def __init__(self, key: Hashable, first: W) -> None:
        self.key = key
        self.waiting: deque[W] = deque([first])

    def take(self) -> list[W]:
        """The next batch, in the order of arrival."""
        return [self.waiting.popleft() for _ in range(min(MEMBERS_MAX, len(self.waiting)))]


class Gathering(Generic[W]):
    """The lines of all keys, and the branches whose calls have made batches fail and go alone since."""

    def __init__(self, key_of: KeyOf) -> None:
        self._key_of = key_of
        self._lines: dict[Hashable, Line[W]] = {}
        self._apart: dict[Branch, None] = {}

    def key_of(self, call: IncomingCall) -> Hashable | None:
        """Under which key `call` waits; None: it runs by itself. May run the user's code: not under a lock."""
        return None if call.key in self._apart else self._key_of(call)

    def join(self, key: Hashable, work: W) -> Line[W] | None:
        """Have `work` wait. A line that is to be run now; None: it is, and will come to this work."""
        line = self._lines.get(key)
        if line is not None:
            line.waiting.append(work)
            return None
        line = self._lines[key] = Line(key, work)
        return line

    def ended(self, line: Line[W]) -> bool:
        """A batch of it has ended; whether the line is to be run again, since more waits."""
        if line.waiting:
            return True
        del self._lines[line.key]
        return False

    def learn(self, answers: Answers) -> None:
        """A call that has made its batch fail goes alone from now on: it may do so each time."""
        if answers.culprit is not None:
            self._apart[answers.culprit] = None
            if len(self._apart) > APART_MAX:
                del self._apart[next(iter(self._apart))]
