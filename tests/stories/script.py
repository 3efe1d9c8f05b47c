"""The language of the stories: one command a line, described in ``COMMANDS``.

A story is a text file. Lines that begin with ``#`` say what it is about. Then come sections: commands, a line ``----``,
and what the world printed while they ran, up to the next empty line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import NamedTuple

from coordinator.machine import begin
from coordinator.model import BranchSpec, Joined, Outcome, Phase, Policy, Reply, Spec, State
from coordinator.orders import AddBranch, Cancel, Confirm, OperatorCancel, Order, Renew, Report, Resolve, Retry

from .world import Answer, World, row_text

XID = "01980000000070008a5c3e1f7b9d2460"
"""What the back-off is drawn from, unless a story chooses another."""


class Section(NamedTuple):
    """Some commands, and what they are expected to print."""

    remarks: str
    commands: tuple[str, ...]
    expected: str


def parse(text: str) -> list[Section]:
    """The sections of a story. Raises ValueError when it is not one."""
    sections = []
    for block in re.split(r"\n(?:[ \t]*\n)+", text.strip("\n")):
        above, mark, below = f"{block}\n".partition("\n----\n")
        lines = above.strip("\n").split("\n")
        remarks = [line for line in lines if line.startswith("#")]
        commands = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
        if commands and not mark:
            raise ValueError(f"no line ---- after {commands[-1]!r}")
        sections.append(Section("".join(f"{line}\n" for line in remarks), commands, below))
    return sections


def tell(sections: list[Section]) -> str:
    """The story as it really goes: the same commands, with what they print now."""
    world = World(Policy())
    told = []
    for section in sections:
        text = section.remarks
        if section.commands:
            world.lines = []
            for command in section.commands:
                perform(world, command)
            text += "".join(f"{line}\n" for line in (*section.commands, "----", *world.lines))
        told.append(text)
    return "\n".join(told)


def perform(world: World, command: str) -> None:
    """Do what one command line says. Raises ValueError when it says nothing that we know."""
    for pattern, do in COMMANDS.items():
        found = re.fullmatch(pattern, command)
        if found:
            do(world, *found.groups())
            return
    raise ValueError(f"no such command: {command!r}")


def _policy(world: World, name: str, value: str) -> None:
    if name not in Policy._fields:
        raise ValueError(f"no such policy: {name}")
    world.policy = world.policy._replace(**{name: int(value)})  # type: ignore[arg-type]  # its numbers


def _begin(world: World, ordered: str | None, timeout: str, xid: str | None, branches: str) -> None:
    names = [text.split(".") for text in branches.split()]
    wanted = tuple(BranchSpec(who, what) for who, what in names)
    spec = Spec(bytes.fromhex(xid or XID), b"", world.now_ms, _ms(timeout), wanted, ordered=ordered is not None)
    try:
        tx = begin(spec, world.now_ms, world.policy)
    except ValueError as error:
        world.log("  ", f"refused: {error}")
        return
    world.store.insert(tx._replace(save_id=1000))
    world.log("  ", f"begin {row_text(tx)}")


def _begin_interactive(world: World, timeout: str) -> None:
    spec = Spec(bytes.fromhex(XID), b"", world.now_ms, _ms(timeout), (), interactive=True)
    tx = begin(spec, world.now_ms, world.policy)
    world.store.insert(tx._replace(save_id=1000))
    world.log("  ", f"begin {row_text(tx)}")


def _asked(world: World, name: str, what: str) -> None:
    for pattern, make in _ORDERS.items():
        found = re.fullmatch(pattern, what)
        if found:
            world.coordinator(name).ask(make(*found.groups()))
            return
    raise ValueError(f"no such order: {what!r}")


def _add(verb: str, who: str, what: str, key: str, parent: str | None) -> Order:
    return AddBranch(BranchSpec(who, what), Joined(key, verb == "enlist", int(parent or 0)))


def _report(branch: str, who: str, how: str, seen: str | None) -> Order:
    outcome = {"tried": Outcome.DONE, "refused": Outcome.REFUSED}[how]
    saw = tuple(map(int, (seen or "").split()))
    return Report(Reply(int(branch) - 1, Phase.TRY, outcome, f"db-{who}", seen=saw))


_ORDERS: dict[str, Callable[..., Order]] = {
    r"(try|enlist) (\S+)\.(\S+) as (\S+)(?: below (\d))?": _add,
    r"report (\d) (\S+) (tried|refused)(?: seeing ([\d ]+))?": _report,
    r"confirm([\d ]*)": lambda ids: Confirm(frozenset(map(int, ids.split()))),
    r"cancel ?(.*)": Cancel,
    r"renew for (\w+)": lambda span: Renew(_ms(span)),
    r"retry(?: (\S+))?": lambda participant: Retry(participant or ""),
    r"record for (\S+) that (\d) was (confirmed|cancelled) by hand(, being lost)?": lambda actor, branch, how, lost: (
        Resolve(int(branch), how == "confirmed", actor, "by hand", bool(lost))
    ),
    r"stop it for (\S+) because (.*)": OperatorCancel,
}


def _answers(world: World, branch: str, phase: str, who: str | None, answers: str) -> None:
    parsed = [answer for text in re.split(r""",(?=(?:[^"]*"[^"]*")*[^"]*$)""", answers) for answer in _answer(text)]
    world.answers[who or "", int(branch) - 1, Phase[phase.upper()]] = parsed


def _answer(text: str) -> list[Answer]:
    """``refused "no funds" after 20ms x3``: what, why, from which fence database, when, how many times."""
    kind, *words = shlex.split(text)
    answer, times = _KINDS[kind], 1
    while words:
        word = words.pop(0)
        if word == "after":
            answer = answer._replace(after_ms=_ms(words.pop(0)))
        elif word == "from":
            answer = answer._replace(fence_id=words.pop(0))
        elif word == "saw":
            answer = answer._replace(seen=(int(words.pop(0)),))
        elif re.fullmatch(r"x\d+", word):
            times = int(word[1:])
        elif answer.outcome is Outcome.DONE:
            answer = answer._replace(result=word)
        else:
            answer = answer._replace(text=word)
    return [answer] * times


_KINDS = {
    "done": Answer(),
    "lost": Answer(lost=True),
    "silent": Answer(after_ms=None),
    "down": Answer(Outcome.UNKNOWN, after_ms=1, text="unavailable"),
    "unknown": Answer(Outcome.UNKNOWN),
    "flagged": Answer(Outcome.UNKNOWN, attention=True),
    "refused": Answer(Outcome.REFUSED),
    "violation": Answer(Outcome.VIOLATION),
}


def _drives(world: World, name: str) -> None:
    world.coordinator(name).drive(world.store.standing())


def _claims(world: World, name: str) -> None:
    coordinator = world.coordinator(name)
    if not world.claim(coordinator):
        coordinator.log("finds nothing to claim")


def _scans(world: World, name: str) -> None:
    world.coordinator(name).scans = True


def _stops(world: World, name: str) -> None:
    coordinator = world.coordinator(name)
    coordinator.stopped = True
    coordinator.log("is stopped")


def _goes_on(world: World, name: str) -> None:
    coordinator = world.coordinator(name)
    coordinator.log("goes on")
    coordinator.go_on()


def _crashes(world: World, name: str, when: str, state: str) -> None:
    world.coordinator(name).crash_at = (when, State[state])


def _loses(world: World, name: str, fate: str) -> None:
    world.coordinator(name).next_commit = fate


def _run(world: World, span: str | None) -> None:
    world.run(None if span is None else world.now_ms + _ms(span))


def _row(world: World) -> None:
    tx = world.store.standing()
    world.log("  ", f"row   {row_text(tx)}")
    if tx.cancel_reason:
        world.log("  ", f"      cancelled: {tx.cancel_reason}")
    for number, step in enumerate(tx.steps, 1):
        if step.error:
            world.log("  ", f"      {number} last error: {step.error}")
        if step.result is not None:
            world.log("  ", f"      {number} result: {step.result.data.decode()}")


def _history(world: World) -> None:
    for past in world.store.standing().past:
        for run in past.runs:
            which = f"{run.phase.name} #{run.first_attempt}-{run.last_attempt} from {run.first_ms} to {run.last_ms}"
            flag = " !" if run.attention else ""
            world.log("  ", f"      {past.branch_id} failed {which}: {run.error}{flag}")
        for end in past.ends:
            world.log("  ", f"      {past.branch_id} {end.status.name.lower()} at {end.time_ms}")


def _ms(text: str) -> int:
    found = re.fullmatch(r"(\d+)(ms|s|h)", text)
    if found is None:
        raise ValueError(f"not a time: {text!r}")
    return int(found[1]) * {"ms": 1, "s": 1_000, "h": 3_600_000}[found[2]]


_C = r"(c\d)"
COMMANDS: dict[str, Callable[..., None]] = {
    r"policy (\w+) (\d+)": _policy,
    r"begin( ordered)? timeout (\w+)(?: xid (\w+))?((?: \S+\.\S+)*)": _begin,
    r"begin interactive timeout (\w+)": _begin_interactive,
    r"(c\d) is asked to (.*)": _asked,  # what somebody wants of the stored transaction
    r"branch (\d) (try|confirm|cancel|settle_confirmed|settle_cancelled)(?: for (c\d))?: (.*)": _answers,
    rf"{_C} drives": _drives,  # the row as it stands, claimed or not
    rf"{_C} claims": _claims,  # if its wake has come
    rf"{_C} scans": _scans,  # claims by itself from now on, whenever it drives nothing
    rf"{_C} stops": _stops,  # as by SIGSTOP: neither replies nor COMMITs reach it
    rf"{_C} goes on": _goes_on,
    rf"{_C} will crash (before|after) saving (\w+)": _crashes,
    rf"{_C} will lose its next COMMIT, (applied|not applied)": _loses,
    r"run(?: (\w+))?": _run,
    r"row": _row,
    r"history": _history,  # what failed, and what ended since
}
