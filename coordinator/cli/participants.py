"""``tricord participants``: where each participant is, how it fares, and how much waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from .calls import call_on, connected, endpoint_option, time_text
from .forms import output_option, tell_rows
from .output import age_text, count_text, print_table
from .params import Text

if TYPE_CHECKING:
    from tricord.v1 import operator_pb2

_PAGE_SIZE = 1_000


@click.command()
@click.argument("name", type=Text(), default="")
@endpoint_option
@output_option("table", "wide", "json", "jsonl")
def participants(name: str, endpoint: str, output: str) -> None:
    """Show participants, or one, and what waits for them.

    FROM is where an address is known from: the configuration (static), or its own registration, which it repeats
    every 10 seconds; SEEN is how long ago it last did. BREAKER, FAILS (in a row) and LAST ERROR are those of the
    coordinator that is asked; a BREAKER of "-" means that it has not called that address.
    OPEN counts the open transactions that have the participant, OLDEST is the age of the oldest of them.
    """
    tell_rows(output, "participants", _pages(endpoint, name), partial(_print, wide=output == "wide"))


def _pages(endpoint: str, name: str) -> Iterator[dict[str, Any]]:
    from tricord.v1 import operator_pb2

    token = ""
    with connected(endpoint) as channel:
        while True:
            request = operator_pb2.ListParticipantsRequest(participant=name, page_size=_PAGE_SIZE, page_token=token)
            response = call_on(channel, endpoint, "ListParticipants", request)
            yield from map(as_json, response.participants)
            token = response.next_page_token
            if not token:
                return


def as_json(participant: operator_pb2.ParticipantStatus) -> dict[str, Any]:
    """A participant for machines."""
    return {
        "name": participant.name,
        "actions": list(participant.actions),
        "withdrawn_actions": list(participant.withdrawn_actions),
        "open_transactions": participant.open_transactions,
        "more_open": participant.more_open,
        "oldest_create_time": time_text(participant, "oldest_create_time"),
        "addresses": [_address_json(address) for address in participant.addresses],
    }


def _address_json(address: operator_pb2.ParticipantAddress) -> dict[str, Any]:
    from tricord.v1 import operator_pb2

    health = address.health if address.HasField("health") else None
    return {
        "address": address.address,
        "configured": address.configured,
        "registered": address.registered,
        "seen_time": time_text(address, "seen_time"),
        "missing_actions": list(address.missing_actions),
        "health": None
        if health is None
        else {
            "breaker": operator_pb2.BreakerState.Name(health.breaker).removeprefix("BREAKER_STATE_"),
            "since_time": time_text(health, "since_time"),
            "failures": health.failures,
            "in_flight": health.in_flight,
            "last_error": health.last_error,
        },
    }


_HEAD = ("NAME", "ADDRESS", "FROM", "SEEN", "BREAKER", "FAILS", "OPEN", "OLDEST")
_WIDE = ("SINCE", "IN FLIGHT", "ACTIONS", "WITHDRAWN", "MISSING HERE")
_NOWHERE: dict[str, Any] = {
    "address": "(nowhere)", "configured": False, "registered": False, "seen_time": "", "missing_actions": (),
    "health": None,
}  # fmt: skip


def _print(found: list[dict[str, Any]], *, wide: bool) -> None:
    more = _WIDE if wide else ()
    rows = []
    for participant in found:
        for address in participant["addresses"] or [_NOWHERE]:
            health = address["health"] or {"breaker": "-", "since_time": "", "failures": "", "in_flight": ""}
            wider = _wide(participant, address, health) if wide else []
            rows.append([*_row(participant, address, health), *wider, health.get("last_error", "")])
    print_table([*_HEAD, *more, "LAST ERROR"], rows, wraps=(*more, "LAST ERROR"))


def _row(participant: dict[str, Any], address: dict[str, Any], health: dict[str, Any]) -> list[str]:
    origins = (("static", address["configured"]), ("registered", address["registered"]))
    return [
        participant["name"],
        address["address"],
        "+".join(name for name, is_so in origins if is_so),
        age_text(address["seen_time"]),
        health["breaker"],
        str(health["failures"]),
        count_text(participant["open_transactions"], more=participant["more_open"]),
        age_text(participant["oldest_create_time"]),
    ]


def _wide(participant: dict[str, Any], address: dict[str, Any], health: dict[str, Any]) -> list[str]:
    return [
        age_text(health["since_time"]),
        str(health["in_flight"]),
        ",".join(participant["actions"]),
        ",".join(participant["withdrawn_actions"]),
        ",".join(address["missing_actions"]),
    ]
