"""The measurements of one variant over all its runs, and the figures computed from them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.settings import RankResult

Ranks = tuple[RankResult, ...]


@dataclass
class Record:
    """All runs of one variant. The figures are None where nothing was measured."""

    name: str
    about: str
    runs: list[Ranks] = field(default_factory=list)
    """Time runs; in each, one result per rank."""
    cold_first_step_s: list[float] = field(default_factory=list)
    warm_first_step_s: list[float] = field(default_factory=list)
    memory_runs: list[Ranks] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    log_tail: str = ""

    @property
    def run_medians_s(self) -> list[float]:
        """One figure per run: the median step of the slowest rank, which sets the pace."""
        return [max(statistics.median(rank.step_s) for rank in ranks) for ranks in self.runs]

    @property
    def step_s(self) -> float | None:
        return statistics.median(self.run_medians_s) if self.runs else None

    @property
    def spread_s(self) -> tuple[float, float] | None:
        """The lowest and the highest of the runs' medians; of the steps, if there is only one run."""
        if not self.runs:
            return None
        figures = self.run_medians_s
        if len(figures) == 1:
            figures = [second for rank in self.runs[0] for second in rank.step_s]
        return min(figures), max(figures)

    @property
    def shares_s(self) -> tuple[float, float, float] | None:
        """The parts of a step, averaged over timed steps and ranks: CPU time of the thread that trains, of all others,
        and the rest, in which a rank that has one core to itself waits for the wire or for another rank."""
        if not self.runs:
            return None
        ranks = [rank for run in self.runs for rank in run]
        own = statistics.fmean(rank.own_cpu_s for rank in ranks)
        other = statistics.fmean(rank.other_cpu_s for rank in ranks)
        return own, other, max(0.0, statistics.fmean(s for rank in ranks for s in rank.step_s) - own - other)

    @property
    def peak_bytes(self) -> float | None:
        if not self.memory_runs:
            return None
        return statistics.median(
            max(statistics.median(rank.peak_bytes) for rank in ranks) for ranks in self.memory_runs
        )

    @property
    def sent_bytes_per_step(self) -> float | None:
        if not self.runs:
            return None
        return statistics.median(max(rank.sent_bytes_per_step for rank in ranks) for ranks in self.runs)

    @property
    def collectives(self) -> dict[str, int]:
        return self.runs[-1][0].collectives if self.runs else {}

    @property
    def losses(self) -> list[list[float]]:
        """For each run, the mean loss over ranks at each step."""
        return [mean_losses(ranks) for ranks in self.runs]


def mean_losses(ranks: Ranks) -> list[float]:
    return [statistics.fmean(step) for step in zip(*(rank.losses for rank in ranks), strict=True)]


def first_step_s(ranks: Ranks) -> float:
    return max(rank.first_step_s for rank in ranks)


def worst_deviation(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference at any step; infinite where a loss is not a number."""
    if len(losses) != len(reference):
        return float("inf")
    pairs = zip(losses, reference, strict=True)
    differences = [abs(loss - expected) / abs(expected) for loss, expected in pairs]
    return max((d if d == d else float("inf") for d in differences), default=float("inf"))


def ratio(
    records: Mapping[str, Record], name: str, baseline: str, figure: Callable[[Record], float | None]
) -> float | None:
    if baseline not in records:
        return None
    above, below = figure(records[name]), figure(records[baseline])
    return above / below if above is not None and below else None
