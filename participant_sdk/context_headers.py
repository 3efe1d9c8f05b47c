"""The current xid and branch id as they travel with a request: two headers, the same in gRPC metadata and in HTTP.

What is sent and what is accepted is said here once; `interceptors` and `asgi` only carry it. A header that is there
but wrong is an error and never "no transaction": work that was meant to belong to one must not run outside of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from participant_sdk.context import BRANCH_ID_FORM, BRANCH_ID_MAX, XID_FORM, current_branch_id, current_xid, is_xid

XID_HEADER: Final = "tricord-xid"
BRANCH_ID_HEADER: Final = "tricord-branch-id"

_BRANCH_ID: Final = re.compile(r"[1-9][0-9]{0,9}")  # digits only: int() would take "+7", "0_7" and more


class MalformedHeader(ValueError):
    """A request's header does not name a transaction or branch. The text names the header and what it must be."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name = name


def outgoing_headers() -> dict[str, str]:
    """The headers that carry the current xid and branch id with a request to another service; empty without an xid.

    `httpx.post(url, headers={**outgoing_headers(), …})`; requests, aiohttp and urllib take them the same way.
    """
    xid, branch_id = current_xid(), current_branch_id()
    if xid is None:
        return {}
    return {XID_HEADER: xid} if branch_id is None else {XID_HEADER: xid, BRANCH_ID_HEADER: str(branch_id)}


def headers_to_add(present: Iterable[str]) -> list[tuple[str, str]]:
    """What to add to a request that has headers of these names: nothing if its sender has set one of the two.

    Not even the other one: the sender's xid must not get the branch id of the current one.
    """
    return [] if {XID_HEADER, BRANCH_ID_HEADER} & set(present) else list(outgoing_headers().items())


def read_headers(headers: Iterable[tuple[str | bytes, str | bytes]]) -> tuple[str | None, int | None]:
    """The xid and branch id that a request brings, as `bound` takes them; its names are in lower case.

    Raises MalformedHeader if one of the two has not its form, is there twice, or the branch id comes alone.
    """
    found: dict[str, str] = {}
    for key, value in headers:
        name = _text(key)
        if name not in (XID_HEADER, BRANCH_ID_HEADER):
            continue
        if name in found:
            raise MalformedHeader(name, "is there more than once")
        found[name] = _text(value)
    xid, branch_id = found.get(XID_HEADER), found.get(BRANCH_ID_HEADER)
    if xid is not None and not is_xid(xid):
        raise MalformedHeader(XID_HEADER, f"is not {XID_FORM}")
    if branch_id is None:
        return xid, None
    if xid is None:
        raise MalformedHeader(BRANCH_ID_HEADER, f"is there without {XID_HEADER}")
    if not _BRANCH_ID.fullmatch(branch_id) or int(branch_id) > BRANCH_ID_MAX:
        raise MalformedHeader(BRANCH_ID_HEADER, f"is not {BRANCH_ID_FORM}")
    return xid, int(branch_id)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
