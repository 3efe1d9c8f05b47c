"""Asking a participant about its fence: one question at a time, each with a time-out, answers as plain values."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from tricord.v1 import participant_pb2 as pb
from tricord.v1 import participant_pb2_grpc as pb_grpc

from .delivery_link import CHANNEL_OPTIONS, could_not_connect
from .doctor import ALIKE_MAX, Answer, FenceFacts, Reach
from .doctor_fence import FenceRow
from .doctor_holds import HoldFacts, HoldSum, Mismatch
from .fence_word import Word
from .store.store import Store

ASK_S = 5.0
PAGE_S = 20.0
PAGE_ROWS = 1_000
"""As many transactions as a look-up takes."""
TEXT_CHARS_MAX = 300
_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
"""A connection of its own: else what deliveries know of the address answers, a second after it has come back."""

_REACHES = {
    grpc.StatusCode.UNIMPLEMENTED: Reach.NOT_OFFERED,
    grpc.StatusCode.NOT_FOUND: Reach.STRANGER,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reach.BUSY,
}

_OF_THE_QUERY = frozenset((grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.DEADLINE_EXCEEDED))


_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class FenceUnanswered(Exception):
    """A page did not come: why."""


class FenceLink:
    """A connection to one address of one participant."""

    def __init__(self, participant: str, address: str, channel: grpc.aio.Channel) -> None:
        self._participant = participant
        self._address = address
        self._stub: pb_grpc.ParticipantServiceAsyncStub = pb_grpc.ParticipantServiceStub(channel)

    async def ask(self, store: Store) -> Answer:
        """Whether it answers, how long that took, and what there is to know of its fence."""
        sent_s, sent_ms = time.monotonic(), store.now_ms()
        fence, reach, text = None, Reach.ANSWERED, ""
        try:
            request = pb.GetFenceRequest(participant=self._participant)
            told = await self._stub.GetFence(request, timeout=ASK_S, wait_for_ready=False)
        except grpc.aio.AioRpcError as error:
            text = _text(error)
            reach = _REACHES.get(error.code()) or (Reach.UNREADABLE if _is_its_own(error) else Reach.SILENT)
        else:
            took_ms = store.now_ms() - sent_ms
            skew_ms = told.now.ToMilliseconds() - (sent_ms + took_ms // 2)
            fence = FenceFacts(told.fence_id, told.retention.ToMilliseconds(), skew_ms, -(-took_ms // 2))
        took_ms = int((time.monotonic() - sent_s) * 1000)
        return Answer(self._participant, self._address, reach, took_ms, text, fence)

    async def branch(self, xid: str, branch_id: int) -> Word:
        """What it says of one branch, or why it says nothing."""
        request = pb.GetBranchRequest(participant=self._participant, xid=xid, branch_id=branch_id)
        try:
            told = await self._stub.GetBranch(request, timeout=ASK_S, wait_for_ready=False)
        except grpc.aio.AioRpcError as error:
            silent = Reach.UNREADABLE if _is_its_own(error) else Reach.SILENT
            other = silent if error.code() in _SILENT else Reach.NOT_OFFERED
            return Word(self._address, _REACHES.get(error.code(), other), _text(error))
        row = _row(told.branch, told.now.ToMilliseconds()) if told.HasField("branch") else None
        return Word(self._address, Reach.ANSWERED, fence_id=told.fence_id, row=row)

    async def rows(self, grace_ms: int, pages_max: int) -> AsyncIterator[list[FenceRow]]:
        """Its fence rows that have not changed for so long, page by page; between pages it rests for as long.

        The last page is None-terminated by the iterator's end; raises FenceUnanswered, also if there are more pages.
        """
        request = pb.ListBranchesRequest(participant=self._participant, page_size=PAGE_ROWS)
        request.min_age.FromMilliseconds(grace_ms)
        for _ in range(pages_max):
            began_s = time.monotonic()
            try:
                page = await self._stub.ListBranches(request, timeout=PAGE_S)
            except grpc.aio.AioRpcError as error:
                raise FenceUnanswered(_text(error)) from error
            now_ms = page.now.ToMilliseconds()
            yield [_row(branch, now_ms) for branch in page.branches]
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token
            await asyncio.sleep(time.monotonic() - began_s)
        raise FenceUnanswered(f"only the oldest {pages_max * PAGE_ROWS} rows of its table were compared")

    async def holds(self) -> HoldFacts:
        """What it holds in its own tables, as it compares that with its fence; nothing if it declares none."""
        request = pb.CompareHoldsRequest(participant=self._participant, mismatches_max=ALIKE_MAX)
        try:
            told = await self._stub.CompareHolds(request, timeout=PAGE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return HoldFacts()
            return HoldFacts(_text(error), is_query=error.code() in _OF_THE_QUERY)
        sums = [HoldSum(each.unit, each.reserved, each.tried) for each in told.sums]
        mismatches = [_mismatch(each) for each in told.mismatches]
        compared = f"{told.holds} holds compared with {told.tried} TRIED branches"
        return HoldFacts("", False, compared, sums, told.leaked, told.missing, mismatches, told.compared_until)


@asynccontextmanager
async def fence_link(participant: str, address: str) -> AsyncIterator[FenceLink]:
    """A connection for as long as the block lasts."""
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        yield FenceLink(participant, address, channel)


async def words_of(participant: str, addresses: Iterable[str], fence_id: str, xid: str, branch_id: int) -> list[Word]:
    """What all addresses of a participant say of a branch; only the first that speaks for this fence, if one does."""

    async def ask(address: str) -> Word:
        async with fence_link(participant, address) as link:
            return await link.branch(xid, branch_id)

    asking = [asyncio.create_task(ask(address)) for address in addresses]
    words = []
    try:
        for asked in asyncio.as_completed(asking):
            words.append(await asked)
            if words[-1].is_of(fence_id):
                return words[-1:]
        return words
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


def _row(branch: pb.FenceBranch, now_ms: int) -> FenceRow:
    return FenceRow(
        branch.xid,
        branch.branch_id,
        branch.action,
        int(branch.status),
        branch.finished,
        branch.external,
        branch.running,
        now_ms - branch.update_time.ToMilliseconds(),
    )


def _mismatch(each: pb.HoldMismatch) -> Mismatch:
    leaked = each.kind == pb.HOLD_MISMATCH_KIND_LEAKED
    branch = each.xid, each.branch_id, each.action, int(each.status), each.participant
    return Mismatch(leaked, *branch, each.amount, each.unit)


def _is_its_own(error: grpc.aio.AioRpcError) -> bool:
    """Whether it is the participant that answers so, and not the connection that fails: only it says this."""
    return (error.details() or "").startswith("the fence cannot be read")


def _text(error: grpc.aio.AioRpcError) -> str:
    if could_not_connect(error):
        return "cannot be reached"
    return " ".join((error.details() or error.code().name).split())[:TEXT_CHARS_MAX]
