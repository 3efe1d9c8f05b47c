"""A transaction's timeline: lines of text, from what ``tricord show -o json`` has, and from nothing else."""

from __future__ import annotations

import shutil
from datetime import datetime
from typing import Any, NamedTuple

from .output import length_text

WIDTH_MIN, WIDTH_MAX = 60, 160
NAME_CHARS_MAX = 30
_LEGEND = {
    "=": "Try",
    "T": "tried",
    "R": "refused",
    "|": "decided",
    "?": "not answered",
    "-": "Confirm or Cancel",
    "C": "confirmed",
    "X": "cancelled",
    "!": "failed",
    ".": "wait",
    ">": "next attempt",
}
_GAP = "   "


class _Scale(NamedTuple):
    """Which column a time has."""

    start: datetime
    seconds: float
    columns: int

    def column(self, when: datetime) -> int:
        share = (when - self.start).total_seconds() / self.seconds if self.seconds > 0 else 0.0
        return round(min(1.0, max(0.0, share)) * (self.columns - 1))


def timeline(tx: dict[str, Any], width: int) -> list[str]:
    """The lines, none longer than ``width``, of which 60 to 160 are used.

    Times are relative to the creation. When a branch has answered is on record once an attempt has failed. Where it is
    not, its Try is drawn up to the decision, or up to the last change while there is none, and its Confirm or Cancel up
    to the last change. A failure has the free place next to its time, in the part of its phase.
    """
    created = _time(tx["create_time"])
    updated = _time(tx["update_time"])
    if created is None or updated is None:
        return []
    decided = _time(tx["decide_time"])
    finished = tx["state"] in ("CONFIRMED", "CANCELLED")
    attempts = [when for b in tx["branches"] if (when := _time(b["next_attempt_time"])) is not None]
    deadline = _time(tx["deadline_time"]) if decided is None else None
    marked = [("created", created), ("decided", decided), ("finished" if finished else "last change", updated)]
    marked += [("next attempt", min(attempts, default=None)), ("deadline", deadline)]
    events = sorted(((name, when) for name, when in marked if when is not None), key=lambda event: event[1])
    names = [f"{b['branch_id']} {b['participant']}.{b['action']}" for b in tx["branches"]]
    columns = min(WIDTH_MAX, max(WIDTH_MIN, width))
    margin = min(NAME_CHARS_MAX, max(map(len, names), default=0)) + 1
    latest = max([when for _, when in events] + attempts)
    scale = _Scale(created, (latest - created).total_seconds(), columns - margin)
    told = [_told(tx, branch["branch_id"], decided) for branch in tx["branches"]]
    bars = [_bar(branch, known, scale, decided, updated) for branch, known in zip(tx["branches"], told, strict=True)]
    used = [f"{mark} {text}" for mark, text in _LEGEND.items() if any(mark in bar for bar in bars)]
    return [
        *_packed([_event_text(name, when, created) for name, when in events], columns),
        *(f"{_cut(name, margin - 1):<{margin}}{bar}" for name, bar in zip(names, bars, strict=True)),
        *_packed(used, columns),
    ]


def terminal_width() -> int:
    """Columns of the terminal (or of the environment's COLUMNS); 100 if there is none."""
    return shutil.get_terminal_size((100, 24)).columns


class _Told(NamedTuple):
    """What the history tells of a branch."""

    tried: datetime | None
    refused: datetime | None
    end: datetime | None
    failures: set[tuple[datetime, bool]]
    """When, and whether in Try."""


def _told(tx: dict[str, Any], branch_id: int, decided: datetime | None) -> _Told:
    times: dict[str, datetime] = {}
    failures: set[tuple[datetime, bool]] = set()
    for event in tx["history"]:
        if event["branch_id"] == branch_id and (when := _time(event["time"])) is not None:
            times[event["event"]] = when
            if (failed := event["failed"]) is not None:
                undecided = decided is None or when < decided  # attempts that were dropped have no phase
                in_try = failed.get("phase", "TRY" if undecided else "") == "TRY"
                failures |= {(when, in_try), (_time(failed["last_time"]) or when, in_try)}
    end = times.get("confirmed") or times.get("cancelled")
    return _Told(times.get("tried"), times.get("refused"), end, failures)


def _bar(branch: dict[str, Any], told: _Told, scale: _Scale, decided: datetime | None, updated: datetime) -> str:
    """One branch's line: its Try, then its Confirm or Cancel, then what it waits for; its failures in between."""
    state = branch["state"]
    mark = {"CANCELLED": "|", "CONFIRMED": "T", "TRIED": "T", "REFUSED": "R"}.get(state, "?")
    if told.tried is not None:
        mark = "T"
    elif told.refused is not None or branch["refusal"]:
        mark = "R"
    try_end = told.tried or told.refused
    parts = [("=", try_end or decided or updated, mark)]
    if try_end is not None and decided is not None:
        parts.append((" ", decided, ""))
    if decided is not None and state in ("CONFIRMED", "CANCELLED"):
        parts.append(("-", told.end or updated, "X" if state == "CANCELLED" else "C"))
    elif decided is not None and state != "REFUSED":
        parts.append(("-", updated, "-"))
    waits_until = _time(branch["next_attempt_time"])
    if waits_until is not None:
        parts.append((".", waits_until, ">"))
    bar = ""
    for n, (filling, until, mark) in enumerate(parts, 1):
        last = scale.columns - 1 - (len(parts) - n)  # those to come need a column each
        bar += filling * (min(scale.column(until), last) - len(bar)) + mark
    for column, in_try in sorted({(scale.column(when), in_try) for when, in_try in told.failures}):
        before, after = range(min(column, len(bar) - 1), -1, -1), range(column, len(bar))
        places = (*before, *after) if in_try else (*after, *before)
        free = next((n for n in places if bar[n] in ("=" if in_try else "-.")), None)
        if free is not None:
            bar = f"{bar[:free]}!{bar[free + 1 :]}"
    return bar


def _event_text(name: str, when: datetime, created: datetime) -> str:
    if name == "created":
        return f"created {created.isoformat(timespec='milliseconds').replace('+00:00', 'Z')}"
    seconds = (when - created).total_seconds()
    return f"{name} +{seconds:.3f}s" if seconds < 60 else f"{name} +{length_text(seconds)}"


def _packed(texts: list[str], width: int) -> list[str]:
    """As many on a line as it holds."""
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + len(_GAP) + len(text) <= width:
            lines[-1] += _GAP + text
        else:
            lines.append(text)
    return lines


def _time(text: str) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"
