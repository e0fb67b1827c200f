"""Insert nodes together with their fake values, and copy graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from .. import _torch_compat as compat


def emit(graph: fx.Graph, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call of ``op`` where the graph inserts now; its value is the op's result on fake arguments."""
    node = graph.call_function(op, args, kwargs)
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda used: used.meta["val"])
    with compat.fake_mode_of(fake_args):
        node.meta["val"] = op(*fake_args, **fake_kwargs)
    return node


def copied(graph: fx.Graph) -> fx.Graph:
    """Return a copy with the nodes' names and metadata; constants stay in the module that owns the graph."""
    copy = fx.Graph(graph.owning_module)
    copy.output(copy.graph_copy(graph, {}))
    return copy
