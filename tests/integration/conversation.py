"""An ``ExecuteStream`` by the published contract alone: a test writes calls and reads results as it likes."""

import queue
from collections.abc import Iterable
from typing import Any

from google.rpc import error_details_pb2

from tests.coordinators import CALL_S
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import coordinator_pb2_grpc


class Conversation:
    """One stream."""

    def __init__(self, stub: coordinator_pb2_grpc.CoordinatorServiceStub) -> None:
        self._requests: queue.SimpleQueue[pb.ExecuteStreamRequest | None] = queue.SimpleQueue()
        self.stream: Any = stub.ExecuteStream(iter(self._requests.get, None), timeout=CALL_S)
        self.messages: list[pb.ExecuteStreamResponse] = [next(self.stream)]

    def send(self, *requests: pb.ExecuteRequest, first: int = 1, patience_ms: int = 0) -> None:
        """In one message; the calls are numbered from ``first``."""
        calls = [
            pb.ExecuteStreamCall(call_id=call_id, request=request, patience_ms=patience_ms)
            for call_id, request in enumerate(requests, first)
        ]
        self._requests.put(pb.ExecuteStreamRequest(calls=calls))

    def end(self) -> None:
        """No more calls."""
        self._requests.put(None)

    def results(self, count: int) -> dict[int, pb.ExecuteStreamResult]:
        """The next so many results, by call, in the order in which they come. Raises grpc.RpcError."""
        found: list[pb.ExecuteStreamResult] = []
        while len(found) < count:
            self.messages.append(next(self.stream))
            found += self.messages[-1].results
        assert len(found) == count, f"{len(found)} results, {count} were asked for"
        return {result.call_id: result for result in found}

    def rest(self) -> list[pb.ExecuteStreamResult]:
        """All results until the stream ends. Raises grpc.RpcError."""
        return [result for message in self.stream for result in message.results]


def details(error: pb.ExecuteStreamError) -> tuple[str, dict[str, str]]:
    """An error's reason, and the fields that it names."""
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    reason, fields = "", {}
    for detail in error.details:
        if detail.Unpack(info):
            assert info.domain == "tricord"
            reason = info.reason
        elif detail.Unpack(bad):
            fields = {v.field: v.description for v in bad.field_violations}
    return reason, fields


def ids(results: Iterable[pb.ExecuteStreamResult]) -> list[int]:
    """Whose they are."""
    return sorted(result.call_id for result in results)
