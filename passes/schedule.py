"""The planned order, once more, on what Inductor is about to generate.

Inductor's fusion and its own sorting undo the order of the FX graph. This callable sits in
``reorder_for_compute_comm_overlap_passes``, gets the scheduler's nodes after both, and gives them back in the order
of overlap.py.

    post-grad hook     leave_graph()  schedule_this_graph()      for our graphs: the switch of these passes is on
    lowering, fusion
    scheduler pass     planned order, leave_graph()              and off again

The switch changes how Inductor lowers any graph (torch 2.15 keeps no-op slices, and does not fuse what an all-reduce
takes), so it is on for our graphs alone. A graph that fails on the way leaves it on, until the next one begins.
"""

from __future__ import annotations

from typing import Any

from . import _torch_compat_kernels as compat
from ._torch_compat_kernels import BaseSchedulerNode
from .kernels import Kernels
from .overlap import Items, planned_order


def schedule_this_graph() -> bool:
    """Have Inductor call the scheduler passes for the graph that this thread compiles; False where it will not."""
    if compat.is_deterministic() or not any(map(_is_ours, compat.scheduler_passes())):
        return False
    compat.switch_scheduler_passes(on=True)
    return True


def leave_graph() -> None:
    """Turn the switch back where we turned it on."""
    compat.switch_scheduler_passes(on=False)


def _is_ours(one_pass: object) -> bool:
    return isinstance(one_pass, ScheduleInPlannedOrder)


class ScheduleInPlannedOrder:
    """Picklable and without state but for the hash of the passes' source: Inductor keys its cache by it."""

    def __init__(self, source_hash: str) -> None:
        self.source_hash = source_hash

    def __call__(self, snodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        kernels = Kernels(snodes)
        if not kernels.are_ours:
            return snodes
        leave_graph()
        compat.drop_temporary_dependencies(snodes)
        if kernels.compute_again:
            compat.free_after_last_reader()
        items = Items(
            order=kernels.in_order_of_graph(),
            deps=kernels.deps,
            role=kernels.role.__getitem__,
            is_launch=kernels.is_launch,
            phase=kernels.phase,
        )
        lookahead = next(role.lookahead for role in kernels.role.values() if role is not None)
        planned = planned_order(items, lookahead)
        _pin(planned, items)
        return planned


def _pin(planned: list[BaseSchedulerNode], items: Items[BaseSchedulerNode]) -> None:
    """Let a gather's launch depend on what runs before it, so that later passes do not hoist it.

    torch 2.15 runs ``simple_overlap`` after this one: it moves every collective to the front while the peak of memory
    allows, and respects dependencies.
    """
    before: Any = None
    for snode in planned:
        if snode in items.gathers and before is not None:
            compat.add_order_dependency(snode, before)
        if items.role[snode] is None:
            before = snode
