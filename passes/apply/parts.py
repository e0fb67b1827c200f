"""Have backward recompute what an all-gather extension makes of gathered tensors, if it gathers these again.

    joint graph                          after
    g = unshard(sent, part=0)            g = unshard(sent, part=0)    # by ``keep``: recompute=MUST_RECOMPUTE
    v = mul(g, scale)                    v = mul(g, scale)            # recompute=MUST_RECOMPUTE
    w = made_of_parts(v)                 y = mm(x, v)
    y = mm(x, w)

Without the tags, the partitioner would save ``v``, which is a full parameter.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..ir import markers
from ..ir.meta import tag
from ..ir.nodes import closure
from ..ir.plan import Plan
from ..ir.provenance import find_unshards


def parts(graph: fx.Graph, plan: Plan) -> int:
    """Tag the nodes between gathered parts and the tensors made of them; return how many were tagged."""
    del plan  # the markers say which are gathered again
    made = graph.find_nodes(op="call_function", target=markers.made_of_parts)
    if not made:
        return 0
    again = [one.node for one in find_unshards(graph) if one.spec.part >= 0 and one.spec.regather]
    behind = closure(again, lambda node: node.users)
    before = closure(made, lambda node: node.all_input_nodes)
    between = behind & before - {*again, *made}
    for node in between:
        tag(node, CheckpointPolicy.MUST_RECOMPUTE)
    for node in made:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)
    return len(between)
