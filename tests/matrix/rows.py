"""The rows of the matrix: each a way of training beside an unsharded copy.

The copy trains on the mean over the batches of all ranks, so it is no output of this package. A row takes optimizer
steps on both, compares after each, and counts the collectives of the last.
"""

from __future__ import annotations

from functools import partial

from fsdp_compile import CPUOffloadPolicy, FSDPModule, no_sync
from tests.matrix import around, models, tools
from tests.matrix.loop import (
    accumulate,
    breaks,
    checkpointed,
    compiled_optimizer,
    custom,
    double_backward,
    evaluate,
    optimizer_in_backward,
    two_lengths,
    whole_step,
)
from tests.matrix.models import NUM_MICRO
from tests.matrix.sharding import (
    block_by_block,
    expert_meshes,
    lora,
    mixed_precision,
    pipeline,
    plain,
    replicated,
    subclass,
    tensor_parallel,
    whole_mesh,
)
from tests.matrix.train import Row
from tests.models import mesh_of

_UNHEEDED = (
    "set_modules_to_forward_prefetch, set_reduce_scatter_max_input_buffers, set_separate_reduce_scatter_group",
    "set_modules_to_backward_prefetch, set_keep_unsharded_storage, set_unshard_in_backward",
)

ROWS: tuple[Row, ...] = (
    # name, function, most graphs captured, most compiled regions in backward, compiled autograd
    Row("fully_shard", partial(plain, block=models.Dropping), shows="fully_shard FSDPModule"),
    Row("blocks compiled one by one", block_by_block, 1, 2, shows="compile"),
    Row(  # held back, reduced with what was held back, and reduced by itself
        "4 micro-batches, set_requires_gradient_sync and no_sync",
        lambda meter: accumulate(meter, *2 * [FSDPModule.set_requires_gradient_sync], no_sync),
        3,
        NUM_MICRO,
        shows="set_requires_gradient_sync no_sync",
    ),
    Row(
        "HSDP 2x2, 4 micro-batches, set_requires_all_reduce",
        lambda meter: accumulate(
            meter, *2 * [FSDPModule.set_requires_all_reduce], mesh=mesh_of("replicate", "shard")
        ),
        2,
        NUM_MICRO,
        ranks=4,
        shows="set_requires_all_reduce",
    ),
    Row("reshard_after_forward=2", partial(plain, reshard_after_forward=2), ranks=4),
    Row("replicate", replicated, shows="replicate"),
    Row("dp_mesh_dims, dp 2 x tp 2", whole_mesh, ranks=4, shows="DataParallelMeshDims"),
    Row("ShardPlacementResult, two meshes", expert_meshes, ranks=4, shows="ShardPlacementResult"),
    Row("tensor and sequence parallel, dp 2 x tp 2", tensor_parallel, ranks=4),
    Row(  # three graphs until it is known who sets the flag
        "pipeline 1F1B, pp 2 x dp 2, compiled stages",
        pipeline,
        3,
        NUM_MICRO,
        ranks=4,
    ),
    Row("checkpoint with a selective policy, checkpoint_wrapper", checkpointed),
    Row("2 graph breaks, compiled autograd", breaks, 4, 1, True),
    # explain_breaks captures three graphs as well.
    Row("2 graph breaks, explain_breaks", breaks, 6, 3, shows="explain_breaks BreakReport GraphBreak"),
    Row("optimizer in backward (hooks)", optimizer_in_backward),
    Row("backward, clipping and SGD inside, compiled autograd", whole_step, None, 1, True),
    Row("compiled optimizer step", compiled_optimizer, 3),  # the first makes momenta
    Row("LoRA over a frozen base stored in bf16", lora),
    Row(
        "CPUOffloadPolicy",
        lambda meter: plain(meter, offload_policy=CPUOffloadPolicy()),
        shows="CPUOffloadPolicy OffloadPolicy",
    ),
    Row("subclass with an all-gather extension", subclass),
    # Kernels that are fused otherwise than the reference's round in other places: 0.04 where a gradient nearly cancels.
    Row(
        "bf16, reduced in fp32, with the backend's own random numbers",
        mixed_precision,
        2,
        tolerance=0.1,
        own_random=True,
        shows="MixedPrecisionPolicy",
    ),
    Row(
        "collectives and hooks of the user's own",
        custom,
        None,
        None,
        shows="set_custom_all_gather set_custom_reduce_scatter set_all_reduce_hook set_reduce_scatter_unused_params",
        # The warning names one of these settings: the first one that the package asks about.
        warns=(r"layers\.0 \(Even\) runs eagerly inside compiled code: set_reduce_scatter_unused_params",),
    ),
    Row("evaluation, plan_of", evaluate, 3, shows="plan_of"),
    Row("two sequence lengths, mark_dynamic", two_lengths),
    Row("a penalty on gradients, eagerly", double_backward, None, None),
    Row("adopt", around.adopted, shows="adopt Adoption"),
    Row("a checkpoint, resumed", around.resumed, 2, shows="CheckedReader"),
    Row(
        "from a folder of safetensors",
        around.from_a_folder,
        shows="load_pretrained save_pretrained stream_full_params load_full_params",
    ),
    Row(
        "from the meta device, by a policy",
        around.made_of_nothing,
        shows="auto_shard materialize sync_module_states cast_buffers clip_grad_norm_ full_params",
    ),
    Row(
        "inspect, explain, profile, check_parity",
        tools.looked_at,
        None,
        shows="inspect Report explain Explanation ExplainedStep ExplainedBucket ExplainedParameter ExplainedMemory "
        "profile Profile Summary check_parity Parity",
    ),
    Row("configure, install_passes", tools.configured, shows="configure install_passes"),
    Row("a second forward method", tools.forward_method, 2, shows="register_fsdp_forward_method"),
    Row("two roots, share_comm_ctx", tools.shared_context, shows="share_comm_ctx"),
    Row(
        "unshard, reshard and the end of a backward by hand",
        tools.done_by_hand,
        shows="unshard reshard UnshardHandle reset_iter_state set_is_last_backward set_manual_backward_finalization "
        "finalize_backward GradientReductionHandle",
        warns=("set_is_last_backward has no effect where",),
    ),
    Row(
        "settings that a graph heeds",
        tools.settings_of_graphs,
        2,
        shows="set_reshard_after_forward set_reshard_after_backward set_force_sum_reduction_for_comms set_reduce_scatter_divide_factor "
        "set_gradient_divide_factor",
        warns=("set_reduce_scatter_divide_factor has a new name",),
    ),
    Row(
        "settings that have no effect in a graph, or without a GPU",
        tools.settings_without_effect,
        shows=" ".join(_UNHEEDED).replace(",", "")
        + " set_symm_mem_for_comm set_allocate_memory_from_process_group_for_comm set_post_optim_event",
        warns=tuple(f"{names} has no effect where" for names in _UNHEEDED),
    ),
)
