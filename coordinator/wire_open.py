"""What comes in for a transaction that is stored already, checked; each complaint names the field and the limit."""

from __future__ import annotations

from tricord.v1 import coordinator_pb2 as pb

from .errors import InvalidRequest, Violation
from .ids import parse_xid
from .model import BranchSpec, Joined, Outcome, Payload, Phase, Refusal, Reply
from .orders import BRANCHES_MAX, LIFE_MS_MAX, AddBranch
from .wire import (
    FENCE_ID_CHARS_MAX,
    KEY_CHARS_MAX,
    NO_XID,
    RESULT_BYTES_MAX,
    check_content_type,
    check_wait,
    duration_ms,
    read_branch,
)

REASON_CHARS_MAX = 256


def read_try(request: pb.CoordinatorServiceTryRequest) -> tuple[bytes, AddBranch]:
    """The xid, and what to add. Raises InvalidRequest, with every wrong field."""
    wrong: list[Violation] = []
    xid = xid_of(request.xid, wrong)
    branch = _added(request, wrong)
    raise_wrong(wrong)
    return xid, AddBranch(branch, Joined(request.branch_key))


def read_enlist(request: pb.EnlistRequest) -> tuple[bytes, AddBranch]:
    """The xid, and what to add. Raises InvalidRequest, with every wrong field."""
    wrong: list[Violation] = []
    xid = xid_of(request.xid, wrong)
    branch = _added(request, wrong)
    if request.parent_branch_id > BRANCHES_MAX:
        wrong.append(_no_branch_id("parent_branch_id", request.parent_branch_id))
    raise_wrong(wrong)
    return xid, AddBranch(branch, Joined(request.branch_key, True, request.parent_branch_id))


def read_report(request: pb.ReportRequest) -> tuple[bytes, Reply]:
    """The xid, and the reply that the report stands for. Raises InvalidRequest, with every wrong field."""
    wrong: list[Violation] = []
    xid = xid_of(request.xid, wrong)
    if not 0 < request.branch_id <= BRANCHES_MAX:
        wrong.append(_no_branch_id("branch_id", request.branch_id))
    fence_id = request.fence_id
    if not 0 < len(fence_id) <= FENCE_ID_CHARS_MAX or not fence_id.isprintable():
        wrong.append(Violation("fence_id", f"needs 1 to {FENCE_ID_CHARS_MAX} printable characters"))
    reply = Reply(request.branch_id - 1, Phase.TRY, Outcome.DONE, fence_id)
    match request.WhichOneof("outcome"):
        case "tried":
            tried = request.tried
            seen = _branch_ids("tried.tried_branch_ids", tried.tried_branch_ids, wrong)
            result = None
            if tried.HasField("result"):
                size = len(tried.result.data)
                if size > RESULT_BYTES_MAX:
                    wrong.append(Violation("tried.result", f"has {size} bytes; the limit is {RESULT_BYTES_MAX}"))
                check_content_type("tried.result.content_type", tried.result.content_type, wrong)
                result = Payload(tried.result.data, tried.result.content_type)
            reply = reply._replace(result=result, seen=tuple(sorted(seen)))
        case "refusal":
            refusal = Refusal(request.refusal.reason or "refused", request.refusal.message)
            reply = reply._replace(outcome=Outcome.REFUSED, refusal=refusal)
        case _:
            wrong.append(Violation("outcome", "is missing: tried, or refusal"))
    raise_wrong(wrong)
    return xid, reply


def read_confirm(request: pb.CoordinatorServiceConfirmRequest) -> tuple[bytes, frozenset[int]]:
    """The xid, and the branch_ids that are named. Raises InvalidRequest, with every wrong field."""
    wrong: list[Violation] = []
    xid = xid_of(request.xid, wrong)
    named = _branch_ids("tried_branch_ids", request.tried_branch_ids, wrong)
    check_wait(request.wait, wrong)
    raise_wrong(wrong)
    return xid, named


def read_cancel(request: pb.CoordinatorServiceCancelRequest) -> tuple[bytes, str]:
    """The xid and the reason. Raises InvalidRequest, with every wrong field."""
    wrong: list[Violation] = []
    xid = xid_of(request.xid, wrong)
    if len(request.reason) > REASON_CHARS_MAX:
        wrong.append(Violation("reason", f"has {len(request.reason)} characters; the limit is {REASON_CHARS_MAX}"))
    elif not request.reason.isprintable():
        wrong.append(Violation("reason", "has control or other unprintable characters"))
    check_wait(request.wait, wrong)
    raise_wrong(wrong)
    return xid, request.reason


def read_renew(request: pb.RenewRequest) -> tuple[bytes, int]:
    """The xid and the new time-out. Raises InvalidRequest, with every wrong field."""
    wrong: list[Violation] = []
    xid = xid_of(request.xid, wrong)
    timeout_ms = duration_ms(request.timeout)
    if not 0 < timeout_ms <= LIFE_MS_MAX:
        wrong.append(Violation("timeout", f"is {timeout_ms} ms; it must be more than 0 and at most 24 h"))
    raise_wrong(wrong)
    return xid, timeout_ms


def xid_of(text: str, wrong: list[Violation]) -> bytes:
    """The xid that a text names; if it names none, that is added to ``wrong``."""
    xid = parse_xid(text)
    if xid is None:
        wrong.append(Violation("xid", NO_XID))
    return xid or b""


def _added(request: pb.CoordinatorServiceTryRequest | pb.EnlistRequest, wrong: list[Violation]) -> BranchSpec:
    key = request.branch_key
    if not 0 < len(key) <= KEY_CHARS_MAX:
        wrong.append(Violation("branch_key", f"has {len(key)} characters; it needs 1 to {KEY_CHARS_MAX}"))
    elif not key.strip() or not key.isprintable():
        wrong.append(Violation("branch_key", "is blank, or has control or other unprintable characters"))
    return read_branch("branch", request.branch, wrong)


def _branch_ids(field: str, branch_ids: object, wrong: list[Violation]) -> frozenset[int]:
    given: list[int] = list(branch_ids)  # type: ignore[call-overload]
    if len(given) > BRANCHES_MAX:
        wrong.append(Violation(field, f"has {len(given)} branches; the limit is {BRANCHES_MAX}"))
        return frozenset()
    for n, branch_id in enumerate(given):
        if not 0 < branch_id <= BRANCHES_MAX:
            wrong.append(_no_branch_id(f"{field}[{n}]", branch_id))
    return frozenset(given)


def _no_branch_id(field: str, branch_id: int) -> Violation:
    return Violation(field, f"is {branch_id}, which is no branch_id: 1 to {BRANCHES_MAX}")


def raise_wrong(wrong: list[Violation]) -> None:
    """Raises InvalidRequest if there is anything wrong."""
    if wrong:
        raise InvalidRequest(*wrong)
