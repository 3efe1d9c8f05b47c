"""The keyed shop in a process of its own, that SIGKILL may end: `python -m … server urls address mode where`.

`where` "work": it kills itself in the middle of the work; else it dies where its environment says, if it says so.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from participant_sdk.idempotency.operation import Mode

from .keyed_shop import Shop, policy


def operation(mode: Mode) -> dict[str, Any]:
    """How the process runs its method."""
    lease = {} if mode is Mode.ATOMIC else {"lease_s": 1.0}
    return {"mode": mode, "wait_s": 30.0, **lease}


def main(server: str, url: str, address: str, mode: str, where: str) -> None:
    """Serve until killed."""
    with Shop(server, (url, url), [policy(operation=operation(Mode(mode)))], address=address) as shop:
        shop.mortal = where == "work"
        print("serves", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
