"""The rows of the matrix: each a way of training beside an unsharded copy.

The copy trains on the mean over the batches of all ranks, so it is no output of this package. A row takes optimizer
steps on both, compares after each, and counts the collectives of the last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fsdp_compile import CPUOffloadPolicy
from tests.matrix import around, numbers, tools
from tests.matrix.loop import (
    accumulate,
    breaks,
    checkpointed,
    compiled_optimizer,
    custom,
    divide_factor,
    double_backward,
    evaluate,
    loop,
    optimizer_in_backward,
    two_lengths,
    whole_step,
    wrapped_checkpoints,
)
from tests.matrix.meter import Meter
from tests.matrix.models import NUM_MICRO, Checkpointed, GatherByHand, ReduceByHand, SelectivelyCheckpointed
from tests.matrix.sharding import (
    block_by_block,
    expert_meshes,
    lora,
    own_random_numbers,
    pipeline,
    plain,
    replicated,
    subclass,
    tensor_parallel,
    whole_mesh,
)
from tests.matrix.train import Row
from tests.models import mesh_of


def _hsdp(run: Callable[..., None], *args: Any) -> Callable[[Meter], None]:
    """``run`` on a mesh that replicates twice and shards twice."""
    return lambda meter: run(meter, *args, mesh=mesh_of("replicate", "shard"))


def _eager_unit(setting: str) -> tuple[str, ...]:
    return (rf"layers\.1 \(Dropping\) runs eagerly inside compiled code: {setting}",)


_UNHEEDED = (
    "set_modules_to_forward_prefetch, set_reduce_scatter_max_input_buffers, set_separate_reduce_scatter_group",
    "set_modules_to_backward_prefetch, set_keep_unsharded_storage, set_unshard_in_backward, set_reshard_after_backward",
)

ROWS: tuple[Row, ...] = (
    # name, function, most graphs captured, most compiled regions in backward, compiled autograd
    Row("fully_shard", plain, shows="fully_shard FSDPModule"),
    Row("uneven shards, three ranks", plain, ranks=3),
    Row("random numbers of the backend's own", own_random_numbers, 2, own_random=True),
    Row("blocks compiled one by one", partial(block_by_block, before=False), 1, 2, shows="compile"),
    Row("blocks compiled before they are sharded", partial(block_by_block, before=True), 1, 2),
    Row(  # held back, reduced with what was held back, and reduced by itself
        "4 micro-batches, set_requires_gradient_sync",
        partial(accumulate, how="sync"),
        3,
        NUM_MICRO,
        shows="set_requires_gradient_sync",
    ),
    Row("4 micro-batches, no_sync", partial(accumulate, how="no_sync"), 3, NUM_MICRO, shows="no_sync"),
    Row("HSDP 2x2", _hsdp(plain), ranks=4),
    Row(
        "HSDP 2x2, 4 micro-batches, set_requires_all_reduce",
        _hsdp(accumulate, "all_reduce"),
        2,
        NUM_MICRO,
        ranks=4,
        shows="set_requires_all_reduce",
        recipe="Replicas of shards",
    ),
    Row(
        "reshard_after_forward=2",
        partial(plain, reshard_after_forward=2),
        ranks=4,
        recipe="Gather from few ranks in backward",
    ),
    Row("reshard_after_forward=False", partial(plain, reshard_after_forward=False)),
    Row("replicate", replicated, shows="replicate", recipe="Replicas alone"),
    Row(
        "dp_mesh_dims, dp 2 x tp 2",
        whole_mesh,
        ranks=4,
        shows="DataParallelMeshDims",
        recipe="Parameters on the whole mesh",
    ),
    Row(
        "ShardPlacementResult, two meshes",
        expert_meshes,
        ranks=4,
        shows="ShardPlacementResult",
        recipe="Experts on a mesh of their own",
    ),
    Row("tensor parallel, dp 2 x tp 2", partial(tensor_parallel, sequence=False), ranks=4, recipe="Tensor parallelism"),
    Row("sequence parallel, dp 2 x tp 2", partial(tensor_parallel, sequence=True), ranks=4),
    Row(  # three graphs until it is known who sets the flag
        "pipeline 1F1B, pp 2 x dp 2, compiled stages",
        pipeline,
        3,
        NUM_MICRO,
        ranks=4,
        recipe="Pipeline stages",
        warns=("set_reshard_after_backward has no effect where",),  # torch's schedule calls it
    ),
    Row("checkpoint around each block", partial(checkpointed, kind=Checkpointed)),
    Row("checkpoint, selective policy", partial(checkpointed, kind=SelectivelyCheckpointed)),
    Row("checkpoint_wrapper", wrapped_checkpoints, recipe="Activation checkpointing"),
    Row("2 graph breaks, compiled autograd", breaks, 4, 1, True),
    Row("2 graph breaks", breaks, 3, 3),
    Row("optimizer in backward (hooks)", optimizer_in_backward, recipe="An optimizer in backward"),
    Row("optimizer in backward (hooks), compiled autograd", optimizer_in_backward, None, None, True),
    Row(
        "backward, clipping and SGD inside, compiled autograd",
        whole_step,
        None,
        1,
        True,
        recipe="Clipping and the optimizer in the compiled step",
    ),
    Row("compiled optimizer step", compiled_optimizer, 3, recipe="A compiled optimizer"),  # the first makes momenta
    Row("LoRA over a frozen base", partial(lora, dtype=torch.float32), recipe="A frozen base with adapters"),
    Row("LoRA over a frozen base stored in bf16", partial(lora, dtype=torch.bfloat16)),
    Row(
        "CPUOffloadPolicy",
        lambda meter: plain(meter, offload_policy=CPUOffloadPolicy()),
        shows="CPUOffloadPolicy OffloadPolicy",
        recipe="Shards on the CPU",
    ),
    Row("subclass with an all-gather extension", subclass, recipe="A tensor subclass says what travels"),
    # Kernels that are fused otherwise than the reference's round in other places: 0.04 where a gradient nearly cancels.
    Row("bf16, reduced in fp32", numbers.mixed_precision, 2, tolerance=0.1, shows="MixedPrecisionPolicy"),
    Row("GradScaler and clipping", numbers.scaled),
    Row(
        "set_custom_all_gather",
        partial(custom, change=lambda block: block.set_custom_all_gather(GatherByHand())),
        None,
        None,
        shows="set_custom_all_gather",
        warns=_eager_unit("set_custom_all_gather"),
    ),
    Row(
        "set_custom_reduce_scatter",
        partial(custom, change=lambda block: block.set_custom_reduce_scatter(ReduceByHand())),
        None,
        None,
        shows="set_custom_reduce_scatter",
        warns=_eager_unit("set_custom_reduce_scatter"),
    ),
    Row(
        "set_all_reduce_hook",
        partial(custom, change=lambda block: block.set_all_reduce_hook(lambda summed: None)),
        None,
        None,
        shows="set_all_reduce_hook",
        recipe="Do something to gradients on their way",
        warns=_eager_unit("set_all_reduce_hook"),
    ),
    Row(
        "set_reduce_scatter_unused_params",
        partial(custom, change=lambda block: block.set_reduce_scatter_unused_params(True)),
        None,
        None,
        shows="set_reduce_scatter_unused_params",
        warns=_eager_unit("set_reduce_scatter_unused_params"),
    ),
    Row(
        "set_gradient_divide_factor",
        divide_factor,
        shows="set_gradient_divide_factor",
        recipe="Divide gradients by a number of your own",
    ),
    Row("evaluation, no_grad", partial(evaluate, without_grad=torch.no_grad, reshard=True), 3, recipe="Evaluate"),
    Row("evaluation, inference_mode", partial(evaluate, without_grad=torch.inference_mode), 3),
    Row("two sequence lengths", partial(two_lengths, mark=False), 2),
    Row("two sequence lengths, mark_dynamic", partial(two_lengths, mark=True), recipe="Lengths that change"),
    Row("6 steps: accumulation, evaluation, two lengths", loop, 6, 2),
    Row("a penalty on gradients, eagerly", double_backward, None, None, recipe="Gradients of gradients"),
    Row("adopt", around.adopted, shows="adopt Adoption", recipe="Code that was written for torch's FSDP2"),
    Row("a checkpoint, resumed", around.resumed, 2, shows="CheckedReader", recipe="Save, load, resume"),
    Row(
        "from a folder of safetensors",
        around.from_a_folder,
        shows="load_pretrained save_pretrained",
        recipe="Hugging Face folders",
    ),
    Row("a moving average", around.averaged, 2, recipe="A moving average of the model"),
    Row("a frozen teacher", around.taught, 2, recipe="A frozen teacher"),
    Row("AdamW with groups", around.grouped, recipe="Which optimizers"),
    # The second graph is the reference's: torch.cond that is called eagerly compiles itself.
    Row("torch.cond, another branch on each rank", around.branched, 2, recipe="Branches and loops"),
    Row(
        "from the meta device, by a policy",
        around.made_of_nothing,
        shows="auto_shard materialize sync_module_states cast_buffers clip_grad_norm_ full_params",
        recipe="From the meta device, by a policy",
    ),
    Row("inspect", tools.inspected, 2, shows="inspect Report"),
    Row("plan_of", tools.planned, 2, shows="plan_of"),
    Row("profile", tools.profiled, 2, shows="profile Profile Summary"),
    Row(
        "explain",
        tools.reasons,
        2,
        shows="explain Explanation ExplainedStep ExplainedBucket ExplainedParameter ExplainedMemory",
    ),
    Row("explain_breaks", tools.explained, None, shows="explain_breaks BreakReport GraphBreak"),
    Row("check_parity", tools.parity, None, shows="check_parity Parity"),
    Row("configure", tools.configured, shows="configure"),
    Row("install_passes", tools.bounced, shows="install_passes"),
    Row("a second forward method", tools.forward_method, 2, shows="register_fsdp_forward_method"),
    Row("two roots, share_comm_ctx", tools.shared_context, shows="share_comm_ctx"),
    Row("unshard by hand", tools.gathered_by_hand, shows="unshard reshard UnshardHandle reset_iter_state"),
    Row(
        "settings that a graph heeds",
        tools.settings_of_graphs,
        2,
        shows="set_reshard_after_forward set_force_sum_reduction_for_comms set_reduce_scatter_divide_factor",
        warns=("set_reduce_scatter_divide_factor has a new name",),
    ),
    Row(
        "settings that a graph does not heed",
        tools.settings_of_eager_units,
        shows=" ".join(_UNHEEDED).replace(",", ""),
        warns=tuple(f"{names} has no effect where" for names in _UNHEEDED),
    ),
    Row(
        "the end of a backward, said by hand",
        tools.finished_by_hand,
        shows="set_is_last_backward set_manual_backward_finalization finalize_backward "
        "GradientReductionHandle",
        warns=("set_is_last_backward has no effect where",),
    ),
    Row(
        "settings of GPUs, without one",
        tools.without_a_gpu,
        shows="set_symm_mem_for_comm set_allocate_memory_from_process_group_for_comm set_post_optim_event",
    ),
)
