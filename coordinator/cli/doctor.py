"""``tricord doctor``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from .calls import end_for, endpoint_option
from .exits import FINDINGS
from .forms import output_option, tell_rows
from .params import Age, Text, actor_option, age_ms, login

if TYPE_CHECKING:
    from tricord.v1 import operator_pb2

PATIENCE_S = 3600.0
"""A look at large fences takes minutes; Ctrl-C ends it at any time, and harms nothing."""


@click.command()
@endpoint_option
@click.option("--participant", type=Text(), default="", metavar="NAME", help="Only this one.")
@click.option(
    "--grace", type=Age(), default="5m", show_default=True, metavar="AGE",
    help="What is younger may still be on its way: 30s, 5m.",
)  # fmt: skip
@click.option("--apply", "mend", is_flag=True, help="Mend what can be mended safely: make transactions due now.")
@actor_option
@output_option("table", "json", "jsonl")
def doctor(endpoint: str, participant: str, grace: str, mend: bool, actor: str, output: str) -> None:
    """Find what does not fit, and say what to do about it.

    Looks at addresses, clocks, settings, open transactions and the participants' fences: branches that nobody will
    settle, and what contradicts the record. Changes nothing without --apply.

    Exit codes: 0 nothing, or only infos, 2 wrong usage, 3 no such participant, 5 cannot be reached, 6 errors or
    warnings that were not mended.
    """
    from tricord.v1 import operator_pb2

    request = operator_pb2.ExamineRequest(participant=participant, mend=mend, actor=actor or (login() if mend else ""))
    request.grace.FromMilliseconds(age_ms(grace))
    findings: list[dict[str, Any]] = []
    found = _noting(_examine(endpoint, request), findings)
    if output != "jsonl":
        found = iter(sorted(found, key=lambda finding: _SEVERITIES.index(finding["severity"])))
    tell_rows(output, "findings", found, _print)
    open_ones = [each for each in findings if each["severity"] != "INFO" and not each["mended"]]
    click.echo(_summary(findings), err=True)
    if open_ones:
        sys.exit(FINDINGS)


_SEVERITIES = ("ERROR", "WARNING", "INFO", "UNSPECIFIED")


def _noting(found: Iterator[dict[str, Any]], noted: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """As they are found; ``noted`` has them afterwards."""
    for finding in found:
        noted.append(finding)
        yield finding


def _examine(endpoint: str, request: operator_pb2.ExamineRequest) -> Iterator[dict[str, Any]]:
    """The findings; what is being done goes to standard error."""
    import grpc

    from tricord.v1 import operator_pb2_grpc

    with grpc.insecure_channel(endpoint) as channel:
        try:
            for response in operator_pb2_grpc.OperatorServiceStub(channel).Examine(request, timeout=PATIENCE_S):
                if response.WhichOneof("of") == "finding":
                    yield as_json(response.finding)
                else:
                    click.echo(f"{response.progress} …", err=True)
            return
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
    end_for(endpoint, code, details)


def as_json(finding: operator_pb2.Finding) -> dict[str, Any]:
    """A finding for machines."""
    from tricord.v1 import operator_pb2

    return {
        "severity": operator_pb2.Severity.Name(finding.severity).removeprefix("SEVERITY_"),
        "code": finding.code,
        "participant": finding.participant,
        "xid": finding.xid,
        "branch_id": finding.branch_id,
        "problem": finding.problem,
        "advice": finding.advice,
        "mendable": finding.mendable,
        "mended": finding.mended,
    }


def _print(findings: Sequence[dict[str, Any]]) -> None:
    if not findings:
        return
    from .output import print_table

    print_table(
        ("SEVERITY", "CODE", "PARTICIPANT", "XID", "WHAT IS WRONG", "WHAT TO DO"),
        [
            (each["severity"], each["code"], each["participant"], each["xid"], each["problem"], _advice(each))
            for each in findings
        ],
        wraps=("PARTICIPANT", "XID", "WHAT IS WRONG", "WHAT TO DO"),
    )


def _advice(finding: dict[str, Any]) -> str:
    return "mended: it is due now" if finding["mended"] else str(finding["advice"])


def _summary(findings: Sequence[dict[str, Any]]) -> str:
    count = Counter(each["severity"] for each in findings)
    mended = sum(each["mended"] for each in findings)
    told = f"errors: {count['ERROR']}, warnings: {count['WARNING']}, infos: {count['INFO']}"
    return f"{told}; mended: {mended}" if mended else told
