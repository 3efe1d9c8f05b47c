"""An external Try whose process is killed (protocol C4): before it has asked the provider, or after."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from tests import forks
from tests.contract.participant.till import Provider, Till
from tests.contract.participant.world import CANCEL, CONFIRM, DONE, TRY, UNKNOWN, VIOLATION, new_xid
from tricord.v1 import participant_pb2_grpc

ROOT = Path(__file__).parents[3]
RUNNING = (1, False, True)

pytestmark = pytest.mark.parametrize("flavour", ["postgres-sync", "mariadb-async", "sqlite-sync"], indirect=True)


class Process:
    """A till's process; the test reads what it asks of the provider."""

    def __init__(self, till: Till) -> None:
        self.till = till
        self.channel: grpc.aio.Channel | None = None
        self.process = forks.start(
            ["tests.contract.participant.till_process", till.flavour, till.url],
            env=os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )

    async def connect(self) -> None:
        """From now on the till's calls go to this process."""
        what, address, fence_id = (await self.line()).split()
        assert what == "serves"
        self.channel = grpc.aio.insecure_channel(address)
        self.till.serving = SimpleNamespace(fence_id=fence_id)
        self.till.stub = participant_pb2_grpc.ParticipantServiceStub(self.channel)

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    async def ask_provider(self, provider: Provider) -> None:
        """Have the provider do what it is asked for next."""
        what, xid, branch_id = (await self.line()).split()
        key = xid, int(branch_id)
        match what:
            case "authorise":
                provider.authorise(key, 10)
            case "capture":
                provider.capture(key)
            case "void":
                provider.void(key)

    async def answer(self, provider: Provider) -> None:
        """As `ask_provider`, and the answer arrives."""
        await self.ask_provider(provider)
        assert self.process.stdin is not None
        self.process.stdin.write("done\n")
        self.process.stdin.flush()

    async def kill(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.wait, 30)

    async def end(self) -> None:
        await asyncio.to_thread(self.process.__exit__, None, None, None)
        if self.channel is not None:
            await self.channel.close()


@asynccontextmanager
async def running(till: Till) -> AsyncIterator[Process]:
    process = Process(till)
    try:
        await process.connect()
        yield process
    except BaseException:
        await process.kill()
        raise
    finally:
        await process.end()


@pytest.fixture
async def till(flavour: str, participant_url: str) -> AsyncIterator[Till]:
    """Only its tables, messages and eyes; who serves is a Process."""
    till = Till(flavour, participant_url, Provider())
    till.create_business_tables()
    yield till
    till.serving = None
    await till.close()


@pytest.mark.parametrize("asked", [False, True])
async def test_what_a_killed_try_may_have_done_is_never_taken_for_done(till: Till, asked: bool) -> None:
    """Neither is it lost: Cancel reaches it, and a repeat runs under the same key."""
    provider = till.provider
    xids = [new_xid(), new_xid()]
    for xid in xids:
        async with running(till) as first:
            trying = asyncio.create_task(till.ask(TRY, xid))
            if asked:
                await first.ask_provider(provider)
            else:
                assert await first.line() == f"authorise {xid} 1"
            await first.kill()
            with pytest.raises(grpc.aio.AioRpcError):
                await trying
    async with running(till) as second:
        for xid in xids:
            assert till.intent(xid) == RUNNING
            for phase, outcome in ((TRY, UNKNOWN), (CANCEL, UNKNOWN), (CONFIRM, VIOLATION)):
                assert (await till.ask(phase, xid)).outcome == outcome
            till.let_lease_lapse(xid)
        for phase, xid in zip((TRY, CANCEL), xids, strict=True):
            calling = asyncio.create_task(till.ask(phase, xid))
            await second.answer(provider)
            assert (await calling).outcome == DONE
        assert provider.authorised == {(xids[0], 1): 10}
        assert provider.asked_for(xids[0]) == ["authorise"] * (2 if asked else 1)
        assert provider.asked_for(xids[1]) == (["authorise", "void"] if asked else ["void"])
        confirming = asyncio.create_task(till.ask(CONFIRM, xids[0]))
        await second.answer(provider)
        assert (await confirming).outcome == DONE
        assert [till.intent(xid) for xid in xids] == [(2, True, False), (3, True, False)]
