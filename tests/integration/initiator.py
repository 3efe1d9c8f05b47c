"""Either client called from asyncio, so that a test is written once; its blocks and its streams, too."""

import asyncio
import inspect
from types import TracebackType
from typing import Any, Self

from participant_sdk import AsyncTricordClient, TransactionState, TricordClient


class Awaited:
    """An object of either flavour: every call of its methods is awaited, the sync one's in a thread."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.made, name)
        if not callable(found):
            return found

        async def call(*arguments: Any, **named: Any) -> Any:
            if inspect.iscoroutinefunction(found):
                return await found(*arguments, **named)
            return await asyncio.to_thread(found, *arguments, **named)

        return call

    async def __aenter__(self) -> Self:
        await (self.made.__aenter__() if hasattr(self.made, "__aenter__") else asyncio.to_thread(self.made.__enter__))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if hasattr(self.made, "__aexit__"):
            await self.made.__aexit__(kind, error, at)
        else:
            await asyncio.to_thread(self.made.__exit__, kind, error, at)


class Initiator(Awaited):
    """A client: `async with initiator.block(timeout=20) as tx: await tx.try_(...)`."""

    def __init__(self, kind: str, endpoint: str) -> None:
        super().__init__(TricordClient(endpoint) if kind == "sync" else AsyncTricordClient(endpoint))

    def block(self, **arguments: Any) -> Awaited:
        """See `TricordClient.transaction`."""
        return Awaited(self.made.transaction(**arguments))

    async def watched(self, **arguments: Any) -> list[TransactionState]:
        """The states that `watch` tells, when it has ended."""
        watch = self.made.watch(**arguments)
        if hasattr(watch, "__anext__"):
            return [each.state async for each in watch]
        return [each.state for each in await asyncio.to_thread(list, watch)]
