"""Predict the seconds of a graph's kernels and collectives, by a roofline of the hardware's figures.

    a kernel       kernel_s + max(flops / peak of the dtype, bytes read and written / memory bandwidth)
    a collective   latency + steps of each link + the slower of: bytes over the links inside nodes, bytes between nodes

    chain of pointwise ops      x -> mul -> add -> gelu -> mm        one kernel: reads x once, writes what mm reads
    views, getitem, sizes       nothing

Inductor fuses pointwise ops into their readers; without that, such chains would be predicted at several times what they
take. A symbolic size counts as the value that was seen in tracing. Nothing here is measured: equal graphs cost the same
on every rank, if all ranks allow TF32 or none does.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import _torch_compat as compat
from ..ir.aliases import base_of, elements, hint, inputs_of, is_free, tensor_bytes, tensors_of
from ..ir.nodes import LOOKUPS
from ..wire.collectives import KIND_OF, is_launch
from ..wire.copies import is_awaited, to_device, to_host
from ..wire.lower import gather_offloaded
from .fusion import kernels_of
from .profiles import KINDS, HardwareProfile, Link

aten = torch.ops.aten


_GROUPED = ("_grouped_mm", "_scaled_grouped_mm")


@dataclass(frozen=True)
class Group:
    """Where the ranks of a process group are: how many in all, and how many of them share a node."""

    num_ranks: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if not 1 <= self.ranks_per_node <= self.num_ranks:
            raise ValueError(
                f"A group of {self.num_ranks} ranks cannot have {self.ranks_per_node} of them on a node. Give a number "
                "from 1 to the number of ranks."
            )

    @classmethod
    def of(cls, ranks: Iterable[int], profile: HardwareProfile) -> Group:
        """Make the group of these global ranks, which fill one node after the other."""
        nodes = Counter(rank // profile.ranks_per_node for rank in ranks)
        return cls(nodes.total(), max(nodes.values()))

    @property
    def spans_nodes(self) -> bool:
        """Whether the ranks are on more than one node."""
        return self.num_ranks > self.ranks_per_node

    @property
    def link(self) -> str:
        """The name of the slowest link that its collectives take: a field of the hardware's profile."""
        return "between" if self.spans_nodes else "inside"

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks {self.link} nodes"


# From the name of a process group to where its ranks are.
Groups = Mapping[str, Group] | Callable[[str], Group]


@dataclass(frozen=True)
class Sent:
    """What one launch in a graph sends."""

    kind: str
    num_bytes: int  # all ranks' parts of a gather or a scatter; else one rank's tensor
    group: str  # its name


def sent_by(node: fx.Node) -> Sent:
    """Return what a launch sends."""
    kind, arguments = KIND_OF[node.target], compat.arguments_of(node)
    whole = [node] if kind == "all_gather" else node.all_input_nodes
    num_bytes = sum(tensor_bytes(tensor) for one in whole for tensor in tensors_of(one))
    return Sent(kind, num_bytes, str(arguments["group_name"]))


def launch_seconds(node: fx.Node, group: Group, profile: HardwareProfile) -> float:
    """Return the seconds of a launch with nothing else on the links; offloaded shards are copied first."""
    sent = sent_by(node)
    seconds = collective_seconds(sent.kind, sent.num_bytes, group, profile)
    if node.target is gather_offloaded:
        seconds += _host_seconds([one for source in node.all_input_nodes for one in tensors_of(source)], profile)
    return seconds


def copy_seconds(num_bytes: int, profile: HardwareProfile) -> float:
    """Return the seconds of a copy to or from the host beside compute, with nothing else on the link."""
    return profile.kernel_s + num_bytes / (profile.host_bytes_per_s * profile.memory_efficiency)


def collective_seconds(kind: str, num_bytes: int, group: Group, profile: HardwareProfile) -> float:
    """Return a collective's seconds from its launch to its end, with nothing else on the links.

    ``num_bytes`` is the size of what a gather returns, or of what a scatter, an all_to_all or an all_reduce takes.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of collective. Give one of {', '.join(KINDS)}.")
    if group.num_ranks == 1:
        return 0.0
    link = link_of(group, profile)
    steps_s = _steps_seconds(kind, group, profile)
    if kind in link.measured:
        fit = link.measured[kind]
        measured = Group(link.measured_ranks, link.measured_per_node if group.spans_nodes else link.measured_ranks)
        latency_s = max(fit.latency_s + steps_s - _steps_seconds(kind, measured, profile), 0.0)
        return latency_s + bytes_on_link(kind, num_bytes, group, profile.backend) / fit.bytes_per_s
    inside_bytes, between_bytes = _wire_bytes(kind, num_bytes, group, profile.backend)
    inside_s = inside_bytes / (profile.inside.bytes_per_s * profile.inside.efficiency)
    between_s = between_bytes / (profile.between.bytes_per_s * profile.between.efficiency)
    return link.latency_s + steps_s + max(inside_s, between_s)


def wire_bytes(kind: str, num_bytes: int, num_ranks: int, backend: str) -> float:
    """Return the bytes that each rank sends."""
    return num_bytes * (num_ranks - 1) / num_ranks * _rounds(kind, backend)


def bytes_on_link(kind: str, num_bytes: int, group: Group, backend: str) -> float:
    """Return the bytes that each rank sends on the slowest link of its group: that between nodes, if it spans nodes."""
    inside_bytes, between_bytes = _wire_bytes(kind, num_bytes, group, backend)
    return between_bytes if group.spans_nodes else inside_bytes


def _wire_bytes(kind: str, num_bytes: int, group: Group, backend: str) -> tuple[float, float]:
    """Return the bytes that each rank sends on the links of its node, and through its own adapter to other nodes.

    In a ring, all data that passes a rank also passes the node's boundary, there through all adapters of the node
    together. In an all_to_all each rank sends to each other rank directly.
    """
    total = wire_bytes(kind, num_bytes, group.num_ranks, backend)
    if not group.spans_nodes:
        return total, 0.0
    if kind == "all_to_all":
        away = num_bytes * (group.num_ranks - group.ranks_per_node) / group.num_ranks
        return total - away, away
    return (total if group.ranks_per_node > 1 else 0.0), total / group.ranks_per_node


def _steps_seconds(kind: str, group: Group, profile: HardwareProfile) -> float:
    """Return the seconds of those steps from rank to rank that wait for one another.

    A ring leaves each node once, so a rank's data has arrived everywhere after (number of nodes - 1) steps between
    nodes; all other steps are inside nodes. NCCL sums small tensors up a tree and down again, and sends the parts of an
    all_to_all at once.
    """
    link = link_of(group, profile)
    if profile.backend == "nccl" and kind == "all_reduce":
        return 2 * math.ceil(math.log2(group.num_ranks)) * link.step_s
    if profile.backend == "nccl" and kind == "all_to_all":
        return link.step_s
    num_nodes = math.ceil(group.num_ranks / group.ranks_per_node)
    between, inside = num_nodes - 1, group.num_ranks - num_nodes
    return (between * profile.between.step_s + inside * profile.inside.step_s) * _rounds(kind, profile.backend)


def _rounds(kind: str, backend: str) -> int:
    """Return how often a collective goes around: an all_reduce sums, then gathers; so does gloo's reduce_scatter."""
    return 2 if kind == "all_reduce" or (kind == "reduce_scatter" and backend == "gloo") else 1


def group_of(name: str, profile: HardwareProfile, groups: Groups | None = None) -> Group:
    """Return where the ranks of a process group are, as told by ``groups``, or by c10d without it."""
    if groups is None:
        return Group.of(compat.group_ranks(name), profile)
    if callable(groups):
        return groups(name)
    if name not in groups:
        known = ", ".join(groups) or "none"
        raise ValueError(f"The graph speaks to the group {name!r}, but groups has {known}. Add it.")
    return groups[name]


def link_of(group: Group, profile: HardwareProfile) -> Link:
    """Return the slowest link that a group's collectives take."""
    return profile.between if group.spans_nodes else profile.inside


def slowdown(group: Group, profile: HardwareProfile) -> float:
    """Return the share of its speed that compute loses beside a group's collectives, by the link that costs most."""
    if not group.spans_nodes:
        return profile.inside.slows_compute
    inside = profile.inside.slows_compute if group.ranks_per_node > 1 else 0.0
    return max(profile.between.slows_compute, inside)


def node_seconds(node: fx.Node, profile: HardwareProfile) -> float:
    """Return the seconds of one node as a kernel of its own; 0 for collectives, copies and their waits."""
    if is_free(node) or is_awaited(node):
        return 0.0
    num_bytes = sum(map(tensor_bytes, tensors_of(node))) + sum(_read(node, source) for source in inputs_of(node))
    return profile.kernel_s + _roofline(node, num_bytes, profile)


def graph_seconds(
    graph: fx.Graph, profile: HardwareProfile, away: Collection[fx.Node] | None = None
) -> dict[fx.Node, float]:
    """Return the seconds of each node that computes; a pointwise op that is fused into its readers takes none."""
    seconds = {node: 0.0 for node in graph.nodes if not is_free(node) and not is_launch(node)}
    for writes in kernels_of(graph, away):
        inside = {part for parts in writes.values() for part in parts}
        read: set[fx.Node] = set()
        for node, parts in writes.items():
            bytes_of: dict[fx.Node, int] = {}  # one part may read some rows, and another part all
            for part in parts:
                for source in inputs_of(part):
                    base = base_of(source)
                    if base not in inside and base not in read:
                        bytes_of[base] = max(bytes_of.get(base, 0), _read(part, source))
            read |= set(bytes_of)
            num_bytes = sum(map(tensor_bytes, tensors_of(node))) + sum(bytes_of.values())
            seconds[node] = _roofline(node, num_bytes, profile)
        seconds[next(iter(writes))] += profile.kernel_s
    return seconds


def node_flops(node: fx.Node) -> float:
    """Return the multiplications and additions of a matmul, a convolution or an attention; 0 for anything else."""
    packet, name = _packet(node)
    if _is_attention(node):
        return _attention_flops(node, is_backward="backward" in name)
    if name in _GROUPED:
        return _grouped_flops(node)
    formula = _flop_formulas().get(packet)
    if formula is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: _sized(used.meta.get("val")))
    return float(formula(*args, **kwargs, out_val=_sized(node.meta["val"])))


def is_product(node: fx.Node) -> bool:
    """Whether a node is a matmul, a convolution or an attention."""
    packet, name = _packet(node)
    return packet in _flop_formulas() or name in _GROUPED or _is_attention(node)


def _packet(node: fx.Node) -> tuple[Any, str]:
    """Return a node's operator without its overload, and the operator's name."""
    packet = node.target.overloadpacket if isinstance(node.target, compat.OpOverload) else node.target
    return packet, getattr(packet, "__name__", "")


def _is_attention(node: fx.Node) -> bool:
    return _packet(node)[1].startswith(("_scaled_dot_product", "flex_attention"))


@functools.cache
def _flop_formulas() -> Mapping[Any, Callable[..., Any]]:
    """Return torch's formulas. Their import is late, as it loads Triton's compiler, which only predictions need."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _attention_flops(node: fx.Node, is_backward: bool) -> float:
    """Return the flops of two matmuls in forward, or five in backward; a causal mask halves them.

    The formulas are our own: those of torch 2.11 know neither the CPU's kernel, nor groups of queries that share a key,
    nor flex_attention, which has no schema. Its mask does not count here: how many scores its blocks skip is data.
    """
    arguments = compat.arguments_of(node) if isinstance(node.target, compat.OpOverload) else {}
    given = [arguments[name] for name in ("query", "key", "value")] if arguments else node.args[:3]
    query, key, value = (tensors_of(one)[0].shape for one in given)  # type: ignore[arg-type]
    scores = 2.0 * math.prod(map(hint, query[:-1])) * hint(key[-2])
    query_dim, value_dim = hint(query[-1]), hint(value[-1])
    flops = scores * (3 * query_dim + 2 * value_dim if is_backward else query_dim + value_dim)
    return flops / 2 if arguments.get("is_causal") else flops


def _grouped_flops(node: fx.Node) -> float:
    """Return the flops of a grouped matmul: its groups share out the rows, the columns or the summed dimension."""
    arguments = compat.arguments_of(node)
    left, right = ([hint(size) for size in tensors_of(arguments[name])[0].shape] for name in ("self", "mat2"))
    if len(left) == 3 and len(right) == 2:
        return 2.0 * left[-2] * math.prod(right)
    return 2.0 * math.prod(left) * right[-1]


def _sized(value: Any) -> Any:
    """Replace tensors by tensors without data, and symbolic sizes by numbers, as the formulas take them."""
    if isinstance(value, torch.Tensor):
        return torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return hint(value)
    return type(value)(map(_sized, value)) if isinstance(value, (tuple, list)) else value


def _roofline(node: fx.Node, num_bytes: int, profile: HardwareProfile) -> float:
    if node.target in (to_device, to_host):
        return _host_seconds(tensors_of(node), profile)
    flops = node_flops(node)
    compute_s = flops / _peak(node, profile) if flops else 0.0
    if _is_attention(node):
        compute_s /= profile.attention_efficiency
    return max(compute_s, num_bytes / (profile.memory_bytes_per_s * profile.memory_efficiency))


def _host_seconds(copied: Iterable[torch.Tensor], profile: HardwareProfile) -> float:
    """Return the seconds of a copy from the memory of the CPU, or to it."""
    return sum(map(tensor_bytes, copied)) / (profile.host_bytes_per_s * profile.memory_efficiency)


def _peak(node: fx.Node, profile: HardwareProfile) -> float:
    """Return the flops per second of matmuls in the dtype of the node's first input."""
    taken = next((tensors[0] for tensors in map(tensors_of, node.all_input_nodes) if tensors), None)
    name = "float32" if taken is None else str(taken.dtype).removeprefix("torch.")
    if name == "float32" and compat.allows_tf32():
        name = "tf32"
    known = profile.flops
    # A narrow float without a figure is taken to be as fast as the next wider one that has a figure.
    wider = ("float8_e4m3fn", "bfloat16", "float16") if name.startswith(("float8", "float4")) else ()
    name = next((one for one in (name, *wider) if one in known), "float32")
    return known[name] * profile.matmul_efficiency


def _read(node: fx.Node, source: fx.Node) -> int:
    """Return the bytes that a node reads of one of its inputs."""
    if node.target in LOOKUPS and source is node.args[0]:
        picked = tensors_of(node)[0]
        return elements(picked) * picked.dtype.itemsize
    if node.target is aten.copy_.default and source is node.args[0]:
        return 0
    return sum(map(tensor_bytes, tensors_of(source)))
