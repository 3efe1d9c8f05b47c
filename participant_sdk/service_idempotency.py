"""What became of a key, over gRPC: tricord.v1.IdempotencyService, for a program's own server.

    IdempotencyService(idempotency, operations, tenant=...).add_to(server)

A caller sees the records of its own tenant. One that is not there, one of another tenant, one that has expired and an
operation that is not known are told alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import grpc

from participant_sdk.errors import ConfigurationError, TricordError
from participant_sdk.idempotency.errors import KeyMissing
from participant_sdk.idempotency.grpc_calls import tenant_of
from participant_sdk.idempotency.grpc_policy import GrpcOperation
from participant_sdk.idempotency.grpc_status import GrpcCodes, Refusal, refused
from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency
from participant_sdk.idempotency.keys import KeyRules
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.record import Codec, Record, State
from tricord.v1 import idempotency_pb2, idempotency_pb2_grpc

_STATES: Final = {
    State.PROCESSING: idempotency_pb2.IDEMPOTENCY_KEY_STATE_PROCESSING,
    State.SUCCEEDED: idempotency_pb2.IDEMPOTENCY_KEY_STATE_SUCCEEDED,
    State.FAILED_FINAL: idempotency_pb2.IDEMPOTENCY_KEY_STATE_FAILED_FINAL,
    State.FAILED_RETRYABLE: idempotency_pb2.IDEMPOTENCY_KEY_STATE_FAILED_RETRYABLE,
    State.UNKNOWN: idempotency_pb2.IDEMPOTENCY_KEY_STATE_UNKNOWN,
    State.TOMBSTONE: idempotency_pb2.IDEMPOTENCY_KEY_STATE_TOMBSTONE,
}
_NOT_FOUND: Final = refused(grpc.StatusCode.NOT_FOUND, "there is no record of that key", "IDEMPOTENCY_KEY_NOT_FOUND")


class _LookUps:
    """What both kinds of servers have in common."""

    def __init__(
        self,
        operations: Iterable[Operation | GrpcOperation],
        tenant: Callable[[Any], str | None] | None,
        key_rules: KeyRules,
    ) -> None:
        self._known: dict[str, tuple[Operation, KeyRules]] = {}
        for each in operations:
            operation, rules = (each, key_rules) if isinstance(each, Operation) else (each.operation, each.key_rules)
            known = operation, replace(rules, field="idempotency_key")
            if self._known.setdefault(operation.name, known) != known:
                raise ConfigurationError(f"two operations have the name {operation.name}, or two rules for its keys")
        self._tenant = tenant
        self._codes = GrpcCodes()

    def asked(
        self, request: idempotency_pb2.GetIdempotencyKeyRequest, context: Any
    ) -> tuple[Operation, str, str] | None:
        """The operation, the key and the tenant; None for an operation that is not known."""
        tenant = "" if self._tenant is None else tenant_of(self._tenant, context)
        if request.operation not in self._known:
            return None
        operation, rules = self._known[request.operation]
        if not request.idempotency_key:
            raise KeyMissing("idempotency_key is empty")
        return operation, rules.check(request.idempotency_key), tenant

    def found(self, operation: Operation, record: Record | None) -> idempotency_pb2.GetIdempotencyKeyResponse | Refusal:
        """What is told of a record."""
        if record is None or record.operation != operation.name:
            return _NOT_FOUND
        if record.expires_left_ms is not None and record.expires_left_ms <= 0:
            return _NOT_FOUND
        return idempotency_pb2.GetIdempotencyKeyResponse(record=_message(record))

    def refusal(self, error: TricordError) -> Refusal:
        """What is told of an error."""
        return self._codes.refusal(error)


def _message(record: Record) -> idempotency_pb2.IdempotencyKeyRecord:
    message = idempotency_pb2.IdempotencyKeyRecord(
        operation=record.operation,
        state=_STATES[record.state],
        attempt=record.attempt,
        recovery_point=record.recovery_point or "",
    )
    message.age.FromMilliseconds(max(0, record.age_ms))
    if record.state is State.PROCESSING:
        message.lease_left.FromMilliseconds(max(0, record.lease_left_ms))
    if record.expires_left_ms is not None:
        message.expires_in.FromMilliseconds(record.expires_left_ms)
    if record.answer is not None and record.answer.codec in (Codec.GRPC, Codec.HTTP):
        message.answer_status = record.answer.status
        message.answer_is_http = record.answer.codec is Codec.HTTP
    return message


class IdempotencyService(_LookUps, idempotency_pb2_grpc.IdempotencyServiceServicer):
    """For a `grpc.server`.

    `tenant`: whose call it is, from its authenticated context; None in its place where the program has one tenant.
    `key_rules`: of the operations that are not a GrpcOperation. Raises ConfigurationError.
    """

    def __init__(
        self,
        idempotency: Idempotency,
        operations: Iterable[Operation | GrpcOperation],
        *,
        tenant: Callable[[Any], str | None] | None,
        key_rules: KeyRules | None = None,
    ) -> None:
        super().__init__(operations, tenant, key_rules or KeyRules())
        self._idempotency = idempotency

    def add_to(self, server: grpc.Server) -> None:
        """Serve it there."""
        idempotency_pb2_grpc.add_IdempotencyServiceServicer_to_server(self, server)

    def GetIdempotencyKey(
        self, request: idempotency_pb2.GetIdempotencyKeyRequest, context: Any
    ) -> idempotency_pb2.GetIdempotencyKeyResponse:
        """See the contract."""
        told: idempotency_pb2.GetIdempotencyKeyResponse | Refusal = _NOT_FOUND
        try:
            if (asked := self.asked(request, context)) is not None:
                told = self.found(asked[0], self._idempotency.look_up(*asked))
        except TricordError as error:
            told = self.refusal(error)
        if not isinstance(told, Refusal):
            return told
        context.set_trailing_metadata(told.trailing_metadata)
        context.abort(told.code, told.message)
        raise AssertionError("abort raises")


class AsyncIdempotencyService(_LookUps, idempotency_pb2_grpc.IdempotencyServiceServicer):
    """As IdempotencyService, for a `grpc.aio.server`."""

    def __init__(
        self,
        idempotency: AsyncIdempotency,
        operations: Iterable[Operation | GrpcOperation],
        *,
        tenant: Callable[[Any], str | None] | None,
        key_rules: KeyRules | None = None,
    ) -> None:
        super().__init__(operations, tenant, key_rules or KeyRules())
        self._idempotency = idempotency

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve it there."""
        idempotency_pb2_grpc.add_IdempotencyServiceServicer_to_server(self, server)

    async def GetIdempotencyKey(
        self, request: idempotency_pb2.GetIdempotencyKeyRequest, context: Any
    ) -> idempotency_pb2.GetIdempotencyKeyResponse:
        """See the contract."""
        told: idempotency_pb2.GetIdempotencyKeyResponse | Refusal = _NOT_FOUND
        try:
            if (asked := self.asked(request, context)) is not None:
                told = self.found(asked[0], await self._idempotency.look_up(*asked))
        except TricordError as error:
            told = self.refusal(error)
        if not isinstance(told, Refusal):
            return told
        await context.abort(told.code, told.message, told.trailing_metadata)
        raise AssertionError("abort raises")
