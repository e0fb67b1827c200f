"""Predict which pointwise results Inductor does not write to memory, but computes inside the kernels that read them.

x -> mul -> add -> gelu -> mm        mul and add are not written, gelu is written for mm
x -> exp -> sum                      exp is not written, sum is written
x -> mul -> cat                      mul is written at its place in the result of cat

There is a limit: a result that several readers would compute again from many inputs is written once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from .. import _torch_compat as compat
from ..ir.aliases import base_of, inputs_of, is_free, is_view, tensors_of
from ..ir.nodes import CASTS, LOOKUPS, readers_of
from ..wire.copies import is_awaited

aten = torch.ops.aten

# Inductor's realize_reads_threshold and realize_acc_reads_threshold, in 2.11 and 2.15: a result that is computed from
# more inputs than this is written to memory: the first figure is for several readers, the second for one.
_MOST_READS_SHARED, _MOST_READS = 4, 8
# On the CPU it writes these rather than compute twice (ir.StorageBox.should_realize_on_reuse); silu becomes an exp.
_HEAVY = {
    aten.exp.default, aten.log.default, aten.log10.default, aten.log1p.default, aten.log2.default, aten.sigmoid.default,
    aten.tanh.default, aten.silu.default,
}  # fmt: skip
# Inductor fuses these into their readers, although they are not tagged as pointwise.
_INLINED = {
    *CASTS, aten.constant_pad_nd.default, aten.full.default, aten.full_like.default, aten.zeros.default,
    aten.ones.default, aten.arange.start_step, aten.scalar_tensor.default, torch.ops.prims.iota.default,
    *LOOKUPS, aten.lift_fresh_copy.default, aten.slice_scatter.default, aten.select_scatter.default,
}  # fmt: skip


def fused_away(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that are computed inside their readers, which are all pointwise ops, reductions or cat."""
    away: dict[fx.Node, set[fx.Node]] = {}  # with what they read from memory
    heavy: set[fx.Node] = set()
    for node in graph.nodes:
        if not is_pointwise(node) or is_free(node):
            continue
        readers = _readers(node)
        reads: set[fx.Node] = set()
        for source in map(base_of, inputs_of(node)):
            reads |= away.get(source, {source})
            if source in heavy:
                heavy.add(node)
        if node.target in _HEAVY and tensors_of(node)[0].device.type == "cpu":
            heavy.add(node)
        is_shared = len(readers) > 1
        most_reads = _MOST_READS_SHARED if is_shared else _MOST_READS
        is_costly = len(reads) > most_reads or (is_shared and node in heavy)
        if readers and all(map(computes_inputs, readers)) and not is_costly:
            away[node] = reads
        else:
            heavy.discard(node)  # it is in memory: its readers only load it
    return set(away)


def kernels_of(graph: fx.Graph, away: Collection[fx.Node] | None = None) -> list[dict[fx.Node, list[fx.Node]]]:
    """Return the kernels: for each, the nodes that it writes, each with all nodes that it computes for it.

    ``away`` is what ``fused_away`` returns, if a caller has that already.

    A node that is fused away is computed in every kernel that needs it. Two kernels that compute the same node become
    one, and so do one that writes a pointwise result and one that reads it, unless a node that is never fused, such as
    a product, stands between the two:

        x -> mul -> add -> mm                one kernel reads x, and writes add and sum
              `---> sum

        x -> mul -> norm -> mm -> add        two, for the second add needs mm
              `-------------------^
    """
    away = fused_away(graph) if away is None else away
    computed: dict[fx.Node, list[fx.Node]] = {}
    kernels: list[_Kernel] = []
    computing: dict[fx.Node, list[_Kernel]] = {}  # for a pointwise node: the kernels that do
    # Sets of written nodes, one bit each: those that a node depends on, and those behind a node that is never fused.
    behind: dict[fx.Node, int] = {}
    far_behind: dict[fx.Node, int] = {}
    for node in graph.nodes:
        near = far = 0
        for source in node.all_input_nodes:
            near |= behind[source]
            far |= far_behind[source]
            if not is_free(source) and not computes_inputs(source):
                far |= behind[source]
        if not is_free(node) and not is_awaited(node):
            sources = dict.fromkeys(map(base_of, inputs_of(node)))
            parts = dict.fromkeys(part for source in sources if source in away for part in computed[source])
            computed[node] = [*parts, node]
            if node not in away:
                near |= 1 << len(kernels)  # its own bit
                kernels.append(_Kernel(1 << len(kernels), far, {node: computed[node]}))
                _unite(kernels[-1], node, computed[node], computing)
        behind[node], far_behind[node] = near, far
    return [one.writes for one in kernels if one.part_of is None]


def _unite(kernel: _Kernel, node: fx.Node, parts: list[fx.Node], computing: dict[fx.Node, list[_Kernel]]) -> None:
    """Merge a new kernel, which writes a node, with all that share a pointwise node with it and can be merged."""
    if not computes_inputs(node):
        return
    common = dict.fromkeys(parts)
    if node.target is not aten.cat.default:  # cat copies what it reads from memory
        common |= dict.fromkeys(base_of(source) for part in parts for source in inputs_of(part))
    for one in common:
        if inputs_of(one):  # each kernel computes constants anew
            for other in dict.fromkeys(found.whole() for found in computing.get(one, ())):
                kernel = other.with_(kernel)
    for one in filter(is_pointwise, parts):
        computing.setdefault(one, []).append(kernel)


@dataclass(eq=False)
class _Kernel:
    """A kernel that writes some nodes, or after a merge a part of such a kernel."""

    bits: int  # of the nodes that it writes
    far_behind: int  # bits of the nodes that another kernel has to write before it runs
    writes: dict[fx.Node, list[fx.Node]]
    part_of: _Kernel | None = None

    def whole(self) -> _Kernel:
        whole = self
        while whole.part_of is not None:
            whole = whole.part_of
        return whole

    def with_(self, other: _Kernel) -> _Kernel:
        """Merge ``other`` into this kernel and return it; return ``other`` if they cannot be one."""
        if other is self or self.bits & other.far_behind or other.bits & self.far_behind:
            return other
        self.bits |= other.bits
        self.far_behind |= other.far_behind
        self.writes |= other.writes
        other.part_of = self
        return self


def is_pointwise(node: fx.Node) -> bool:
    return node.target in _INLINED or compat.has_tag(node.target, torch.Tag.pointwise) or _is_one_hot(node)


def _is_one_hot(node: fx.Node) -> bool:
    """Whether a node puts a number at one place in each row of a constant, as cross entropy's gradient does.

    Inductor's patterns on the joint graph make it ``where(place == arange, number, constant)`` (joint_graph.py's
    ``scatter_upon_const_tensor``, in 2.11 and 2.15).
    """
    if node.target is not aten.scatter.value:
        return False
    constant, dim, place = node.args[:3]
    if not (isinstance(constant, fx.Node) and constant.target is aten.full.default and len(constant.users) == 1):
        return False
    assert isinstance(dim, int) and isinstance(place, fx.Node)
    places, sizes = list(place.meta["val"].shape), list(constant.meta["val"].shape)
    if not sizes or len(places) != len(sizes):
        return False
    sizes[dim] = 1
    return places == sizes


def computes_inputs(node: fx.Node) -> bool:
    """Whether a node's kernel can compute pointwise inputs itself, instead of reading them from memory."""
    is_reduction = compat.has_tag(node.target, torch.Tag.reduction)
    return is_pointwise(node) or is_reduction or node.target is aten.cat.default


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that read a node's result, or a view of it; nodes that only take sizes do not count."""
    readers = (user for user in readers_of(node, is_view) if user.op != "call_function" or not is_free(user))
    return list(dict.fromkeys(readers))
