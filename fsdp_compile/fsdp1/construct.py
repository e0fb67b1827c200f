"""The wrapper's constructor and forward. The constructor's arguments are handled in these files:

    module, ignored_*                 region.py     what is not sharded
    device_id, process_group,
      device_mesh, sharding_strategy  ranks.py      the mesh
    auto_wrap_policy                  policies.py   wrappers around modules below
    param_init_fn, sync_module_states,
      mixed_precision's dtypes        prepare.py    values and dtypes before sharding
    the rest                          fully_shard, or replicate
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from .._torch_compat import fsdp1
from ..api.arguments import modules_in, require_dtypes
from ..api.classes import refresh
from ..api.fully_shard import make_unit, replicate
from ..core.containers import cast_floating, tensors_in
from ..core.left import hand_over
from ..core.mesh import hybrid_mesh, replicate_mesh, shard_mesh
from ..core.unit import Unit, unit_of
from .helpers import Either, state_of_wrapper
from .policies import modules_to_wrap, wrap_children
from .prepare import (
    ask_for_gradients_in,
    cast_region_buffers,
    fill_meta,
    require_ties_inside,
    restore_buffers,
    send_from_first,
)
from .ranks import KEEPS_GATHERED, device_for, mesh_for
from .region import PARAMS, WRAPPED, Wrapper, all_ignored, region_of, region_tensors, wrappers_in
from .state_dicts import default_settings, has_clean_state_dicts

# True while a constructor makes the wrappers of its policy: only that constructor then warns and looks for optimizers.
_IS_WRAPPING: ContextVar[bool] = ContextVar("wraps what a policy chose", default=False)


class Constructed(Wrapper):
    """A module around the user's module: it casts the inputs, then calls that module."""

    _is_root: bool  # no other wrapper is around this one

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        _require_kinds(module, sharding_strategy, cpu_offload, mixed_precision, device_mesh)
        self._ignored = all_ignored(module, ignored_modules, ignored_states)
        held = region_tensors(module, self._ignored, PARAMS)
        devices = {param.device for _, _, _, param in held if not param.is_meta}
        self.sharding_strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        self.compute_device = device_for(device_id, devices, device_mesh)
        self._device_mesh = mesh_for(
            self.sharding_strategy, process_group, device_mesh, self.compute_device, auto_wrap_policy is None
        )
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.cpu_offload = cpu_offload or CPUOffload()
        self.forward_prefetch, self.use_orig_params = forward_prefetch, use_orig_params
        self.backward_prefetch, self.limit_all_gathers = backward_prefetch, limit_all_gathers
        if not _IS_WRAPPING.get():
            self._warn_of_settings()
        if self._is_alone:
            self.sharding_strategy = ShardingStrategy.NO_SHARD

        if auto_wrap_policy is not None:
            self._wrap_children(
                module,
                auto_wrap_policy,
                {
                    "process_group": None,
                    "sharding_strategy": sharding_strategy,
                    "cpu_offload": cpu_offload,
                    "backward_prefetch": backward_prefetch,
                    "mixed_precision": mixed_precision,
                    "param_init_fn": param_init_fn,
                    "device_id": device_id,
                    "sync_module_states": sync_module_states,
                    "forward_prefetch": forward_prefetch,
                    "limit_all_gathers": limit_all_gathers,
                    "use_orig_params": use_orig_params,
                    "ignored_states": self._ignored.params,
                    "device_mesh": self._device_mesh,
                },
            )

        fill_meta(module, self._ignored, self.compute_device, param_init_fn)
        if sync_module_states:
            send_from_first(module, self._ignored, self._device_mesh)
        precision = self.mixed_precision
        reduce_dtype = precision.reduce_dtype or precision.param_dtype
        if precision.keep_low_precision_grads and reduce_dtype is not None:
            ask_for_gradients_in(module, self._ignored, reduce_dtype)
        self._saved_buffer_dtypes: dict[str, torch.dtype] = {}
        if precision.buffer_dtype is not None:
            self._saved_buffer_dtypes = cast_region_buffers(module, self._ignored, precision.buffer_dtype)
        self._shard(module, reduce_dtype)
        self._fsdp_wrapped_module = module
        self._gives_inputs_dtype: bool = False
        # As in FSDP1, the variable is read here; if it is 1, evaluation computes in the parameters' own dtype.
        self._full_precision_in_eval = os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"
        self._is_in_full_precision: bool = False
        self._has_comm_hook: bool = False
        self._state_dict_settings = default_settings()
        for one in wrappers_in(self):
            one._is_root = one is self
            one._settle_casts()
        self._settle_precision()
        has_clean_state_dicts(self)
        fsdp1.tell_checkpoint_helpers(Either, state_of_wrapper)
        if not _IS_WRAPPING.get():
            hand_over()

    def _new(self, module: nn.Module, **kwargs: Any) -> Constructed:
        """Make a wrapper for a module below this one."""
        raise NotImplementedError

    @property
    def _is_alone(self) -> bool:
        return self._device_mesh.ndim == 1 and self._device_mesh.size() == 1

    def _warn_of_settings(self) -> None:
        """Warn of arguments that have no effect, and of a strategy that has another name by now."""
        if self.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
            warnings.warn(
                f"backward_prefetch={self.backward_prefetch} has no effect: compiled, the plan says what backward "
                "gathers when (fsdp_compile.inspect shows it); eagerly, the next unit is gathered while one computes.",
                stacklevel=3,
            )
        if not self.limit_all_gathers:
            warnings.warn(
                "limit_all_gathers=False has no effect: one gather is launched ahead eagerly, and as many as the plan "
                "says in compiled code.",
                stacklevel=3,
            )
        if self._is_alone and self.sharding_strategy is not ShardingStrategy.NO_SHARD:
            warnings.warn(
                f"FSDP is switching to use `NO_SHARD` instead of {self.sharding_strategy} since the world size is 1. "
                "Pass it to say so.",
                stacklevel=3,
            )
        elif not self._is_alone and self.sharding_strategy is ShardingStrategy.NO_SHARD:
            warnings.warn(
                "The `NO_SHARD` sharding strategy is deprecated in FSDP1. Call fsdp_compile.replicate(model), which "
                "does the same, and is what runs here.",
                FutureWarning,
                stacklevel=3,
            )

    def _wrap_children(self, module: nn.Module, policy: Any, kwargs: dict[str, Any]) -> None:
        """Wrap what the policy chooses below ``module``."""
        chosen, exact = modules_to_wrap(module, policy, self._ignored, kwargs)
        require_ties_inside(module, chosen)

        def wrap(child: nn.Module, its: dict[str, Any]) -> Constructed:
            its = dict(its)
            if its["process_group"] is not None and its["device_mesh"] is self._device_mesh:
                its["device_mesh"] = None  # the policy gave this child its own group
            wrapper = self._new(child, **its)
            wrapper._gives_inputs_dtype = child in exact
            return wrapper

        token = _IS_WRAPPING.set(True)
        try:
            wrap_children(module, chosen, wrap)
        finally:
            _IS_WRAPPING.reset(token)

    def _shard(self, module: nn.Module, reduce_dtype: torch.dtype | None) -> None:
        """Shard or replicate the parameters of the module's region."""
        given: Any = module
        if is_container(module):
            warnings.warn(
                "FSDP1 warns that FSDP will not all-gather parameters for containers that do not implement forward. "
                f"Here the members of this {type(module).__name__} are one unit, gathered when the first of them is "
                "called. Wrap them one by one, or what calls them.",
                stacklevel=4,
            )
            given = [child for child in module.children() if not isinstance(child, Wrapper)]
            if not given:
                return
        policy = MixedPrecisionPolicy(
            param_dtype=self.mixed_precision.param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        )
        offload = CPUOffloadPolicy() if self.cpu_offload.offload_params else OffloadPolicy()
        ignored = set(self._ignored.params)
        is_replicated, mesh = self.sharding_strategy is ShardingStrategy.NO_SHARD, self._device_mesh
        # FSDP1 accepts a mesh of two dimensions without names.
        target = (replicate_mesh if is_replicated else hybrid_mesh if mesh.ndim == 2 else shard_mesh)(mesh)
        known, asked = unit_of(module), (target, policy, self.cpu_offload.offload_params)
        if known is not None and (known.mesh, known.mp_policy, known.offload) == asked:
            return  # one more wrapper around a module that is a unit already
        if is_replicated:
            replicate(given, mesh=mesh, mp_policy=policy, offload_policy=offload, ignored_params=ignored)
            return
        # None: the root alone stays gathered, as in FSDP1.
        reshard_after_forward = False if self.sharding_strategy in KEEPS_GATHERED else None
        given = modules_in(given, "fully_shard")
        make_unit(given, target, reshard_after_forward, None, policy, offload, ignored)

    def _settle_casts(self) -> None:
        """Set the dtype that inputs are cast to, now that it is known whether this is the outermost wrapper."""
        precision = self.mixed_precision
        casts = precision.cast_forward_inputs or (self._is_root and precision.cast_root_forward_inputs)
        self._inputs_dtype = precision.param_dtype if casts and not self._is_in_full_precision else None

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self._settle_precision()
        return self

    def _settle_precision(self) -> None:
        """Compute in full precision in evaluation, if that was asked for, and in mixed precision in training."""
        is_full, unit = self._full_precision_in_eval and not self._fsdp_wrapped_module.training, self._unit
        if is_full == self._is_in_full_precision:
            return
        self._is_in_full_precision = is_full
        self._settle_casts()
        if unit is not None:
            if is_full:
                self._trains_by, unit.mp_policy = unit.mp_policy, MixedPrecisionPolicy(cast_forward_inputs=False)
            else:
                unit.mp_policy = self._trains_by
            refresh(unit)
        if is_full:
            restore_buffers(self._fsdp_wrapped_module, self._ignored, self._saved_buffer_dtypes)
        elif self.mixed_precision.buffer_dtype is not None:
            cast_region_buffers(self._fsdp_wrapped_module, self._ignored, self.mixed_precision.buffer_dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module with its inputs cast to the dtype that it computes in."""
        if self._inputs_dtype is not None:
            args, kwargs = cast_floating(args, self._inputs_dtype), cast_floating(kwargs, self._inputs_dtype)
        if not self._gives_inputs_dtype:
            return self._fsdp_wrapped_module(*args, **kwargs)
        dtypes = [one.dtype for one in tensors_in((args, kwargs)) if one.is_floating_point()]
        args, kwargs = cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)
        output = self._fsdp_wrapped_module(*args, **kwargs)
        return cast_floating(output, dtypes[0]) if dtypes else output

    @property
    def module(self) -> Any:
        """The wrapped module, without the wrapper of activation checkpointing that may be around it."""
        return fsdp1.behind_checkpointing(self._fsdp_wrapped_module)

    def __getattr__(self, name: str) -> Any:
        """Get an attribute that the wrapper lacks from the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        """Return a member of a wrapped ``nn.Sequential``."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    @property
    def params(self) -> list[nn.Parameter]:
        """The wrapper's own parameters, without those of inner wrappers: DTensors, where FSDP1 has flat parameters."""
        return [] if self._unit is None else [param.param for param in self._unit.params]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group of ranks over which parameters are sharded or, with NO_SHARD, replicated."""
        return self._device_mesh.get_group(self._device_mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """This rank's place in the process group."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """The number of ranks in the process group."""
        return self.process_group.size()

    @property
    def _unit(self) -> Unit | None:
        """The outermost unit in the wrapper's region; None if that holds nothing but wrappers.

        Checkpointing and torch.compile may have wrapped its module before this wrapper was made, or after, and the
        unit of a container is that of its members.
        """
        found = (unit_of(one) for _, one in region_of(self._fsdp_wrapped_module))
        return next((unit for unit in found if unit is not None), None)

    @property
    def _has_params(self) -> bool:
        """Return False: accelerate casts the flat parameter of a wrapper that has one to fp32, and ours have none."""
        unit = self._unit
        low = {param.param.dtype for param in unit.params if param.param.requires_grad} if unit is not None else set()
        if low - {torch.float32, torch.float64}:
            warnings.warn(
                f"Parameters of the {type(self.module).__name__} are trained in {', '.join(map(str, low))}: there is "
                "no flat parameter to cast. For optimizer steps in fp32 call model.float() before wrapping.",
                stacklevel=2,
            )
        return False

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one."""
        return self._is_root


def is_container(module: nn.Module) -> bool:
    """Whether the module is a list or a dict of modules, without a forward that calls them."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def _require_kinds(module: Any, strategy: Any, cpu_offload: Any, mixed_precision: Any, mesh: Any) -> None:
    """Raise for an argument of the wrong type."""
    for name, given, kind in (
        ("module", module, nn.Module),
        ("sharding_strategy", strategy, ShardingStrategy),
        ("cpu_offload", cpu_offload, CPUOffload),
        ("mixed_precision", mixed_precision, MixedPrecision),
        ("device_mesh", mesh, DeviceMesh),
    ):
        if not isinstance(given, kind) and (given is not None or kind is nn.Module):
            raise TypeError(f"{name} is a {type(given).__name__}. Pass a {kind.__name__}.")
    require_dtypes("mixed_precision", mixed_precision, ("param_dtype", "reduce_dtype", "buffer_dtype"))
