"""A bank that runs calls together, as a process of its own, for tests that kill it.

    python -m tests.contract.participant.together_process FLAVOUR URL

It prints "serves ADDRESS", and "waits XID" where a handler of mode "slow" waits for a line of its input.
"""

import asyncio
import sys

from participant_sdk import Call
from tests.contract.participant.together import Together
from tests.contract.participant.world import Debit


class Obedient(Together):
    """Slow handlers wait for whoever reads the output."""

    def hold_up(self, what: str, call: Call[Debit]) -> None:
        if call.payload.mode == "slow":
            print("waits", call.xid, flush=True)
            sys.stdin.readline()


async def main(flavour: str, url: str) -> None:
    bank = Obedient(flavour, url)
    await bank.start()
    print("serves", bank.serving.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
