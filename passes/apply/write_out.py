"""Write to memory what forward computes of a weight and backward reads, in a graph that is not cut.

    whole step                         after
    w = unshard(s)                     w = unshard(s)
    x = embedding(w, tokens)           x = in_memory(embedding(w, tokens))
    y = mm(mul(x, x), v)               y = mm(mul(x, x), v)
    ...                                ...
    gx = mul(x, gz)                    gx = mul(x, gz)         in backward

Inductor computes a pointwise result once more in each kernel that reads it. In backward, such a kernel would read what
forward gathered: ``w`` would live until then, and so would all that was gathered with it. If a graph is cut, forward
writes its results for backward to memory; this pass has the same done in a graph that is not cut.
"""

from __future__ import annotations

import torch
from torch import fx

from .._torch_compat import kernels as kernels_compat
from ..cost.fusion import is_pointwise
from ..ir.aliases import base_of, inputs_of, is_free
from ..ir.markers import spec_in
from ..ir.nodes import emit
from ..ir.phases import phase_of, put_in_phase
from ..ir.plan import Plan
from ..ir.provenance import unshard_nodes
from ..wire.spec import define_op

in_memory = define_op("in_memory(Tensor(a) result) -> Tensor(a)", torch.ops.aten.alias.default)


def write_out(graph: fx.Graph, plan: Plan) -> int:
    """Write results that Inductor would compute of a gathered weight in a later phase; return how many these are."""
    del plan  # the phases say what is read in which
    kernels_compat.lower_as_written(in_memory)
    gathers = {node for node in unshard_nodes(graph) if spec_in(node).regather}
    computed: dict[fx.Node, None] = {}  # from weights, with nothing in memory between
    late: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or is_free(node):
            continue
        sources = [base_of(source) for source in inputs_of(node)]
        late |= dict.fromkeys(one for one in sources if one in computed and phase_of(one) < phase_of(node))
        is_inlined = is_pointwise(node) or node.target is torch.ops.aten.cat.default
        if is_inlined and any(one in computed or one in gathers for one in sources):
            computed[node] = None
    for node in late:
        readers = list(node.users)
        with graph.inserting_after(node):
            written = emit(graph, in_memory, node)
        put_in_phase(written, phase_of(node))
        for reader in readers:
            reader.replace_input_with(node, written)
    return len(late)
