"""ParamGroup: the parameters of one fully_shard call, what is gathered and reduced, and in which layout.

Both paths read it: the graph path bakes its specs into the markers, the eager path runs the same lowering programs
over the same buckets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from . import _torch_compat as compat
from ._mesh import ShardMesh
from ._param import ShardedParam
from .passes.layout import BUCKETINGS
from .passes.markers import ParamSpec

REDUCTIONS = ("auto", "reduce_scatter", "all_to_all")


@dataclass
class ParamGroup:
    """One fully_shard call's parameters with everything that decides how they travel."""

    unit: str  # class of the module, or of the modules
    mesh: ShardMesh
    mp_policy: MixedPrecisionPolicy
    params: list[ShardedParam] = field(default_factory=list)
    overrides: dict[str, torch.dtype] = field(default_factory=dict)  # by FQN, from param_dtype_override_fn
    # None: FSDP2's rule, regather unless this is the root.
    reshard_after_forward: bool | None = None
    is_root: bool = True
    bucketing: str = "size"
    reduction: str = "auto"

    @property
    def regather(self) -> bool:
        """Whether backward gathers again what forward gathered."""
        if self.reshard_after_forward is None:
            return not self.is_root
        return self.reshard_after_forward

    def set_options(self, bucketing: str | None, reduction: str | None) -> None:
        if bucketing is not None:
            if bucketing not in BUCKETINGS:
                raise ValueError(f"bucketing={bucketing!r} is none of {', '.join(BUCKETINGS)}.")
            self.bucketing = bucketing
        if reduction is not None:
            if reduction not in REDUCTIONS:
                raise ValueError(f"reduction={reduction!r} is none of {', '.join(REDUCTIONS)}.")
            self.reduction = reduction

    def spec_of(self, param: ShardedParam) -> ParamSpec:
        """What a marker of the parameter says, by the dtype that its shard has now."""
        stored = param.shard.dtype
        floating = stored.is_floating_point
        dtype = self._param_dtype(param, stored) if floating else stored
        grad_dtype = compat.get_grad_dtype(param.shard) or dtype  # an explicit None: as autograd produces it
        reduce_dtype = (self.mp_policy.reduce_dtype or grad_dtype) if floating else stored
        reduction = self.mesh.default_reduction if self.reduction == "auto" else self.reduction
        reduce_op, predivide, postdivide = self._division(reduce_dtype, reduction)
        return ParamSpec(
            fqn=param.fqn,
            unit=self.unit,
            order=param.order,
            size=param.layout.size,
            dim=param.layout.dim,
            num_shards=param.layout.num_shards,
            local_length=param.layout.local_size(self.mesh.rank)[param.layout.dim],
            group=self.mesh.group,
            backend=self.mesh.backend,
            dtype=dtype,
            reduce_dtype=reduce_dtype,
            grad_dtype=grad_dtype,
            regather=self.regather,
            reduce_op=reduce_op,
            predivide=predivide,
            postdivide=postdivide,
            reduction=reduction,
            bucketing=self.bucketing,
        )

    def _param_dtype(self, param: ShardedParam, stored: torch.dtype) -> torch.dtype:
        return self.overrides.get(param.fqn) or self.mp_policy.param_dtype or stored

    def _division(self, reduce_dtype: torch.dtype, reduction: str) -> tuple[str, float, float]:
        """Where the mean over ranks is taken: (operation on the wire, divisor before it, divisor after it)."""
        ranks = self.mesh.num_shards
        if ranks == 1:
            return "sum", 1.0, 1.0
        if reduce_dtype is torch.float16:
            # Half before, half after, or sums of 65504 and more overflow and small gradients vanish.
            before = 1
            while before * before < ranks:
                before *= 2
            return "sum", float(before), ranks / before
        if self.mesh.backend == "nccl" and reduction == "reduce_scatter":
            return "avg", 1.0, 1.0
        return "sum", 1.0, float(ranks)
