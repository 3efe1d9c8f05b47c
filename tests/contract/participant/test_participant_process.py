"""A participant as a process of its own: what it prints, and how it ends."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from sqlalchemy import create_engine, text

from tests.contract.participant.world import DONE, new_xid
from tricord.v1 import participant_pb2, participant_pb2_grpc, types_pb2

PROGRAMS = {
    "sync": """
        import sys
        from sqlalchemy import create_engine
        from participant_sdk import Call, ConfigurationError, Participant

        bank = Participant("bank", create_engine(f"sqlite:///{sys.argv[1]}"))

        @bank.action("debit")
        def debit(call: Call[bytes], db) -> bytes:
            print("in the handler", flush=True)
            sys.stdin.readline()
            return b"held"

        @debit.confirm
        def _(call, db): ...

        @debit.cancel
        def _(call, db): ...

        try:
            bank.serve(sys.argv[2], coordinator=sys.argv[3] or None)
        except ConfigurationError as error:
            sys.exit(str(error))
        print("ended", flush=True)
    """,
    "async": """
        import asyncio
        import sys
        from sqlalchemy.ext.asyncio import create_async_engine
        from participant_sdk import Call, ConfigurationError, Participant

        async def main():
            engine = create_async_engine(f"sqlite+aiosqlite:///{sys.argv[1]}")
            bank = Participant("bank", engine)

            @bank.action("debit")
            async def debit(call: Call[bytes], db) -> bytes:
                print("in the handler", flush=True)
                await asyncio.to_thread(sys.stdin.readline)
                return b"held"

            @debit.confirm
            async def _(call, db): ...

            @debit.cancel
            async def _(call, db): ...

            try:
                await bank.serve_async(sys.argv[2], coordinator=sys.argv[3] or None)
            finally:
                await engine.dispose()

        try:
            asyncio.run(main())
        except ConfigurationError as error:
            sys.exit(str(error))
        print("ended", flush=True)
    """,
}


class Process:
    """A participant's process; `line()` waits for the next line that it prints."""

    def __init__(self, kind: str, directory: Path, listen: str = "127.0.0.1:0", coordinator: str = "") -> None:
        self.database = directory / "bank.db"
        program = directory / "bank.py"
        program.write_text(textwrap.dedent(PROGRAMS[kind]))
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(program), str(self.database), listen, coordinator],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def let_go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """Its exit code and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture(params=["sync", "async"])
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Process]:
    process = Process(request.param, tmp_path)
    yield process
    process.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_drains_when_it_is_told_to_end(started: Process, number: signal.Signals) -> None:
    line = started.line()
    assert line.startswith("participant bank serves on 127.0.0.1:")
    xid = new_xid()
    message = participant_pb2.Call(
        call_id=1,
        phase=participant_pb2.PHASE_TRY,
        xid=xid,
        branch_id=1,
        participant="bank",
        action="debit",
        payload=types_pb2.Payload(data=b"x"),
    )
    message.timeout.FromSeconds(20)
    with grpc.insecure_channel(line.split()[-1]) as channel:
        hold_open = threading.Event()

        def requests() -> Iterator[participant_pb2.ExchangeRequest]:
            yield participant_pb2.ExchangeRequest(calls=[message])
            hold_open.wait(20)

        replies = participant_pb2_grpc.ParticipantServiceStub(channel).Exchange(requests())
        assert started.line() == "in the handler"
        started.process.send_signal(number)
        started.let_go()
        assert [(reply.outcome, reply.result.data) for reply in next(replies).replies] == [(DONE, b"held")]
        assert list(replies) == []
        hold_open.set()
    assert started.line() == "ended"
    assert started.end() == (0, "")
    engine = create_engine(f"sqlite:///{started.database}")
    with engine.connect() as db:
        assert db.execute(text("SELECT xid, status FROM tcc_fence_log")).all() == [(xid, 1)]
    engine.dispose()


def test_a_second_signal_ends_it_at_once(started: Process) -> None:
    """Somebody who asks twice does not want to wait for handlers that hang."""
    address = started.line().split()[-1]
    message = participant_pb2.Call(
        call_id=1,
        phase=participant_pb2.PHASE_TRY,
        xid=new_xid(),
        branch_id=1,
        participant="bank",
        action="debit",
        payload=types_pb2.Payload(data=b"x"),
    )
    message.timeout.FromSeconds(600)
    with grpc.insecure_channel(address) as channel:
        stub = participant_pb2_grpc.ParticipantServiceStub(channel)
        hanging = stub.Try.future(participant_pb2.TryRequest(call=message))
        assert started.line() == "in the handler"
        started.process.send_signal(signal.SIGTERM)
        probe = participant_pb2.Call()
        probe.CopyFrom(message)
        probe.phase = participant_pb2.PHASE_CANCEL
        probe.timeout.FromMilliseconds(50)
        error = ""
        while error != "the participant is stopping":
            error = stub.Cancel(participant_pb2.CancelRequest(call=probe), timeout=30).reply.error
        started.process.send_signal(signal.SIGTERM)
        assert started.end()[0] == -signal.SIGTERM  # and not 0 when the grace is over
        assert hanging.exception() is not None


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_it_can_be_ended_while_it_waits_for_its_coordinator(kind: str, tmp_path: Path) -> None:
    process = Process(kind, tmp_path, coordinator="127.0.0.1:1")
    try:
        assert process.process.stderr is not None
        assert "participant bank waits for the coordinator at 127.0.0.1:1" in process.process.stderr.readline()
        process.process.send_signal(signal.SIGTERM)
        assert process.line() == "ended"
        assert process.end() == (0, "")
    finally:
        process.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_port_in_use_is_said_without_a_traceback(kind: str, started: Process, tmp_path: Path) -> None:
    address = started.line().split()[-1]
    directory = tmp_path / "second"
    directory.mkdir()
    process = Process(kind, directory, listen=address)
    try:
        code, errors = process.end()
        assert code == 1
        assert errors.splitlines()[-1].startswith(f"cannot listen on {address}: the port is in use")
        assert "Traceback" not in errors
    finally:
        process.close()
