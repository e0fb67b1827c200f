"""Record what the passes do to a model: every graph before and after every pass, every collective, every plan.

    with fsdp_compile.inspect(model) as report:
        model(x).sum().backward()          # compiles, also if it was compiled before
    print(report)                          # a table for each graph
    report.save("inspected")               # the graphs as files that run, the plans as JSON

One rank may use it alone: compiling issues no collective. Outside the block nothing is recorded or slowed down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from .._torch_compat import dynamo, inductor
from ..core.unit import Unit, original_class
from ..eager.around import around_observers
from ..eager.running import running
from ..graph.install import manager
from ..page.page import page_of
from ..page.picture import Picture
from ..page.trace import trace_events
from ..passes import GraphRecord, Plan
from ..passes.schedule.buckets import gather_buckets, reduce_buckets
from .pictured import pictured
from .predicted import steps_of
from .report import GraphReport
from .tables import WIDTH, format_bytes, format_unit, plural, table
from .trial import observing


@contextlib.contextmanager
def inspect(model: nn.Module) -> Iterator[Report]:
    """Compile ``model`` afresh when it runs inside the block, and record what the passes do.

    The report fills while the block runs. It holds every graph with sharded parameters that compiles in the block,
    other models' included. Run backward inside the block too: its graph is compiled when it first runs.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"inspect takes the model, but got {type(model).__name__}. For a compiled train step, pass the model that "
            "it trains, and call the step inside the block."
        )
    classes = {type(module) for module in model.modules() if original_class(module) is not type(module)}
    report = Report(original_class(dynamo.behind_compile(model)).__name__, num_sharded_classes=len(classes))
    report.num_forgotten = dynamo.forget_compiled(classes)
    num_graphs_before = dynamo.num_dynamo_graphs()
    by_passes = observing(manager.observers, report.records.append)
    try:
        with by_passes, observing(around_observers, report.stood_around), inductor.no_compile_caches():
            yield report
    finally:
        report.num_dynamo_graphs = dynamo.num_dynamo_graphs() - num_graphs_before


@dataclass(frozen=True)
class Around:
    """What the eager path launches around the graphs of a unit that is compiled by itself or in parts.

    These are the collectives of one forward and one backward, if the unit trains and its gradients are reduced.
    """

    unit: str  # "layers.0 (Block)"
    num_params: int
    num_gathers: int  # in forward
    num_again: int  # in backward
    gathered_bytes: int  # one rank's part
    num_reductions: int
    reduced_bytes: int


def _around(unit: Unit) -> Around:
    """Count the collectives that the eager path launches around the unit's graphs."""
    gathered = running(unit).current()
    specs = gathered.specs
    train = [spec for spec, shard in zip(specs, gathered.shards) if shard.requires_grad]
    sent = [spec for spec in specs if spec.num_shards > 1]
    reduced = [spec for spec in train if spec.num_shards > 1 or spec.num_replicas > 1]
    return Around(
        unit=format_unit(f"{unit.label}:{unit.path_of(unit.modules[0])}"),  # as plans write it: class and path
        num_params=len(specs),
        num_gathers=len(gather_buckets(sent)),
        num_again=len(gather_buckets([spec for spec in sent if not spec.is_table])) if unit.regather else 0,
        gathered_bytes=sum(spec.gather_bytes for spec in sent),
        num_reductions=len(reduce_buckets(reduced)),
        reduced_bytes=sum(spec.reduce_bytes for spec in reduced),
    )


class Report:
    """The graphs, plans and collectives that ``inspect`` recorded."""

    def __init__(self, model: str, num_sharded_classes: int) -> None:
        self.model = model
        self.records: list[GraphRecord] = []
        self.num_forgotten = 0  # frames that had been compiled before the block
        self.num_dynamo_graphs = 0  # captured in the block, also those without sharded parameters
        # Units that are compiled by themselves or in parts, and the collectives around their graphs.
        self.around: dict[Unit, Around] = {}
        self._num_sharded_classes = num_sharded_classes

    def stood_around(self, unit: Unit) -> None:
        """Note the collectives that the eager path launches around the unit's graph."""
        if unit not in self.around:
            self.around[unit] = _around(unit)

    @property
    def graphs(self) -> list[GraphReport]:
        """Every graph that the passes saw, in the order in which they saw it."""
        step_of = {id(record): step for step in steps_of(self.records) for record in step.records}
        return [GraphReport(record, number, step_of[id(record)]) for number, record in enumerate(self.records)]

    @property
    def joint(self) -> GraphReport:
        """The joint graph, which still has its markers; LookupError unless there is exactly one."""
        return self._only("joint")

    @property
    def forward(self) -> GraphReport:
        return self._only("forward")

    @property
    def backward(self) -> GraphReport:
        return self._only("backward")

    @property
    def inference(self) -> GraphReport:
        """The graph of a forward without gradients."""
        return self._only("inference")

    @property
    def plans(self) -> list[Plan]:
        return [record.plan for record in self.records]

    def _only(self, stage: str) -> GraphReport:
        found = [graph for graph in self.graphs if graph.stage == stage]
        if len(found) == 1:
            return found[0]
        have = ", ".join(graph.name for graph in self.graphs) or "none"
        hint = "" if found else "".join(f" {note}" for note in self.notes)
        raise LookupError(f"{len(found)} {stage} graphs were recorded (of all: {have}). See report.graphs.{hint}")

    @property
    def notes(self) -> list[str]:
        """Sentences that explain the tables: how the graphs came about, and what is missing."""
        notes = []
        if self.num_forgotten:
            notes.append(
                f"{self.model} had been compiled before (in {plural(self.num_forgotten, 'frame')}): that was dropped, "
                "and what ran in the block was compiled afresh."
            )
        stages = {record.stage for record in self.records}
        if any(graph.launches for graph in self.graphs):
            notes.append(
                "#: order of launch in the graph that Inductor gets. bytes/rank: what one rank gives to a gather or "
                "gets from a reduction. bucket: all ranks' parts, padding included. copied: what this rank writes once "
                "more to pack, pad and cut; what travels alone is sent from its shard and read where it came. takes: "
                "with nothing else on the links. beside it: compute between its launch and its wait. exposed: of "
                "waiting."
            )
        if self.around:
            notes.append(
                "Units that are compiled by themselves, or in parts, take gathered weights: their graphs have no "
                "collective for them, and are not shown where they have no other. The eager path gathers and reduces "
                "around them, one unit ahead and one behind."
            )
        if not stages:
            return notes if self.around else [*notes, self._why_nothing()]
        notes.append(
            "Compile caches were not read in the block (no pass runs when they hit) and not written. What was compiled "
            "stays in use after it; another process may be served from a cache."
        )
        if stages == {"joint"}:
            notes.append(
                "Only joint graphs: the backend does not run Inductor's post-grad passes (aot_eager), or another "
                "setting of post_grad_custom_pre_pass replaced ours (call fsdp_compile.install_passes() after it). The "
                "markers run as they are, one collective each."
            )
        elif "forward" in stages and "backward" not in stages:
            notes.append("No backward graph: it is compiled when backward first runs. Call backward() in the block.")
        return notes

    def _why_nothing(self) -> str:
        if not self._num_sharded_classes:
            return (
                f"Nothing was recorded: {self.model} has no sharded module. Call fully_shard(...) on its blocks and on "
                "itself first, and pass that model."
            )
        if self.num_dynamo_graphs:
            return (
                f"Nothing was recorded, though {plural(self.num_dynamo_graphs, 'graph')} compiled in the block: none "
                "that the passes saw reads a sharded parameter. Use the backend inductor or aot_eager (not eager), and "
                "see TORCH_LOGS=graph_breaks,recompiles for frames that fell back to eager."
            )
        return (
            f"Nothing was recorded: {self.model} did not run in the block, or it ran eagerly. Compile it "
            "(torch.compile(model), or model.compile()) and run one step of what that returns inside the block."
        )

    def __str__(self) -> str:
        graphs = self.graphs
        num_collectives = sum(len(graph.launches) for graph in graphs)
        total = format_bytes(sum(graph.num_bytes for graph in graphs))
        title = f"{self.model}: {plural(len(graphs), 'graph')}"
        if graphs:
            title += f", {plural(num_collectives, 'collective')}, {total} a rank"
        if self.around:
            gathers = sum(one.num_gathers + one.num_again for one in self.around.values())
            reductions = sum(one.num_reductions for one in self.around.values())
            title += f"; {plural(gathers, 'gather')} and {plural(reductions, 'reduction')} a step around "
            title += plural(len(self.around), "compiled unit")
        tables = [*map(str, graphs), *([_table_around(self.around.values())] if self.around else [])]
        return "\n\n".join([title, *tables, "\n".join(textwrap.fill(note, WIDTH) for note in self.notes)])

    def html(self, path: str | Path) -> Path:
        """Write one page that shows every step: time line, memory, collectives, what each pass changed, the plan.

        The page opens offline in any browser, and needs no other file.
        """
        return _written(path, page_of(self.picture()))

    def chrome_trace(self, path: str | Path) -> Path:
        """Write the planned steps as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""
        return _written(path, json.dumps(trace_events(self.picture())))

    def picture(self) -> Picture:
        """Return the data that the page and the trace show."""
        return pictured(self.model, steps_of(self.records), self.notes)

    def save(self, folder: str | Path) -> list[Path]:
        """Write every graph before and after each pass, the plans and the report; return the files.

            report.txt
            01_forward/plan.json
            01_forward/0_captured.py  1_insert.py  2_overlap.py  ...

        All ranks write files of the same names: give each rank its own folder.
        """
        folder = Path(folder)
        files = {folder / "report.txt": f"{self}\n"}
        for graph in self.graphs:
            files[folder / graph.name / "plan.json"] = f"{graph.plan.to_json()}\n"
            for step, name in enumerate(graph.steps()):
                files[folder / graph.name / f"{step}_{name}.py"] = graph.code(step)
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return list(files)


def _table_around(units: Iterable[Around]) -> str:
    """Return a table with one line for all units that differ only in their names."""
    alike: dict[Around, list[str]] = {}
    for one in units:
        alike.setdefault(dataclasses.replace(one, unit=""), []).append(one.unit)
    rows = [["unit", "params", "gathers", "bytes/rank", "in backward", "reductions", "bytes/rank"]]
    for one, names in alike.items():
        more = f" and {len(names) - 1} like it" if len(names) > 1 else ""
        rows.append(
            [
                names[0] + more,
                str(one.num_params),
                str(one.num_gathers),
                format_bytes(one.gathered_bytes),
                "again" if one.num_again else "kept",
                str(one.num_reductions),
                format_bytes(one.reduced_bytes),
            ]
        )
    lines = table(rows, right=(1, 2, 3, 5, 6))
    return "\n".join(["around graphs, by the eager path:", *[f"  {line}" for line in lines]])


def _written(path: str | Path, text: str) -> Path:
    path = Path(path)
    path.write_text(text, encoding="utf-8")
    return path
