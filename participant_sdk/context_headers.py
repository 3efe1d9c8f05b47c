"""The current xid and branch id as they travel with a request: headers, the same in gRPC metadata and in HTTP.

A request also takes a branch key along (see `branch_keys`), and its answer brings back which branches were tried.

What is sent and what is accepted is said here once; `interceptors` and `asgi` only carry it. A request's header that
is there but wrong is an error and never "no transaction": work that was meant to belong to one must not run outside
of it. In an answer what is wrong counts as absent: a branch that is not seen tried bars the confirm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from participant_sdk.branch_keys import outgoing_branch_key
from participant_sdk.context import (
    BRANCH_ID_FORM,
    BRANCH_ID_MAX,
    BRANCH_KEY_FORM,
    XID_FORM,
    Scope,
    current_scope,
    current_xid,
    is_branch_key,
    is_xid,
    note_tried,
)

XID_HEADER: Final = "tricord-xid"
BRANCH_ID_HEADER: Final = "tricord-branch-id"
BRANCH_KEY_HEADER: Final = "tricord-branch-key"
TRIED_HEADER: Final = "tricord-tried"
"""Of an answer: the ids of the branches that were tried for it, with commas between them."""

_REQUEST_HEADERS: Final = frozenset({XID_HEADER, BRANCH_ID_HEADER, BRANCH_KEY_HEADER})
_BRANCH_ID: Final = re.compile(r"[1-9][0-9]{0,9}")  # digits only: int() would take "+7", "0_7" and more


class MalformedHeader(ValueError):
    """A request's header does not name a transaction or branch. The text names the header and what it must be."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name = name


def outgoing_headers() -> dict[str, str]:
    """The headers that carry the current xid and branch id with a request to another service; empty without an xid.

    `httpx.post(url, headers={**outgoing_headers(), …})`; requests, aiohttp and urllib take them the same way. Each call
    of it is for one request: its branch key tells that from others, and a repeat of it is to have the same headers.
    """
    return _headers("")


def headers_to_add(present: Mapping[str, object], target: str) -> dict[str, str]:
    """What to add to a request to `target` that has headers of these names, given in lower case.

    Nothing if its sender has set the xid or the branch id: its xid must not get the branch of the current one.
    """
    if XID_HEADER in present or BRANCH_ID_HEADER in present:
        return {}
    headers = _headers(target)
    if BRANCH_KEY_HEADER in present:
        headers.pop(BRANCH_KEY_HEADER, None)
    return headers


def _headers(target: str) -> dict[str, str]:
    scope = current_scope()
    if scope.xid is None:
        return {}
    headers = {XID_HEADER: scope.xid, BRANCH_KEY_HEADER: outgoing_branch_key(target)}
    if scope.branch_id is not None:
        headers[BRANCH_ID_HEADER] = str(scope.branch_id)
    return headers


def read_headers(headers: Iterable[tuple[str | bytes, str | bytes]], expires_at: float | None = None) -> Scope:
    """Where a request belongs, which has these headers, named in lower case, and whose sender waits until then.

    Raises MalformedHeader if one of them has not its form, is there twice, or comes without the xid.
    """
    found: dict[str, str] = {}
    for key, value in headers:
        name = _text(key)
        if name not in _REQUEST_HEADERS:
            continue
        if name in found:
            raise MalformedHeader(name, "is there more than once")
        found[name] = _text(value)
    if not found:
        return Scope(expires_at=expires_at)
    xid, branch_id, branch_key = (found.get(name) for name in (XID_HEADER, BRANCH_ID_HEADER, BRANCH_KEY_HEADER))
    if xid is None:
        raise MalformedHeader(next(iter(found)), f"is there without {XID_HEADER}")
    if not is_xid(xid):
        raise MalformedHeader(XID_HEADER, f"is not {XID_FORM}")
    if branch_id is not None and not _is_branch_id(branch_id):
        raise MalformedHeader(BRANCH_ID_HEADER, f"is not {BRANCH_ID_FORM}")
    if branch_key is not None and not is_branch_key(branch_key):
        raise MalformedHeader(BRANCH_KEY_HEADER, f"is not {BRANCH_KEY_FORM}")
    return Scope(xid, int(branch_id) if branch_id is not None else None, branch_key, expires_at)


def tried_header(branch_ids: Iterable[int]) -> tuple[str, str]:
    """The header of an answer that tells that these branches were tried for it."""
    return TRIED_HEADER, ",".join(str(branch_id) for branch_id in sorted(branch_ids))


def read_tried(headers: Iterable[tuple[str | bytes, str | bytes]]) -> frozenset[int]:
    """The branches that an answer with these headers, named in lower case, says were tried; none if it is not clear."""
    found: set[int] = set()
    for key, value in headers:
        if _text(key) != TRIED_HEADER:
            continue
        ids = [part.strip() for part in _text(value).split(",")]
        if not all(map(_is_branch_id, ids)):
            return frozenset()
        found.update(map(int, ids))
    return frozenset(found)


def collect_tried(headers: Mapping[str, str]) -> None:
    """Take note of the branches that a service which was called over HTTP has tried: `collect_tried(answer.headers)`.

    Call it for an answer that says that all went well, and for no other: the transaction may then be confirmed with
    these branches. Takes the headers of httpx, requests, aiohttp; does nothing without a current xid.
    """
    if (xid := current_xid()) is not None:
        note_tried(xid, read_tried([(key.lower(), value) for key, value in headers.items()]))


def _is_branch_id(text: str) -> bool:
    return _BRANCH_ID.fullmatch(text) is not None and int(text) <= BRANCH_ID_MAX


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
