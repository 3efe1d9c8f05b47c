"""The gRPC service of operators: lists and single transactions."""

from __future__ import annotations

import base64
import binascii
import hashlib

from tricord.v1 import operator_pb2 as pb
from tricord.v1 import operator_pb2_grpc as pb_grpc
from tricord.v1 import types_pb2

from .codec import UnreadableRow, transaction
from .engine import Engine
from .errors import InvalidRequest, Violation
from .ids import XID_BYTES
from .model import State, Transaction
from .rpc import Context, answering
from .store.rows import ListFilter, Row
from .wire import check_name, duration_ms, read_xid, transaction_message, unreadable_message

PAGE_SIZE_DEFAULT = 50
PAGE_SIZE_MAX = 1_000
STATES_MAX = 16
AGE_DAYS_MAX = 36_500
AGE_MS_MAX = AGE_DAYS_MAX * 86_400_000
_TOKEN_VERSION = b"\x01"
_FILTER_BYTES = 8


class OperatorService(pb_grpc.OperatorServiceServicer):
    """What operators call."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @answering
    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:
        """A page of transactions, newest first, without metadata and the bytes of payloads and results."""
        which = self._filter(request)
        rows = await self._engine.store.list(which._replace(limit=which.limit + 1))
        page = rows[: which.limit]
        response = pb.ListResponse(transactions=[self._summary(row) for row in page])
        if len(rows) > which.limit:
            response.next_page_token = _token(request, page[-1].xid)
        return response

    @answering
    async def Get(self, request: pb.OperatorServiceGetRequest, context: Context) -> pb.OperatorServiceGetResponse:
        """One transaction."""
        tx = await self._engine.get_by_xid(read_xid(request.xid))
        return pb.OperatorServiceGetResponse(transaction=self._message(tx))

    def _message(self, tx: Transaction) -> types_pb2.Transaction:
        """With what only operators see: the time-outs that this coordinator's settings give to its calls."""
        message = transaction_message(tx)
        for branch, asked in zip(message.branches, tx.spec.branches, strict=True):
            branch.call_timeout.FromMilliseconds(self._engine.policy.call_timeout_of(asked))
        return message

    def _summary(self, row: Row) -> types_pb2.Transaction:
        """A row as a list shows it; one that cannot be read hides none of the others."""
        try:
            message = self._message(transaction(row))
        except UnreadableRow as error:
            return unreadable_message(row, str(error))
        message.ClearField("metadata")
        for branch in message.branches:
            branch.payload.data = b""
            branch.result.data = b""
        return message

    def _filter(self, request: pb.ListRequest) -> ListFilter:
        if request.page_size > PAGE_SIZE_MAX:
            raise InvalidRequest(Violation("page_size", f"is {request.page_size}; the limit is {PAGE_SIZE_MAX}"))
        if len(request.states) > STATES_MAX:
            raise InvalidRequest(Violation("states", f"has {len(request.states)} states; the limit is {STATES_MAX}"))
        known = {int(state) for state in State}
        for n, state in enumerate(request.states):
            if state not in known:
                raise InvalidRequest(Violation(f"states[{n}]", f"is {state}, which is no state"))
        created_before_ms = None
        if request.HasField("older_than"):
            age_ms = duration_ms(request.older_than)
            if not 0 <= age_ms <= AGE_MS_MAX:
                raise InvalidRequest(Violation("older_than", f"must be 0 to {AGE_DAYS_MAX} days"))
            created_before_ms = self._engine.store.now_ms() - age_ms
        if request.participant:
            check_name("participant", request.participant)
        before_xid = _xid_of_token(request) if request.page_token else None
        limit = request.page_size or PAGE_SIZE_DEFAULT
        return ListFilter(list(request.states), created_before_ms, request.participant, before_xid, limit)


def _token(request: pb.ListRequest, xid: bytes) -> str:
    """Opaque to callers: where the next page starts, and which filters it belongs to."""
    return base64.urlsafe_b64encode(_TOKEN_VERSION + _filter_digest(request) + xid).decode().rstrip("=")


def _xid_of_token(request: pb.ListRequest) -> bytes:
    text = request.page_token
    try:
        token = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        token = b""
    if len(token) != 1 + _FILTER_BYTES + XID_BYTES or token[:1] != _TOKEN_VERSION:
        raise InvalidRequest(Violation("page_token", "is not a token that a list has returned"))
    if token[1 : 1 + _FILTER_BYTES] != _filter_digest(request):
        raise InvalidRequest(Violation("page_token", "belongs to a list with other filters"))
    return token[1 + _FILTER_BYTES :]


def _filter_digest(request: pb.ListRequest) -> bytes:
    states = ",".join(str(state) for state in sorted(request.states))
    text = f"{states}|{request.participant}|{request.older_than.ToJsonString()}"
    return hashlib.sha256(text.encode()).digest()[:_FILTER_BYTES]
