"""Calls and replies between the wire and the model; what a participant sends has limits."""

from __future__ import annotations

from tricord.v1 import participant_pb2 as pb

from .machine import from_registered
from .model import Call, Outcome, Payload, Phase, Refusal, Reply, Spec
from .orders import BRANCHES_MAX
from .wire import CONTENT_TYPE_CHARS_MAX, FENCE_ID_CHARS_MAX, RESULT_BYTES_MAX, write_ms, write_payload

_CALL_BYTES = 200
"""Of a call without its payload and metadata, about."""

_PLAIN_MAX = 10_000
_PLAIN: dict[tuple[int, Phase, str, str], Reply] = {}

_OUTCOMES = {
    pb.OUTCOME_DONE: Outcome.DONE,
    pb.OUTCOME_REFUSED: Outcome.REFUSED,
    pb.OUTCOME_VIOLATION: Outcome.VIOLATION,
}


def call_message(xid: str, spec: Spec, call: Call) -> pb.Call:
    """A call on its way; its call_id is its link's to set."""
    message = pb.Call()
    write_call(message, xid, spec, call)
    return message


def write_call(message: pb.Call, xid: str, spec: Spec, call: Call) -> None:
    """Fill an empty message in place: to put one message into another, protobuf copies it."""
    branch = spec.branches[call.branch]
    message.phase = call.phase  # type: ignore[assignment]  # the same numbers; a test compares them
    message.xid = xid
    message.branch_id = call.branch + 1
    message.participant = branch.participant
    message.action = branch.action
    message.attempt = call.attempt
    write_payload(message.payload, branch.payload)
    write_ms(message.timeout, call.timeout_ms)
    if spec.metadata:
        message.metadata.update(spec.metadata)


def call_bytes(spec: Spec, branch: int) -> int:
    """How large a call of a branch, by its index, is, about."""
    size = len(spec.branches[branch].payload.data) + _CALL_BYTES
    if spec.metadata:
        size += sum(len(key) + len(value.encode()) + 8 for key, value in spec.metadata)
    return size


def reply_of(branch: int, phase: Phase, reply: pb.Reply, registered: str) -> Reply:
    """What a reply says of the call that it answers; ``registered``: the fence database that must answer, if known."""
    # Done, and no more: the same few for nearly all calls, so they are made once.
    plain = reply.outcome == pb.OUTCOME_DONE and not (reply.HasField("result") or reply.tried_branch_ids or reply.error)
    which = branch, phase, reply.fence_id, registered
    said = _PLAIN.get(which) if plain else None
    if said is None:
        said = _read(branch, phase, reply, registered)
        if plain and said.outcome is Outcome.DONE:
            if len(_PLAIN) > _PLAIN_MAX:
                _PLAIN.clear()
            _PLAIN[which] = said
    return said


def _read(branch: int, phase: Phase, reply: pb.Reply, registered: str) -> Reply:
    outcome = _OUTCOMES.get(reply.outcome, Outcome.UNKNOWN)
    excess = _excess(reply)
    fence_id, error = reply.fence_id, reply.error
    if excess and outcome is not Outcome.UNKNOWN:
        # Nothing that is asked again would be answered otherwise: of a Try it is a refusal.
        return Reply(branch, phase, Outcome.VIOLATION, fence_id[:FENCE_ID_CHARS_MAX], error=excess)
    result = None
    refusal = None
    if outcome is Outcome.REFUSED:
        refusal = Refusal(reply.refusal.reason or "refused", reply.refusal.message)
    elif outcome is Outcome.DONE:
        if reply.HasField("result"):
            result = Payload(reply.result.data, reply.result.content_type)
    elif not error:
        error = f"the participant answered {outcome.name} and gave no reason"
    seen = tuple(reply.tried_branch_ids)
    said = Reply(branch, phase, outcome, fence_id, result, refusal, error, reply.attention, 0, seen)
    return from_registered(said, registered)


def _excess(reply: pb.Reply) -> str:
    """What in a reply is beyond its limit; empty if nothing is."""
    if reply.HasField("result"):
        size = len(reply.result.data)
        if size > RESULT_BYTES_MAX:
            return f"Try returned a result of {size} bytes; the limit is {RESULT_BYTES_MAX}"
        if len(reply.result.content_type) > CONTENT_TYPE_CHARS_MAX:
            return f"the result's content_type is longer than {CONTENT_TYPE_CHARS_MAX} characters"
    if len(reply.tried_branch_ids) > BRANCHES_MAX:
        return f"tried_branch_ids has {len(reply.tried_branch_ids)} branches; the limit is {BRANCHES_MAX}"
    if len(reply.fence_id) > FENCE_ID_CHARS_MAX:
        return f"fence_id is longer than {FENCE_ID_CHARS_MAX} characters"
    return ""
