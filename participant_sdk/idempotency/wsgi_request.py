"""A WSGI request as the HTTP door sees it: as an ASGI scope, so that what an operation says is said once; its body."""

from __future__ import annotations

import re
from typing import Any, Final, TypeAlias

from participant_sdk.asgi import Scope
from participant_sdk.idempotency.errors import RequestTooLarge
from participant_sdk.idempotency.http_spool import CHUNK_BYTES, Spool, check_declared
from participant_sdk.idempotency.problems import RequestLengthMissing, RequestTruncated
from participant_sdk.idempotency.request_parts import BodyHasher, HashedBody

Environ: TypeAlias = dict[str, Any]

ENVIRON: Final = "wsgi.environ"
"""Where a scope that was made here has its environ."""
_DIGITS: Final = re.compile(r"[0-9]+")


def place_of(environ: Environ) -> Scope:
    """Method and path of a request: enough to find its operation."""
    root, path = _text(environ.get("SCRIPT_NAME", "")), _text(environ.get("PATH_INFO", ""))
    return {"type": "http", "method": environ["REQUEST_METHOD"], "path": root + path or "/", "root_path": root}


def scope_of(environ: Environ) -> Scope:
    """A request as an ASGI scope, with its environ under "wsgi.environ". Lines of one name have become one, by WSGI."""
    headers = [
        (name[5:].replace("_", "-").lower().encode("latin-1", "replace"), value.encode("latin-1", "replace"))
        for name, value in environ.items()
        if name.startswith("HTTP_") and isinstance(value, str)
    ]
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            headers.append((name.replace("_", "-").lower().encode(), environ[name].encode("latin-1", "replace")))
    return {
        **place_of(environ),
        "scheme": environ.get("wsgi.url_scheme", "http"),
        "query_string": environ.get("QUERY_STRING", "").encode("latin-1", "replace"),
        "headers": headers,
        "client": (environ["REMOTE_ADDR"], 0) if environ.get("REMOTE_ADDR") else None,
        ENVIRON: environ,
    }


def _text(bytes_as_text: str) -> str:
    """What WSGI hands over as Latin-1 is UTF-8; what is not even that stays another path than any other."""
    return bytes_as_text.encode("latin-1", "replace").decode("utf-8", "surrogateescape")


class WsgiBody:
    """A request's whole body, hashed as it arrived."""

    def __init__(self, spool: Spool, hashed: HashedBody) -> None:
        self.spool = spool
        self.hashed = hashed

    def put_into(self, environ: Environ) -> None:
        """Have the application read it, from its beginning, and with its length said."""
        environ.pop("HTTP_TRANSFER_ENCODING", None)
        environ["wsgi.input"] = self.spool.reader()
        environ["wsgi.input_terminated"] = True
        environ["CONTENT_LENGTH"] = str(self.spool.size)


def read_body(environ: Environ, bytes_max: int) -> WsgiBody:
    """The body of a request. Never reads past its end, where a server would wait for more.

    Raises RequestTooLarge as soon as that is known, RequestTruncated for a Content-Length that is none or says more
    than there is, and RequestLengthMissing for chunks that the server has not taken apart.
    """
    left = _length(environ)
    check_declared(None if left is None else b"%d" % left, bytes_max)
    spool, hasher = Spool(), BodyHasher()
    try:
        while left is None or left > 0:
            chunk: bytes = environ["wsgi.input"].read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES))
            if not chunk:
                break
            hasher.add(chunk)
            if hasher.size > bytes_max:
                raise RequestTooLarge(bytes_max)
            spool.add(chunk)
            left = None if left is None else left - len(chunk)
        if left:
            raise RequestTruncated(f"the request ends {left} bytes before the end that its Content-Length says")
    except BaseException as error:
        spool.close()
        if isinstance(error, OSError):
            raise RequestTruncated("the request has broken off") from error
        raise
    return WsgiBody(spool, hasher.done(spool.whole))


def _length(environ: Environ) -> int | None:
    """How much there is to be read; None: up to the end."""
    declared = str(environ.get("CONTENT_LENGTH") or "")
    chunked = bool(environ.get("HTTP_TRANSFER_ENCODING"))
    if environ.get("wsgi.input_terminated") and (chunked or not declared):
        return None
    if chunked:
        raise RequestLengthMissing
    if not declared:
        return 0
    if not _DIGITS.fullmatch(declared):
        raise RequestTruncated("Content-Length is not a number of bytes")
    return int(declared[:20])
