"""One graph's part of an inspection: its collectives and what the passes did, as data and as plain-text tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..passes import GraphRecord, HardwareProfile, Plan, Prediction
from ..passes.ir.phases import is_backward, phase_of
from ..passes.ir.provenance import Marker, find_reduces, find_unshards
from ..passes.wire.copies import is_copy, launch_to_host
from .collectives import Collective, collectives_of, num_bytes_of
from .graph_code import runnable_code
from .predicted import StepRecords, collectives_table, steps_of
from .tables import format_bytes, format_dtype, format_unit, plural, shorten, table


class GraphReport:
    """The record of one graph: collectives, passes, code and prediction."""

    def __init__(self, record: GraphRecord, number: int, step: StepRecords | None = None) -> None:
        self.record = record
        self.number = number
        self._step = steps_of([record])[0] if step is None else step

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.launches)} collectives>"

    @property
    def stage(self) -> str:
        """joint, forward, backward or inference; whole where backward was traced into the graph of its forward."""
        return self.record.stage

    @property
    def plan(self) -> Plan:
        return self.record.plan

    @property
    def predicted(self) -> Prediction:
        """The prediction for the step of this graph: seconds, bytes, which collectives are exposed, and why."""
        return self.predict()

    def predict(self, profile: HardwareProfile | str | Path | None = None) -> Prediction:
        """Predict the step on other hardware: a profile's name or file; by default the budget's or the built-in one."""
        return self._step.predicted(profile)

    @property
    def name(self) -> str:
        return f"{self.number:02d}_{self.stage}"

    @property
    def launches(self) -> list[Collective]:
        """Our collectives, in the order of launch; none in a joint graph, which still has markers."""
        return collectives_of(self.record.snapshots[-1], self.plan)

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's parts in all collectives."""
        return sum(launch.num_bytes for launch in self.launches)

    @property
    def copied_bytes(self) -> int:
        """Bytes that this rank writes once more to pack, pad and cut what travels."""
        return sum(launch.copied_bytes for launch in self.launches)

    def collectives(self) -> str:
        """The collectives, one a line, in the order of launch: kind, parameters, dtype, bytes of the whole bucket."""
        rows = [
            [one.kind, " ".join(one.fqns), format_dtype(one.dtype), format_bytes(one.bucket_bytes)]
            for one in self.launches
        ]
        return "\n".join(table(rows))

    def code(self, step: int = -1) -> str:
        """Runnable source: 0 is the graph as it reached the passes, n after the n-th pass, -1 after the last."""
        return runnable_code(self.record, range(len(self.record.snapshots))[step])

    def steps(self) -> list[str]:
        """Return the names of the steps that ``code`` takes by number."""
        return ["captured", *[one.name for one in self.record.passes]]

    def __str__(self) -> str:
        record = self.record
        passes = ", ".join(f"{one.name} {one.count} ({one.seconds * 1e3:.1f} ms)" for one in record.passes)
        markers = f"{plural(record.num_unshards, 'unshard')} and {plural(record.num_reduces, 'reduce_grad')}"
        if self.stage == "joint":
            became = what_becomes(self.plan, str(len(self.plan.again)))
            rows = self._joint_rows()
            if self.plan.choice is not None:
                rows += str(self.plan.choice).splitlines()
            if self._step.graphs:
                rows.append(self._said(lambda: [str(self.predicted)])[0])
        else:
            became = f"{plural(len(self.launches), 'collective')}, {format_bytes(self.num_bytes)} a rank"
            rows = self._launch_rows()
            if self._step.joint is None:
                rows.append(self._said(lambda: [str(self.predicted)])[0])
            if self.launches:
                rows += self._said(lambda: collectives_table(self.predicted.of(self.stage)))
            if any(map(is_copy, self.record.snapshots[-1].nodes)):
                rows += self._said(lambda: [self._copies_row()])
        lines = [f"{self.name}: {markers} -> {became}", *[f"  {row}" for row in rows], f"  passes: {passes}"]
        return "\n".join(lines)

    def _said(self, lines: Callable[[], list[str]]) -> list[str]:
        """Return the lines, or the error as a line: a report prints even if custom operators cannot be predicted."""
        try:
            return lines()
        except Exception as error:
            return [f"(not predicted: {error})"]

    def _copies_row(self) -> str:
        """Say what the graph copies of activations to or from the host, and what that takes."""
        copies = [node for node in self.record.snapshots[-1].nodes if is_copy(node)]
        flights = [self.predicted.of(self.stage).timeline.flights[node.name] for node in copies]
        size = format_bytes(sum(num_bytes_of(node.meta["val"]) for node in copies))
        seconds, waited_s = sum(one.launch.seconds for one in flights), sum(one.exposed_s for one in flights)
        where = "to" if copies[0].target is launch_to_host else "from"
        return (
            f"{plural(len(copies), 'activation')}, {size}, copied {where} the host in {seconds * 1e3:.3f} ms, "
            f"{waited_s * 1e3:.3f} of them waited for"
        )

    def _launch_rows(self) -> list[str]:
        if not self.launches:
            return ["(no collective: one rank holds every shard)"]
        header = ["#", "collective", "unit", "params", "names", "dtype", "bytes/rank", "bucket", "copied"]
        rows = [
            [
                str(place),
                one.kind,
                one.unit,
                str(len(one.fqns)),
                shorten(one.fqns, one.unit),
                format_dtype(one.dtype),
                format_bytes(one.num_bytes),
                format_bytes(one.bucket_bytes),
                format_bytes(one.copied_bytes) if one.copied_bytes else "-",
            ]
            for place, one in enumerate(self.launches)
        ]
        if any(one.host_bytes for one in self.launches):
            header.append("host")
            for row, one in zip(rows, self.launches):
                row.append(format_bytes(one.host_bytes))
        return table([header, *rows], right=(0, 3, 6, 7, 8, 9))

    def _joint_rows(self) -> list[str]:
        graph = self.record.snapshots[-1]
        reduced = {marker.fqn for marker in find_reduces(graph)}
        residency = self._step.residency
        units: dict[tuple[str, str], list[Marker]] = {}
        for marker in find_unshards(graph):
            if is_backward(phase_of(marker.node)):
                continue  # in a whole step, where the parameter's forward marker has the row
            units.setdefault((marker.unit, residency[marker.fqn].becomes), []).append(marker)
        rows = []
        for (unit, policy), markers in units.items():
            fqns = [marker.fqn for marker in markers]
            size = sum(num_bytes_of(marker.node.meta["val"]) for marker in markers)
            num_reduced = sum(fqn in reduced for fqn in fqns)
            unit, why = format_unit(unit), ", or ".join(dict.fromkeys(residency[fqn].why for fqn in fqns))
            rows.append([unit, str(len(fqns)), shorten(fqns, unit), policy, str(num_reduced), format_bytes(size), why])
        header = ["unit", "params", "names", "in backward", "reduced", "gathered", "why"]
        return table([header, *rows], right=(1, 4, 5))


def what_becomes(plan: Plan, again: str) -> str:
    """Say what becomes of parameters after forward; ``again`` says how many are gathered again."""
    said = f"{again} gathered again in backward, {len(plan.keep)} kept"
    if plan.slices:
        said += f", slices of {len(plan.slices)}"
    if plan.recompute:
        said += f", activations of {len(plan.recompute)} computed again"
    if plan.offload:
        said += f", activations of {len(plan.offload)} on the host"
    return said
