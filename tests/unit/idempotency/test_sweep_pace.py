"""How often the sweeper walks through the table."""

from participant_sdk.idempotency.sweeping import IDLE_MAX, Pace, Sweep, SweepReport

SETTINGS = Sweep(every_s=60, page=10)
LITTLE = SweepReport(looked_at=10_000, deleted=3)
MUCH = SweepReport(looked_at=10_000, deleted=400)
SMALL = SweepReport(looked_at=50)
FAILED = SweepReport(error="no database")


def test_it_keeps_its_time_while_it_finds_something_or_costs_nothing() -> None:
    pace = Pace(SETTINGS)
    assert [pace.after(report) for report in (MUCH, SMALL, MUCH)] == [60, 60, 60]


def test_it_comes_less_often_while_it_finds_little() -> None:
    pace = Pace(SETTINGS)
    assert [pace.after(LITTLE) for _ in range(6)] == [120, 240, 480, 960, 960, 960]
    assert 60 * 2**IDLE_MAX == 960
    assert pace.after(MUCH) == 60


def test_it_comes_less_often_while_it_fails() -> None:
    pace = Pace(SETTINGS)
    assert [pace.after(FAILED) for _ in range(5)] == [120, 240, 480, 600, 600]
    assert pace.after(SMALL) == 60
    rare = Pace(Sweep(every_s=3_600))
    assert rare.after(FAILED) == 3_600
