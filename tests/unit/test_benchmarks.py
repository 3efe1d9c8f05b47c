"""What the benchmarks make of their figures: goals, comparison, growth, chart, page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import chart
from benchmarks.compare import compare
from benchmarks.goals import GOALS, Goal
from benchmarks.report import MARKS, Measure, judged, load, markdown, put_into, save
from benchmarks.soak import GROWTH_MB_MAX, Sample, growth_mb

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("goal", "met", "missed"),
    [(Goal(">=", 2.5), 2.5, 2.49), (Goal("<=", 200), 200, 200.1), (Goal("<", 1), 0.999, 1)],
)
def test_a_goal_has_a_right_side(goal: Goal, met: float, missed: float) -> None:
    assert goal.met_by(met)
    assert not goal.met_by(missed)


def test_a_figure_is_told_with_its_goal() -> None:
    measure = judged("cpu_us_unary", 1_100.0, "µs/transaction")
    assert (measure.goal, measure.met) == ("<= 1,000", False)


def _rate(value: float, spread: float | None = None) -> Measure:
    return Measure("stream_ratio", value, "pgbench", spread=spread)


def _cost(value: float) -> Measure:
    return Measure("cpu_us_stream", value, "µs/transaction")


@pytest.mark.parametrize(
    ("base", "new", "verdict"),
    [
        (_rate(2.0), _rate(1.7), "worse"),
        (_rate(2.0), _rate(2.3), "better"),
        (_rate(2.0), _rate(1.85), ""),  # within 10 %
        (_rate(2.0, spread=0.3), _rate(1.5), ""),  # its own repetitions lay as far apart
        (_rate(2.0), _rate(1.5, spread=0.3), ""),
        (_rate(2.0, spread=0.2), _rate(1.5), "worse"),
        (_cost(100.0), _cost(120.0), "worse"),
        (_cost(100.0), _cost(80.0), "better"),
        (Measure("no_goal_per_s", 100.0, "1/s"), Measure("no_goal_per_s", 80.0, "1/s"), "worse"),
        (Measure("other", 6.0, "", goal="≥ 5"), Measure("other", 4.0, "", goal="≥ 5"), "worse"),
        (Measure("no_goal_p99_ms", 100.0, "ms"), Measure("no_goal_p99_ms", 129.0, "ms"), ""),
        (Measure("no_goal_p99_ms", 100.0, "ms"), Measure("no_goal_p99_ms", 131.0, "ms"), "worse"),
        (Measure("no_goal_ms", 100.0, "ms"), Measure("no_goal_ms", 80.0, "ms"), "better"),
        (Measure("from_nothing", 0.0, "ms"), Measure("from_nothing", 1.0, "ms"), "worse"),
        (Measure("from_nothing", 0.0, "ms"), Measure("from_nothing", 0.0, "ms"), ""),
    ],
)
def test_what_is_worse_by_more_than_the_noise(base: Measure, new: Measure, verdict: str) -> None:
    (change,) = compare([base], [new])
    assert change.verdict == verdict
    assert (change.base, change.new) == (base.value, new.value)


def test_only_what_both_runs_have_is_compared() -> None:
    assert [change.metric for change in compare([_rate(1.0)], [_rate(1.0), _cost(1.0)])] == ["stream_ratio"]


@pytest.mark.parametrize(("value", "code"), [(1.99, 0), (1.0, 1)])
def test_compare_as_a_command(tmp_path: Path, value: float, code: int) -> None:
    """A saved folder beside the new one; what is worse decides the exit code."""
    for name, measure in (("base", _rate(2.0)), ("new", _rate(value))):
        (tmp_path / name).mkdir()
        save(tmp_path / name / "coordinator.json", [measure])
    done = _compare(tmp_path / "base", tmp_path / "new")
    assert done.returncode == code, done.stdout + done.stderr
    assert "stream_ratio" in done.stdout
    assert ("WORSE" in done.stdout) == bool(code)


@pytest.mark.parametrize("text", ["{", '{"metric": 1}', '[{"metrics": 1}]', "[1]"])
def test_what_is_no_run_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    done = _compare(tmp_path / "bad.json", tmp_path / "bad.json")
    assert done.returncode == 2
    assert "bad.json holds no figures of a benchmark" in done.stderr
    missing = _compare(tmp_path / "missing.json", tmp_path / "bad.json")
    assert missing.returncode == 2
    assert "missing.json" in missing.stderr


def _compare(base: Path, new: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.compare", str(base), str(new)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_figures_survive_the_file_and_make_a_table_for_a_page(tmp_path: Path) -> None:
    measures = [
        Measure("beside", 3.0, "ms", 2.0, 1.5),
        Measure("sweep.1.p50", 1.0, "ms"),
        judged("rss_mb_10k", 90.0, "MB"),
    ]
    save(tmp_path / "x.json", measures)
    assert load(tmp_path / "x.json") == measures
    lines = markdown(measures).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2:] == [
        "| `rss_mb_10k` | 90.000 | MB |  |  | <= 200 | yes |",
        "| `beside` | 3.000 | ms | 2.000 | 1.500 |  |  |",
    ]


def test_figures_go_between_the_marks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    put_into(page, "new\n")
    assert page.read_text() == f"before\n{MARKS[0]}\nnew\n{MARKS[1]}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no marks"):
        put_into(page, "new")
    assert MARKS[0] in (ROOT / "docs" / "performance.md").read_text()


def test_growth_is_seen_through_noise() -> None:
    """A leak of 64 bytes for each transaction, in samples that jump by 4 MB."""
    finished = range(0, 1_000_000, 10_000)
    still = [Sample(n, 90.0 + 4 * (number % 2)) for number, n in enumerate(finished)]
    leaking = [Sample(sample.finished, sample.rss_mb + sample.finished * 64 / 1e6) for sample in still]
    assert abs(growth_mb(still)) < 0.5 < GROWTH_MB_MAX < growth_mb(leaking)
    assert growth_mb([Sample(5, 1.0), Sample(5, 9.0)]) == 0.0  # nothing has moved


def test_a_chart_is_well_formed_and_stays_within_its_axes(tmp_path: Path) -> None:
    points = [(1.0, 3.0), (64.0, 700.0), (2048.0, 9_999.0)]
    panels = [
        chart.Panel(
            "a < b", [chart.Line("stream", points), chart.Line("unary", points[:1], 1)], ("pgbench & co", 12_000.0)
        ),
        chart.Panel("latency", [chart.Line("p50", points, dashed=True)], logarithmic=True),
    ]
    chart.write(tmp_path / "x.svg", "title", panels)
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    circles = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(circles) == 7
    assert all(chart.LEFT <= x <= chart.WIDTH and chart.TOP <= y <= chart.TOP + chart.PANEL_H for x, y in circles)
    (x1, y1), (x2, y2), (x3, y3) = circles[:3]
    assert x1 < x2 < x3
    assert y1 > y2 > y3  # up is more


def test_the_page_names_every_goal() -> None:
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "performance.md").read_text()))
    assert set(GOALS) <= named
