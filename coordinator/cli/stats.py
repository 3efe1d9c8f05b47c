"""``tricord stats``: how much is open, and how the coordinator fares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .calls import call, endpoint_option, time_text
from .forms import output_option, tell_one
from .output import age_text, count_text, length_text, print_table

if TYPE_CHECKING:
    from tricord.v1 import operator_pb2


@click.command()
@endpoint_option
@output_option("table", "json", "jsonl")
def stats(endpoint: str, output: str) -> None:
    """Show what is open, and a coordinator's figures.

    COUNT is how many transactions of the store are open, RETRYING, VIOLATION and STUCK how many of them have that
    attention.

    Late are open transactions that have been due for more than 5 seconds: nobody has looked at them. The others are of
    the coordinator that is asked (of several workers: of the one that takes the call), since its start; while its store
    does not answer these are all there is.
    """
    from tricord.v1 import operator_pb2

    figures = figures_json(call(endpoint, "GetStatistics", operator_pb2.GetStatisticsRequest()))
    tell_one(output, figures, lambda: print_figures(figures))


def figures_json(response: operator_pb2.GetStatisticsResponse) -> dict[str, Any]:
    """The figures for machines; ``open`` is null while the store does not answer."""
    own = response.coordinator
    return {
        "open": _open_json(response.open) if response.HasField("open") else None,
        "coordinator": {
            "serving": own.serving,
            "uptime_ms": own.uptime.ToMilliseconds(),
            "live": own.live,
            "live_max": own.live_max,
            "begun": own.begun,
            "confirmed": own.confirmed,
            "cancelled": own.cancelled,
            "recovered": own.recovered,
            "flushes": own.flushes,
            "store_id": own.store_id,
            "store_format": own.store_format,
            "schema_revision": own.schema_revision,
        },
    }


def _open_json(figures: operator_pb2.OpenStatistics) -> dict[str, Any]:
    from tricord.v1 import types_pb2

    return {
        "states": {
            types_pb2.TransactionState.Name(of.state).removeprefix("TRANSACTION_STATE_"): {
                "count": of.count,
                "attention": {
                    "RETRYING": of.attention_retrying,
                    "VIOLATION": of.attention_violation,
                    "STUCK": of.attention_stuck,
                },
            }
            for of in figures.states
        },
        "more_open": figures.more_open,
        "oldest_create_time": time_text(figures, "oldest_create_time"),
        "late": figures.late,
    }


def print_figures(figures: dict[str, Any]) -> None:
    """On standard output, for people."""
    of_store, own = figures["open"], figures["coordinator"]
    if of_store is not None:
        more = of_store["more_open"]
        rows = [
            [
                state,
                count_text(of["count"], more=more),
                *(count_text(n, more=more) for n in of["attention"].values()),
            ]
            for state, of in of_store["states"].items()
        ]
        print_table(("OPEN", "COUNT", "RETRYING", "VIOLATION", "STUCK"), rows)
        click.echo()
    facts = (
        []
        if of_store is None
        else [
            ("oldest open", age_text(of_store["oldest_create_time"]) or "-"),
            ("late", count_text(of_store["late"], more=of_store["more_open"])),
        ]
    )
    facts += [
        ("serving", "yes" if own["serving"] else "NO: the store does not answer"),
        ("uptime", length_text(own["uptime_ms"] / 1000)),
        ("live", f"{own['live']} of {own['live_max']}"),
        *((name, str(own[name])) for name in ("begun", "confirmed", "cancelled", "recovered", "flushes")),
        ("store", f"{own['store_id']}, format {own['store_format']}, schema revision {own['schema_revision']}"),
    ]
    print_table(("FIGURE", "VALUE"), facts, wraps=("VALUE",))
