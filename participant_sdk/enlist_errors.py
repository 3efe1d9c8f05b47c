"""What may come of enlisting a branch, beside success and Refused, which a Try handler raises."""

from __future__ import annotations

from typing import ClassVar

from participant_sdk.errors import TricordError


class NotEnlisted(TricordError):
    """The branch has no part in its transaction, for certain, and asking again changes nothing.

    `reason` says why: NOT_TRYING (it was decided), SEALED, NOT_FOUND, BRANCH_KEY_REUSED, TOO_MANY_BRANCHES, NO_XID or
    NO_BRANCH_KEY (the call did not bring them), or another of the coordinator. Try was not run; where `ran` is true,
    it was, and the transaction was cancelled meanwhile: Cancel undoes it.
    """

    reason = "NOT_ENLISTED"

    def __init__(self, message: str, reason: str, *, ran: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.ran = ran


class BranchUnknown(TricordError):
    """It is not known whether the branch was tried. It bars the confirm unless a repeat makes it known.

    Let your caller know that it failed, or is unknown. It may send the same request again, with the same branch key:
    that is the same branch. `branch_id` is None if it is not even known whether there is one.
    """

    reason = "BRANCH_UNKNOWN"
    retryable: ClassVar[bool] = True

    def __init__(self, message: str, xid: str, branch_key: str, branch_id: int | None) -> None:
        super().__init__(message)
        self.xid = xid
        self.branch_key = branch_key
        self.branch_id = branch_id
