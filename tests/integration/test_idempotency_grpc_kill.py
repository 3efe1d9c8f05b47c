"""Servers killed in the middle of a keyed call: one effect, and the answer that was durable."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from participant_sdk.idempotency.operation import Mode
from participant_sdk.idempotency.testing import CRASH_VARIABLE
from tests import forks
from tests.contract.participant.world import postgres_url
from tests.postgres import free_port

from .keyed_shop import Shop, policy
from .keyed_shop_process import operation
from .keyed_shops import replayed

PATIENCE_S = 60.0


@contextmanager
def process(*arguments: str, where: str) -> Iterator[forks.Running]:
    """One that serves, and is killed in the middle of the work, or by itself when all is committed; or afterwards."""
    command = ["tests.integration.keyed_shop_process", *arguments, where]
    environment = {**os.environ, CRASH_VARIABLE: "before_answer"} if where == "answer" else os.environ
    with forks.start(command, env=environment, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "serves\n"
            yield child
        finally:
            child.kill()


@pytest.mark.database
@pytest.mark.parametrize("where", ["answer", "work"])
@pytest.mark.parametrize("mode", [Mode.ATOMIC, Mode.LEASED])
@pytest.mark.parametrize("server", ["threads", "tasks"])
def test_case_38_a_server_that_is_killed(pg_database: str, server: str, mode: Mode, where: str) -> None:
    url, address = postgres_url(pg_database), f"127.0.0.1:{free_port()}"
    with Shop("threads", (url, url), [policy(operation=operation(mode))]) as other:
        with process(server, url, address, mode.value, where=where) as child:
            with grpc.insecure_channel(address) as channel:
                survivors, other.channel = other.channel, channel
                assert other.refused(plan="die") is grpc.StatusCode.UNAVAILABLE
                other.channel = survivors
            child.wait(PATIENCE_S)
        assert other.items() == ([] if where == "work" else [b"tea"])
        again = other.done(plan="die")  # of a leased run in the middle of its work: once its lease is over
        assert again.result().data == b"1:tea"
        assert (replayed(again), other.runs) == ((True, 0) if where == "answer" else (False, 1))
        assert other.items() == [b"tea"]
