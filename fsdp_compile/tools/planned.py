"""Find the plan that a running model follows, also where its graphs came from a compile cache and no pass ran.

    text of a graph          "forward ... all_gather w0 ... | the plan of the step, packed"     is in its code
    ledger                   that text, and the shards that the graph was given, when it ran
    plan_of(model)           the plan in the last text that came with shards of this model
"""

from __future__ import annotations

from torch import nn

from ..core.unit import original_class, units_in
from ..passes import Plan
from ..passes.wire.ledger import ledger


def plan_of(model: nn.Module, training: bool = True) -> Plan:
    """Return the plan of the compiled step of ``model`` that ran last: ``report.joint.plan`` of an inspection.

    It compiles nothing, and works in a process that loaded all graphs from a compile cache. ``training=False`` returns
    the plan of the forward without gradients. A model that breaks into several graphs has a plan for each of them.
    ``plan_of`` raises LookupError where no compiled graph with the model's collectives ran, and for a replicated model:
    its graphs gather nothing, so nothing tells which model they belong to.
    """
    units = units_in(model)
    if units and all(unit.mesh.num_shards == 1 for unit in units):
        raise LookupError(
            f"{original_class(model).__name__} is whole on every rank, so its graphs gather nothing that tells whose "
            "they are. Run a step in inspect(model): report.joint.plan is its plan."
        )
    addresses = {param.address for unit in units for param in unit.params if param.address}
    for text, shards in ledger.ran(max((unit.made_after for unit in units), default=0)):
        if addresses.isdisjoint(shards):
            continue
        if (text.stage == "inference") != training and text.plan:
            return Plan.unpacked(text.plan)
    what = "a training step" if training else "a forward without gradients"
    raise LookupError(
        f"no compiled graph of {original_class(model).__name__} ran {what} in this process: run one first, of a model "
        "that is compiled as a whole on Inductor and sharded over several ranks. Blocks that are compiled one by one "
        "have no plan, nor has the eager path. inspect(model) shows what compiles."
    )
