"""What the coordinator is to reach, by the name of the metric: ratios in one run on one machine of two cores."""

from __future__ import annotations

from typing import NamedTuple


class Goal(NamedTuple):
    """A limit, and on which side of it the figure has to be."""

    sign: str
    """``>=``, ``<=`` or ``<``."""
    limit: float

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:,g}"

    def met_by(self, value: float) -> bool:
        """Whether a figure is where it has to be."""
        if self.sign == "<":
            return value < self.limit
        return value >= self.limit if self.sign == ">=" else value <= self.limit

    @property
    def more_is_better(self) -> bool:
        """Which way a figure gets worse."""
        return self.sign == ">="


GOALS: dict[str, Goal] = {
    "stream_ratio": Goal(">=", 2.5),
    "stream_ratio_2": Goal(">=", 3.0),
    "unary_ratio": Goal(">=", 0.5),
    "latency_ratio": Goal("<=", 1.5),
    "cpu_us_stream": Goal("<=", 200),
    "cpu_us_unary": Goal("<=", 1_000),
    "commits_per_tx": Goal("<=", 0.02),
    "wal_bytes_per_tx": Goal("<=", 1_200),
    "p99_over_p50": Goal("<=", 4),
    "rss_mb_10k": Goal("<=", 200),
    "sqlite_ratio": Goal(">=", 1.0),
    "workers_cpu_ratio": Goal("<=", 1.15),
    # At one client: the begin and the decision; the last save rides on the next one's begin, but for the very last.
    "commits_per_tx_unary_1": Goal("<=", 2.05),
    "commits_per_tx_unary_64": Goal("<", 1.0),
    "idle_cpu_pct": Goal("<", 1),
    "idle_rss_mb": Goal("<", 120),
}
