"""Keep the activations of the matrices in ``plan.offload`` in the host's memory from forward to backward.

    joint graph                 after                            forward                     backward
    u = mm(x, w)                u = mm(x, w)                     u = mm(x, w)                l = launch_to_device(h)
    y = gelu(u)                 h = to_host(u)                   y = gelu(u)                 v = wait_tensor(l)
    ...                         v = to_device(h)                 l = launch_to_host(u)       gu = gelu_backward(gy, v)
    gu = gelu_backward(gy, u)   y = gelu(v)                      h = wait_tensor(l)
                                gu = gelu_backward(gy, v)        return y, h

The partitioner has to save ``h``, and backward has to make ``v`` of it, so whatever backward computes again is computed
of ``v``. In forward ``v`` is ``u``. The pass copies what forward would save otherwise, which a cut of a copy of the
graph tells. Whatever backward computes in that cut, it has to compute in the next: the partitioner takes a copy for a
reason to save what was computed beside it. The pass does not copy what forward returns, since the caller holds that in
any case, nor what inputs and parameters bring, nor what is small. ``overlap`` moves the copies.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping

from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from .. import _torch_compat as compat
from ..cost.memory import ACTIVATION, OTHER, kinds_of, results_of
from ..ir.aliases import Storage, hint, is_view, storages_of, tensors_of
from ..ir.meta import OFFLOADED, ROLE, Role, tag
from ..ir.nodes import closure, emit, tangents_of
from ..ir.plan import Plan
from ..ir.provenance import Marker
from ..schedule.activations import matrices_of
from ..wire.collectives import is_wait, wait_tensor
from ..wire.copies import launch_to_device, launch_to_host, to_device, to_host

# A copy takes some 10 us however small it is. A link to the host moves half a megabyte in that time.
LEAST_BYTES = 32 << 10


def may_be_away(graph: fx.Graph, plan: Plan) -> dict[fx.Node, Marker]:
    """Return the nodes of a joint graph, not yet tagged, that the plan has on the host if they are saved."""
    matrices = matrices_of(graph) if plan.offload else {}
    return {node: matrix for node, matrix in matrices.items() if matrix.fqn in plan.offload}


def send_away(graph: fx.Graph, matrices: Mapping[fx.Node, Marker]) -> int:
    """Have those of these nodes that forward saves be saved on the host; return how many forward copies."""
    if not matrices:
        return 0
    of_backward = closure(tangents_of(graph), lambda node: node.users)
    sent = 0
    saved, again = _cut_as_it_is(graph)
    for node in again:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for node in saved:
        if node not in matrices:
            continue
        matrix, value = matrices[node], node.meta["val"]
        with graph.inserting_after(node):
            on_host = emit(graph, to_host, node, value.device.type != "cpu")
        if list(map(hint, on_host.meta["val"].stride())) != list(map(hint, value.stride())):
            graph.erase_node(on_host)  # it has gaps, or shows some elements twice
            continue
        with graph.inserting_after(on_host):
            back = emit(graph, to_device, on_host, device=str(value.device))
        for one in (on_host, back):
            one.meta |= {key: node.meta[key] for key in ("nn_module_stack", "seq_nr") if key in node.meta}
            one.meta[OFFLOADED] = matrix.fqn, matrix.unit
        tag(on_host, CheckpointPolicy.MUST_SAVE)
        node.replace_all_uses_with(back)
        for one in closure([back], lambda node: filter(is_view, node.users)) - of_backward:  # else a view may be saved
            tag(one, CheckpointPolicy.MUST_RECOMPUTE)
        on_host.replace_input_with(back, node)
        sent += 1
    return sent


def _cut_as_it_is(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return what forward would hold for nobody but backward, and what backward would compute that forward could."""
    num_results = num_forward_results(graph)
    of_backward = closure(tangents_of(graph), lambda node: node.users)
    forward, backward = compat.cut(copy.deepcopy(graph), graph.owning_module, num_results)
    storages, may_leave = storages_of(forward), those_that_may_leave(forward, num_results)
    saved = [storages[one] for one in results_of(forward)[num_results:] if isinstance(one, fx.Node)]
    by_name = {node.name: node for node in graph.nodes}
    found = [_with_tensor(by_name[one.node.name], one.place) for these in saved for one in these if one in may_leave]
    computed = (by_name.get(node.name) for node in backward.nodes if node.op == "call_function" and tensors_of(node))
    again = [one for one in computed if one is not None and one not in of_backward]
    return [*dict.fromkeys(one for one in found if one is not None)], again


def those_that_may_leave(forward: fx.Graph, num_results: int) -> set[Storage]:
    """Return the storages that may be on the host when forward, which returns so many results, has ended."""
    storages, kinds = storages_of(forward), kinds_of(forward)
    results = [one for one in results_of(forward)[:num_results] if isinstance(one, fx.Node)]
    returned = {storage for one in results for storage in storages[one]}
    return {
        storage
        for storage, kind in kinds.items()
        if kind in (ACTIVATION, OTHER) and storage.node.op == "call_function" and storage not in returned
        if storage.num_bytes >= LEAST_BYTES
    }


def _with_tensor(node: fx.Node, place: int) -> fx.Node | None:
    """Return the node whose value is the tensor that a node makes at this place; the wait for what is launched."""
    if isinstance(node.meta.get("val"), Tensor):
        return next((user for user in node.users if is_wait(user)), node)
    parts = (user for user in node.users if user.target is operator.getitem and user.args[1] == place)
    return next((one for one in parts if isinstance(one.meta.get("val"), Tensor)), None)


def num_forward_results(joint: fx.Graph) -> int:
    """Return how many results of a joint graph are its forward's; the gradients of inputs follow, one for each."""
    inputs, tangents, results = joint.find_nodes(op="placeholder"), tangents_of(joint), results_of(joint)
    num_results = len(results) - (len(inputs) - len(tangents))
    of_backward = closure(tangents, lambda node: node.users)
    if num_results < 0 or any(one in of_backward for one in results[:num_results]):
        raise RuntimeError(
            f"the joint graph returns {len(results)} results for {len(inputs) - len(tangents)} inputs, so what it "
            "returns of its forward is not known, and memory_budget cannot predict its peak. Leave memory_budget out."
        )
    return num_results


def launch_copies(graph: fx.Graph, plan: Plan) -> int:
    """Replace copies in a graph that was cut by launches and waits; return how many are left."""
    for back in _offloaded(graph, to_device):
        on_host = back.args[0]
        assert isinstance(on_host, fx.Node)
        if on_host.target is to_host:
            back.replace_all_uses_with(on_host.args[0])  # type: ignore[arg-type]
            graph.erase_node(back)
    num_copies = 0
    for node in (*_offloaded(graph, to_host), *_offloaded(graph, to_device)):
        if node.users:
            with graph.inserting_before(node):
                if node.target is to_host:
                    launch = emit(graph, launch_to_host, node.args[0])
                else:
                    launch = emit(graph, launch_to_device, node.args[0], node.kwargs["device"])
                wait = emit(graph, wait_tensor, launch)
            _, unit = node.meta[OFFLOADED]
            for one in (launch, wait):
                one.meta |= {key: said for key, said in node.meta.items() if key not in ("val", "recompute")}
                one.meta[ROLE] = Role("copy", num_copies, unit, len(plan.order))
            node.replace_all_uses_with(wait)
            num_copies += 1
        graph.erase_node(node)
    return num_copies


def _offloaded(graph: fx.Graph, op: compat.OpOverload) -> list[fx.Node]:
    return [node for node in graph.find_nodes(op="call_function", target=op) if OFFLOADED in node.meta]
