"""The rows of `benchmarks.modes`, in the order of the table: each a way of training beside an unsharded copy.

The copy trains on the mean over the batches of all ranks, so it is no output of this package. A row takes optimizer
steps on both, compares after each, and counts the collectives of the last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.modes_loop import (
    accumulate,
    breaks,
    checkpointed,
    compiled_optimizer,
    custom,
    divide_factor,
    evaluate,
    loop,
    optimizer_in_backward,
    two_lengths,
    whole_step,
    wrapped_checkpoints,
)
from benchmarks.modes_meter import Meter
from benchmarks.modes_models import (
    NUM_MICRO,
    SIZES,
    Checkpointed,
    SelectivelyCheckpointed,
    gather_by_hand,
    hook_of_nothing,
)
from benchmarks.modes_sharding import (
    block_by_block,
    expert_meshes,
    lora,
    pipeline,
    plain,
    replicated,
    subclass,
    tensor_parallel,
    whole_mesh,
)
from benchmarks.modes_train import EAGER, Row, mesh_of
from fsdp_compile import CPUOffloadPolicy


def _hsdp(run: Callable[..., None], *args: Any) -> Callable[[Meter], None]:
    """``run`` on a mesh that replicates twice and shards twice."""
    return lambda meter: run(meter, *args, mesh=mesh_of("replicate", "shard"))


ROWS: tuple[Row, ...] = (
    # name, function, most graphs captured, most compiled regions in backward, compiled autograd
    Row("fully_shard, inductor", partial(plain, backend="inductor")),
    Row("fully_shard", partial(plain, backend=EAGER)),
    Row("blocks compiled one by one", block_by_block, 1, SIZES.layers),
    Row("4 micro-batches, set_requires_gradient_sync", partial(accumulate, how="sync"), 2, NUM_MICRO),
    Row("4 micro-batches, no_sync", partial(accumulate, how="no_sync"), 2, NUM_MICRO),
    Row("HSDP 2x2", _hsdp(plain, EAGER)),
    Row("HSDP 2x2, 4 micro-batches, set_requires_all_reduce", _hsdp(accumulate, "all_reduce"), 2, NUM_MICRO),
    Row("reshard_after_forward=2", partial(plain, backend=EAGER, reshard_after_forward=2)),
    Row("reshard_after_forward=False", partial(plain, backend=EAGER, reshard_after_forward=False)),
    Row("replicate", replicated),
    Row("dp_mesh_dims, dp 2 x tp 2", whole_mesh),
    Row("ShardPlacementResult, two meshes", expert_meshes),
    Row("tensor parallel, dp 2 x tp 2", partial(tensor_parallel, sequence=False)),
    Row("sequence parallel, dp 2 x tp 2", partial(tensor_parallel, sequence=True)),
    Row("pipeline 1F1B, pp 2 x dp 2, compiled stages", pipeline, 3, NUM_MICRO),  # until it is known who sets the flag
    Row("checkpoint around each block", partial(checkpointed, kind=Checkpointed)),
    Row("checkpoint, selective policy", partial(checkpointed, kind=SelectivelyCheckpointed)),
    Row("checkpoint_wrapper", wrapped_checkpoints),
    Row("2 graph breaks, compiled autograd, inductor", partial(breaks, backend="inductor"), 4, 1, True),
    Row("2 graph breaks", partial(breaks, backend=EAGER), 3, 3),
    Row("optimizer in backward (hooks)", optimizer_in_backward),
    Row("optimizer in backward (hooks), compiled autograd", optimizer_in_backward, None, None, True),
    Row("backward, clipping and SGD inside, compiled autograd", whole_step, None, 1, True),
    Row("compiled optimizer step", compiled_optimizer, 3),  # the first step makes momenta, and is another graph
    Row("LoRA over a frozen base", partial(lora, dtype=torch.float32)),
    Row("LoRA over a frozen base stored in bf16", partial(lora, dtype=torch.bfloat16)),
    Row("CPUOffloadPolicy", lambda meter: plain(meter, EAGER, offload_policy=CPUOffloadPolicy())),
    Row("subclass with an all-gather extension", subclass),
    Row("set_custom_all_gather", partial(custom, change=gather_by_hand), None, None),
    Row("set_all_reduce_hook", partial(custom, change=hook_of_nothing), None, None),
    Row("set_gradient_divide_factor", divide_factor),
    Row("evaluation, no_grad", partial(evaluate, mode=torch.no_grad)),
    Row("evaluation, inference_mode", partial(evaluate, mode=torch.inference_mode)),
    Row("two sequence lengths", partial(two_lengths, mark=False), 2),
    Row("two sequence lengths, mark_dynamic", partial(two_lengths, mark=True)),
    Row("20 steps: accumulation, evaluation, two lengths", loop, 6, 2),
)
