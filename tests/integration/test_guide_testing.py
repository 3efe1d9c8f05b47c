"""The tests of docs/testing-idempotency.md, run as its readers do; what its plugin costs who does not name it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from participant_sdk.idempotency.testing import Point
from tests.integration.guide_programs import ROOT, blocks, plain_environment, programs, run, save

PAGE = "testing-idempotency.md"
PASSED = 7 + 1 + 7
STRICT = "-W error -p no:cacheprovider -o asyncio_default_fixture_loop_scope=function"
"""What warnings are there, but for pytest-asyncio's own, which its users set, too."""
PLUGIN = "participant_sdk.idempotency.testing.plugin"


def test_the_page_can_be_followed(tmp_path: Path) -> None:
    for file, text in programs().items():
        save(tmp_path, file, text)
    commands = [command for block in blocks(PAGE) if block.language == "sh" for command in block.commands]
    assert commands == [
        f"python -m pytest {name}.py" for name in ("test_transfers", "test_statements", "test_our_front")
    ]
    files = " ".join(command.split()[-1] for command in commands)
    assert f"{PASSED} passed" in run(f"python -m pytest {files} {STRICT}", tmp_path)


def test_the_page_has_every_point() -> None:
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    table = text[text.index("| Point | What a repeat finds |") :].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [point.value for point in Point]


def test_who_does_not_name_the_plugin_loads_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\n\ndef test_nothing_is_there():\n"
        "    assert not [name for name in sys.modules if name.startswith('participant_sdk')]\n"
    )
    assert "1 passed" in run(f"python -m pytest {STRICT} -p no:{PLUGIN} test_other.py", tmp_path)


def test_the_plugin_can_be_named_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "test_fixture.py").write_text(
        "def test_store(idempotency_store, expire, crash_at):\n    assert idempotency_store.sweeper is None\n"
    )
    assert "1 passed" in run(f"python -m pytest {STRICT} -p {PLUGIN} test_fixture.py", tmp_path)


def test_a_program_loads_nothing_of_the_kit_and_the_kit_nothing_of_pytest(tmp_path: Path) -> None:
    code = (
        "import sys; from participant_sdk.idempotency import Idempotency; from sqlalchemy import create_engine\n"
        "Idempotency(create_engine('sqlite:///x.db'))\n"
        "assert not [name for name in sys.modules if 'idempotency.testing' in name]\n"
        "import participant_sdk.idempotency.testing\n"
        "assert 'pytest' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=plain_environment(), cwd=tmp_path)
