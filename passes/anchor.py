"""Launches stay between the products that the plan put them between, while Inductor fuses and sorts kernels.

    dw, gx products or attentions, db sums, L launch; db1 and db0 read something in common

    planned      dw1  db1  L1 (dw1, db1)  gx0  dw0  db0  L0 (dw0, db0)
    unanchored   gx0  db1+db0  dw1  dw0  L1  L0                            one kernel of both; the peak that Inductor
                                                                           estimates is lower with the products last
    anchored     dw1  db1  L1 ----------> gx0  dw0  db0  L0                gx0 depends on L1, so db1 and db0 are two

Without, most reductions of a backward are launched when nothing is left that could hide them, and what the products
read lives as long. So a launch depends on the heavy kernel before it, and the heavy kernel behind it on the launch.
What is fused between two heavy kernels is Inductor's to say.

Where activations are computed again to fit a budget, everything depends on the heavy kernel before it:

    planned      ga = mm(gy, w)  u = mm(x, v)  a = gelu(u)  dw = mm(a, gy)  gu = gelu'(u, ga)    a goes before gu comes
    fused        ga = mm(gy, w)  u = mm(x, v)  a, gu = gelu(u), gelu'(u, ga)  dw = mm(a, gy)     both read u
"""

from __future__ import annotations

from . import _torch_compat_kernels as compat
from ._torch_compat_kernels import BaseSchedulerNode, SchedulerPass
from .kernels import Kernels


class AnchorLaunches(SchedulerPass):  # type: ignore[misc]
    """Called before fusion. Without state but for the hash of the passes' source: Inductor keys its cache by it."""

    anchors_launches = True

    def __init__(self, source_hash: str) -> None:
        self.source_hash = source_hash

    def __call__(self, snodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        kernels = Kernels(snodes)
        if not kernels.are_ours:
            return snodes
        snodes = kernels.in_order_of_graph()
        _anchor(snodes, kernels)
        compat.dependencies_added(snodes)
        return snodes

    def uuid(self) -> str:
        return self.source_hash


def anchors_graphs() -> bool:
    """Whether Inductor will call this pass, by itself or behind a pass of the user's."""
    return getattr(compat.pre_fusion_pass(), "anchors_launches", False)


def _anchor(snodes: list[BaseSchedulerNode], kernels: Kernels) -> None:
    """Add the dependencies, all of them of what is behind on what is before, so no circle closes."""
    heavy: BaseSchedulerNode | None = None
    launched: list[BaseSchedulerNode] = []  # behind the last heavy kernel
    in_order = kernels.compute_again
    for snode in snodes:
        is_launch = kernels.is_launch(snode)
        if heavy is not None and (in_order or is_launch or compat.is_wait(snode)):
            compat.add_temporary_dependency(snode, heavy)
        if is_launch:
            launched.append(snode)
        elif kernels.role[snode] is None and compat.is_heavy(snode) and snode not in kernels.begins:
            heavy = snode
            for launch in launched:
                compat.add_temporary_dependency(snode, launch)
            launched.clear()
