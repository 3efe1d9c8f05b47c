"""Real coordinators for tests: a process each, on a free port of loopback.

with CoordinatorProcess(store=path, backoff_cap_ms=200) as coordinator:
    stub = coordinator.coordinator_service()
"""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests import forks
from tests.postgres import free_port
from tricord.v1 import (
    coordinator_pb2 as pb,
)
from tricord.v1 import (
    coordinator_pb2_grpc,
    operator_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    types_pb2,
)

START_S = 60.0
STOP_S = 60.0
CALL_S = 60.0
"""Generous: a test never waits so long unless something is broken."""


def environment() -> dict[str, str]:
    """This process's environment without any setting of a coordinator."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TRICORD_")}


def tricord(
    *arguments: str | bytes, env: dict[str, str] | None = None, cwd: Path | None = None, merged: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; ``merged``: what it says on standard error is in its output, as on a screen."""
    variables = {**environment(), **(env or {})}
    return forks.run(["coordinator", *arguments], env=variables, cwd=cwd, merged=merged, timeout_s=START_S)


class CoordinatorProcess:
    """``tricord serve`` as a process of its own; settings by name, as flags. Its log is JSON, in ``log()``."""

    def __init__(self, *, store: str | Path, listen: str | None = None, **settings: object) -> None:
        self.listen = listen or f"127.0.0.1:{free_port()}"
        self.endpoint = f"127.0.0.1:{self.listen.rpartition(':')[2]}"
        settings = {"log_format": "json", "store": store, "listen": self.listen, **settings}
        self._command = ["coordinator", "serve"]
        for name, value in settings.items():
            flag = f"--{name.replace('_', '-')}"
            self._command += [flag] if value is True else [flag, str(value)]
        self._process: forks.Running | None = None
        self._lines: list[str] = []
        self._reader: threading.Thread | None = None
        self._channels: list[grpc.Channel] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when it serves."""
        process = self._process = forks.start(
            self._command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("tricord: listening on "):
            self.stop()
            raise AssertionError(f"the coordinator did not start: {line}{''.join(self._lines)}")

    def stop(self) -> int:
        """In order, by SIGTERM; the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """By SIGKILL, as a power cut would."""
        return self._end(signal.SIGKILL)

    def interrupt(self) -> None:
        """SIGINT, as Ctrl-C sends it, and nothing is waited for."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)

    @contextmanager
    def hung(self) -> Iterator[None]:
        """In the block its process is stopped by SIGSTOP: connections stay, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def log(self, event: str) -> list[dict[str, Any]]:
        """The log's entries of one kind so far."""
        entries = [json.loads(line) for line in list(self._lines) if line.startswith("{")]
        return [entry for entry in entries if entry["event"] == event]

    def text_log(self) -> str:
        """All of standard error so far."""
        return "".join(self._lines)

    def channel(self) -> grpc.Channel:
        """A connection of its own; closed when the coordinator is stopped."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        channel = grpc.insecure_channel(self.endpoint, options=options)
        self._channels.append(channel)
        return channel

    def coordinator_service(self) -> coordinator_pb2_grpc.CoordinatorServiceStub:
        """What initiators call."""
        return coordinator_pb2_grpc.CoordinatorServiceStub(self.channel())

    def operator_service(self) -> operator_pb2_grpc.OperatorServiceStub:
        """What operators call."""
        return operator_pb2_grpc.OperatorServiceStub(self.channel())

    def register(
        self,
        participant: str,
        address: str,
        actions: dict[str, str] | None = None,
        *,
        replace_fence: bool = False,
    ) -> None:
        """Make a participant known."""
        request = registration(participant, address, actions, replace_fence=replace_fence)
        registry_pb2_grpc.RegistryServiceStub(self.channel()).RegisterParticipant(request, timeout=CALL_S)

    def withdraw(self, participant: str, address: str) -> None:
        """Have no more calls go to an address."""
        request = registry_pb2.WithdrawParticipantRequest(participant=participant, address=address)
        registry_pb2_grpc.RegistryServiceStub(self.channel()).WithdrawParticipant(request, timeout=CALL_S)

    def _end(self, number: signal.Signals) -> int:
        while self._channels:
            self._channels.pop().close()
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(number)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        if self._reader is not None:
            self._reader.join()
        process.stderr.close()
        return code

    def _read_log(self) -> None:
        process = self._process
        assert process is not None
        assert process.stderr is not None
        for line in process.stderr:
            self._lines.append(line)


# --- requests and answers ---------------------------------------------------------------------------------


def registration(
    participant: str, address: str, actions: dict[str, str] | None = None, *, replace_fence: bool = False
) -> registry_pb2.RegisterParticipantRequest:
    """A registration's request."""
    named = {"debit": "fence-1", "credit": "fence-1"} if actions is None else actions
    return registry_pb2.RegisterParticipantRequest(
        participant=participant,
        address=address,
        actions=[registry_pb2.ActionRegistration(name=name, fence_id=fence) for name, fence in named.items()],
        replace_fence=replace_fence,
    )


def branch(participant: str = "bank", action: str = "debit", data: bytes = b"{}") -> pb.BranchRequest:
    """One branch of a request."""
    payload = types_pb2.Payload(data=data, content_type="application/json")
    return pb.BranchRequest(participant=participant, action=action, payload=payload)


def execute_request(
    *branches: pb.BranchRequest,
    key: str = "",
    timeout_ms: int | None = None,
    wait: "pb.Wait.ValueType" = pb.WAIT_UNSPECIFIED,
) -> pb.ExecuteRequest:
    """A request to run a transaction."""
    request = pb.ExecuteRequest(idempotency_key=key, branches=branches, wait=wait)
    if timeout_ms is not None:
        request.timeout.FromMilliseconds(timeout_ms)
    return request


class Refused:
    """How a coordinator refused a request: status, reason, wrong fields."""

    def __init__(self, error: grpc.RpcError) -> None:
        self.code: grpc.StatusCode = error.code()
        self.message: str = error.details() or ""
        self.reason = ""
        self.metadata: dict[str, str] = {}
        self.fields: dict[str, str] = {}
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # an error of a call is that call too
        for detail in status.details if status is not None else ():
            info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
            if detail.Unpack(info):
                assert info.domain == "tricord"
                self.reason, self.metadata = info.reason, dict(info.metadata)
            elif detail.Unpack(bad):
                self.fields = {v.field: v.description for v in bad.field_violations}


def refused(method: Any, request: Any, timeout_s: float = CALL_S) -> Refused:
    """Call, and return how it was refused."""
    try:
        answer = method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        return Refused(error)
    raise AssertionError(f"it was not refused but answered {str(answer)[:500]}")


def states(tx: types_pb2.Transaction) -> Sequence[str]:
    """A transaction's state, then its branches', without their prefixes."""
    whole = types_pb2.TransactionState.Name(tx.state).removeprefix("TRANSACTION_STATE_")
    return [whole, *(types_pb2.BranchState.Name(b.state).removeprefix("BRANCH_STATE_") for b in tx.branches)]
