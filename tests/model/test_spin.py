"""The Promela model holds, and spin finds each rule that is broken in it."""

from __future__ import annotations

import pytest

from tests.model import __main__ as command
from tests.model import spin
from tests.model.spin import BOTH_TWO, READINGS, Reading

pytestmark = pytest.mark.timeout(600)  # compiling what spin writes takes long on a busy machine

NAMES = {reading.name: reading for reading in READINGS}
SAFETY = NAMES["spin, two coordinators, two branches"]
SET_BACK = NAMES["spin, two coordinators, two branches, a database set back"]
ENDS = NAMES["spin, one coordinator, two branches, two faults: ends"]


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    if "without_spin" not in request.node.name and (name := spin.missing()):
        if spin.required():
            pytest.fail(f"{name} is not installed")
        pytest.skip(f"{name} is not installed; `make servers` installs it")


@pytest.mark.parametrize("reading", [SAFETY, ENDS], ids=lambda reading: reading.name)
def test_protocol_holds(reading: Reading) -> None:
    result = spin.run(reading)
    assert not result.violation, "\n".join(result.trace)
    assert result.states > 10_000


@pytest.mark.parametrize(
    ("reading", "broken", "told"),
    [
        (SAFETY, "BREAK_SENT", "row.state"),
        (SAFETY, "BREAK_CAS", "assertion violated"),
        (SAFETY, "BREAK_READ_BACK", "assertion violated"),
        (SAFETY, "BREAK_PRESUMED", "decision"),
        (SAFETY, "BREAK_LATE_TRY", "after.tries"),
        (SET_BACK, "BREAK_EMPTY_CONFIRM", "confirms==1"),
        (ENDS, "BREAK_REFUSED", "invalid end state"),
    ],
)
def test_broken_rule_is_found(reading: Reading, broken: str, told: str) -> None:
    result = spin.run(reading, (broken,))
    assert told in result.violation
    assert any("proc" in line for line in result.trace)


def test_error_in_the_model_is_no_result() -> None:
    with pytest.raises(spin.SpinFailed, match="spin"):
        spin.run(Reading("nonsense", (*BOTH_TWO, "NB=many")))


def test_command_without_spin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "SMALL", ())
    monkeypatch.setattr(spin, "missing", lambda: "spin")
    monkeypatch.delenv("CI", raising=False)
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "spin is not installed: tricord.pml was not explored (`make servers` installs it)",
        "model: 0 states, 0 violations",
    ]
    monkeypatch.setenv("CI", "true")
    assert command.main([]) == 1
