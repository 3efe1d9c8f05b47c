"""What a process remembers of the keys it has seen."""

from participant_sdk.idempotency.repeats import FIRST_WEIGHS, KEYS_MAX, TIDE_MAX, Repeats


def test_it_remembers_the_youngest_and_no_more_than_it_may() -> None:
    repeats = Repeats()
    keys = [number.to_bytes(32, "big") for number in range(5 * KEYS_MAX)]
    for key in keys:
        repeats.add(key)
    remembered = [key in repeats for key in keys]
    assert sum(remembered) <= 2 * KEYS_MAX
    assert all(remembered[-KEYS_MAX:])


def test_repeats_prevail_above_three_in_four_and_the_tide_turns_soon() -> None:
    repeats = Repeats()
    assert not repeats.prevail()
    for number in range(400):  # three in four
        repeats.met(b"", repeat=number % 4 != 3)
    assert not repeats.prevail()
    for _ in range(1_000):
        repeats.met(b"", repeat=True)
    assert repeats.prevail()
    for _ in range(int(TIDE_MAX / FIRST_WEIGHS)):
        repeats.met(b"", repeat=False)
    assert not repeats.prevail()
    assert b"" in repeats
