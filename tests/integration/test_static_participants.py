"""Participants that the configuration names, and that do not register."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.config import load
from tests.coordinators import (
    CALL_S,
    CoordinatorProcess,
    branch,
    execute_request,
    refused,
    registration,
    states,
    tricord,
)
from tests.postgres import free_port
from tricord.v1 import registry_pb2_grpc

from .participant_server import ParticipantServer
from .test_readme import README


@pytest.fixture
def bank() -> Iterator[ParticipantServer]:
    """A participant."""
    with ParticipantServer() as server:
        yield server


@pytest.fixture
def coordinator(tmp_path: Path, bank: ParticipantServer) -> Iterator[CoordinatorProcess]:
    """A coordinator whose file names the bank; it takes no registrations."""
    with started(tmp_path, bank, listen=f"0.0.0.0:{free_port()}") as process:
        yield process


def started(folder: Path, bank: ParticipantServer, **settings: Any) -> CoordinatorProcess:
    """A coordinator with a file, which is not running yet."""
    config = folder / "tricord.toml"
    config.write_text(f'[participants.bank]\naddresses = ["{bank.address}"]\nactions = ["debit", "credit"]\n')
    return CoordinatorProcess(store=folder / "tricord.db", config=config, **settings)


def run(coordinator: CoordinatorProcess, action: str = "debit") -> list[str]:
    """One transaction with the bank; its states."""
    answer = coordinator.coordinator_service().Execute(execute_request(branch(action=action)), timeout=CALL_S)
    return list(states(answer.transaction))


def test_it_takes_part_without_a_registration(coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
    assert run(coordinator) == ["CONFIRMED", "CONFIRMED"]
    service = coordinator.coordinator_service()
    assert refused(service.Execute, execute_request(branch("stock"))).reason == "UNKNOWN_PARTICIPANT"
    assert refused(service.Execute, execute_request(branch(action="close"))).reason == "UNKNOWN_ACTION"
    with pytest.raises(grpc.RpcError, match="--allow-registration"):
        coordinator.register("stock", bank.address)
    coordinator.kill()
    coordinator.start()
    assert run(coordinator, "credit") == ["CONFIRMED", "CONFIRMED"]
    assert [seen.call.action for seen in bank.seen("CONFIRM")] == ["debit", "credit"]


def test_a_registration_with_other_actions_is_refused(tmp_path: Path, bank: ParticipantServer) -> None:
    with started(tmp_path, bank) as coordinator, ParticipantServer() as other:
        stub = registry_pb2_grpc.RegistryServiceStub(coordinator.channel())
        for address in (other.address, bank.address):
            request = registration("bank", address, {"debit": "fence-1", "close": "fence-1"})
            differs = refused(stub.RegisterParticipant, request)
            assert (differs.code, differs.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ACTIONS_DIFFER")
            assert differs.metadata == {"address": bank.address, "only_there": "credit", "only_here": "close"}
        assert run(coordinator) == ["CONFIRMED", "CONFIRMED"]
        assert other.seen() == []


def test_one_that_can_more_joins_and_leaves_and_the_configured_one_stays(
    tmp_path: Path, bank: ParticipantServer
) -> None:
    with started(tmp_path, bank) as coordinator, ParticipantServer() as other:
        every = {"debit": "fence-1", "credit": "fence-1", "close": "fence-1"}
        coordinator.register("bank", other.address, every)
        assert run(coordinator, "close") == ["CONFIRMED", "CONFIRMED"]
        assert [run(coordinator) for _ in range(4)] == [["CONFIRMED", "CONFIRMED"]] * 4
        assert {seen.call.action for seen in bank.seen()} == {"debit"}
        assert {seen.call.action for seen in other.seen()} == {"debit", "close"}
        coordinator.register("bank", bank.address, every)  # it may register all the same
        for server in (bank, other):
            coordinator.withdraw("bank", server.address)
        before = len(other.seen())
        assert run(coordinator) == ["CONFIRMED", "CONFIRMED"]
        assert len(other.seen()) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('addresses = ["nowhere"]\nactions = ["a"]', "participants.bank.addresses.0 (file "),
        ('addresses = ["h:1"]\nactions = ["a"]\nfence = 1', "participants.bank.fence (file "),
        ('addresses = ["h:1"]\nactions = ["a"]\n[participants.bank]', "('participants', 'bank') twice"),
    ],
)
def test_a_mistake_is_named_at_the_start(tmp_path: Path, text: str, said: str) -> None:
    config, store = tmp_path / "tricord.toml", tmp_path / "tricord.db"
    config.write_text(f"[participants.bank]\n{text}\n")
    run = tricord("serve", "--config", str(config), "--store", str(store))
    assert (run.returncode, said in run.stderr, store.exists()) == (2, True, False), run.stderr
    assert "Traceback" not in run.stderr


def test_config_show_tells_them(tmp_path: Path) -> None:
    given = {"bank": {"addresses": ["h:1", "h:2"], "actions": ["debit"]}}
    env = {"TRICORD_PARTICIPANTS": json.dumps(given)}
    shown = json.loads(tricord("config", "show", "-o", "json", env=env).stdout)["participants"]
    assert shown == {"value": given, "from": "environment TRICORD_PARTICIPANTS"}
    assert "bank=h:1+h:2 for debit" in tricord("config", "show", env=env).stdout


def test_what_the_readme_shows_can_be_loaded(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^ *```toml\n(.*?)^ *```$", README, re.MULTILINE | re.DOTALL)
    (tmp_path / "tricord.toml").write_text(shown)
    settings, _ = load({}, str(tmp_path / "tricord.toml"))
    assert settings.participants["bank"].actions == ("debit", "credit")
