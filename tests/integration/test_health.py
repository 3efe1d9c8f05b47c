"""Health goes by how long ago the store has last given a good answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.coordinators import CALL_S, CoordinatorProcess
from tests.postgres import PostgresServer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
WITH_STORE = ("", "tricord.v1.CoordinatorService", "tricord.v1.OperatorService", "tricord.v1.RegistryService")

pytestmark = pytest.mark.database


@contextmanager
def killed(server: PostgresServer) -> Iterator[None]:
    """For a while there is no server."""
    server.kill()
    yield
    server.start()


@pytest.mark.parametrize("away", ["hangs", "is gone"])
def test_not_serving_while_the_store_is_silent(own_server: PostgresServer, away: str) -> None:
    with CoordinatorProcess(store=own_server.create_database()) as coordinator:
        stub: Any = health_pb2_grpc.HealthStub(coordinator.channel())
        requests = [health_pb2.HealthCheckRequest(service=name) for name in WITH_STORE]
        watching = [stub.Watch(request, timeout=CALL_S) for request in requests]
        assert {next(answers).status for answers in watching} == {SERVING}
        with own_server.frozen() if away == "hangs" else killed(own_server):
            assert {next(answers).status for answers in watching} == {NOT_SERVING}
            own = health_pb2.HealthCheckRequest(service="grpc.health.v1.Health")
            assert stub.Check(own, timeout=CALL_S).status == SERVING
            if away == "hangs":  # nothing has failed, nor would it
                assert coordinator.log("engine.claim_failed") == []
        assert {next(answers).status for answers in watching} == {SERVING}
        for answers in watching:
            answers.cancel()
            with pytest.raises(grpc.RpcError):
                next(answers)
        assert coordinator.stop() == 0
        assert [entry["serving"] for entry in coordinator.log("coordinator.health")] == [False, True]


def test_an_idle_coordinator_goes_on_serving(own_server: PostgresServer) -> None:
    """Nothing is asked of it, so it is the look for due work that the store answers."""
    with CoordinatorProcess(store=own_server.create_database()) as coordinator:
        stub: Any = health_pb2_grpc.HealthStub(coordinator.channel())
        watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=7.0)
        assert next(watching).status == SERVING
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            next(watching)
