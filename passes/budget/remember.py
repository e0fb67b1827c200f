"""Cache what was chosen within a budget, for processes that compile the same step later, such as after a restart.

    first process     joint graph -> a search -> decision -> <Inductor's cache>/fsdp_compile/<key>
    another one       joint graph, equal in all that a search reads  ->  read there

The key covers all that a search reads: the joint graph with its sizes, the parameters' names, the ranks, the hardware
profile, the budget, the settings of AOTAutograd (whose partitioner cuts), whether GPUs may round to TF32, torch and the
source of the passes. A share of the free memory is not cached: it is other bytes in each process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import fx

from .. import _torch_compat as compat
from .._torch_compat import kernels as kernels_compat
from ..ir import markers
from ..ir.aliases import hint, tensors_of
from ..ir.plan import Plan
from ..ir.provenance import find_reduces, find_unshards, groups_of
from ..source import source_hash

_SAID_TO_THE_PARTITIONER = ("recompute", "ac_graph_id", "partitioner_tag", "desc")


def remembered(graph: fx.Graph, said: object, search: Callable[[], Plan]) -> Plan:
    """Return the cached decision for a joint graph and what else was ``said``; if there is none, search and cache."""
    folder = kernels_compat.cache_folder()
    has_graphs_inside = any(not tensors_of(node) for node in graph.find_nodes(op="get_attr"))  # not in the key
    if folder is None or has_graphs_inside:
        return search()
    path = folder / "fsdp_compile" / _key(graph, said)
    # A file that another program wrote, or half a file, is as good as none.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
        return Plan.from_json(path.read_text())
    decision = search()
    with contextlib.suppress(OSError):  # a full or read-only disk: the next process searches again
        _write(path, decision.to_json())
    return decision


def _key(graph: fx.Graph, said: object) -> str:
    ranks = sorted(compat.group_ranks(group) for group in groups_of(graph))
    names = [[one.fqn for one in found] for found in (find_unshards(graph), find_reduces(graph))]
    settings = compat.partitioner_settings(), compat.allows_tf32()
    circumstances = [repr(one) for one in (*settings, said, ranks, names)]
    parts = [torch.__version__, source_hash(), *circumstances]
    digest = hashlib.sha256("\n".join([*parts, *map(_text, graph.nodes)]).encode())
    return digest.hexdigest()


def _text(node: fx.Node) -> str:
    kwargs: object = node.kwargs
    if node.target in (markers.unshard, markers.reduce_grad):  # the id of its budget is one of this process
        kwargs = dataclasses.replace(markers.spec_in(node), step="")
    values = [([*map(hint, one.shape)], _strides(one), one.dtype, one.device.type) for one in tensors_of(node)]
    said = [str(node.meta.get(key)) for key in _SAID_TO_THE_PARTITIONER]
    target = node.target if isinstance(node.target, (str, compat.OpOverload)) else torch.typename(node.target)
    return f"{node.name} {node.op} {target} {node.args} {kwargs} {values} {said}"


def _strides(tensor: torch.Tensor) -> Sequence[int]:
    return [*map(hint, tensor.stride())] if tensor.layout is torch.strided else []


def _write(path: Path, text: str) -> None:
    """Write a file atomically, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(name, path)
