"""Inductor's kernels, before and after it fuses them, by the FX nodes that they came from."""

from __future__ import annotations

import torch
from torch import fx

from . import _torch_compat_kernels as compat
from ._torch_compat_kernels import BaseSchedulerNode
from .collectives import is_launch
from .insert import ROLE, Role
from .keep import STEP
from .ledger import begin
from .phases import phase_of
from .views import VIEWS

_VIEWS = (*VIEWS, torch.ops.aten.reshape.default)  # Inductor has made all views reshapes


class Kernels:
    """What the passes ask about the kernels of one graph."""

    def __init__(self, snodes: list[BaseSchedulerNode]) -> None:
        self.snodes = snodes
        self.origins = {snode: [one for part in snode.get_nodes() for one in _call_origins(part)] for snode in snodes}
        self.role = {snode: _role(nodes) for snode, nodes in self.origins.items()}
        self.begins = [one for one, nodes in self.origins.items() if any(node.target is begin for node in nodes)]
        self._producer = {name: snode for snode in snodes for name in snode.get_buffer_names()}

    @property
    def are_ours(self) -> bool:
        """False for those that Inductor compiles for itself on the way, as its autotuning does."""
        return any(self.role.values())

    @property
    def compute_again(self) -> bool:
        """Whether the plan of their step has activations computed again, and so counts bytes."""
        return any(STEP in one.meta and one.meta[STEP].recompute for nodes in self.origins.values() for one in nodes)

    def is_launch(self, snode: BaseSchedulerNode) -> bool:
        # Inductor reduces in place: the copy that it makes first comes from the all-reduce too, and is no launch.
        return compat.is_collective(snode) and any(map(is_our_launch, self.origins[snode]))

    def deps(self, snode: BaseSchedulerNode) -> list[BaseSchedulerNode]:
        made = [self._producer[dep.name] for dep in snode.unmet_dependencies if dep.name in self._producer]
        return [*self.begins, *made] if self.is_launch(snode) else made

    def phase(self, snode: BaseSchedulerNode) -> int:
        return max(map(phase_of, self.origins[snode]), default=0)

    def in_order_of_graph(self) -> list[BaseSchedulerNode]:
        """Each where the first of what is fused in it stood, but behind what it depends on.

        A comparison that forward saves for backward stands at the end of the FX graph, its kernel is the activation's.
        """
        graphs = {node.graph for nodes in self.origins.values() for node in nodes}
        stood = {node: index for graph in graphs for index, node in enumerate(graph.nodes)}
        place: dict[BaseSchedulerNode, int] = {}
        for snode in self.snodes:
            parts = [[stood[node] for node in _call_origins(part)] for part in snode.get_nodes()]
            own = min((max(its) for its in parts if its), default=-1)
            place[snode] = max([own, *(place[dep] for dep in self.deps(snode) if dep in place)])
        return sorted(self.snodes, key=place.__getitem__)


def is_our_launch(node: fx.Node) -> bool:
    return ROLE in node.meta and is_launch(node)


def _call_origins(part: BaseSchedulerNode) -> list[fx.Node]:
    return [] if part.node is None else [one for one in part.node.get_origins() if one.op == "call_function"]


def _role(origins: list[fx.Node]) -> Role | None:
    """A kernel is communication when all of it is, but for views; a kernel that computes as well is compute."""
    roles = [node.meta.get(ROLE) for node in origins if ROLE in node.meta or node.target not in _VIEWS]
    return roles[0] if None not in roles and roles else None
