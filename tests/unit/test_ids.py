"""What an engine draws at random: as unlike as what is read from the system each time."""

from types import SimpleNamespace

import pytest

import coordinator.ids
from coordinator.ids import Ids, new_xid

NOW_MS = 1_700_000_000_123


def test_xids_are_alike_but_for_their_randomness() -> None:
    ids = Ids()
    xids = [ids.xid(NOW_MS) for _ in range(2_000)] + [new_xid(NOW_MS)]
    assert len(set(xids)) == len(xids)
    for xid in xids:
        assert (len(xid), int.from_bytes(xid[:6], "big"), xid[6] >> 4, xid[8] >> 6) == (16, NOW_MS, 7, 2)


def test_save_ids_are_positive_and_of_63_bits() -> None:
    ids = Ids()
    drawn = [ids.save_id() for _ in range(2_000)]
    assert len(set(drawn)) == len(drawn)
    assert min(drawn) > 0
    assert 2**60 < max(drawn) <= 2**62


def test_no_byte_is_used_twice_where_one_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = iter([bytes(range(20)), bytes(range(100, 120))])
    monkeypatch.setattr(coordinator.ids, "os", SimpleNamespace(urandom=lambda _count: next(blocks)))
    ids = Ids()
    drawn = [ids._draw(8) for _ in range(4)]
    assert drawn == [bytes(range(start, start + 8)) for start in (0, 8, 100, 108)]
