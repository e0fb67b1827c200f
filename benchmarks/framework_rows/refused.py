"""What torch's own FSDP does not do on a CPU: each attempt is made, and what it raises is printed as the reason."""

from __future__ import annotations

from functools import partial
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as helpers

from benchmarks.framework_rows.accelerated import forget_state, plugin_for
from benchmarks.framework_rows.by_hand import for_inference, shard_quantized, wrapped
from benchmarks.framework_rows.common import FSDP1, Refused, decoder, started_by_torchrun


def _accelerate_as_it_is() -> None:
    from accelerate import Accelerator

    with started_by_torchrun():
        try:
            forget_state()
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin_for(2))
            if accelerator.state.fsdp_plugin is None or "FSDP" not in str(accelerator.distributed_type):
                raise RuntimeError(f"Accelerator(cpu=True, fsdp_plugin=...) is {accelerator.distributed_type}")
        finally:
            forget_state()


def _fabric_as_it_is() -> None:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import FSDPStrategy

    Fabric(accelerator="cpu", strategy=FSDPStrategy(), devices=2)


def _offloaded() -> None:
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

    model = FullyShardedDataParallel(
        decoder(), device_id=torch.device("cpu"), cpu_offload=CPUOffload(offload_params=True)
    )
    model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()


def _async_save() -> None:
    model = wrapped(decoder(), compiled=False)
    state = {"model": helpers.get_model_state_dict(model)}
    group = dist.new_group(backend="gloo")
    with TemporaryDirectory() as folder:
        dcp.async_save(state, checkpoint_id=folder, process_group=group).result()


REFUSED = (
    Refused("async_save of the helpers' sharded state", "torch", _async_save, FSDP1),
    Refused("accelerate's own state, not told that FSDP runs on a CPU", "accelerate", _accelerate_as_it_is),
    Refused("Lightning Fabric, FSDPStrategy itself", "lightning_fabric", _fabric_as_it_is, FSDP1),
    Refused("CPUOffload", "torch", _offloaded, FSDP1),
    Refused(
        "QLoRA over Int8WeightOnlyConfig, sharded",
        "torchao",
        partial(shard_quantized, for_inference("Int8WeightOnlyConfig")),
    ),
    Refused(
        "QLoRA over Int4WeightOnlyConfig, sharded",
        "torchao",
        partial(shard_quantized, for_inference("Int4WeightOnlyConfig", group_size=32)),
    ),
    Refused(
        "QLoRA over IntxWeightOnlyConfig, four bits, sharded",
        "torchao",
        partial(shard_quantized, for_inference("IntxWeightOnlyConfig", weight_dtype=torch.int4)),
    ),
)
