"""The result of ``explain``, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..api.fitting import listed
from ..passes import Prediction
from ..passes.cost.owners import MemoryOwners
from ..passes.cost.predicted import PredictedCollective
from .breaks import BreakReport
from .inspect import Report
from .tables import format_bytes, format_dtype, format_unit, located, plural, table, terminal_width, wrapped

_CURVE = 60  # columns of the memory curve
_LEVELS = " ▁▂▃▄▅▆▇█"
_OWNERS = 6


@dataclass(frozen=True)
class ExplainedBucket:
    """One collective of the step."""

    stage: str  # of its graph
    launch: PredictedCollective  # bytes, dtype, places, seconds, hidden share, and the verdict in words
    apart: str  # why it does not travel with the next one of its kind; empty for the last


@dataclass(frozen=True)
class ExplainedParameter:
    """One parameter, and the collectives that it travels in."""

    fqn: str
    unit: str  # "layers.0 (Block)"
    dtype: str  # in which it is gathered
    num_bytes: int  # of one rank's part of the gather
    reduce_dtype: str  # in which its gradient is reduced
    becomes: str  # after forward: kept, gathered again or not needed; empty where there is no backward
    why: str
    buckets: tuple[ExplainedBucket, ...]

    @property
    def hidden_share(self) -> float:
        """The share of its collectives' seconds that computation does not wait for."""
        total = sum(one.launch.seconds for one in self.buckets)
        exposed = sum(min(one.launch.exposed_s, one.launch.seconds) for one in self.buckets)
        return 1 - exposed / total if total else 1.0


@dataclass(frozen=True)
class ExplainedMemory:
    """One graph's memory: bytes by kind over its time, and who owns the peak."""

    stage: str
    at_s: tuple[float, ...]
    owners: MemoryOwners


@dataclass(frozen=True)
class ExplainedStep:
    """Graphs that run one after the other; a model that breaks has several steps."""

    predicted: Prediction
    buckets: tuple[ExplainedBucket, ...]
    parameters: tuple[ExplainedParameter, ...]
    memory: tuple[ExplainedMemory, ...]
    computed_again: tuple[str, ...] = ()  # parameters whose activations backward recomputes, by the plan


@dataclass
class Explanation:
    """The result of ``explain``: ``print`` it, or read ``steps`` and ``eagerly``."""

    model: str
    steps: tuple[ExplainedStep, ...]
    eagerly: tuple[str, ...]  # what ran outside of graphs, and why
    breaks: BreakReport = field(repr=False)
    report: Report = field(repr=False)  # of ``inspect``: tables, html, the graphs

    @property
    def buckets(self) -> tuple[ExplainedBucket, ...]:
        return tuple(bucket for step in self.steps for bucket in step.buckets)

    @property
    def parameters(self) -> tuple[ExplainedParameter, ...]:
        return tuple(one for step in self.steps for one in step.parameters)

    def __str__(self) -> str:
        width = terminal_width()
        lines = [f"{self.model}: {plural(len(self.steps), 'step')} of {plural(len(self.report.graphs), 'graph')}"]
        for step in self.steps:
            lines += ["", *_step(step, width)]
        lines += ["", "ran eagerly" if self.eagerly else "nothing ran eagerly", *[f"  {one}" for one in self.eagerly]]
        return "\n".join(lines)


def _step(step: ExplainedStep, width: int | None) -> Iterator[str]:
    yield from wrapped(str(step.predicted), width)
    places = ["launched behind", "waited for before"]
    header = ["#", "graph", "collective", "names", "dtype", "bytes/rank", *places, "hidden", ""]
    rows = [
        [
            str(place), one.stage, one.launch.kind, located(one.launch.fqns, format_unit(one.launch.unit)),
            format_dtype(one.launch.dtype), format_bytes(one.launch.num_bytes), one.launch.launched_behind,
            one.launch.waited_before, f"{one.launch.hidden_share:.0%}", one.launch.cause,
        ]
        for place, one in enumerate(step.buckets)
    ]  # fmt: skip
    lines = table([header, *rows], right=(0, 5, 8), width=None if width is None else width - 2)
    yield from (f"  {line}" for line in lines)
    exposed = [(place, one.launch) for place, one in enumerate(step.buckets) if not one.launch.is_hidden]
    if exposed:
        yield "exposed"
        for place, sent in exposed:
            because = f"#{place} {sent.exposed_s * 1e3:.3f} ms, because of {_BECAUSE[sent.cause]}: {sent.verdict}"
            yield from wrapped(because, width, indent="  ")
    apart = [(one.apart, f"#{place}") for place, one in enumerate(step.buckets)]
    yield from _grouped("not merged with the next", apart, width)
    stays = [(f"{one.becomes}: {one.why}", one.fqn) for one in step.parameters if one.becomes]
    stays += [("what is computed with it is computed again", fqn) for fqn in step.computed_again]
    yield from _grouped("from forward to backward", stays, width)
    yield from _memory(step, width)


_BECAUSE = {"compute": "compute", "memory": "memory", "dependency": "a dependency", "order": "the order"}


def _grouped(title: str, said: list[tuple[str, str]], width: int | None) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for words, name in said:
        if words:
            groups.setdefault(words, []).append(name)
    if groups:
        yield title
    for words, names in groups.items():
        yield from wrapped(f"{words} ({listed(names, most=4)})", width, indent="  ")


def _memory(step: ExplainedStep, width: int | None) -> Iterator[str]:
    if not any(one.owners.events for one in step.memory):
        return
    highest = max(step.memory, key=lambda one: max(one.owners.alive, default=0))
    top = max(highest.owners.alive)
    yield f"memory, up to {format_bytes(top)}"
    for one, graph in zip(step.memory, step.predicted.graphs):
        yield f"  {one.stage:<9} |{_curve(one, graph.seconds, top)}|"
    place = highest.owners.alive.index(top)
    kinds = {kind: levels[place] for kind, levels in highest.owners.of_kind.items() if levels[place]}
    parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sorted(kinds.items(), key=lambda pair: -pair[1]))
    peak = f"peak in {highest.stage} at {highest.owners.peak_at}: {parts}"
    yield from wrapped(peak, width, indent="  ")
    rows = [[f"{one.of or one.name}", one.kind, format_bytes(one.num_bytes)] for one in highest.owners.peak[:_OWNERS]]
    yield from (f"    {line}" for line in table(rows, right=(2,)))
    if len(highest.owners.peak) > _OWNERS:
        yield f"    and {len(highest.owners.peak) - _OWNERS} more"


def _curve(one: ExplainedMemory, seconds: float, top: int) -> str:
    """Draw memory over the graph's time: each column shows the most bytes that are alive in its part of the time."""
    columns = [0] * _CURVE
    ends = [*one.at_s[1:], seconds]
    for begin_s, end_s, count in zip(one.at_s, ends, one.owners.alive):
        first, last = (min(int(at_s / (seconds or 1.0) * _CURVE), _CURVE - 1) for at_s in (begin_s, end_s))
        for column in range(first, last + 1):
            columns[column] = max(columns[column], count)
    return "".join(_LEVELS[round(count / top * (len(_LEVELS) - 1))] for count in columns)
