"""What a unit's parameters travel by: the arguments of their markers, which the eager path goes by as well."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from .._torch_compat import autograd, dtensors
from .extension import ALL_ARGUMENTS, Protocol, arity_of, halves_of, why_not_traced
from .mesh import ShardMesh
from .param import ReadSpec, ShardedParam
from .unit import Unit


def spec_of(unit: Unit, param: ShardedParam) -> ReadSpec:
    """What a marker of the parameter says, by the dtype that its shard has now."""
    stored = param.shard.dtype
    floating = stored.is_floating_point
    dtype = _param_dtype(unit, param, stored) if floating else stored
    grad_dtype = autograd.get_grad_dtype(param.shard) or dtype  # an explicit None: as autograd produces it
    reduce_dtype = (unit.mp_policy.reduce_dtype or grad_dtype) if floating else stored
    mesh, settings, inner = param.mesh, unit.settings, unit.post_forward or _may_slice(unit, param)
    reduction = mesh.default_reduction if settings.reduction == "auto" else settings.reduction
    if settings.comms.reduce_scatter is not None or settings.comms.all_reduce_hook is not None:
        reduction = "reduce_scatter"  # the user's takes its place, or its result
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
        pinned=unit.computes_elsewhere and dtensors.is_pinned(param.shard),
    )


def spec_key(unit: Unit, param: ShardedParam) -> tuple[Any, ...]:
    """Where this is as it was, ``spec_of`` would say what it said."""
    shard, local = param.shard, param.local
    if type(local) is not torch.Tensor:
        return unit.num_set_ups, param.version  # an extension may look elsewhere
    pinned = unit.computes_elsewhere and dtensors.is_pinned(shard)
    return unit.num_set_ups, shard.dtype, autograd.get_grad_dtype(shard), pinned


def _may_slice(unit: Unit, param: ShardedParam) -> ShardMesh | None:
    """Who may hold slices of a parameter from forward to backward, if the plan says so; None where that cannot be."""
    few = unit.may_slice
    if few is None or param.dtensor is not None or param.mesh != unit.mesh or any(halves_of(param.shard)):
        return None
    # A slice that is as short as a shard would save nothing.
    is_longer = dataclasses.replace(param.layout, num_shards=few.num_shards).chunk > param.layout.chunk
    return few if is_longer and not unit.computes_elsewhere else None


def eager_only(unit: Unit) -> str | None:
    """Name of what a graph cannot honour; None without such a thing."""
    for param in unit.params:
        slices = unit.post_forward is not None
        reason = why_not_traced(param.fqn, param.shard, slices, unit.computes_elsewhere)
        if reason is not None:
            return reason
        if param.grad_dtype is None and autograd.GRADIENTS_COME_AS_PRODUCED:
            return f"grad_dtype=None of {param.fqn}"  # a graph casts gradients to the dtype of what they are of
    if unit.settings.reduce_unused:  # what a graph does not read it does not reduce either
        return "set_reduce_scatter_unused_params"
    return unit.settings.comms.custom


def can_be_given(param: ShardedParam) -> bool:
    """Whether a graph can take the full parameter and honours all that was asked for, whoever gathers and reduces."""
    as_produced = param.grad_dtype is None and autograd.GRADIENTS_COME_AS_PRODUCED
    return not as_produced and not any(halves_of(param.shard))


def protocol_of(param: ShardedParam, shard: Any, mp_policy: Any) -> Protocol:
    """How to speak to the extension that a shard has; raises where it does not listen."""
    local = dtensors.local_tensor(shard)
    takes_all = arity_of(param.fqn, local) == ALL_ARGUMENTS
    owner = weakref.ref(param.slots[0].module) if takes_all else None
    look = None if param.apart is None else param.apart.look
    return Protocol(type(local), param.mesh.over_shards, shard.size(), tuple(shard.stride()), mp_policy, owner, look)


def _traced_protocol(unit: Unit, param: ShardedParam) -> Protocol | None:
    """How a graph speaks to the shard's extension; None where it cannot, and where there is none."""
    if not any(halves_of(param.shard)) or why_not_traced(param.fqn, param.shard) is not None:
        return None
    return protocol_of(param, param.shard, unit.mp_policy)


def _param_dtype(unit: Unit, param: ShardedParam, stored: torch.dtype) -> torch.dtype:
    return unit.overrides.get(param.fqn) or unit.mp_policy.param_dtype or stored


def division(
    ranks: int, factor: float | None, force_sum: bool, averages: bool, reduce_dtype: torch.dtype
) -> tuple[str, float, float]:
    """Where gradients are divided: (operation on the wire, divisor before it, divisor after it).

    By the number of ``ranks``, or by the ``factor`` in its place: once. ``averages``: the backend can do it on the way.
    """
    divisor = float(ranks) if factor is None else float(factor)
    if divisor == 1.0:
        return "sum", 1.0, 1.0
    if reduce_dtype is torch.float16:
        # Half before, half after, or sums of 65504 and more overflow and small gradients vanish.
        before = 1.0
        while before * before < divisor:
            before *= 2
        return "sum", before, divisor / before
    if averages and factor is None and not force_sum:
        return "avg", 1.0, 1.0
    return "sum", 1.0, divisor
