"""The stored answer of a request that has run before."""

from __future__ import annotations

from dataclasses import dataclass

from participant_sdk.idempotency.record import Answer, Record


@dataclass(frozen=True, slots=True)
class Replay:
    """The request has run before: give `answer` again."""

    record: Record
    answer: Answer

    @property
    def age_ms(self) -> int:
        """Since the record was made, in ms."""
        return self.record.age_ms
