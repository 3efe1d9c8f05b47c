"""What happened to a transaction, for machines: as ``tricord show -o json`` prints it, and as its timeline reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .calls import time_text

if TYPE_CHECKING:
    from tricord.v1 import operator_pb2


def history_json(response: operator_pb2.OperatorServiceGetResponse) -> list[dict[str, Any]]:
    """The events, oldest first. ``branch_id`` is null but for a branch's own, ``failed`` but for failed attempts."""
    return [
        {
            "time": time_text(event, "time"),
            "event": event.event,
            "detail": event.detail,
            "actor": event.actor,
            "branch_id": event.branch_id or None,
            "failed": _failed(event.failed) if event.HasField("failed") else None,
        }
        for event in response.history
    ]


def _failed(failed: operator_pb2.FailedAttempts) -> dict[str, Any]:
    from tricord.v1 import participant_pb2

    found = {"attempts": failed.attempts, "last_time": time_text(failed, "last_time")}
    if failed.runs:
        return {**found, "runs": failed.runs}
    return {
        **found,
        "phase": participant_pb2.Phase.Name(failed.phase).removeprefix("PHASE_"),
        "first_attempt": failed.first_attempt,
        "last_attempt": failed.last_attempt,
        "error": failed.error,
        "attention": failed.attention,
    }
