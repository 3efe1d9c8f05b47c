"""When a client first sent what it wants done: whoever comes back after its record may be gone is told so.

A repeat that comes when its record has been swept would run as if it were the first. A client that says when it began
is refused instead: it has to find out what became of its intent. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import FirstSentMalformed, IntentTooOld
from participant_sdk.idempotency.kinds import NUMBER, check_kinds
from participant_sdk.idempotency.operation import Operation

SKEW_S_MAX: Final = 86_400
_DATE: Final = re.compile(r"@?([0-9]{1,11})")
_NAME: Final = re.compile(r"[0-9a-z!#$%&'*+.^_`|~-]{1,100}", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSent:
    """`name`: the header (gRPC: metadata, then in lower case) that holds the time at which a client first sent this.

    It is the Date of structured fields (RFC 9651), `@1767225600`: seconds since 1970, UTC; or the same number bare.
    `skew_s`: how far a client's clock may be off, in s; so much earlier than its record can be gone it is refused.
    `required`: whether a request with a key has to have it. Raises ConfigurationError.
    """

    name: str = "First-Sent"
    skew_s: float = 60.0
    required: bool = False

    def __post_init__(self) -> None:
        check_kinds("first_sent", self, name=str, skew_s=NUMBER, required=bool)
        if not _NAME.fullmatch(self.name):
            raise ConfigurationError(f"first_sent: name {self.name!r} is not the name of a header")
        if not (math.isfinite(self.skew_s) and 0 <= self.skew_s <= SKEW_S_MAX):
            raise ConfigurationError(f"first_sent: skew_s {self.skew_s!r} is not 0 to {SKEW_S_MAX} seconds")

    def check_operation(self, operation: Operation) -> None:
        """Raises ConfigurationError for an operation whose clients would all be refused."""
        if self.skew_s >= operation.ttl_s:
            raise ConfigurationError(
                f"{operation.name}: first_sent's skew_s {self.skew_s} is not shorter than ttl_s {operation.ttl_s}"
            )

    def check(self, operation: Operation, lines: Sequence[str | bytes], now_s: float) -> None:
        """`lines`: the values of all headers of that name; `now_s`: since 1970.

        Raises FirstSentMalformed for what is no time, and for one in the future; IntentTooOld.
        """
        if not lines:
            if self.required:
                raise FirstSentMalformed(f"{self.name} is required here, and is not there")
            return
        if len(lines) > 1:
            raise FirstSentMalformed(f"{self.name} is given {len(lines)} times; 1 is taken")
        text = lines[0].decode("latin-1") if isinstance(lines[0], bytes) else lines[0]
        found = _DATE.fullmatch(text.strip(" \t"))
        if found is None:
            raise FirstSentMalformed(f"{self.name} is not a time as @1767225600: 1 to 11 digits, seconds since 1970")
        age_s = now_s - int(found[1])
        if age_s < -self.skew_s:
            raise FirstSentMalformed(
                f"{self.name} lies {-age_s:.0f} seconds in the future; at most {self.skew_s:.0f} are taken"
            )
        if age_s > operation.ttl_s - self.skew_s:
            raise IntentTooOld(operation.ttl_s - self.skew_s)
