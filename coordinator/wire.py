"""Between the wire and the model: requests checked and read, transactions and errors written.

Everything that comes in is checked here, before anything is stored; each complaint names the field and the limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple, Self

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import code_pb2, error_details_pb2, status_pb2

from tricord.v1 import coordinator_pb2, types_pb2

from .errors import DOMAIN, InvalidRequest, RpcError, Violation
from .ids import parse_xid
from .machine import called
from .model import Attention, BranchSpec, Payload, Transaction
from .orders import BRANCHES_MAX, LIFE_MS_MAX
from .store.rows import Row
from .wire_labels import read_labels

PAYLOAD_BYTES_MAX = 1024 * 1024
REQUEST_BYTES_MAX = 8 * 1024 * 1024
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""gRPC's own limit: above ours, so that it is ours that is told."""
KEY_CHARS_MAX = 255
NAME_CHARS_MAX = 64
CONTENT_TYPE_CHARS_MAX = 255
ADDRESS_CHARS_MAX = 255
FENCE_ID_CHARS_MAX = 64
VIOLATIONS_TOLD_MAX = 5
ERROR_BYTES_MAX = 400
"""An error travels in gRPC's trailing metadata, of which many clients take no more than 8 KiB."""
METADATA_ENTRIES_MAX = 16
METADATA_VALUE_CHARS_MAX = 256
METADATA_KEY_SHOWN_MAX = 80
"""Of a key in an error's field, escaped: those within the limit are shown whole."""
LOOK_UP_XIDS_MAX = 1_000
TIMEOUT_MS_MAX = LIFE_MS_MAX
RESULT_BYTES_MAX = 64 * 1024
"""Of one Try's result. With 64 branches, and their payloads, an answer still fits into one message."""

_StartingRequest = coordinator_pb2.ExecuteRequest | coordinator_pb2.BeginRequest

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})\Z")
_WAITS = frozenset(coordinator_pb2.Wait.values())
_KEY_SEPARATOR = b"\0"
NO_XID = "is not an xid: 32 hexadecimal digits"


# --- what comes in ----------------------------------------------------------------------------------------


class Starting(NamedTuple):
    """A checked request to start a transaction."""

    size: int
    """Of the request, in bytes."""
    key: bytes
    timeout_ms: int
    metadata: tuple[tuple[str, str], ...]
    labels: tuple[tuple[str, str], ...]
    branches: tuple[BranchSpec, ...] = ()
    interactive: bool = False
    ordered: bool = False

    @classmethod
    def of_execute(cls, request: coordinator_pb2.ExecuteRequest, namespace: str, timeout_ms_default: int) -> Self:
        """Raises InvalidRequest, with every wrong field."""
        wrong: list[Violation] = []
        common = _starting(request, namespace, timeout_ms_default, wrong)
        check_wait(request.wait, wrong)
        count = len(request.branches)
        if not count:
            wrong.append(Violation("branches", "a transaction needs at least 1 branch"))
        elif count > BRANCHES_MAX:
            wrong.append(Violation("branches", f"has {count} branches; the limit is {BRANCHES_MAX}"))
        if wrong:
            raise InvalidRequest(*wrong)
        branches = tuple(read_branch(f"branches[{n}]", b, wrong) for n, b in enumerate(request.branches))
        if wrong:
            raise InvalidRequest(*wrong)
        return cls(*common, branches, ordered=request.ordered)

    @classmethod
    def of_begin(cls, request: coordinator_pb2.BeginRequest, namespace: str, timeout_ms_default: int) -> Self:
        """Raises InvalidRequest, with every wrong field."""
        wrong: list[Violation] = []
        common = _starting(request, namespace, timeout_ms_default, wrong)
        if wrong:
            raise InvalidRequest(*wrong)
        return cls(*common, interactive=True)


def _starting(
    request: _StartingRequest, namespace: str, timeout_ms_default: int, wrong: list[Violation]
) -> tuple[int, bytes, int, tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """What every starting request has: size, key, time-out in ms, metadata, labels.

    Raises InvalidRequest if it is too large to be looked at.
    """
    size = request.ByteSize()
    if size > REQUEST_BYTES_MAX:
        raise InvalidRequest(Violation("request", f"has {size} bytes; the limit is {REQUEST_BYTES_MAX}"))
    key = read_key(request.idempotency_key, namespace, wrong) if request.idempotency_key else b""
    timeout_ms = _timeout_ms(request, timeout_ms_default, wrong)
    metadata = _metadata(request, wrong) if request.metadata else ()
    return size, key, timeout_ms, metadata, read_labels(request.labels, wrong) if request.labels else ()


def read_key(text: str, namespace: str, wrong: list[Violation]) -> bytes:
    """The stored form of an idempotency key. The namespace stands before it, so two callers' keys never meet (B4)."""
    field = "idempotency_key"
    if len(text) > KEY_CHARS_MAX:
        wrong.append(Violation(field, f"has {len(text)} characters; the limit is {KEY_CHARS_MAX}"))
    elif not text.strip():
        wrong.append(Violation(field, f"is empty; it needs 1 to {KEY_CHARS_MAX} characters"))
    elif not text.isprintable():
        wrong.append(Violation(field, "has control or other unprintable characters"))
    return namespace.encode() + _KEY_SEPARATOR + text.encode()


def read_xid(text: str, field: str = "xid") -> bytes:
    """The xid that a text names. Raises InvalidRequest."""
    xid = parse_xid(text)
    if xid is None:
        raise InvalidRequest(Violation(field, NO_XID))
    return xid


def read_xids(texts: Sequence[str]) -> list[bytes]:
    """The xids of a look-up, each once. Raises InvalidRequest, with every wrong one."""
    if not 0 < len(texts) <= LOOK_UP_XIDS_MAX:
        raise InvalidRequest(Violation("xids", f"has {len(texts)} xids; 1 to {LOOK_UP_XIDS_MAX} are needed"))
    xids: dict[bytes, None] = {}
    wrong: list[Violation] = []
    for n, text in enumerate(texts):
        xid = parse_xid(text)
        if xid is None:
            wrong.append(Violation(f"xids[{n}]", NO_XID))
        else:
            xids[xid] = None
    if wrong:
        raise InvalidRequest(*wrong)
    return list(xids)


def check_name(field: str, name: str) -> None:
    """Raises InvalidRequest unless it is a participant's or action's name."""
    wrong: list[Violation] = []
    _check_name(field, name, wrong)
    if wrong:
        raise InvalidRequest(*wrong)


def duration_ms(duration: duration_pb2.Duration) -> int:
    """Whole milliseconds, rounded up."""
    return duration.seconds * 1000 + -(-duration.nanos // 1_000_000)


def _timeout_ms(request: _StartingRequest, default_ms: int, wrong: list[Violation]) -> int:
    if not request.HasField("timeout"):
        return default_ms
    timeout_ms = duration_ms(request.timeout)
    if not 0 < timeout_ms <= TIMEOUT_MS_MAX:
        wrong.append(Violation("timeout", f"is {timeout_ms} ms; it must be more than 0 and at most 24 h"))
    return timeout_ms


def _metadata(request: _StartingRequest, wrong: list[Violation]) -> tuple[tuple[str, str], ...]:
    count = len(request.metadata)
    if count > METADATA_ENTRIES_MAX:
        wrong.append(Violation("metadata", f"has {count} entries; the limit is {METADATA_ENTRIES_MAX}"))
        return ()
    entries = tuple(sorted(request.metadata.items()))
    for key, value in entries:
        shown = json.dumps(key[:NAME_CHARS_MAX])[:METADATA_KEY_SHOWN_MAX]
        field = f"metadata[{shown}]"
        _check_name(field, key, wrong, "key")
        if len(value) > METADATA_VALUE_CHARS_MAX:
            text = f"has {len(value)} characters; the limit is {METADATA_VALUE_CHARS_MAX}"
            wrong.append(Violation(field, text))
        elif not value.isprintable():
            wrong.append(Violation(field, "has control or other unprintable characters"))
    return entries


def read_branch(field: str, branch: coordinator_pb2.BranchRequest, wrong: list[Violation]) -> BranchSpec:
    """One branch of a request; what is wrong with it is added to ``wrong``."""
    payload = branch.payload
    spec = BranchSpec(branch.participant, branch.action, Payload(payload.data, payload.content_type))
    if not _NAME.match(spec.participant) or not _NAME.match(spec.action):
        _check_name(f"{field}.participant", spec.participant, wrong)
        _check_name(f"{field}.action", spec.action, wrong)
    if len(spec.payload.data) > PAYLOAD_BYTES_MAX:
        size = len(spec.payload.data)
        wrong.append(Violation(f"{field}.payload", f"has {size} bytes; the limit is {PAYLOAD_BYTES_MAX}"))
    check_content_type(f"{field}.payload.content_type", spec.payload.content_type, wrong)
    return spec


def check_wait(wait: int, wrong: list[Violation]) -> None:
    """Complain of one that is none."""
    if wait not in _WAITS:
        wrong.append(Violation("wait", f"is {wait}, which is no Wait"))


def check_content_type(field: str, content_type: str, wrong: list[Violation]) -> None:
    """Complain of one that is none."""
    if len(content_type) > CONTENT_TYPE_CHARS_MAX or not (content_type.isascii() and content_type.isprintable()):
        limit = f"must be at most {CONTENT_TYPE_CHARS_MAX} printable ASCII characters"
        wrong.append(Violation(field, limit))


def _check_name(field: str, name: str, wrong: list[Violation], what: str = "name") -> None:
    if not _NAME.match(name):
        shown = f"has {len(name)} characters" if len(name) > NAME_CHARS_MAX else f"is {name!a}"
        wrong.append(Violation(field, f"{shown}; a {what} is 1 to {NAME_CHARS_MAX} of A-Z a-z 0-9 . _ -"))


# --- what goes out ----------------------------------------------------------------------------------------


def transaction_message(tx: Transaction) -> types_pb2.Transaction:
    """A transaction as callers see it."""
    message = types_pb2.Transaction()
    write_transaction(message, tx)
    return message


def write_transaction(message: types_pb2.Transaction, tx: Transaction) -> None:
    """Fill an empty message in place: to put one message into another, protobuf copies it."""
    spec = tx.spec
    message.xid = spec.xid.hex()
    if spec.key:
        message.idempotency_key = spec.key.partition(_KEY_SEPARATOR)[2].decode()
    message.state = int(tx.state)  # type: ignore[assignment]  # the same numbers; a test compares them
    message.attention = _ATTENTION[tx.attention]
    for branch in range(len(tx.steps)):
        _write_branch(message.branches.add(), tx, branch)
    write_ms(message.create_time, spec.created_ms)
    write_ms(message.update_time, tx.updated_ms)
    write_ms(message.deadline_time, tx.deadline_ms)
    message.version = tx.version
    message.sealed = tx.sealed
    write_ms(message.timeout, spec.timeout_ms)
    if tx.cancel_reason:
        message.cancel_reason = tx.cancel_reason
    if spec.interactive or spec.ordered:
        message.interactive, message.ordered = spec.interactive, spec.ordered
    if tx.resolved:
        message.mixed = tx.mixed
    if spec.metadata:
        message.metadata.update(spec.metadata)
    if spec.labels:
        message.labels.update(spec.labels)
    if tx.decided_ms:
        write_ms(message.decide_time, tx.decided_ms)


def unreadable_message(row: Row, why: str) -> types_pb2.Transaction:
    """What can be told of a row that this version of the program cannot read."""
    return types_pb2.Transaction(
        xid=row.xid.hex(),
        state=row.state,  # type: ignore[arg-type]
        attention=types_pb2.ATTENTION_VIOLATION,
        create_time=timestamp(row.created_ms),
        update_time=timestamp(row.updated_ms),
        cancel_reason=why,
        version=row.version,
    )


_ATTENTION = {
    Attention.NONE: types_pb2.ATTENTION_NONE,
    Attention.RETRYING: types_pb2.ATTENTION_RETRYING,
    Attention.VIOLATION: types_pb2.ATTENTION_VIOLATION,
    Attention.STUCK: types_pb2.ATTENTION_STUCK,
}


def branch_message(tx: Transaction, index: int) -> types_pb2.Branch:
    """One branch as callers see it."""
    message = types_pb2.Branch()
    _write_branch(message, tx, index)
    return message


def _write_branch(message: types_pb2.Branch, tx: Transaction, index: int) -> None:
    branch, step = tx.spec.branches[index], tx.steps[index]
    message.branch_id = index + 1
    message.participant = branch.participant
    message.action = branch.action
    message.state = int(step.status)  # type: ignore[assignment]  # the same numbers; a test compares them
    write_payload(message.payload, branch.payload)
    if step.attempts:
        message.attempts = step.attempts
    if step.error:
        message.last_error = step.error
    if step.result is not None:
        write_payload(message.result, step.result)
    if step.refusal is not None:
        message.refusal.reason, message.refusal.message = step.refusal.reason, step.refusal.message
    if step.attempts and step.next_ms and called(tx, index) is not None:
        write_ms(message.next_attempt_time, step.next_ms)
    joined = tx.joined_as(index) if tx.joined else None
    if joined is not None:
        message.branch_key, message.enlisted, message.parent_branch_id = joined
    if tx.resolved and (resolution := tx.resolution_of(index)) is not None:
        message.resolution.CopyFrom(
            types_pb2.Resolution(
                resolved_state=types_pb2.BRANCH_STATE_CONFIRMED
                if resolution.confirmed
                else types_pb2.BRANCH_STATE_CANCELLED,
                actor=resolution.actor,
                reason=resolution.reason,
                time=timestamp(resolution.time_ms),
                lost=resolution.lost,
            )
        )
    if tx.seen:
        message.tried_branch_ids.extend(seen.branch_id for seen in tx.seen if seen.by == index + 1)


def write_payload(message: types_pb2.Payload, payload: Payload) -> None:
    """Fill an empty message in place."""
    message.data, message.content_type = payload.data, payload.content_type


def write_ms(message: Timestamp | duration_pb2.Duration, ms: int) -> None:
    """Likewise with a time, or how long something takes."""
    message.seconds, message.nanos = ms // 1000, ms % 1000 * 1_000_000


def timestamp(ms: int) -> Timestamp:
    """Milliseconds since 1970 on the wire."""
    return Timestamp(seconds=ms // 1000, nanos=ms % 1000 * 1_000_000)


def _cut(text: str, bytes_max: int) -> str:
    return text.encode()[:bytes_max].decode(errors="ignore")


def error_status(error: RpcError) -> status_pb2.Status:
    """An error as google.rpc.Status: one ErrorInfo, and the wrong fields or the time to wait where there are any."""
    message = _cut(str(error), ERROR_BYTES_MAX)
    status = status_pb2.Status(code=getattr(code_pb2, error.code.name), message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details: list[object] = [info]
    if error.violations:
        fields = [
            error_details_pb2.BadRequest.FieldViolation(field=v.field, description=_cut(v.description, ERROR_BYTES_MAX))
            for v in error.violations[:VIOLATIONS_TOLD_MAX]
        ]
        details.append(error_details_pb2.BadRequest(field_violations=fields))
    if error.retry_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)  # type: ignore[arg-type]
        status.details.append(packed)
    return status
