"""The setting ``alert_url``: what is taken, and what of it may be shown."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field

ALERT_URL_CHARS_MAX = 2_000


def _check(url: str) -> str:
    if not url:
        return url
    from urllib3.exceptions import LocationParseError  # an HTTP client: only who names a URL needs it
    from urllib3.util import parse_url

    try:
        parts = parse_url(url)
    except LocationParseError as error:
        raise ValueError("must be a URL such as https://host/path") from error
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ValueError("must begin with http:// or https:// and a host")
    if not url.isprintable() or " " in url or parts.fragment is not None:
        raise ValueError("must have no blanks, control characters or #fragment")
    return url


AlertUrl: TypeAlias = Annotated[str, AfterValidator(_check), Field(max_length=ALERT_URL_CHARS_MAX)]
"""An http or https URL, or nothing."""


def masked_path(url: str) -> str:
    """An HTTP URL without its path and query, which often hold a secret."""
    return re.sub(r"(?s)(?<=[^:/])[/?#].+", "/***", url)
