"""docs/operators-acting.md: its commands are run as printed, one after another, in the night that the page tells of.

A comment in the page's source, before a command, says what happens first: see ``Night``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from tricord.v1 import types_pb2

from .outage_scene import FINISHED, Outage, outage
from .test_operators_guide import shape

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operators-acting.md").read_text(encoding="utf-8")
DAY_MS = 86_400_000


class Shown(NamedTuple):
    """A command of the page."""

    events: Sequence[str]
    command: str
    output: str


def shown() -> Iterator[Shown]:
    """The page's commands, each with what happens before it and what it prints."""
    block = re.compile(r"(?:^<!-- (.*?) -->\n)?^```sh\n(.*?)\n```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for events, command, output in block.findall(PAGE):
        yield Shown(re.split("; ", events) if events else (), command, output)


def lines(output: str) -> list[str]:
    """The shape of an output; of lines that look alike one is enough, for how many there are is chance, as is the order
    of what happens in the same millisecond.
    """
    text = re.sub(r'(--page-token |"next_page_token": ")[\w-]+', r"\1TOKEN", output)
    text = re.sub(r"\+(\d+\.\d+s|\d+[smhd](\d+[smh])?)", "+AGE", text)
    text = re.sub(r"(?<=T)[-!.]+>", "!>", text)  # the timeline, and what of its signs is explained
    text = re.sub(r"^T tried .*$", "T tried", text, flags=re.MULTILINE)
    return sorted(line for line, _ in groupby(shape(text)))


class Night:
    """The scene of the page, and what its comments may say."""

    def __init__(self, scene: Outage, store: str) -> None:
        self._scene = scene
        self._store = store
        self._order = ""
        scene.happen(["41", "42", "43"], strays=["44", "46"], begun="45")

    def run(self, shown: Shown) -> str:
        """What a command prints, after what happens before it."""
        code = 0
        for event in shown.events:
            match event.split():
                case ["order", number]:
                    self._order = number
                case ["exit", "code", number]:
                    code = int(number)
                case _:
                    {
                        "bank-b is started": self._scene.bank_b.start,
                        "bank-b has answered": self._answered,
                        "bank-b has written it down": self._written_down,
                        "eve has begun orders 48 and 49": self._begun_by_eve,
                        "bank-b goes down once more": self._down_again,
                        "bank-b has confirmed it, and was not heard": self._unheard,
                        "a clock was wrong": self._put_off,
                    }[event]()
        words = shlex.split(shown.command.replace("XID", self._scene.xids.get(self._order, "")))
        assert words.pop(0) == "tricord"
        ended = self._scene.run(*words, merged=True)
        assert ended.returncode == code, ended.stdout
        return ended.stdout

    def _answered(self) -> None:
        """Whatever bank-b was asked has been answered: done, or that there is no such account."""
        for order in self._scene.xids:
            self._scene.until(order, lambda tx: tx.state in FINISHED or "gone" in tx.branches[1].last_error)

    def _written_down(self) -> None:
        """Both that were resolved by hand have ended."""
        for order in ("44", "46"):
            self._scene.finish(order)

    def _begun_by_eve(self) -> None:
        """Two transactions of one customer, undecided."""
        for order in ("48", "49"):
            self._scene.begin(order, customer="eve")

    def _down_again(self) -> None:
        """Between the Try and the Confirm of order 50."""
        self._scene.fall(["50"])
        self._scene.let_them_fail("50")

    def _unheard(self) -> None:
        """bank-b has confirmed order 50, and the coordinator waits for its next attempt."""
        self._scene.confirm_unheard("50")

    def _put_off(self) -> None:
        """A transaction is to be looked at in a day, though it is undecided; all others have ended."""
        self._scene.finish("50")
        self._scene.begin("47")
        late = [DAY_MS, bytes.fromhex(self._scene.xids["47"])]
        with psycopg.connect(self._store) as connection:
            connection.execute("UPDATE tricord_transaction SET wake_ms = wake_ms + %s WHERE xid = %s", late)


def test_every_state_and_flag_is_explained() -> None:
    """As the command prints them."""
    told = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for name in re.findall("`([A-Z_]+)`", row)}
    for enum in (types_pb2.TransactionState, types_pb2.BranchState, types_pb2.Attention):
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.DESCRIPTOR.name).upper() + "_"
        assert {name.removeprefix(prefix) for name in enum.DESCRIPTOR.values_by_name} - {"UNSPECIFIED"} <= told
    assert "MIXED" in told


def test_it_has_no_command_that_is_not_run() -> None:
    assert len(list(shown())) == PAGE.count("```sh") == PAGE.count("\ntricord ")


@pytest.mark.database
@pytest.mark.timeout(400)
def test_the_page_shows_what_is_printed(tmp_path: Path, pg_database: str) -> None:
    with outage(tmp_path, pg_database) as scene:
        night = Night(scene, pg_database)
        for each in shown():
            printed = night.run(each)
            assert lines(printed) == lines(each.output), f"{each.command}\n{printed}"
