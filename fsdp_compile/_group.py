"""ParamGroup: the parameters of one fully_shard call, what is gathered and reduced, and in which layout.

Both paths read it: the graph path bakes its specs into the markers, the eager path runs the same lowering programs
over the same buckets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from . import _torch_compat as compat
from ._comm import Comms
from ._extension import traced_protocol, why_not_traced
from ._mesh import ShardMesh
from ._param import Mode, ReadSpec, ShardedParam
from ._watch import Watch
from .passes.layout import BUCKETINGS

REDUCTIONS = ("auto", "reduce_scatter", "all_to_all")


@dataclass(eq=False)
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
    divide_factor: float | None = None  # what gradients are divided by in place of the number of ranks
    force_sum: bool = False  # only sums travel; the division is done around them
    # After forward each rank keeps a slice for these few ranks, and backward gathers over them alone.
    post_forward: ShardMesh | None = None
    offload: bool = False  # shards and their gradients stay on the CPU
    # Counts changes of what the specs say.
    version: int = 0
    # What FSDPModule's setters say; the eager path reads them when it needs them.
    sync: bool = True
    all_reduce: bool = True
    # Compiled markers are of several kinds once the user has accumulated without communication, or without that over
    # replicas, or has changed his mind between a forward and its backward.
    has_accumulated: bool = False
    has_accumulated_over_shards: bool = False
    decides_in_backward: bool = False
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    reduce_unused: bool = False
    keep_storage: bool = False
    max_reductions: int = 1
    comms: Comms = field(default_factory=Comms)
    reduce_groups: dict[str, str] = field(default_factory=dict)  # process group to reduce in, by the one to gather in
    # By FQN: full gradients of backwards without sync, reduced shards of backwards without all-reduce.
    pending: dict[str, torch.Tensor] = field(default_factory=dict)
    partials: dict[str, torch.Tensor] = field(default_factory=dict)
    watch: Watch = field(init=False, repr=False)
    has_joined_edges: bool = False  # one autograd node leads from compiled graphs to the parameters that nobody hooked

    def __post_init__(self) -> None:
        self.watch = Watch(self)

    @property
    def regather(self) -> bool:
        """Whether backward gathers again what forward gathered."""
        if self.reshard_after_forward is None:
            return not self.is_root
        return self.reshard_after_forward

    def mode_of(self, param: ShardedParam) -> Mode:
        """What compiled backwards do with the parameter's gradient."""
        if not self.sync or self.decides_in_backward:
            return "hold"  # and where backward finds that it must synchronize, its end does
        if self.has_accumulated_over_shards and param.mesh.num_replicas > 1:
            return "resume_over_shards"
        return "resume" if self.has_accumulated else "reduce"

    @property
    def has_left_over(self) -> bool:
        """Whether gradients wait that are to be reduced by now."""
        return self.sync and bool(self.pending or (self.partials and self.all_reduce))

    @property
    def computes_elsewhere(self) -> bool:
        """Whether shards are not where they are gathered, and are copied there and back."""
        return self.offload and self.mesh.device.type != "cpu"

    @property
    def eager_only(self) -> str | None:
        """Name of what a graph cannot honour; None without such a thing."""
        for param in self.params:
            reason = why_not_traced(param, param.shard, self.post_forward is not None, self.computes_elsewhere)
            if reason is not None:
                return reason
            if param.grad_dtype is None and compat.GRADIENTS_COME_AS_PRODUCED:
                return f"grad_dtype=None of {param.fqn}"  # a graph casts gradients to the dtype of what they are of
        if self.reduce_unused:  # what a graph does not read it does not reduce either
            return "set_reduce_scatter_unused_params"
        return self.comms.custom

    def set_options(self, bucketing: str | None, reduction: str | None) -> None:
        if bucketing is not None and bucketing not in BUCKETINGS:
            raise ValueError(f"bucketing={bucketing!r} is none of {', '.join(BUCKETINGS)}.")
        if reduction is not None and reduction not in REDUCTIONS:
            raise ValueError(f"reduction={reduction!r} is none of {', '.join(REDUCTIONS)}.")
        self.bucketing = self.bucketing if bucketing is None else bucketing
        self.reduction = self.reduction if reduction is None else reduction

    def spec_of(self, param: ShardedParam) -> ReadSpec:
        """What a marker of the parameter says, by the dtype that its shard has now."""
        stored = param.shard.dtype
        floating = stored.is_floating_point
        dtype = self._param_dtype(param, stored) if floating else stored
        grad_dtype = compat.get_grad_dtype(param.shard) or dtype  # an explicit None: as autograd produces it
        reduce_dtype = (self.mp_policy.reduce_dtype or grad_dtype) if floating else stored
        mesh = param.mesh
        reduction = mesh.default_reduction if self.reduction == "auto" else self.reduction
        if self.comms.reduce_scatter is not None or self.comms.all_reduce_hook is not None:
            reduction = "reduce_scatter"  # the user's takes its place, or its result
        reduce_op, predivide, postdivide = division(
            mesh.num_shards * mesh.num_replicas,
            self.divide_factor,
            self.force_sum,
            averages=mesh.backend == "nccl" and (reduction == "reduce_scatter" or mesh.num_shards == 1),
            reduce_dtype=reduce_dtype,
        )
        return ReadSpec(
            fqn=param.fqn,
            unit=self.unit,
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
            regather=self.regather,
            reduce_op=reduce_op,
            predivide=predivide,
            postdivide=postdivide,
            reduction=reduction,
            bucketing=self.bucketing,
            replicate_group=mesh.replicate_group,
            num_replicas=mesh.num_replicas,
            inner_shards=1 if self.post_forward is None else self.post_forward.num_shards,
            inner_group="" if self.post_forward is None else self.post_forward.group,
            inner_rank=0 if self.post_forward is None else self.post_forward.rank,
            read_as=param.dtensor,
            mode=self.mode_of(param),
            extension=traced_protocol(param, param.shard, self.mp_policy),
            device=str(self.mesh.device) if self.computes_elsewhere else "",
            pinned=self.computes_elsewhere and compat.is_pinned(param.shard),
        )

    def _param_dtype(self, param: ShardedParam, stored: torch.dtype) -> torch.dtype:
        return self.overrides.get(param.fqn) or self.mp_policy.param_dtype or stored



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
