"""How what operators ask of a participant fails."""

from __future__ import annotations

from typing import Any

import grpc

from participant_sdk.fence import Status
from participant_sdk.upkeep_steps import error_text


class InspectionFailed(Exception):
    """What was asked cannot be answered: a gRPC status, and why."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def wrong(text: str) -> InspectionFailed:
    """For a request that cannot be answered."""
    return InspectionFailed(grpc.StatusCode.INVALID_ARGUMENT, text)


def failed(error: Exception) -> InspectionFailed:
    """For a database that does not answer."""
    return InspectionFailed(grpc.StatusCode.UNAVAILABLE, f"the fence cannot be read: {error_text(error)}")


def status_number(number: int) -> Any:
    """As the contract numbers it, which is as it is stored; 0 for one that a newer version has written."""
    return number if number in {int(status) for status in Status} else 0
