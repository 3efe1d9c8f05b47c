"""A night with an outage, from the first look to the audit: all by the command, as an operator would do it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.transfer.databases import Account

from .outage_scene import CENTS, Outage, outage

OK, FINDINGS = 0, 6
PAID, STRAY, BEGUN = ("41", "42", "43"), "44", "45"
OPEN = (*PAID, STRAY, BEGUN)
BY_HAND = "paid to dave in cash, ticket 17"

pytestmark = [pytest.mark.database, pytest.mark.timeout(400)]


@pytest.fixture
def scene(tmp_path: Path, pg_database: str) -> Iterator[Outage]:
    """Before anything has happened."""
    with outage(tmp_path, pg_database) as made:
        yield made


def prints(scene: Outage, *arguments: str, code: int = OK) -> str:
    """What a command prints."""
    ran = scene.run(*arguments)
    assert ran.returncode == code, ran.stderr
    return ran.stdout


def tells(scene: Outage, *arguments: str, code: int = OK) -> Any:
    """What it tells a program."""
    return json.loads(prints(scene, *arguments, "-o", "json", code=code))


def table(text: str) -> list[list[str]]:
    """The cells of a table's rows, where none has blanks in it."""
    return [line.split() for line in text.splitlines()]


def test_an_outage_from_the_first_look_to_the_audit(scene: Outage) -> None:
    assert tells(scene, "doctor") == {"findings": []}
    scene.happen(PAID, strays=[STRAY], begun=BEGUN)
    what_is_stuck_is_listed(scene)
    one_says_why_and_since_when(scene)
    the_participant_is_seen_to_be_down(scene)
    the_doctor_says_what_to_do(scene)
    what_is_undecided_can_be_cancelled(scene)
    scene.bank_b.start()
    a_retry_drains_what_waits(scene)
    what_cannot_end_is_resolved_by_hand(scene)
    nothing_is_left(scene)
    the_audit_has_all_of_it(scene)


def what_is_stuck_is_listed(scene: Outage) -> None:
    head, *rows = table(prints(scene, "list", "--filter", "attention != NONE", "--order", "oldest"))
    assert head == ["XID", "STATE", "CREATED", "ATTENTION", "BRANCHES"]
    states = ["CONFIRMING"] * 4 + ["TRYING"]
    wanted = [[scene.xids[order], state, "RETRYING"] for order, state in zip(OPEN, states, strict=True)]
    assert sorted([row[0], row[1], row[3]] for row in rows) == sorted(wanted)
    listed = tells(scene, "list", "--participant", "bank-b")["transactions"]
    assert sorted((tx["labels"]["order"], tx["attention"]) for tx in listed) == [(order, "RETRYING") for order in OPEN]
    (found,) = tells(scene, "list", "--label", "order=42")["transactions"]
    assert found["xid"] == scene.xids["42"]


def one_says_why_and_since_when(scene: Outage) -> None:
    xid = scene.xids["41"]
    text = prints(scene, "show", xid)
    for words in ("CONFIRMING", "RETRYING", "order=41", "cannot be reached", "decided", "to confirm"):
        assert words in text
    tx = tells(scene, "show", xid)
    debit, credit = tx["branches"]
    assert (debit["state"], debit["attempts"], debit["last_error"]) == ("CONFIRMED", 0, "")
    assert (credit["participant"], credit["state"]) == ("bank-b", "TRIED")
    assert credit["attempts"] >= 2
    assert scene.bank_b_address in credit["last_error"]
    assert tx["create_time"] <= tx["decide_time"] < tx["update_time"] < credit["next_attempt_time"]
    events = [event["event"] for event in tx["history"]]
    assert events[:2] == ["created", "decided"]
    assert sorted(set(events[2:])) == ["confirmed", "failed", "retry"]
    (failed,) = [event for event in tx["history"] if event["event"] == "failed"]
    assert scene.bank_b_address in json.dumps(failed)


def the_participant_is_seen_to_be_down(scene: Outage) -> None:
    _, good, bad = table(prints(scene, "participants"))
    assert (good[0], good[4], good[6]) == ("bank-a", "CLOSED", "5")
    assert (bad[0], bad[4], bad[6]) == ("bank-b", "OPEN", "5")
    assert " ".join(bad[8:]) == f"participant at {scene.bank_b_address} cannot be reached"
    (told,) = tells(scene, "participants", "bank-b")["participants"]
    (address,) = told["addresses"]
    assert (told["open_transactions"], address["health"]["breaker"]) == (5, "OPEN")
    assert told["oldest_create_time"] == tells(scene, "show", scene.xids["41"])["create_time"]
    states = tells(scene, "stats")["open"]["states"]
    assert states["CONFIRMING"] == {"count": 4, "attention": {"RETRYING": 4, "VIOLATION": 0, "STUCK": 0}}
    assert states["TRYING"]["count"] == 1


def the_doctor_says_what_to_do(scene: Outage) -> None:
    # The age of the backlog counts from the decision, and a grace is a whole second at least.
    while not (findings := scene.findings("BACKLOG")):
        pass
    assert [each["severity"] for each in findings] == ["WARNING"]
    assert findings[0]["problem"].startswith("4 decided branches wait for it")
    assert findings[0]["advice"] == "bring the participant back; nothing else is needed"
    (down,) = scene.findings("ADDRESS_UNREACHABLE")
    assert (down["severity"], down["participant"]) == ("ERROR", "bank-b")
    assert scene.bank_b_address in down["problem"]
    assert {each["xid"] for each in scene.findings("ATTENTION_RETRYING")} == {*scene.xids.values()}
    text = prints(scene, "doctor", code=FINDINGS)
    assert text.splitlines()[1].split()[:3] == ["ERROR", "ADDRESS_UNREACHABLE", "bank-b"]
    assert "start it again" in text


def what_is_undecided_can_be_cancelled(scene: Outage) -> None:
    text = prints(scene, "cancel", scene.xids[BEGUN], "--reason", "the customer has left", "--yes", "--actor", "bob")
    assert "cancelled by an operator (bob): the customer has left" in text
    scene.let_them_fail()
    assert tells(scene, "show", scene.xids[BEGUN])["state"] == "CANCELLING"  # bank-b is still owed its Cancel


def a_retry_drains_what_waits(scene: Outage) -> None:
    due = {order: scene.get(order).branches[1].next_attempt_time.ToMilliseconds() for order in OPEN}
    assert prints(scene, "retry", "--participant", "bank-b", "--dry-run") == "5 would be retried\n"
    arguments = ("--participant", "bank-b", "--reason", "bank-b is back", "--actor", "alice")
    assert prints(scene, "retry", *arguments) == "5 retried\n"
    for order in (*PAID, BEGUN):
        tx = scene.finish(order)
        assert tx.update_time.ToMilliseconds() < due[order]  # not by itself
    gone = scene.until(STRAY, lambda tx: "gone" in tx.branches[1].last_error)
    assert gone.branches[1].last_error == "RuntimeError: account dave is gone"
    _, row = table(prints(scene, "list", "--filter", "attention != NONE"))
    assert (row[0], row[1], row[3]) == (scene.xids[STRAY], "CONFIRMING", "RETRYING")


def what_cannot_end_is_resolved_by_hand(scene: Outage) -> None:
    arguments = (scene.xids[STRAY], "2", "--as", "confirmed", "--reason", BY_HAND, "--actor", "alice")
    prints(scene, "resolve", *arguments, "--yes")
    scene.finish(STRAY)
    tx = tells(scene, "show", scene.xids[STRAY])
    assert (tx["state"], tx["mixed"], tx["attention"]) == ("CONFIRMED", False, "NONE")
    resolution = tx["branches"][1]["resolution"]
    assert (resolution["as"], resolution["actor"], resolution["reason"]) == ("CONFIRMED", "alice", BY_HAND)
    assert f"CONFIRMED by alice at {resolution['time']}: {BY_HAND}" in prints(scene, "show", scene.xids[STRAY])


def nothing_is_left(scene: Outage) -> None:
    assert tells(scene, "list", "--filter", "attention != NONE")["transactions"] == []
    assert scene.findings() == []
    (told,) = tells(scene, "participants", "bank-b")["participants"]
    assert (told["open_transactions"], told["addresses"][0]["health"]["breaker"]) == (0, "CLOSED")
    accounts = scene.cast.databases.accounts()
    assert accounts["alice@bank-a"] == Account(100_000 - 4 * CENTS)
    assert accounts["bob@bank-b"] == Account(100_000 + 3 * CENTS)


def the_audit_has_all_of_it(scene: Outage) -> None:
    records = tells(scene, "audit", "--limit", "1000")["records"]
    by_id = {record["id"]: record for record in records}
    assert all(record["peer"] and record["time"] for record in records)
    told = []
    for done in records[::-1]:
        if done["actor"] == "night shift" or done["outcome"] == "ASKED":
            continue
        asked = by_id[done["asked_id"]]
        assert asked["outcome"] == "ASKED"
        assert asked["time"] < done["time"]
        assert (asked["actor"], asked["reason"], asked["peer"]) == (done["actor"], done["reason"], done["peer"])
        told.append((done["action"], done["outcome"], done["actor"], done["reason"], done["xid"]))
    xids = {order: scene.xids[order] for order in OPEN}
    assert told[0] == ("cancel", "DONE", "bob", "the customer has left", xids[BEGUN])
    assert {*told[1:6]} == {("retry", "DONE", "alice", "bank-b is back", xid) for xid in xids.values()}
    assert told[6:] == [
        ("retry-many", "DONE", "alice", "bank-b is back", ""),
        ("resolve", "DONE", "alice", BY_HAND, xids[STRAY]),
    ]
    done, asked, *_ = tells(scene, "audit", xids[STRAY])["records"]
    assert (asked["before"]["state"], asked["before"]["branches"][1]["state"]) == ("CONFIRMING", "TRIED")
    assert "resolved_as" not in asked["before"]["branches"][1]
    assert done["after"]["branches"][1]["resolved_as"] == "CONFIRMED"
    done, asked = (each for each in tells(scene, "audit", xids[BEGUN])["records"] if each["action"] == "cancel")
    assert (asked["before"]["state"], done["after"]["state"]) == ("TRYING", "CANCELLING")
    text = prints(scene, "audit", xids[STRAY])
    newest = text.splitlines()[1]
    for words in ("resolve", "DONE", "alice", BY_HAND, "CONFIRMING"):
        assert words in newest
