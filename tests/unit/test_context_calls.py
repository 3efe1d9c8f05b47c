"""Calls that leave the running code: how a repeat of one is known again, and what they bring back of branches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from participant_sdk.branch_keys import enlisted_branch_key, handler_branch_key, outgoing_branch_key
from participant_sdk.context import (
    ContextThreadPoolExecutor,
    Scope,
    arrived,
    bound,
    collecting,
    note_tried,
    pinned_branch_key,
)
from participant_sdk.context_headers import collect_tried, outgoing_headers, read_tried, tried_header

A, B = "a" * 32, "b" * 32
WAIT_S = 30.0


class TestBranchKeys:
    """Which calls are known as repeats of each other."""

    def test_case_b2_a_call_that_is_served_again_makes_the_same_calls_again(self) -> None:
        def serve(scope: Scope) -> list[str | None]:
            with arrived(scope):
                return [
                    outgoing_branch_key("/a"), outgoing_branch_key("/a"), outgoing_branch_key("/b"),
                    enlisted_branch_key(scope), enlisted_branch_key(scope), outgoing_branch_key("/a"),
                ]  # fmt: skip

        first, again, other = (serve(Scope(A, 1, key)) for key in ("k", "k", "l"))
        assert first == again
        assert len({*first, *other}) == 12
        assert first[3:5] == ["k.1", "k.2"]

    def test_a_call_to_another_method_in_between_changes_no_key(self) -> None:
        with arrived(Scope(A, 1, "k")):
            plain = [outgoing_branch_key("/a"), outgoing_branch_key("/a")]
        with arrived(Scope(A, 1, "k")):
            assert [outgoing_branch_key(to) for to in ("/a", "/b", "/a")][::2] == plain

    def test_handlers_of_two_branches_have_their_own(self) -> None:
        keys = set()
        for branch_id in (1, 2):
            with arrived(Scope(A, branch_id, handler_branch_key(branch_id))):
                keys.add(outgoing_branch_key("/a"))
        assert len(keys) == 2

    def test_an_initiators_calls_are_all_new(self) -> None:
        with bound(A):
            assert len({outgoing_branch_key("/a") for _ in range(100)}) == 100
        assert enlisted_branch_key(Scope(A)) is None

    def test_a_pinned_one_is_carried_by_every_call_in_its_block(self) -> None:
        with bound(A):
            with pinned_branch_key("order-1/flight"):
                assert outgoing_branch_key("/a") == outgoing_branch_key("/a") == "order-1/flight"
                assert outgoing_headers()["tricord-branch-key"] == "order-1/flight"
                with arrived(Scope(A, 1, "k")):
                    assert outgoing_branch_key("/a") != "order-1/flight"  # another service's code
            assert outgoing_branch_key("/a") != "order-1/flight"

    @pytest.mark.parametrize("key", ["", "a b", "a,b", "k" * 201])
    def test_a_pinned_one_that_cannot_be_sent_is_refused(self, key: str) -> None:
        with pytest.raises(ValueError, match="1 to 200 characters"):
            pinned_branch_key(key)

    def test_positions_are_counted_over_threads_and_tasks(self) -> None:
        with arrived(Scope(A, 1, "k")), ContextThreadPoolExecutor(4) as pool:
            keys = set(pool.map(lambda _: outgoing_branch_key("/a"), range(40), timeout=WAIT_S))
        assert len(keys) == 40


class TestCollecting:
    """What was seen tried."""

    def test_nested_blocks_see_their_own(self) -> None:
        with collecting(A) as outer:
            note_tried(A, [1])
            with collecting(A) as inner:
                note_tried(A, [2, 3])
            note_tried(A, [4])
        note_tried(A, [5])
        assert (outer, inner) == ({1, 4}, {2, 3})

    def test_another_transactions_branches_go_to_the_block_of_that(self) -> None:
        with bound(A), collecting() as of_a:
            with bound(B), collecting() as of_b:
                note_tried(A, [1])
                note_tried(B, [2])
            note_tried(B, [3])
        assert (of_a, of_b) == ({1}, {2})

    def test_without_an_xid_the_first_one_counts(self) -> None:
        with collecting() as seen:
            note_tried(A, [1])
            note_tried(B, [2])
            note_tried(A, [3])
        assert seen == {1, 3}

    def test_what_begins_anew_shows_nothing_to_what_is_around_it(self) -> None:
        with collecting(A) as around, arrived(Scope(A)) as inside:
            note_tried(A, [1])
        assert (around, inside) == (set(), {1})
        with arrived(Scope()) as nowhere:
            note_tried(A, [1])
        assert nowhere == set()

    def test_threads_and_tasks_of_the_block_count(self) -> None:
        with collecting(A) as seen, ContextThreadPoolExecutor(2) as pool:
            list(pool.map(lambda number: note_tried(A, [number]), range(1, 9), timeout=WAIT_S))
        assert seen == set(range(1, 9))

    @given(st.frozensets(st.integers(1, 2**32 - 1), min_size=1, max_size=64))
    def test_what_is_told_is_understood(self, branch_ids: frozenset[int]) -> None:
        assert read_tried([tried_header(branch_ids)]) == branch_ids

    @pytest.mark.parametrize("value", ["", "0", "1,", "1,x", "-1", "1;2", "4294967296", "1,,2"])
    def test_what_is_malformed_names_nothing(self, value: str) -> None:
        assert read_tried([("tricord-tried", value)]) == frozenset()

    def test_http_answers_count_for_the_current_transaction(self) -> None:
        with bound(A), collecting() as seen:
            collect_tried({"Tricord-Tried": "3, 4", "accept": "x"})
        assert seen == {3, 4}
        with collecting() as seen:
            collect_tried({"tricord-tried": "3"})
        assert seen == set()
