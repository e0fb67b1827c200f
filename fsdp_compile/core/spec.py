"""The spec of each parameter of a unit. Markers carry the spec, and the eager path follows the same one."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from .._torch_compat import autograd, dtensors
from ..passes.wire.layout import reduction_of
from .extension import ALL_ARGUMENTS, Protocol, arity_of, halves_of, why_not_traced
from .mesh import ShardMesh
from .param import ReadSpec, ShardedParam
from .unit import Unit


def spec_of(unit: Unit, param: ShardedParam) -> ReadSpec:
    """Return the parameter's spec, for the dtype that its shard has now."""
    stored = param.shard.dtype
    floating = stored.is_floating_point
    asked = unit.overrides.get(param.fqn) or unit.mp_policy.param_dtype
    dtype = (asked or stored) if floating else stored
    grad_dtype = param.shard.grad_dtype or dtype  # an explicit None means as autograd produces it
    reduce_dtype = (unit.mp_policy.reduce_dtype or grad_dtype) if floating else stored
    mesh, settings, inner = param.mesh, unit.settings, unit.post_forward or _may_slice(unit, param)
    reduction = reduction_of(mesh.backend) if settings.reduction == "auto" else settings.reduction
    if settings.comms.reduce_scatter is not None or settings.comms.all_reduce_hook is not None:
        reduction = "reduce_scatter"  # the user's code replaces it, or takes its result
    reduce_op, predivide, postdivide = division(
        mesh.num_shards * mesh.num_replicas,
        settings.divide_factor,
        settings.force_sum,
        averages=mesh.backend == "nccl" and (reduction == "reduce_scatter" or mesh.num_shards == 1),
        reduce_dtype=reduce_dtype,
    )
    return ReadSpec(
        fqn=param.fqn,
        unit=unit.label,
        order=param.order,
        size=param.layout.size,
        dim=param.layout.dim,
        num_shards=param.layout.num_shards,
        local_length=param.layout.local_size(mesh.rank)[param.layout.dim],
        group=mesh.group,
        backend=mesh.backend,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        grad_dtype=grad_dtype,
        regather=unit.regather,
        reduce_op=reduce_op,
        predivide=predivide,
        postdivide=postdivide,
        reduction=reduction,
        bucketing=settings.bucketing,
        step=settings.plan,
        stays=settings.stays if inner is None and not unit.computes_elsewhere else "",
        replicate_group=mesh.replicate_group,
        num_replicas=mesh.num_replicas,
        inner_shards=1 if inner is None else inner.num_shards,
        inner_group="" if inner is None else inner.group,
        inner_rank=0 if inner is None else inner.rank,
        inner_offered=inner is not None and inner is not unit.post_forward,
        read_as=param.dtensor,
        extension=_traced_protocol(unit, param),
        carries=tuple(param.carried),
        device=str(unit.mesh.device) if unit.computes_elsewhere else "",
        is_table=param.is_table,
        pinned=unit.computes_elsewhere and dtensors.is_pinned(param.shard),
    )


def spec_key(unit: Unit, param: ShardedParam) -> tuple[Any, ...]:
    """Return a key that stays the same only while ``spec_of`` returns the same."""
    shard, local = param.shard, param.local
    if type(local) is not torch.Tensor:
        return unit.num_set_ups, param.version  # an extension may depend on anything in it
    pinned = unit.computes_elsewhere and dtensors.is_pinned(shard)
    return unit.num_set_ups, shard.dtype, shard.grad_dtype, pinned


def _may_slice(unit: Unit, param: ShardedParam) -> ShardMesh | None:
    """Return the ranks that hold slices of a parameter until backward if the plan says so; None where they cannot."""
    few = unit.may_slice
    if few is None or param.dtensor is not None or param.mesh != unit.mesh or any(halves_of(param.shard)):
        return None
    # A slice that is as short as a shard would save nothing.
    is_longer = dataclasses.replace(param.layout, num_shards=few.num_shards).chunk > param.layout.chunk
    return few if is_longer and not unit.computes_elsewhere else None


def eager_only(unit: Unit) -> str | None:
    """Return the name of a setting or an extension that a graph cannot honour; None without one."""
    for param in unit.params:
        slices = unit.post_forward is not None
        reason = why_not_traced(param.fqn, param.shard, slices, unit.computes_elsewhere)
        if reason is not None:
            return reason
        if param.grad_dtype is None and autograd.GRADIENTS_COME_AS_PRODUCED:
            return f"grad_dtype=None of {param.fqn}"  # a graph casts gradients to the parameter's dtype
    if unit.settings.reduce_unused:  # a graph does not reduce a parameter that it does not read
        return "set_reduce_scatter_unused_params"
    return unit.settings.comms.custom


def can_be_given(param: ShardedParam) -> bool:
    """Whether a graph can take the full parameter as an input, while the eager path gathers and reduces around it."""
    as_produced = param.grad_dtype is None and autograd.GRADIENTS_COME_AS_PRODUCED
    return not as_produced and not any(halves_of(param.shard))


def protocol_of(param: ShardedParam, shard: Any, mp_policy: Any) -> Protocol:
    """Return how to call the shard's extension; raise if that takes a wrong number of arguments."""
    local = dtensors.local_tensor(shard)
    takes_all = arity_of(param.fqn, local) == ALL_ARGUMENTS
    owner = weakref.ref(param.slots[0].module) if takes_all else None
    look = None if param.apart is None else param.apart.look
    return Protocol(type(local), param.mesh.over_shards, shard.size(), tuple(shard.stride()), mp_policy, owner, look)


def _traced_protocol(unit: Unit, param: ShardedParam) -> Protocol | None:
    """Return how a graph calls the shard's extension; None if it cannot, and without an extension."""
    if not any(halves_of(param.shard)) or why_not_traced(param.fqn, param.shard) is not None:
        return None
    return protocol_of(param, param.shard, unit.mp_policy)


def division(
    ranks: int, factor: float | None, force_sum: bool, averages: bool, reduce_dtype: torch.dtype
) -> tuple[str, float, float]:
    """Return where gradients are divided: (operation on the wire, divisor before it, divisor after it).

    They are divided once, by ``factor``, or by the number of ``ranks`` without one. ``averages`` says that the backend
    can average on the wire.
    """
    divisor = float(ranks) if factor is None else float(factor)
    if divisor == 1.0:
        return "sum", 1.0, 1.0
    if reduce_dtype is torch.float16:
        # Divide half before and half after; otherwise sums beyond 65504 overflow, or small gradients vanish.
        before = 1.0
        while before * before < divisor:
            before *= 2
        return "sum", before, divisor / before
    if averages and factor is None and not force_sum:
        return "avg", 1.0, 1.0
    return "sum", 1.0, divisor
