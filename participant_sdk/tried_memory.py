"""What a Try saw tried by services that it called, remembered for repeats of it.

The fence stores what a Try returned, and not this. A repeat whose answer got lost is answered from the fence without
running again; where this process still knows, the answer then names the branches too. Where it does not, they are not
named, and the transaction cannot be confirmed: safe, but a pity.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from participant_sdk.call import IncomingCall, Outcome, Reply
from participant_sdk.fence import Phase
from participant_sdk.gathering import Answers

REMEMBERED_MAX: Final = 10_000


class TriedMemory:
    """By branch, for the newest; safe for threads. Only of Trys that were committed, so that there is one truth."""

    def __init__(self, remembered_max: int = REMEMBERED_MAX) -> None:
        self._max = remembered_max
        self._seen: dict[tuple[str, int], frozenset[int]] = {}
        self._lock = threading.Lock()

    def completed(self, call: IncomingCall, reply: Reply) -> Reply:
        """The reply to `call`, with what is remembered."""
        if call.phase is not Phase.TRY or reply.outcome is not Outcome.DONE:
            return reply
        if reply.tried_branch_ids:
            with self._lock:
                self._seen[call.key] = reply.tried_branch_ids
                if len(self._seen) > self._max:
                    del self._seen[next(iter(self._seen))]
            return reply
        remembered = self._seen.get(call.key)
        return reply if remembered is None else replace(reply, tried_branch_ids=remembered)

    def completed_all(self, calls: Sequence[IncomingCall], answers: Answers) -> Answers:
        """The replies to `calls` of a batch, with what is remembered."""
        replies = answers.replies
        completed = {call.key: self.completed(call, replies[call.key]) for call in calls if call.key in replies}
        return replace(answers, replies=completed)
