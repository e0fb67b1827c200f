"""The two marker ops: the contract between the runtime half, which emits them, and the passes, which lower them.

    reading a parameter          w  = unshard(shard, spec=text)            local shard -> full parameter
    its autograd rule            gs = reduce_grad(gw, spec=text)           full gradient -> gradient of the shard

    with a leaf                  the leaf gets gs in the place of the shard
    with then="hold"             the leaf gets gw: accumulation without communication
    with a ticket                gw becomes resume(gw, ticket), which adds what accumulated when backward runs
    with then="over_shards"      gs is summed over the shards alone, not over replicas
    with a device                shard and gs are on the CPU, w and gw on the device

A marker's ``spec`` contains everything that a pass needs, as one text: each argument of an op costs time wherever a
graph is traced or copied. It is equal for equal blocks (the FQN is relative to the module given to ``fully_shard``), so
blocks that look alike share one compiled graph. Where no pass lowers the markers (``aot_eager``, ``eager``, or our
passes displaced), they run as they are: one collective each.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .. import _torch_compat as compat
from ..wire import lower
from ..wire.spec import NAMESPACE, ParamSpec, define_op, library

_BACKWARD = 'Tensor? leaf=None, Tensor? ticket=None, str then="reduce"'

# By the number in a ticket. It is a number and no pointer, since saved tensors may be moved before backward.
ticket_holders: dict[int, Callable[[Tensor], Tensor]] = {}


def _unshard_fake(shard: Tensor, *backward: Any, spec: str) -> Tensor:
    its = ParamSpec.of(spec)
    require_data(its.fqn, shard)
    if its.device:
        require_on_cpu(its.fqn, shard)
    return shard.new_empty(its.size, dtype=its.dtype, device=its.device or shard.device)


def _reduce_grad_fake(grad: Tensor, *beside: Any, spec: str) -> Tensor:
    its = ParamSpec.of(spec)
    return grad.new_empty(its.local_size, dtype=its.grad_dtype, device="cpu" if its.device else grad.device)


def _unshard_kernel(shard: Tensor, *backward: Any, spec: str) -> Tensor:
    its = ParamSpec.of(spec)
    _warn_if_displaced("unshard", its.fqn)
    (full,) = lower.finish_gather(lower.run, lower.launch_gather(lower.run, [shard], [its]), [its])
    # A functional op may not return its input, and with one shard and no cast nothing was copied.
    return full.clone() if full.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr() else full


def _reduce_grad_kernel(grad: Tensor, *beside: Any, spec: str) -> Tensor:
    its = ParamSpec.of(spec)
    _warn_if_displaced("reduce_grad", its.fqn)
    pending = lower.launch_reduce(lower.run, [grad], [its])
    (reduced,) = lower.finish_reduce(lower.run, pending, [its])
    same = reduced.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr()
    return reduced.clone() if same else reduced


def _keep_slice(full: Tensor, dim: int, start: int, length: int) -> Tensor:
    return full.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def _beside(grad: Tensor, gathered: list[Tensor]) -> Tensor:
    return grad.clone()


def _resume_fake(grad: Tensor, ticket: Tensor) -> Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def _resume_kernel(grad: Tensor, ticket: Tensor) -> Tensor:
    return ticket_holders[int(ticket)](grad)


unshard = define_op(f"unshard(Tensor shard, {_BACKWARD}, *, str spec) -> Tensor", _unshard_kernel, _unshard_fake)
# Between two passes, ``beside`` lists gathers that backward is to do although no gradient may read them.
reduce_grad = define_op(
    "reduce_grad(Tensor grad, Tensor[]? beside=None, *, str spec) -> Tensor", _reduce_grad_kernel, _reduce_grad_fake
)
# The same for any other gradient, in a graph without reductions.
beside = define_op("beside(Tensor grad, Tensor[] gathered) -> Tensor", _beside)
# This op marks each tensor that an all-gather extension made from gathered parts. The pass ``parts`` removes the op.
# Its kernel clones, since a functional op may not return its input.
made_of_parts = define_op("made_of_parts(Tensor full) -> Tensor", torch.clone)
# This calls the ticket's holder when backward runs, which no graph contains: it adds what earlier backwards held back.
resume = define_op(
    "resume(Tensor grad, Tensor ticket) -> Tensor", _resume_kernel, _resume_fake, (torch.Tag.cudagraph_unsafe,)
)
fx.node.has_side_effect(resume)  # two calls may not become one: the first takes what is pending
# This stands for a parameter from forward to backward, which gathers it again from such slices (slices.py).
keep_slice = define_op("keep_slice(Tensor full, int dim, int start, int length) -> Tensor", _keep_slice)
compat.leave_all_to_python(_unshard_kernel, _reduce_grad_kernel, _resume_kernel)


def _save_spec(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    _, leaf, ticket, then = inputs
    ctx.reduction, ctx.then = backward_spec(ParamSpec.of(keyword_only_inputs["spec"]), then), then
    ctx.has_leaf, ctx.has_ticket = leaf is not None, ticket is not None
    if ticket is not None:
        ctx.save_for_backward(ticket)


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    ticket = ctx.saved_tensors[0] if ctx.has_ticket else None
    return (*gradients(grad, ctx.reduction, ctx.then, ctx.has_leaf, ticket), None, None)


torch.library.register_autograd(f"{NAMESPACE}::unshard", _unshard_backward, setup_context=_save_spec, lib=library)


def backward_spec(spec: ParamSpec, then: str) -> tuple[torch.dtype, str]:
    """Return what ``gradients`` needs of a spec: the dtype that gradients travel in, and the text of their reduction.

    Dynamo may trace ``gradients``, and it cannot trace the reading of a text.
    """
    return spec.reduce_dtype, (spec.over_shards() if then == "over_shards" else spec).text


def gradients(
    grad: Tensor, reduction: tuple[torch.dtype, str], then: str, has_leaf: bool, ticket: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a marker's shard and of its leaf, given the gradient of the full parameter."""
    dtype, spec = reduction
    if ticket is not None:
        grad = torch.ops.fsdpc.resume(grad.to(dtype), ticket)
    if then == "hold":
        return None, grad.to(dtype)
    reduced = torch.ops.fsdpc.reduce_grad(grad, spec=spec)
    return (None, reduced) if has_leaf else (reduced, None)


def spec_in(marker: fx.Node) -> ParamSpec:
    """Return the spec that a marker carries."""
    return ParamSpec.of(str(marker.kwargs["spec"]))


def change_spec(marker: fx.Node, **changes: Any) -> None:
    """Give a marker the same spec with other values in some of its fields."""
    spec = spec_in(marker)
    if any(getattr(spec, name) != value for name, value in changes.items()):  # a search asks for what is there already
        marker.update_kwarg("spec", dataclasses.replace(spec, **changes).text)


def require_data(fqn: str, shard: Tensor) -> None:
    """Raise for a shard that was never materialised; later errors would not name the parameter."""
    if shard.device.type == "meta":
        raise RuntimeError(
            f"FSDP parameters should be materialized from meta device before training, and {fqn} is still there. Call "
            "model.to_empty(device=...) and initialise the parameters, or load_state_dict(..., assign=True)."
        )


def require_on_cpu(fqn: str, shard: Tensor) -> None:
    """Raise for an offloaded shard that somebody moved from the CPU."""
    if shard.device.type != "cpu":
        raise RuntimeError(
            f"FSDP parameters should be materialized on CPU when enabling CPU offloading, but the shard of {fqn} is on "
            f"{shard.device}. Move it back; a model built on meta gets its data with to_empty(device='cpu')."
        )


def _warn_if_displaced(op: str, fqn: str) -> None:
    """Warn when Inductor's generated code runs a marker: then our passes did not see this graph."""
    frame = sys._getframe(2)
    for _ in range(12):
        if frame is None:
            return
        if compat.is_generated_code(frame):
            warnings.warn(
                f"{op} of {fqn} runs unlowered inside a graph compiled by Inductor: a later setting of "
                "torch._inductor.config.post_grad_custom_pre_pass (or torch.compile(options=...)) replaced "
                "fsdp_compile's passes. The numbers are right; every parameter is gathered by itself, without "
                "overlap. Set your own pass before fully_shard, or call fsdp_compile.install_passes() after it.",
                stacklevel=2,
            )
            return
        frame = frame.f_back  # type: ignore[assignment]
