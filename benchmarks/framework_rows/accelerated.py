"""Rows: Hugging Face accelerate, its FSDP2 and FSDP1 plugins, whole, by regions, and in mixed precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.framework_rows.common import (
    FORGETS,
    FSDP1,
    FSDP2,
    IN_BFLOAT16,
    LR,
    SAVED_AFTER,
    STEPS,
    TOLERANCE,
    Block,
    Losses,
    Row,
    decoder,
    loss_between,
    mean_over_ranks,
    started_by_torchrun,
    tokens_of,
)


@contextmanager
def accelerate_on_cpu() -> Iterator[None]:
    """Let accelerate do FSDP on the CPU: its state says so on accelerators only."""
    from accelerate import state
    from accelerate.utils import DistributedType

    init = state.AcceleratorState.__init__

    def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            if self._mixed_precision != "no":  # as accelerate does where it says FSDP itself
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.device = torch.device("cpu")  # FSDP1 knows no cpu:0
            state.PartialState._shared_state["device"] = self.device

    with started_by_torchrun():
        state.AcceleratorState.__init__ = with_fsdp
        try:
            yield
        finally:
            state.AcceleratorState.__init__ = init
            forget_state()


def forget_state() -> None:
    """Have the next Accelerator be the first one of the process."""
    from accelerate import state

    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()


def plugin_for(version: int, **settings: Any) -> Any:
    """The plugin of either version, as its users set it."""
    from accelerate import FullyShardedDataParallelPlugin

    if version == 1:
        settings = {"use_orig_params": True, "sync_module_states": False, **settings}  # it asks for a GPU
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[Block.__name__],
        cpu_ram_efficient_loading=version == 2,
        **{"state_dict_type": "SHARDED_STATE_DICT", **settings},
    )


def _train(
    compiled: bool,
    folder: Path,
    version: int = 2,
    regions: bool = False,
    precision: str = "no",
    **settings: Any,
) -> Losses:
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    def prepare() -> tuple[Any, Any, Any]:
        forget_state()
        dynamo = TorchDynamoPlugin(backend="inductor" if compiled else "no", use_regional_compilation=regions)
        accelerator = Accelerator(
            cpu=True, mixed_precision=precision, fsdp_plugin=plugin_for(version, **settings), dynamo_plugin=dynamo
        )
        model = decoder()
        if version == 2:
            return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR))
        prepared = accelerator.prepare(model)  # FSDP1: the optimizer after its parameters
        return accelerator, prepared, accelerator.prepare(torch.optim.AdamW(prepared.parameters(), lr=LR))

    def steps(accelerator: Any, model: nn.Module, optim: Any, numbers: range) -> Losses:
        losses = []
        for step in numbers:
            with accelerator.accumulate(model):
                loss = loss_between(model(tokens_of(step)), tokens_of(step))
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optim.step()
                optim.zero_grad()
            losses.append(mean_over_ranks(loss))
        return losses

    with accelerate_on_cpu():
        accelerator, model, optim = prepare()
        losses = steps(accelerator, model, optim, range(SAVED_AFTER))
        accelerator.save_state(str(folder))
        losses += steps(accelerator, model, optim, range(SAVED_AFTER, STEPS))
        whole = {name.removeprefix("_orig_mod.") for name in accelerator.get_state_dict(model)}
        names = set(decoder().state_dict())
        if not regions and dist.get_rank() == 0 and whole != names:
            raise RuntimeError(f"get_state_dict gave {sorted(whole ^ names)} too many or too few.")
        accelerator, model, optim = prepare()
        accelerator.load_state(str(folder))
        return losses + steps(accelerator, model, optim, range(SAVED_AFTER, STEPS))


def _row(name: str, engine: str = FSDP2, **settings: Any) -> Row:
    run = partial(_train, version=int(engine[-1]), **settings)
    tolerance: dict[str, Any] = {"tolerance": IN_BFLOAT16} if settings.get("precision") == "bf16" else {}
    resumed = FORGETS if engine == FSDP1 else TOLERANCE
    return Row(f"accelerate, {name}", "accelerate", run, engine, **tolerance, resumed_within=resumed)


ROWS = (
    _row("whole model compiled"),
    _row("regions compiled", regions=True),
    _row("bf16", precision="bf16"),
    _row("FSDP1 plugin", FSDP1),
    _row("FSDP1 plugin, checkpointed activations", FSDP1, activation_checkpointing=True),
    _row("FSDP1 plugin, bf16", FSDP1, precision="bf16"),
)
