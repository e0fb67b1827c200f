"""FullyShardedDataParallel: a module around the user's, whose parameters our core shards.

    FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))

        model: Model            the tree                                the core
          embed                   FSDP
          layers.0: Block           _fsdp_wrapped_module: Model           a unit: embed, head
          head                        embed
                                      layers.0: FSDP
                                        _fsdp_wrapped_module: Block       a unit
                                      head

The wrapper casts inputs and translates names. The unit inside it gathers, computes and reduces, eagerly or compiled, as
if ``fully_shard`` had been called.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import (
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from ..api.clip import clip_grad_norm
from ..api.full_params import require_idle, swapped_in
from ..api.module import no_sync
from ..core.unit import units_in
from .comm_hooks import hook_reductions
from .construct import Constructed
from .older import OlderOptimState
from .optim_state import OptimState, optim_state, optim_state_to_load
from .ranks import HYBRID
from .region import clean, wrappers_in
from .state_dicts import common, default_settings, first_of_one_type, settings_of


class FullyShardedDataParallel(Constructed, OlderOptimState):
    """Shard the parameters of ``module`` that no inner wrapper has, with FSDP1's arguments and their meaning.

    Parameters are DTensors and keep their names and shapes, as with ``use_orig_params=True``, whatever that argument
    says. Compiled code prefetches as the plan says, eager code in the order of the last forward, so
    ``forward_prefetch`` asks for what happens anyway.
    """

    def _new(self, module: nn.Module, **kwargs: Any) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, **kwargs)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the wrappers at and below ``module``; with ``root_only``, those that are in no other wrapper."""
        found = wrappers_in(module)
        inner = {one for outer in found for one in wrappers_in(outer._fsdp_wrapped_module)}
        return [one for one in found if not root_only or one not in inner]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with the names that they had before wrapping."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield clean(name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers with the names that they had before wrapping."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean(name), buffer

    @property
    def _has_full_params(self) -> bool:
        """Whether code runs inside summon_full_params."""
        return any(param.is_full for unit in units_in(self) for param in unit.params)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self._has_full_params:
            raise RuntimeError("The model is moved or cast inside summon_full_params. Leave that block first.")
        return super()._apply(fn, recurse)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call ``fn`` on every module, inner ones first, with full parameters in it, and keep what ``fn`` writes."""
        self._require_idle("apply a function")
        with self.summon_full_params(self, recurse=False):
            super().apply(fn)  # which calls this method of inner wrappers
        return self

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Put full parameters in the place of shards for a block; ``writeback`` keeps what is written to them.

        ``recurse``: also in inner wrappers; ``rank0_only``: other ranks keep their shards; ``with_grads``: ``.grad`` is
        full, too. Every rank must enter and leave the block.
        """
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        if not recurse:
            wrappers = [one for one in wrappers if one is module]
        if writeback and rank0_only:
            raise NotImplementedError(
                "summon_full_params: writeback=True and rank0_only=True is not supported, as other ranks would not "
                "have what rank 0 writes. Pass one of them."
            )
        if with_grads and offload_to_cpu:
            raise NotImplementedError(
                f"summon_full_params: {with_grads=}, {offload_to_cpu=} is not supported. Pass one of them."
            )
        if offload_to_cpu and any(one.sharding_strategy is ShardingStrategy.NO_SHARD for one in wrappers):
            raise NotImplementedError(
                "summon_full_params: offload_to_cpu=True and NO_SHARD is not supported, as parameters are whole. Call "
                ".cpu() on them."
            )
        if offload_to_cpu and not rank0_only:
            warnings.warn(
                "offload_to_cpu=True and rank0_only=False may result in as many copies on the CPU as it has ranks. "
                "Pass rank0_only=True, writeback=False.",
                stacklevel=3,
            )
        units = [one._unit for one in wrappers if one._unit is not None]
        try:
            require_idle(units, "manually unshard parameters")
        except RuntimeError as error:
            raise AssertionError(*error.args) from None
        if any(param.is_full for unit in units for param in unit.params):
            raise AssertionError(
                "Cannot manually unshard parameters when already unsharding parameters, in an outer summon_full_params "
                "or apply. Leave that first."
            )
        with swapped_in(units, writeback, rank0_only, offload_to_cpu, with_grads):
            yield

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings | None:
        """Set the type of state dict of all wrappers at and below ``module``; return the former settings."""
        settings = settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        before = first_of_one_type([one._state_dict_settings for one in wrappers])
        for one in wrappers:
            one._state_dict_settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """Return the settings of state dicts that all wrappers at and below ``module`` share; None without wrappers."""
        return common([one._state_dict_settings for one in FullyShardedDataParallel.fsdp_modules(module)])

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Set the type and configuration of state dicts inside a ``with`` block, and restore them after it."""
        cls = FullyShardedDataParallel
        before = cls.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for one in cls.fsdp_modules(module):
                one._state_dict_settings = before or default_settings()

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: Any, optim_state_dict: OptimState | None = None, group: Any = None
    ) -> OptimState:
        """Return the optimizer's state by parameters' names, of the type that ``set_state_dict_type`` set.

        ``optim_state_dict`` is used in the place of ``optim.state_dict()``; its keys are numbers or names. All ranks of
        ``group`` call this together, with the same states; with ``rank0_only``, only its rank 0 gets the result.
        """
        return optim_state(model, optim, optim_state_dict, FullyShardedDataParallel._settings_in(model), group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Any,
        optim_state_dict: OptimState,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> OptimState:
        """Convert a state that ``optim_state_dict`` returned, on these ranks or others, for ``optim.load_state_dict``.

        ``is_named_optimizer``: the optimizer's keys are the names of ``model.named_parameters()``, not numbers. With
        ``rank0_only`` configured, all ranks load the state of rank 0 of ``group``.
        """
        settings = FullyShardedDataParallel._settings_in(model)
        loadable = optim_state_to_load(model, optim, optim_state_dict, settings, is_named_optimizer, group)
        if load_directly:
            optim.load_state_dict(loadable)
        return loadable

    @staticmethod
    def _settings_in(model: nn.Module) -> StateDictSettings:
        settings = FullyShardedDataParallel.get_state_dict_type(model)
        if settings is None:
            raise ValueError(f"The {type(model).__name__} has nothing in it that is wrapped in FSDP. Wrap it first.")
        return settings

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate full gradients without communication; the first backward after the block reduces the sum."""
        self._require_root("no_sync")
        self._require_idle("stop synchronizing")
        with no_sync(self):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm, as one vector, is at most ``max_norm``; return the norm before."""
        self._require_root("clip_grad_norm_")
        self._require_idle("clip gradients")
        return clip_grad_norm(self.parameters(), max_norm, norm_type, self.compute_device)

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Call ``hook(state, gradients, shards)`` to reduce gradients; ``hook(state, gradients)`` with NO_SHARD.

        torch's hooks that compress to fp16 and bf16 become the dtype of the reduction; a unit with any hook that is not
        torch's runs eagerly.
        """
        if not callable(hook):
            raise ValueError(f"The communication hook must be callable but got {hook!r}. Pass a function.")
        if not self.check_is_root():
            raise AssertionError(
                "register_comm_hook can only be called on a root instance. Call it on the outermost one."
            )
        wrappers = self.fsdp_modules(self)
        for one in wrappers:
            if one.sharding_strategy in HYBRID:
                raise AssertionError(
                    f"Communication hook is not supported for hybrid strategies: {one.sharding_strategy} reduces "
                    "twice. Leave it out, or shard over one group."
                )
            if one._has_comm_hook:
                raise AssertionError("A communication hook is already registered. Register one, once.")
        for one in wrappers:
            one._has_comm_hook = True
            if one._unit is not None:
                hook_reductions(one._unit, one.process_group, state, hook)

    def _require_root(self, method: str) -> None:
        if not self.check_is_root():
            raise RuntimeError(
                f"`{method}()` on inner FSDP instances is not supported: it should only be called on the root FSDP "
                "instance. Call it on the outermost wrapper."
            )

    def _require_idle(self, doing: str) -> None:
        expected = "FSDP was expected to be in states [IDLE] but current state is"  # FSDP1's words
        if self._has_full_params:
            raise ValueError(f"Cannot {doing}: {expected} SUMMON_FULL_PARAMS. Leave summon_full_params first.")
        try:
            require_idle([one._unit for one in self.fsdp_modules(self) if one._unit is not None], doing)
        except RuntimeError as error:
            raise ValueError(f"{expected} FORWARD_BACKWARD. {error}") from None
