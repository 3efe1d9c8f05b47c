"""What the phases of a run leave is met again in the same order, or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.phase_log import LOG_BYTES_MAX, Entry, PhaseLog, Sort

ORDER = Entry("order", Sort.PHASE, b"1")
CHARGE = Entry("charge", Sort.FOREIGN, b"\x00\xff")


def written(*entries: Entry) -> bytes:
    log, data = PhaseLog("pay", None), b""
    for entry in entries:
        log.meet(entry.name, Sort.FOREIGN if entry.sort is Sort.PENDING else entry.sort)
        data = log.with_entry(entry)
        log.reached(entry)
    return data


def test_what_is_done_is_skipped_and_what_is_not_is_run() -> None:
    log = PhaseLog("pay", written(ORDER, CHARGE))
    assert log.meet("order", Sort.PHASE) == ORDER
    assert log.meet("charge", Sort.FOREIGN) == CHARGE
    assert log.meet("paid", Sort.PHASE) is None
    paid = Entry("paid", Sort.PHASE)
    assert log.with_entry(paid) == written(ORDER, CHARGE, paid)


def test_a_call_that_may_have_been_made_is_met_until_it_has_answered() -> None:
    pending = Entry("charge", Sort.PENDING)
    log = PhaseLog("pay", written(ORDER, pending))
    assert log.meet("order", Sort.PHASE) == ORDER
    assert log.meet("charge", Sort.FOREIGN) == pending
    assert log.meet("charge", Sort.FOREIGN) == pending
    assert log.with_entry(CHARGE) == written(ORDER, CHARGE)
    log.reached(CHARGE)
    assert log.meet("paid", Sort.PHASE) is None


def test_another_order_another_name_or_another_sort_is_refused() -> None:
    for name, sort in (("charge", Sort.FOREIGN), ("order", Sort.FOREIGN), ("other", Sort.PHASE)):
        log = PhaseLog("pay", written(ORDER, CHARGE))
        with pytest.raises(ConfigurationError, match="comes where an earlier attempt had the phase 'order'"):
            log.meet(name, sort)


def test_a_name_comes_once_and_is_a_name() -> None:
    log = PhaseLog("pay", None)
    log.meet("order", Sort.PHASE)
    log.reached(ORDER)
    with pytest.raises(ConfigurationError, match="'order' comes a second time"):
        log.meet("order", Sort.PHASE)
    for name in ("", "a b", "é", "x" * 101, "a\n"):
        with pytest.raises(ConfigurationError, match="1 to 100 printable ASCII"):
            log.meet(name, Sort.PHASE)


def test_outputs_that_are_too_large_are_refused() -> None:
    log = PhaseLog("pay", None)
    log.meet("order", Sort.PHASE)
    with pytest.raises(ValueError, match=f"{LOG_BYTES_MAX} are allowed"):
        log.with_entry(Entry("order", Sort.PHASE, b"x" * LOG_BYTES_MAX))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"version":2,"phases":[]}',
        b'{"version":1,"phases":[["a","phase"]]}',
        b'{"version":1,"phases":[["a","other",""]]}',
        b'{"version":1,"phases":[["a","phase","?"]]}',
        b'{"version":1,"phases":[["a","phase",1]]}',
        b'{"version":1,"phases":7}',
        b'{"version":1,"phases":[[1,"phase",""]]}',
    ],
)
def test_what_cannot_be_read_is_told(data: bytes) -> None:
    with pytest.raises(ConfigurationError, match="pay: what its phases have left cannot be read"):
        PhaseLog("pay", data)


@given(st.binary())
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        PhaseLog("pay", data)
    except ConfigurationError:
        return
    pytest.fail("nothing but what a log has written can be read")


@given(st.lists(st.tuples(st.from_regex(r"[!-~]{1,9}", fullmatch=True), st.binary()), unique_by=lambda each: each[0]))
def test_whatever_is_written_is_met_again(phases: list[tuple[str, bytes]]) -> None:
    entries = [Entry(name, Sort.PHASE, output) for name, output in phases]
    log = PhaseLog("pay", written(*entries) or None)
    assert [log.meet(entry.name, Sort.PHASE) for entry in entries] == entries


def test_what_is_stored_today_can_be_read_for_ever() -> None:
    kept = b'{"version":1,"phases":[["order","phase","MQ=="],["charge","foreign","AP8="],["ship","pending",""]]}'
    assert written(ORDER, CHARGE, Entry("ship", Sort.PENDING)) == kept
    log = PhaseLog("pay", kept)
    assert log.meet("order", Sort.PHASE) == ORDER
