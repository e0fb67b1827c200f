"""Log each graph that compiles to Python's logging and to torch's trace.

    logging at INFO, "fsdp_compile"          one line for each graph
    FSDP_COMPILE_LOGS=plan,passes,graph      the same on stderr, followed by the parts that are named here
        plan      its table, as `inspect` prints it
        passes    what each pass did, and how long it took
        graph     its code after the last pass
    TORCH_TRACE=folder                       plan, table and the code before and after each pass, as artifacts of the
                                             frame that compiles: tlparse shows them

No pass runs on a graph that comes from a compile cache, so such a graph is not logged.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

import torch.distributed as dist

from .._torch_compat import dynamo
from ..graph.install import manager
from ..passes import GraphRecord
from ..passes.manager import Listener
from .report import GraphReport, what_becomes
from .tables import format_bytes, plural, table

VARIABLE = "FSDP_COMPILE_LOGS"
NAMES = ("plan", "passes", "graph")

logger = logging.getLogger("fsdp_compile")


class Log:
    """Logs each graph that the passes see."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._num_graphs = 0

    def wants_graphs(self) -> bool:
        """Whether the log needs copies of the graphs."""
        return not self.names.isdisjoint(("plan", "graph")) or dynamo.is_tracing_to_a_file()

    def tell(self, record: GraphRecord) -> None:
        report = GraphReport(record, self._num_graphs)
        self._num_graphs += 1
        if logger.isEnabledFor(logging.INFO):
            logger.info("\n".join([_rank() + _line(report), *self._below(report)]))
        if dynamo.is_tracing_to_a_file():
            _trace(report)

    def _below(self, report: GraphReport) -> list[str]:
        lines = []
        if "plan" in self.names:
            lines += str(report).splitlines()
        if "passes" in self.names:
            rows = [[one.name, str(one.count), f"{one.seconds * 1e3:.1f} ms"] for one in report.record.passes]
            lines += ["  " + line for line in table([["pass", "did", "took"], *rows], right=(1, 2))]
        if "graph" in self.names:
            lines += report.record.codes[-1].splitlines()
        return lines


def start_logging(said: str) -> Log:
    """Log all graphs from now on; ``said`` is the value of FSDP_COMPILE_LOGS."""
    names = {name.strip() for name in said.split(",")} - {""}
    unknown = names.difference(NAMES)
    if unknown:
        warnings.warn(
            f"{VARIABLE} says {', '.join(sorted(unknown))}, which is nothing to log: it takes {', '.join(NAMES)}, with "
            "commas between them.",
            stacklevel=2,
        )
    if names.intersection(NAMES):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    log = Log(frozenset(names.intersection(NAMES)))
    manager.listeners.append(Listener(log.tell, log.wants_graphs))
    return log


def start_logging_as_environment_says() -> None:
    start_logging(os.environ.get(VARIABLE, ""))


def _line(report: GraphReport) -> str:
    plan, record = report.plan, report.record
    if report.stage == "joint":
        what = what_becomes(plan, plural(len(plan.again), "parameter"))
    else:
        gathers = f"{plural(len(plan.gathers), 'gather')} of {_size(plan.gathers)}"
        what = f"{gathers}, {plural(len(plan.reduces), 'reduction')} of {_size(plan.reduces)} a rank"
    took = sum(one.seconds for one in record.passes)
    return f"fsdp_compile {report.name}: {what}; plan {plan.id}, passes {took * 1e3:.0f} ms"


def _size(buckets: tuple) -> str:  # type: ignore[type-arg]
    return format_bytes(sum(bucket.num_bytes for bucket in buckets))


def _rank() -> str:
    return f"[rank {dist.get_rank()}] " if dist.is_available() and dist.is_initialized() else ""


def _trace(report: GraphReport) -> None:
    name = f"fsdp_compile_{report.stage}"
    dynamo.trace_artifact(f"{name}_plan", "json", report.plan.to_json())
    dynamo.trace_artifact(f"{name}_table", "string", str(report))
    stages = ["captured", *[one.name for one in report.record.passes]]
    for number, (stage, code) in enumerate(zip(stages, report.record.codes)):
        dynamo.trace_artifact(f"{name}_{number}_{stage}", "string", code)
