"""docker-compose.yml and Dockerfile are well-formed and keep the rules they should, without a Docker daemon."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"


def check(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load(COMPOSE.read_text())["services"]
    return loaded


def test_compose_file_follows_the_compose_schema() -> None:
    checked = check(COMPOSE)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_schema_catches_a_misspelt_key(tmp_path: Path) -> None:
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(COMPOSE.read_text().replace("depends_on:", "depend_on:", 1))
    checked = check(wrong)
    assert checked.returncode != 0
    assert "depend_on" in checked.stdout + checked.stderr


def test_services_wait_for_healthy_ones(services: dict[str, Any]) -> None:
    assert set(services) == {"postgres", "coordinator", "bank-a", "bank-b"}
    for name, service in services.items():
        for needed, wait in service.get("depends_on", {}).items():
            assert wait["condition"] == "service_healthy", (name, needed)
            assert "healthcheck" in services[needed], (name, needed)


def test_ports_are_published_on_loopback_only(services: dict[str, Any]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_our_services_are_locked_down(services: dict[str, Any]) -> None:
    for name in ("coordinator", "bank-a", "bank-b"):
        assert services[name]["read_only"] is True, name
        assert services[name]["cap_drop"] == ["ALL"], name
        assert services[name]["security_opt"] == ["no-new-privileges:true"], name
    last_stage = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    (user,) = re.findall(r"^USER (\S+)$", last_stage, re.MULTILINE)
    assert user.split(":")[0] not in {"root", "0"}


def test_no_password_is_written_down(services: dict[str, Any]) -> None:
    """Every mention of the password is the variable, which has no default."""
    assert services["postgres"]["environment"]["POSTGRES_PASSWORD"].startswith("${POSTGRES_PASSWORD:?")
    addresses = re.findall(r"postgresql\S*?://\S+?:(\S+)", COMPOSE.read_text())
    assert len(addresses) == 3
    assert all(address.startswith("${POSTGRES_PASSWORD:?") for address in addresses)
