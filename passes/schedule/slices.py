"""Between forward and backward, keep one of n slices of a parameter: backward gathers over n ranks, not over all.

    joint graph                          after
    w = unshard(shard)                   full  = unshard(shard)
    y = mm(x, w)                         piece = keep_slice(full)                    # saved for backward
    ...                                  w     = unshard(piece, group of n ranks)    # computed in backward
    gx = mm(gy, w.t())                   y     = mm(x, w)
                                         ...
                                         gx    = mm(gy, w.t())

    forward graph                        after
    full, piece, w = ...                 full  = unshard(shard)
    y = mm(x, w)                         piece = keep_slice(full)
                                         y     = mm(x, full)

Forward computes with what it gathered from all ranks, backward with what it gathers from slices. Either a unit is told
to (``reshard_after_forward=8``), or the plan chooses it within a memory budget, for parameters that have groups for it.
The ranks of a node have fast links among them, and an n-th of a parameter is little to hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from torch import fx

from ..ir import markers
from ..ir.nodes import emit
from ..ir.plan import Plan
from ..ir.provenance import find_unshards, unshard_nodes, whole_of
from ..wire.spec import ParamSpec


def slices(graph: fx.Graph, plan: Plan) -> int:
    """Put a slice between each gather of a joint graph and its readers, where markers ask for one; return how many."""
    del plan  # the markers decide
    asking = [node for node in unshard_nodes(graph) if markers.spec_in(node).regather and keeps_slice(node)]
    for node in asking:
        _read_from_slices(graph, node)
    return len(asking)


def chosen_slices(graph: fx.Graph, plan: Plan) -> int:
    """Do the same where the plan says so; return how many."""
    return slice_these(graph, plan.slices)


def slice_these(graph: fx.Graph, fqns: Collection[str]) -> int:
    """Keep slices of the parameters with these names in a joint graph (see ``settle_names``); return how many."""
    chosen = [one.node for one in find_unshards(graph) if one.fqn in fqns and offers_slice(one.node)]
    for node in chosen:
        _read_from_slices(graph, node)
    return len(chosen)


def keeps_slice(gather: fx.Node) -> bool:
    """Whether a marker asks for a slice, whatever the plan says."""
    spec = markers.spec_in(gather)
    return spec.inner_shards != 1 and not spec.inner_offered


def offers_slice(gather: fx.Node) -> bool:
    """Whether a plan may choose to keep a slice of what a marker gathers."""
    spec = markers.spec_in(gather)
    return spec.inner_shards != 1 and spec.inner_offered


def is_sliced(gather: fx.Node) -> bool:
    """Whether forward keeps a slice of what is gathered, from which backward gathers."""
    return any(user.target is markers.keep_slice for user in gather.users)


def _read_from_slices(graph: fx.Graph, gather: fx.Node) -> None:
    readers = list(gather.users)
    again = gather_from_slice(graph, gather, gather.next)
    for reader in readers:
        reader.replace_input_with(gather, again)


def gather_from_slice(graph: fx.Graph, gather: fx.Node, reader: fx.Node) -> fx.Node:
    """Cut a slice behind a gather, and gather the parameter from such slices in front of ``reader``."""
    spec = markers.spec_in(gather)
    inner = inner_spec(spec)
    start, stop = inner.layout.span(spec.inner_rank)
    with graph.inserting_after(gather):
        piece = emit(graph, markers.keep_slice, gather, spec.dim, start, stop - start)
    with graph.inserting_before(reader):
        again = emit(graph, markers.unshard, piece, spec=inner.text)
    again.meta = gather.meta | {"val": again.meta["val"]}
    return again


def use_first_gather(graph: fx.Graph) -> None:
    """In a graph that cuts slices, use the full parameters, which are there, and gather nothing from slices."""
    for node in unshard_nodes(graph):
        whole = whole_of(node)
        if whole is not None:
            piece = node.all_input_nodes[0]
            node.replace_all_uses_with(whole)
            graph.erase_node(node)
            if not piece.users:
                graph.erase_node(piece)


def inner_spec(spec: ParamSpec) -> ParamSpec:
    """Return the spec of a marker that gathers a parameter from slices that ``spec.inner_shards`` ranks hold."""
    here = spec.on_device()  # slices are there, wherever shards are
    inner = dataclasses.replace(
        here, num_shards=spec.inner_shards, group=spec.inner_group, inner_shards=1, inner_group="", inner_rank=0,
        inner_offered=False,
    )  # fmt: skip
    return dataclasses.replace(inner, local_length=inner.layout.local_size(spec.inner_rank)[spec.dim])
