"""A coordinator that dies, as by SIGKILL, of each row that it claims whose participant is "poison", for tests.

python -m tests.integration.mortal serve …the coordinator's own options…
"""

from __future__ import annotations

import os
import signal

from coordinator import engine
from coordinator.cli import main
from coordinator.codec import transaction
from coordinator.model import Transaction
from coordinator.store.rows import Row


def read(row: Row) -> Transaction:
    """Read a row, if it is not the last that this process does."""
    if row.participants == ",poison,":
        os.kill(os.getpid(), signal.SIGKILL)
    return transaction(row)


if __name__ == "__main__":
    vars(engine)["transaction"] = read
    main()
