"""The gRPC service of operators: lists and single transactions."""

from __future__ import annotations

from tricord.v1 import operator_pb2 as pb
from tricord.v1 import types_pb2

from .codec import UnreadableRow, transaction
from .model import Transaction
from .operator_actions import OperatorActions
from .operator_doctor import OperatorDoctor
from .operator_list import find_page, read_list
from .operator_many import OperatorMany
from .operator_participants import OperatorParticipants
from .operator_resolve import OperatorResolve
from .operator_statistics import OperatorStatistics
from .rpc import Context, answering
from .store.rows import Row
from .wire import read_xid, transaction_message, unreadable_message


class OperatorService(
    OperatorActions, OperatorMany, OperatorResolve, OperatorParticipants, OperatorStatistics, OperatorDoctor
):
    """What operators call."""

    @answering
    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:
        """A page of transactions, without metadata and the bytes of payloads and results."""
        found = await find_page(self._engine.store, read_list(request))
        return pb.ListResponse(
            transactions=[self._summary(row) for row in found.rows], next_page_token=found.next_page_token
        )

    @answering
    async def Get(self, request: pb.OperatorServiceGetRequest, context: Context) -> pb.OperatorServiceGetResponse:
        """One transaction, and what happened to it."""
        tx = await self._engine.get_by_xid(read_xid(request.xid))
        response = pb.OperatorServiceGetResponse(transaction=self._message(tx))
        await self.tell_history(tx, response)
        return response

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
