"""A row of the fence log as a value, apart from how each database stores and reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from participant_sdk.call import FINGERPRINT_ALGORITHM, IncomingCall, Refusal
from participant_sdk.errors import MESSAGE_LENGTH_MAX, REASON_LENGTH_MAX, printable
from participant_sdk.fence import Phase, Progress, Status
from participant_sdk.payload import Payload
from participant_sdk.steps import CallFailed

MEETS_WITH: Final = {
    Phase.TRY: Status.TRIED,
    Phase.CANCEL: Status.SUSPENDED,
    Phase.SETTLE_CONFIRMED: Status.SUSPENDED,
    Phase.SETTLE_CANCELLED: Status.SUSPENDED,
}
"""What calls insert where a branch has no row yet. Confirm inserts nothing."""


@dataclass(frozen=True, slots=True)
class FenceRow:
    """What is stored about a branch.

    `finished`: the last statement of the call that gave the row its status is in it. `intent` and `lease_left_ms`
    belong to a row of an external Try that is not finished.
    """

    participant: str
    status: Status
    finished: bool
    fingerprint_algorithm: int | None
    fingerprint: bytes | None
    result: Payload | None
    refusal: Refusal | None
    intent: str | None
    lease_left_ms: int

    @property
    def progress(self) -> Progress:
        """How far the call that wrote the row has come."""
        if self.finished:
            return Progress.FINISHED
        if self.intent is None:
            return Progress.UNFINISHED
        return Progress.LEASED if self.lease_left_ms > 0 else Progress.LAPSED

    def holds(self, call: IncomingCall) -> bool:
        """Whether `call` is about the same action and payload as the call that made this row.

        Compared under the row's own algorithm, and only if the row has one.
        """
        if self.participant != call.participant:
            return False
        if self.fingerprint is None or self.fingerprint_algorithm is None:
            return True
        if self.fingerprint_algorithm != FINGERPRINT_ALGORITHM:
            raise CallFailed(
                f"the fence row's fingerprint has algorithm {self.fingerprint_algorithm}, which this version of the "
                "SDK does not know",
                attention=True,
            )
        return self.fingerprint == call.fingerprint


@dataclass(slots=True)
class Meeting:
    """What a call met: `row`, or None if the branch had none, which is then made (but not by Confirm).

    `now_ms` is the database's clock, read after the row was inserted; None if nothing was.
    """

    row: FenceRow | None
    now_ms: int | None = None


def status_of(number: int) -> Status:
    """The status that is stored as `number`; raises CallFailed for one of a newer version."""
    try:
        return Status(number)
    except ValueError:
        raise CallFailed(
            f"the fence row has status {number}, which this version of the SDK does not know", attention=True
        ) from None


def storable(reason: str, message: str) -> Refusal:
    """A refusal within the limits of what is stored and sent."""
    return Refusal(printable(str(reason), REASON_LENGTH_MAX) or "refused", printable(str(message), MESSAGE_LENGTH_MAX))


class RowGone(CallFailed):
    """The fence row is not as this local transaction has left it: nothing may be committed."""

    def __init__(self) -> None:
        super().__init__(
            "the fence row was not there when it was written, or not of this local transaction: its handler has "
            "committed by itself, or rolled back, or changed the row",
            attention=True,
        )
