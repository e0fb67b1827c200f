"""How many bytes a plan's collectives write once more, to pack, pad and cut: counted by hand."""

from __future__ import annotations

import torch

from fsdp_compile.passes import GraphRecord, ParamSpec
from fsdp_compile.passes.apply.insert import insert
from fsdp_compile.passes.schedule.planner import plan_graph
from fsdp_compile.tools.report import GraphReport
from tests.test_passes import Builder, offloaded, spec


def report_of(**shards: tuple[tuple[int, ...], ParamSpec]) -> GraphReport:
    """Of a graph that gathers each parameter, and reduces it as if it were its own gradient."""
    b = Builder()
    fulls = [(b.unshard(b.input(name, *size), its_spec), its_spec) for name, (size, its_spec) in shards.items()]
    graph = b.output(*[b.reduce(full, its_spec) for full, its_spec in fulls])
    plan = plan_graph(graph, "backward")
    insert(graph, plan)
    return GraphReport(GraphRecord("backward", plan, len(fulls), len(fulls), snapshots=[graph]), 0)


def copied(report: GraphReport) -> list[tuple[str, int]]:
    return [(one.kind, one.copied_bytes) for one in report.launches]


def test_what_travels_alone_is_sent_and_read_where_it_lies() -> None:
    report = report_of(weight=((2, 3), spec()))
    assert copied(report) == [("all_gather", 0), ("reduce_scatter", 0)]
    assert [line.split()[-1] for line in str(report).splitlines()[1:4]] == ["copied", "-", "-"]


def test_a_bucket_is_packed_and_cut() -> None:
    report = report_of(weight=((2, 3), spec()), bias=((2,), spec("up.bias", (4,), order=1)))
    # Gathered: 6 and 2 floats of this rank into one buffer, 12 and 4 out of what came. Reduced: 16 into one buffer, and
    # this rank's part is read where it came.
    assert copied(report) == [("all_gather", 4 * (8 + 16)), ("reduce_scatter", 4 * 16)]
    assert report.copied_bytes == 4 * 40
    assert [line.split()[-2:] for line in str(report).splitlines()[2:4]] == [["96", "B"], ["64", "B"]]


def test_what_is_cut_elsewhere_than_in_front_is_put_in_order() -> None:
    columns = spec(size=(4, 6), dim=1)
    assert copied(report_of(weight=((4, 3), columns))) == [("all_gather", 4 * 24), ("reduce_scatter", 4 * 24)]


def test_so_it_is_in_a_bucket_and_by_what_packs_that() -> None:
    columns, bias = spec(size=(4, 6), dim=1), spec("up.bias", (4,), order=1)
    report = report_of(weight=((4, 3), columns), bias=((2,), bias))
    assert copied(report) == [("all_gather", 4 * (14 + 28)), ("reduce_scatter", 4 * 28)]


def test_uneven_shards_are_padded_and_a_cast_is_no_copy() -> None:
    last_rank = spec(size=(3, 3), local_length=1, dtype=torch.bfloat16)
    # One row of two is there: the part that is sent is written with its padding, as is the gradient of three.
    assert copied(report_of(weight=((1, 3), last_rank))) == [("all_gather", 2 * 6), ("reduce_scatter", 4 * 12)]


def test_a_report_says_what_leaves_the_device_for_offloaded_shards() -> None:
    b = Builder()
    weight = offloaded(postdivide=1.0)
    full = b.unshard(b.input("shard", 2, 3), weight)
    graph = b.output(b.reduce(full, weight), b.reduce(full, offloaded(fqn="other", num_replicas=2, replicate_group="r")))
    plan = plan_graph(graph, "backward")
    insert(graph, plan)
    report = GraphReport(GraphRecord("backward", plan, 1, 2, snapshots=[graph]), 0)
    copied = [(one.kind, one.num_bytes, one.host_bytes) for one in report.launches]
    # BF16 travels; what is stored, and what the optimizer reads, is FP32. A bucket leaves the device once.
    assert copied == [("all_gather", 12, 24), ("reduce_scatter", 24, 24), ("reduce_scatter", 24, 0), ("all_reduce", 24, 24)]
    header, *rows = str(report).splitlines()[1:6]
    assert header.endswith("bucket  copied  host") and [row.split("  ")[-1].strip() for row in rows[:2]] == ["24 B", "24 B"]
