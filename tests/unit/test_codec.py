"""Rows as they are stored: what was written before a field was added still reads, and an empty field costs nothing."""

from typing import NamedTuple

import msgspec
import pytest

from coordinator.codec import UnreadableRow, format_of, new_row, saved_row, transaction
from coordinator.model import (
    Attention,
    BranchSpec,
    BranchStatus,
    Dropped,
    End,
    Joined,
    Past,
    Payload,
    Phase,
    Refusal,
    Resolution,
    Run,
    Seen,
    Spec,
    State,
    Step,
    Transaction,
)
from coordinator.store.rows import Row

XID = bytes.fromhex("0190000000007000800000000000002a")
BODY = bytes.fromhex(
    "92cd77249293a662616e6b2d61a5646562697492c40c7b22616d6f756e74223a337db06170706c69636174696f6e2f6a736f6e93a662616e"
    "6b2d62a663726564697492c400a0"
)
PROGRESS = bytes.fromhex(
    "93cf0000018bcfe56b20a09297020000a0a2663192c40468656c64aa746578742f706c61696ec097020105a46c617465a26632c0c0"
)
OLD_ROW = Row(
    XID, 1_700_000_000_123, b"shop\0order-1", BODY, ",bank-a,bank-b,", 1, 3, 77, 2, 1, 1_700_000_010_000,
    1_700_000_000_900, PROGRESS,
)  # fmt: skip
"""As the coordinator wrote it before transactions had metadata, each branch with all its fields."""
SHORT_PROGRESS = bytes.fromhex(
    "93cf0000018bcfe56b20a09296020000a0a2663192c40468656c64aa746578742f706c61696e95020105a46c617465a26632"
)
"""As it writes that now: without the last fields of a branch where they are empty."""
OLD = Transaction(
    Spec(
        XID, b"shop\0order-1", 1_700_000_000_123, 30_500,
        (BranchSpec("bank-a", "debit", Payload(b'{"amount":3}', "application/json")), BranchSpec("bank-b", "credit")),
    ),
    State.CONFIRMING,
    (
        Step(BranchStatus.TRIED, fence_id="f1", result=Payload(b"held", "text/plain")),
        Step(BranchStatus.TRIED, 1, 5, "late", "f2"),
    ),
    3, 77, 1_700_000_010_000, Attention.RETRYING, 1_700_000_000_900, 1_700_000_000_800,
)  # fmt: skip
PAST = (
    Past(
        2,
        (Run(Phase.TRY, "gone", False, 1, 3, 1_700_000_000_200, 1_700_000_000_700),),
        Dropped(2, 9, 1_700_000_000_300, 1_700_000_000_600),
        (End(BranchStatus.TRIED, 1_700_000_000_800),),
    ),
)
METADATA = (("tenant", "a"), ("trace", "é" * 256))


def test_a_row_of_the_old_form_is_read() -> None:
    assert transaction(OLD_ROW) == OLD
    assert transaction(OLD_ROW).spec.metadata == ()


def test_a_transaction_without_metadata_is_written_so_that_a_program_of_before_reads_it() -> None:
    """Byte for byte but for the fields that are left out, which every program's own code takes for empty."""
    row = new_row(OLD)
    assert row == OLD_ROW._replace(progress=SHORT_PROGRESS)
    assert old_steps(row.progress) == list(map(tuple, OLD.steps))
    refused = Step(BranchStatus.REFUSED, refusal=Refusal("no", "why"))
    for step in (Step(), refused, Step(BranchStatus.CONFIRMED, fence_id="f")):
        assert old_steps(saved_row(OLD._replace(steps=(step,))).progress) == [tuple(step)]


class OldStep(NamedTuple):
    """A branch as the first program reads it."""

    status: int = 1
    attempts: int = 0
    next_ms: int = 0
    error: str = ""
    fence_id: str = ""
    result: Payload | None = None
    refusal: Refusal | None = None


def old_steps(progress: bytes) -> list[tuple[object, ...]]:
    """As its own code read them."""
    return list(map(tuple, msgspec.msgpack.decode(progress, type=tuple[int, str, tuple[OldStep, ...]])[2]))


def test_metadata_comes_back() -> None:
    tx = OLD._replace(spec=OLD.spec._replace(metadata=METADATA))
    row = new_row(tx)
    assert transaction(row) == tx
    assert row._replace(body=b"") == OLD_ROW._replace(body=b"", progress=SHORT_PROGRESS)


def test_what_was_resolved_by_hand_comes_back_in_format_3() -> None:
    resolved = (Resolution(2, False, "alice", "paid back by hand", 1_700_000_000_850, True),)
    tx = OLD._replace(resolved=resolved)
    row = new_row(tx)
    assert (row.format, format_of(OLD)) == (3, 1)
    assert transaction(row) == tx
    assert (tx.mixed, tx.resolution_of(1), tx.resolution_of(0)) == (True, resolved[0], None)
    enlisted = tx._replace(joined=(Joined("k"),), seen=(Seen(1, 2),), sealed=False, renewed_ms=9)
    assert transaction(new_row(enlisted)).resolved == resolved


def test_a_program_of_before_refuses_what_it_would_lose() -> None:
    """It reads the row as its own code did, and must not send calls without their metadata."""
    body = new_row(OLD._replace(spec=OLD.spec._replace(metadata=METADATA))).body
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=tuple[int, tuple[BranchSpec, ...]])


def test_labels_come_back_and_need_format_3() -> None:
    for spec in (OLD.spec, OLD.spec._replace(metadata=METADATA, ordered=True)):
        tx = OLD._replace(spec=spec._replace(labels=(("order", "42"),)))
        row = new_row(tx)
        assert transaction(row) == tx
        assert (row.format, saved_row(tx).format) == (3, 3)
        assert format_of(OLD._replace(spec=spec)) < 3


FORMAT_3_PROGRESS = bytes.fromhex("99cf0000018bcfe56b20a09197020000a0a26631c0c0c30090909090")
"""With labels, as it was written before rows had a past."""


PAST_PROGRESS = bytes.fromhex(
    "9acf0000018bcfe56b20a09297020000a0a2663192c40468656c64aa746578742f706c61696ec097020105a46c617465a26632c0c0c300909090"
    "90919402919701a4676f6e65c20103cf0000018bcfe568c8cf0000018bcfe56abc940209cf0000018bcfe5692ccf0000018bcfe56a58919202cf"
    "0000018bcfe56b20"
)
"""With a past."""


def test_what_branches_went_through_comes_back_in_format_3() -> None:
    for tx in (OLD, OLD._replace(seen=(Seen(1, 2),), sealed=False, renewed_ms=9)):
        row = new_row(tx._replace(past=PAST))
        assert row.format == 3
        assert transaction(row) == tx._replace(past=PAST)
    row = new_row(OLD)._replace(format=3, progress=PAST_PROGRESS)
    assert transaction(row) == OLD._replace(past=PAST)


@pytest.mark.parametrize("highest", [1, 2])
def test_a_past_is_left_out_where_older_programs_may_read(highest: int) -> None:
    """Byte for byte what they would write."""
    ordered = OLD._replace(spec=OLD.spec._replace(ordered=True))
    for tx, row_format in ((OLD, 1), (ordered, 2)):
        assert saved_row(tx._replace(past=PAST), highest) == saved_row(tx)
        assert saved_row(tx).format == row_format


def test_a_row_of_format_3_without_a_past_is_read() -> None:
    labelled = OLD._replace(spec=OLD.spec._replace(labels=(("order", "42"),)), steps=OLD.steps[:1])
    labelled = labelled._replace(steps=(Step(BranchStatus.TRIED, fence_id="f1"),), attention=Attention.NONE)
    row = new_row(labelled)
    assert transaction(row) == transaction(row._replace(progress=FORMAT_3_PROGRESS)) == labelled


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x90",
        BODY[:-1],
        msgspec.msgpack.encode((30_500, OLD.spec.branches, METADATA, "1")),
        msgspec.msgpack.encode((30_500, OLD.spec.branches, {"tenant": "a"})),
        msgspec.msgpack.encode((30_500, OLD.spec.branches, [("tenant", 1)])),
    ],
    ids=["empty", "too little", "cut", "a text", "a map", "a number"],
)
def test_what_is_not_understood_is_not_guessed(body: bytes) -> None:
    with pytest.raises(UnreadableRow, match=XID.hex()):
        transaction(OLD_ROW._replace(body=body))


def test_the_next_version_differs_in_what_each_save_writes_anew() -> None:
    for tx in (OLD, OLD._replace(sealed=False, renewed_ms=9, joined=(Joined("k"),), wake_ms=None)):
        for wake_ms in (None, 6):
            assert tx.next_version(10, wake_ms) == tx._replace(version=4, save_id=10, wake_ms=wake_ms)
