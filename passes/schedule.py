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
        planned = _loops_together(planned_order(items, lookahead), items)
        _pin(planned, items)
        return planned


def _loops_together(planned: list[BaseSchedulerNode], items: Items[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """Put generated loops, on the CPU, beside one another where communication stands among them.

        planned     mm  add  launch  wait  norm  mm         two kernels
        together    mm  launch  wait  add  norm  mm         one, as in the unsharded model: add is written once, and
                                                            there is one kernel less to compile

    For the CPU Inductor makes one kernel of all loops between two calls. No loop goes past a product: that would be
    less to hide communication behind, or memory that is taken earlier or given back later.
    """
    together: list[BaseSchedulerNode] = []
    between: list[BaseSchedulerNode] = []  # two products, or whatever else is no loop and no communication
    for snode in planned:
        if items.role[snode] is None and not compat.is_loop_on_cpu(snode):
            together += [*_sorted_out(between, items), snode]
            between.clear()
        else:
            between.append(snode)
    return together + _sorted_out(between, items)


def _sorted_out(between: list[BaseSchedulerNode], items: Items[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """What launches and what loops need, then loops that need no more of that, and so on; each in its order.

    What loops do not need, as the wait for the weight of the product behind them, stays behind them: they hide it.
    """
    launches = [snode for snode in between if snode in items.launches]
    launched_before = dict(zip(launches[1:], launches))
    needed = {snode for snode in between if items.role[snode] is None or snode in items.launches}
    for snode in reversed(between):
        if snode in needed:
            needed.update(items.deps[snode])
    order: list[BaseSchedulerNode] = []
    left = dict.fromkeys(snode for snode in between if snode in needed)
    while left:
        for is_loop in (False, True):
            for snode in [one for one in left if (items.role[one] is None) == is_loop]:
                if not any(one in left for one in (*items.deps[snode], launched_before.get(snode))):
                    order.append(snode)
                    del left[snode]
    return [*order, *(snode for snode in between if snode not in needed)]


def _pin(planned: list[BaseSchedulerNode], items: Items[BaseSchedulerNode]) -> None:
    """Let gathers depend on what runs before them, loops on the waits before them, and reductions on loops.

    torch 2.15 runs ``simple_overlap`` after this pass: while the peak of memory allows, it moves every collective to
    the front and every wait to the end, and respects dependencies. A gather would hold memory for longer there; waits
    and reductions may go where they please, but not in among loops.
    """
    before: BaseSchedulerNode | None = None
    waits: list[BaseSchedulerNode] = []
    for snode in planned:
        if snode in items.launches and before is not None:
            if snode in items.gathers or compat.is_loop_on_cpu(before):
                compat.add_order_dependency(snode, before)
        elif compat.is_wait(snode):
            waits.append(snode)
        elif items.role[snode] is None:
            for wait in waits if compat.is_loop_on_cpu(snode) else ():
                compat.add_order_dependency(snode, wait)
            waits.clear()
            before = snode
