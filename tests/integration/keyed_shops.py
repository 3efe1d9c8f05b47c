"""The keyed shop's fixtures, for tests on each kind of server and database, and what its answers say."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from participant_sdk.idempotency.grpc_policy import GrpcOperation
from tests.contract.participant.world import postgres_url, sqlite_url
from tests.mariadb import asyncmy_url, pymysql_url

from .keyed_shop import Shop, policy

MOST: Final = ("threads-postgres", "threads-sqlite", "tasks-postgres", "tasks-sqlite", "tasks-threads-postgres")
EVERYWHERE: Final = (*MOST, "threads-mariadb", "tasks-mariadb")


class Open(Protocol):
    """Opens shops on one database, whose addresses are `urls`, and closes them."""

    urls: tuple[str, str]

    def __call__(self, *operations: GrpcOperation, **settings: Any) -> Shop: ...


def flavours(names: Sequence[str]) -> Any:
    """The fixture `flavour`: kinds of servers and databases."""

    def flavour(request: pytest.FixtureRequest) -> str:
        return str(request.param)

    return pytest.fixture(params=names, name="flavour")(flavour)


@pytest.fixture
def open_shop(flavour: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens shops on one database."""
    server, _, database = flavour.rpartition("-")
    if database == "sqlite":
        urls = sqlite_url(tmp_path), sqlite_url(tmp_path, asynchronous=True)
    elif database == "mariadb":
        dsn = request.getfixturevalue("mariadb_database")
        urls = pymysql_url(dsn), asyncmy_url(dsn)
    else:
        urls = (postgres_url(request.getfixturevalue("pg_database")),) * 2
    with ExitStack() as stack:

        def opened(*operations: GrpcOperation, **settings: Any) -> Shop:
            return stack.enter_context(Shop(server, urls, operations or [policy()], **settings))

        opening: Any = opened
        opening.urls = urls
        yield opening


def told(call: Any) -> tuple[grpc.StatusCode, str, float | None]:
    """How a call was refused: the status, the one reason, and when to come back, in seconds."""
    trailing = [value for name, value in call.trailing_metadata() if name == "grpc-status-details-bin"]
    assert len(trailing) == 1
    status = status_pb2.Status.FromString(trailing[0])
    assert (status.code, status.message) == (call.code().value[0], call.details())
    infos, after = [], None
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            assert info.domain == "tricord"
            infos.append(info.reason)
        elif detail.Unpack(retry):
            after = retry.retry_delay.ToMilliseconds() / 1_000
    (reason,) = infos
    return call.code(), reason, after


def replayed(call: Any) -> bool:
    """Whether its answer was given before."""
    return dict(call.initial_metadata()).get("idempotency-replayed") == "true"
