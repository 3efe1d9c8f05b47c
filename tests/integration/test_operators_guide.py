"""docs/operators.md: each command is run as printed, against a coordinator as the page describes it.

What is printed there is compared line by line with what is printed here, but for what differs from run to run: ids,
times, numbers, and how long a bar is.
"""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request, tricord
from tests.postgres import free_port
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import operator_pb2, participant_pb2

from .participant_server import ParticipantServer, refuse
from .test_operator_view import begun, stuck_in_confirm, until

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operators.md").read_text(encoding="utf-8")
NOT_RUN = {'eval "$(tricord completion bash)"'}
"""For a shell; test_completion.py runs it."""


def shown() -> list[tuple[str, str]]:
    """The page's commands, each with the output that follows it; empty where none does."""
    blocks = re.findall(r"^```(sh|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    pairs: list[tuple[str, str]] = []
    for language, text in blocks:
        if language == "sh":
            pairs += [(command, "") for command in text.splitlines()]
        else:
            pairs[-1] = (pairs[-1][0], text)
    return [pair for pair in pairs if pair[0] not in NOT_RUN]


def shape(output: str) -> list[str]:
    """Output without what differs from run to run."""
    text = re.sub(r"\b[0-9a-f]{32}\b", "ID", output).replace("HALF_OPEN", "OPEN")
    text = re.sub(r"\b\d+(ms|[smhd])(\d+[smh])?\b", "AGE", text)
    # What took too short a time to be drawn is not explained either.
    text = re.sub(r"\d+", "#", re.sub(r"(= Try|- Confirm or Cancel|\. wait)( {3}|$)", "", text, flags=re.MULTILINE))
    text = re.sub(r"[=.-]+", "", text)
    return [" ".join(line.split()) for line in text.splitlines()]


class Scene:
    """The coordinator of the page, with its participants and transactions."""

    def __init__(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        self._endpoint = coordinator.endpoint
        self._confirms, self._failed = 0, threading.Event()
        service = coordinator.coordinator_service()
        request = execute_request(branch(), branch("bank", "credit"), key="order-41")
        self.xids = {"order-41": service.Execute(request, timeout=CALL_S).transaction.xid}
        bank.answer = refuse
        service.Execute(execute_request(branch(), key="order-42"), timeout=CALL_S)
        bank.answer = self._no_confirm
        request = execute_request(branch(), branch("bank", "credit"), key="order-43", wait=pb.WAIT_DECIDED)
        self.xids["order-43"] = service.Execute(request, timeout=CALL_S).transaction.xid
        begun(coordinator, branch("shop", "sell"))
        operator = coordinator.operator_service()

        def settled(_: object) -> bool:
            found = operator.ListParticipants(operator_pb2.ListParticipantsRequest(participant="shop"), timeout=CALL_S)
            if found.participants[0].addresses[0].health.breaker in (0, operator_pb2.BREAKER_STATE_CLOSED):
                return False
            states = operator.GetStatistics(operator_pb2.GetStatisticsRequest(), timeout=CALL_S).open.states
            return [state.attention_retrying for state in states] == [1, 1, 0]

        until(lambda: None, settled)

    def _no_confirm(self, call: participant_pb2.Call) -> participant_pb2.Reply:
        if call.action == "credit":
            if call.phase == participant_pb2.PHASE_CONFIRM:
                self._failed.wait(CALL_S)
            return participant_pb2.Reply(outcome=participant_pb2.OUTCOME_DONE)
        if call.phase == participant_pb2.PHASE_CONFIRM:
            self._confirms += 1
            if self._confirms > 1:  # the first failure is stored: what ends from now on is in the history
                self._failed.set()
        return stuck_in_confirm(call)

    def run(self, command: str) -> str:
        """A command of the page; what it prints."""
        xid = self.xids["order-41" if command.startswith("tricord watch XID") else "order-43"]
        words = shlex.split(command.replace("XID", xid))
        assert words.pop(0) == "tricord"
        ended = tricord(*words, env={"TRICORD_ENDPOINT": self._endpoint, "COLUMNS": "100"})
        assert (ended.returncode, ended.stderr) == (0, ""), command
        return ended.stdout


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One for the whole page: its commands only read."""
    store = tmp_path_factory.mktemp("operators") / "tricord.db"
    static = f'{{"shop": {{"addresses": ["127.0.0.1:{free_port()}"], "actions": ["sell"]}}}}'
    with (
        ParticipantServer() as bank,
        CoordinatorProcess(
            store=store, participants=static, backoff_cap_ms=100, attention_after=3, drain_ms=0
        ) as process,
    ):
        process.register("bank", bank.address)
        yield Scene(process, bank)


@pytest.mark.parametrize("command", [command for command, _ in shown()])
def test_the_page_shows_what_is_printed(scene: Scene, command: str) -> None:
    printed = scene.run(command)
    wanted = dict(shown())[command]
    if wanted:
        assert shape(printed) == shape(wanted)


def test_the_page_has_every_exit_code() -> None:
    from coordinator.cli import exits

    codes = {str(value) for name, value in vars(exits).items() if name.isupper()}
    assert set(re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)) == {"0", *codes}
