"""A till as a process of its own, for tests that kill it. Its provider is whoever reads its output.

    python -m tests.contract.participant.till_process FLAVOUR URL

It prints "serves ADDRESS FENCE_ID", then a line "authorise XID BRANCH_ID" (or capture, void) for each request to the
provider, and waits for a line that answers it. It ends when its input does.
"""

import asyncio
import sys
import threading
import warnings

from tests.contract.participant.till import Key, Provider, Till


class WireProvider(Provider):
    """The provider at the other end of standard input and output."""

    def __init__(self) -> None:
        super().__init__()
        self._answered = threading.Semaphore(0)
        self.closed = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for _ in sys.stdin:
            self._answered.release()
        self.closed.set()

    def _ask(self, what: str, key: Key) -> None:
        print(what, *key, flush=True)
        self._answered.acquire()

    def authorise(self, key: Key, amount: int) -> None:
        self._ask("authorise", key)

    def capture(self, key: Key) -> None:
        self._ask("capture", key)

    def void(self, key: Key) -> None:
        self._ask("void", key)


async def main(flavour: str, url: str) -> None:
    provider = WireProvider()
    till = Till(flavour, url, provider)
    try:
        await till.start()
        print("serves", till.serving.address, till.serving.fence_id, flush=True)
        await asyncio.to_thread(provider.closed.wait)
    finally:
        await till.close()


if __name__ == "__main__":
    warnings.simplefilter("error")
    asyncio.run(main(*sys.argv[1:]))
