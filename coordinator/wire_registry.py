"""Registrations as they come in, checked before anything is stored; each complaint names the field and the limit."""

from __future__ import annotations

from tricord.v1 import registry_pb2

from .errors import InvalidRequest, Violation
from .store.rows import ParticipantRow
from .wire import ADDRESS, ADDRESS_CHARS_MAX, FENCE_ID_CHARS_MAX, check_name

ACTIONS_MAX = 256


def read_registration(request: registry_pb2.RegisterParticipantRequest) -> ParticipantRow:
    """A checked registration. Raises InvalidRequest, with every wrong field."""
    wrong: list[Violation] = []
    _name("participant", request.participant, wrong)
    _address(request.address, wrong)
    if not 0 < len(request.actions) <= ACTIONS_MAX:
        wrong.append(Violation("actions", f"has {len(request.actions)} actions; 1 to {ACTIONS_MAX} are needed"))
    actions: dict[str, str] = {}
    for n, action in enumerate(request.actions):
        _name(f"actions[{n}].name", action.name, wrong)
        if action.name in actions:
            wrong.append(Violation(f"actions[{n}].name", f"is there twice: {action.name}"))
        fence_id = action.fence_id
        if not 0 < len(fence_id) <= FENCE_ID_CHARS_MAX or not fence_id.isprintable():
            limit = f"needs 1 to {FENCE_ID_CHARS_MAX} printable characters"
            wrong.append(Violation(f"actions[{n}].fence_id", limit))
        actions[action.name] = fence_id
    if wrong:
        raise InvalidRequest(*wrong)
    return ParticipantRow(request.participant, request.address, actions)


def read_withdrawal(request: registry_pb2.WithdrawParticipantRequest) -> tuple[str, str]:
    """The checked name and address of who stops. Raises InvalidRequest, with every wrong field."""
    wrong: list[Violation] = []
    _name("participant", request.participant, wrong)
    _address(request.address, wrong)
    if wrong:
        raise InvalidRequest(*wrong)
    return request.participant, request.address


def is_address(text: str) -> bool:
    """Whether it is host:port, as participants and settings name their addresses."""
    match = ADDRESS.match(text)
    return match is not None and len(text) <= ADDRESS_CHARS_MAX and 0 < int(match[2]) < 65536


def _address(text: str, wrong: list[Violation]) -> None:
    if not is_address(text):
        wrong.append(Violation("address", f"is not host:port with at most {ADDRESS_CHARS_MAX} characters"))


def _name(field: str, name: str, wrong: list[Violation]) -> None:
    try:
        check_name(field, name)
    except InvalidRequest as error:
        wrong += error.violations
