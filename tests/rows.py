"""FSDP2's behaviour, row by row, and the tests that cover it. ``python -m tests.rows`` writes ROWS.md from it.

What a test asserts is said by the test: ROWS.md takes the first line of its docstring, or else its name.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Row(NamedTuple):
    """A row of FEATURES.md's tables: arguments (A), methods (B), what stands beside them (M), what holds anyway (D)."""

    row: str
    what: str
    tests: tuple[str, ...]  # "file.py::test", with " [case]" behind it for one of a table
    note: str = ""


ROWS = (
    Row(
        "A1",
        "one module, sharded in place",
        (
            "test_errors.py::test_equal_modules_share_a_class_and_indexing_keeps_the_original_one",
            "test_eager.py::test_it_is_fsdp2s_class_and_inherits_no_method_of_it",
            "test_inspect.py::test_report_shows_collectives_buckets_bytes_and_passes",
        ),
        "The last one shows which parameters each unit claimed. Names kept: see D20. Not: a module without parameters; that a single module comes back as the same object (asserted for `replicate` and for lists); a ModuleList that has its own forward.",
    ),
    Row(
        "A2",
        "a list of modules as one unit",
        (
            "test_training.py::test_a_list_of_modules_is_one_unit",
            "test_errors.py::test_a_mistake_is_named [nothing]",
            "test_settings.py::test_members_of_a_list_share_one_gather_and_one_reduction",
        ),
        "One gather and one reduction, same list returned, a listed child of a listed parent stays plain. Differs: containers without forward and empty lists raise ValueError; a list may be the outermost unit.",
    ),
    Row(
        "A3",
        "list unit that runs in parts",
        (
            "test_settings.py::test_each_call_of_a_member_by_itself_has_a_reduction_of_its_own",
            "test_settings.py::test_calls_one_after_another_share_a_gather_and_a_reduction",
            "test_settings.py::test_a_member_may_be_skipped",
        ),
        "Head called once a chunk, norm alone, member skipped, nothing left gathered. Differs: within one forward of the root, calls after the first pass share one reduction (FSDP2: one each). Not: casts per member; compiled.",
    ),
    Row(
        "A4",
        "mesh: none, 1-D, 2-D, slice",
        (
            "test_meshes.py::test_replicas_of_shards_train_like_the_unsharded_model",
            "test_meshes.py::test_tensor_parallel_parameters_train_like_the_unsharded_model",
            "test_training.py::test_trains_like_the_unsharded_model",
        ),
        "2-D placements, slice of a bigger mesh, no mesh. Not: `init_process_group()` when there is no group yet; choice of device is gpu.",
    ),
    Row(
        "A5",
        "`dp_mesh_dims` on a whole mesh",
        (
            "test_meshes.py::test_dp_mesh_dims_say_what_is_data_parallel",
            "test_meshes.py::test_flattened_dimensions_leave_room_for_the_others",
        ),
        "Placements, flattened dims and numbers of six mixes. Not: that replicate-only ignores `reshard_after_forward` here (no gathers: asserted for `replicate`, see M6).",
    ),
    Row(
        "A6",
        "`reshard_after_forward=None`: root keeps",
        (
            "test_graphs.py::test_only_the_root_is_kept_by_default",
            "test_eager.py::test_reshard_after_forward_decides_what_backward_gathers",
            "test_errors.py::test_root_keeps_and_the_others_regather_unless_told_otherwise",
        ),
    ),
    Row(
        "A7",
        "`=True`: gather again in backward",
        (
            "test_graphs.py::test_with_resharding_no_full_weight_is_saved",
            "test_eager.py::test_reshard_after_forward_decides_what_backward_gathers",
        ),
        "Root included.",
    ),
    Row(
        "A8",
        "`=False`: keep until after backward",
        (
            "test_graphs.py::test_without_resharding_backward_gathers_nothing",
            "test_eager.py::test_reshard_after_forward_decides_what_backward_gathers",
            "test_eager_regions.py::test_outside_of_a_forward_a_parameter_is_its_shard",
        ),
        "Differs: what is registered is always the shard. The third test uses the default setting, where the root is kept.",
    ),
    Row(
        "A9",
        "`=n`: backward gathers over n",
        (
            "test_eager.py::test_backward_gathers_over_few_ranks_after_an_int",
            "test_graphs.py::test_with_an_int_backward_gathers_what_few_ranks_kept",
            "test_meshes.py::test_an_int_chooses_the_ranks_to_gather_from_in_backward",
        ),
        "n = size and n = 1 (warning) too. Differs: slices are not registered as DTensors. Refused with an all-gather extension (second table). Not: `reshard()` after such a forward.",
    ),
    Row(
        "A10",
        "`shard_placement_fn` gives a `Shard(d)`",
        (
            "test_training.py::test_parameters_cut_on_another_dim",
            "test_errors.py::test_the_placement_function_is_called_once_a_parameter",
        ),
        "Negative dim included. Differs: called once. Errors: second table.",
    ),
    Row(
        "A11",
        "`shard_placement_fn` gives a mesh too",
        (
            "test_meshes.py::test_a_parameter_may_have_a_mesh_of_its_own",
            "test_meshes.py::test_torchs_mesh_infos_are_understood",
            "test_messages.py::test_ours_says_what_torch_says [a gather of one's own for several meshes]",
        ),
        "Differs: equal meshes need not be one mesh-info object; an int `reshard_after_forward` is refused with it.",
    ),
    Row(
        "A12",
        "`param_dtype`: cast, then gather",
        (
            "test_mixed_precision.py::test_gradients_match_a_hand_written_reference",
            "test_passes.py::test_the_cast_comes_before_the_gather_and_padding_goes_after_it",
            "test_training.py::test_to_dtype_after_sharding_is_followed",
        ),
        "Not: integer parameters under a policy.",
    ),
    Row(
        "A13",
        "`reduce_dtype` on wire and accumulation",
        (
            "test_mixed_precision.py::test_gradients_match_a_hand_written_reference",
            "test_accumulate.py::test_what_accumulates_has_the_reductions_dtype",
            "test_passes.py::test_a_gradient_is_cast_reduced_and_divided",
        ),
        "None means the original dtype. Differs: mixed dtypes of a unit travel apart, not promoted. Explicit `grad_dtype`: A20.",
    ),
    Row(
        "A14",
        "`output_dtype` at the boundary",
        (
            "test_mixed_precision.py::test_inputs_and_outputs_are_cast_and_buffers_are_not",
            "test_containers.py::test_what_is_in_a_container_is_cast",
        ),
        "Not: during recomputation, and per call of a list unit's members.",
    ),
    Row(
        "A15",
        "`cast_forward_inputs`",
        (
            "test_mixed_precision.py::test_inputs_and_outputs_are_cast_and_buffers_are_not",
            "test_containers.py::test_what_is_in_a_container_is_cast",
        ),
        "On and off; args and kwargs. Differs: containers are not made anew (no `__post_init__`), and UserDict and its kin are cast too. Mappings that cannot be written to come as they are.",
    ),
    Row(
        "A16",
        "`param_dtype_override_fn`",
        (
            "test_mixed_precision.py::test_one_parameter_may_stay_in_high_precision",
            "test_messages.py::test_ours_says_what_torch_says [override with a foreign dtype]",
        ),
        "The first is skipped on older torch. Not: called once, ranks that disagree, that inputs still get `param_dtype`.",
    ),
    Row(
        "A17",
        "mixed gather dtypes in one unit",
        (
            "test_mixed_precision.py::test_one_parameter_may_stay_in_high_precision",
            "test_loop.py::test_only_adapters_are_reduced_and_the_base_is_gathered_as_it_is_stored",
        ),
        "Both dtypes are read right; the second compares gradients. Differs: one gather a dtype, not bytes of all. Not: the number of gathers.",
    ),
    Row(
        "A18",
        "buffers: whole, uncast, unsynchronised",
        (
            "test_models.py::test_batch_norm_statistics_stay_plain_tensors_of_each_rank",
            "test_mixed_precision.py::test_inputs_and_outputs_are_cast_and_buffers_are_not",
        ),
        "Moving to the mesh's device, also under offload: gpu.",
    ),
    Row(
        "A19",
        "one original dtype a group",
        (
            "test_mixed_precision.py::test_a_unit_may_store_parameters_in_two_dtypes",
        ),
        "Differs: allowed; a bucket for each dtype, each gradient in its own, eager and compiled.",
    ),
    Row(
        "A20",
        "`Tensor.grad_dtype` honoured",
        (
            "test_mixed_precision.py::test_gradients_have_the_dtype_that_was_asked_for",
            "test_mixed_precision.py::test_a_grad_dtype_of_none_means_as_autograd_produced_it",
            "test_grad_dtype.py::test_fp32_gradients_of_bf16_parameters",
            "test_grad_dtype.py::test_fp32_gradients_with_replicas",
            "test_grad_dtype.py::test_gradients_of_their_own_dtype_survive_a_move",
        ),
        "Survives `.to` (with gradients there, too) and `load_state_dict(assign=True)`; torch 2.11 has it too. In graphs such a gradient goes by a leaf, as AOTAutograd would cast it. A unit that asks for gradients as they come (`None`) runs eagerly in a compiled model, with a warning (`test_grad_dtype.py::test_fp32_gradients_in_compiled_code`). Not: on torch 2.11, a gradient that an autograd function makes in another dtype than its input's; autograd casts it there.",
    ),
    Row(
        "A21",
        "`OffloadPolicy()`: no offload",
        (
            "test_training.py::test_trains_like_the_unsharded_model",
        ),
        "It is the default.",
    ),
    Row(
        "A22",
        "`CPUOffloadPolicy`",
        (
            "test_offload.py::test_trains_like_the_unsharded_model",
            "test_offload.py::test_the_numbers_are_those_of_resident_shards",
            "test_offload.py::test_whoever_reads_a_gradient_at_once_finds_it_complete",
            "test_passes.py::test_offloaded_shards_are_copied_as_they_are_stored_and_gradients_as_one",
            "test_streams.py::test_copies_beside_the_current_stream_train_like_the_unsharded_model",
            "test_streams.py::test_the_next_blocks_shards_are_copied_while_a_block_computes",
            "test_streams.py::test_everything_is_in_order",
            "test_gpu.py::test_offloaded_shards_and_gradients_are_pinned",
            "test_gpu.py::test_offloaded_shards_train_in_one_graph",
        ),
        "Compiled: in the graph, tested with a CPU in the device's place. With an all-gather extension the unit runs eagerly: `test_offload.py::test_with_an_extension_the_unit_runs_eagerly_and_says_so`. Pinned memory: gpu. Differs: the gradients of a bucket share their memory; compiled, copies are on the current stream, and the CPU waits at the end of each backward graph.",
    ),
    Row(
        "A23",
        "`ignored_params`",
        (
            "test_errors.py::test_ignored_parameters_stay_whole",
        ),
        "Not: that their gradients are not reduced; that the outer call must name them again.",
    ),
    Row(
        "B1",
        "`reshard()`",
        (
            "test_eager.py::test_unshard_and_reshard_show_in_reads",
            "test_eager.py::test_parameters_may_stay_gathered_between_micro_batches",
        ),
        "Not: called inside a forward.",
    ),
    Row(
        "B2",
        "`unshard(async_op)`",
        (
            "test_eager.py::test_unshard_and_reshard_show_in_reads",
            "test_eager.py::test_what_was_gathered_before_a_step_is_not_used_after_it",
            "test_differences.py::test_between_unshard_and_reshard_reads_are_full_and_what_is_registered_are_shards",
        ),
        "Before the first forward, handle waited twice; what is written to a full parameter is gone with `reshard()`, as in FSDP2. Differs: `named_parameters` still gives shards. Not: a handle nobody waits for, the policy's dtype, that a second call gathers nothing.",
    ),
    Row(
        "B3",
        "`set_keep_unsharded_storage`",
        (
            "test_eager.py::test_kept_storage_has_stable_addresses",
        ),
        "Eager only.",
    ),
    Row(
        "B4",
        "`reset_iter_state()`",
        (
            "test_eager.py::test_a_step_after_an_error_is_right",
            "test_eager.py::test_a_step_after_one_rank_failed_is_right",
            "test_interrupted.py::test_an_error_behind_a_break_that_the_user_catches",
            "test_accumulate.py::test_what_is_held_back_is_reduced_once_whatever_comes_between",
            "test_interrupted.py::test_steps_after_a_backward_that_raised_have_their_gradients_and_no_others",
        ),
        "Before the first forward and on an inner unit: `test_messages.py::test_ours_says_what_torch_says`. Another root's reductions in a shared context go on: `test_eager.py::test_two_roots_share_a_context`.",
    ),
    Row(
        "B5",
        "`set_is_last_backward`",
        (
            "test_settings.py::test_reductions_stay_in_flight_until_the_last_backward",
            "test_settings.py::test_what_was_set_on_a_block_holds_for_the_root_that_comes_later",
        ),
        "As many reductions as the cap allows (1) are in flight after a backward that is not the last. Differs: set on a child before the root is wrapped, it is taken over.",
    ),
    Row(
        "B6",
        "`set_manual_backward_finalization`",
        (
            "test_eager.py::test_backward_is_finalized_by_hand",
            "test_messages.py::test_ours_says_what_torch_says [finalization by hand of an inner unit]",
            "test_messages.py::test_ours_says_what_torch_says [finalization without asking for it]",
            "test_settings.py::test_a_backward_is_finalized_outside_of_it",
            "test_settings.py::test_what_was_set_on_a_block_holds_for_the_root_that_comes_later",
        ),
        "Errors inside a backward and before finalisation included. Differs: set on a child before the root is wrapped, it is taken over without an error.",
    ),
    Row(
        "B7",
        "`finalize_backward(async_op)`",
        (
            "test_eager.py::test_backward_is_finalized_by_hand",
            "test_messages.py::test_ours_says_what_torch_says [finalization before the last one's handle]",
        ),
        "Held-back gradients included.",
    ),
    Row(
        "B8",
        "`set_requires_gradient_sync`",
        (
            "test_accumulate.py::test_micro_batches_without_sync_send_nothing",
            "test_eager.py::test_gradients_accumulate_without_communication",
            "test_eager.py::test_replicas_are_summed_once_for_several_micro_batches",
            "test_eager.py::test_the_flag_that_holds_is_that_of_backward",
            "test_accumulate.py::test_what_the_last_backward_did_not_reach_is_reduced",
        ),
        "Differs: True leaves `set_requires_all_reduce(False)` alone (third test). Not: `recurse=False`.",
    ),
    Row(
        "B9",
        "`set_requires_all_reduce`",
        (
            "test_eager.py::test_replicas_are_summed_once_for_several_micro_batches",
            "test_accumulate.py::test_the_modes_mix",
        ),
        "Not: micro-batches that use different parameters.",
    ),
    Row(
        "B10",
        "`set_reshard_after_forward(bool)`",
        (
            "test_errors.py::test_root_keeps_and_the_others_regather_unless_told_otherwise",
            "test_messages.py::test_ours_says_what_torch_says [set_reshard_after_forward with an int]",
        ),
        "Setting read back from the groups; True between compiled steps, and what backward gathers from then on: `test_matrix.py::test_a_row_holds_on_inductor`. A replicated module: `test_messages.py::test_ours_says_what_torch_says [set_reshard_after_forward of what is replicated]`.",
    ),
    Row(
        "B11",
        "`set_reshard_after_backward`",
        (
            "test_eager.py::test_parameters_may_stay_gathered_between_micro_batches",
            "test_gather_once.py::test_graphs_gather_as_often_as_the_eager_path",
        ),
        "Eager, and in graphs with Inductor. Differs: what was gathered of a shard that was written to since is gathered again.",
    ),
    Row(
        "B12",
        "`set_modules_to_forward_prefetch`",
        (
            "test_messages.py::test_ours_says_what_torch_says [prefetching forward what is not sharded]",
            "test_settings.py::test_a_unit_launches_the_gathers_that_its_forward_was_told_to",
        ),
        "Order of gathers and compute. Eager only. Not: that a list unit's later members do not launch again.",
    ),
    Row(
        "B13",
        "`set_modules_to_backward_prefetch`",
        (
            "test_messages.py::test_ours_says_what_torch_says [prefetching backward what is not sharded]",
            "test_settings.py::test_a_unit_launches_the_gathers_that_its_backward_was_told_to",
        ),
        "Order of gathers and reductions. Eager only.",
    ),
    Row(
        "B14",
        "`set_custom_all_gather`",
        (
            "test_eager.py::test_collectives_and_hooks_of_ones_own",
            "test_eager_regions.py::test_one_warning_names_the_module_and_the_reason",
        ),
        "In a compiled model the unit runs eagerly, with one warning.",
    ),
    Row(
        "B15",
        "`set_custom_reduce_scatter`",
        (
            "test_eager.py::test_collectives_and_hooks_of_ones_own",
            "test_eager_regions.py::test_one_warning_names_the_module_and_the_reason",
        ),
    ),
    Row(
        "B16",
        "`set_all_reduce_hook`",
        (
            "test_eager.py::test_collectives_and_hooks_of_ones_own",
            "test_eager_regions.py::test_one_warning_names_the_module_and_the_reason",
        ),
        "Before the division: `test_recipes.py::test_a_recipe_does_what_it_says` (a clamp). Only in what order it runs, with `stream=` and on a replicated mesh: `test_streams.py::test_everything_is_in_order`.",
    ),
    Row(
        "B17",
        "`set_post_optim_event`",
        (
            "test_gpu.py::test_eager_training_frees_what_it_gathered",
        ),
        "It makes the accelerator's stream wait.",
    ),
    Row(
        "B18",
        "`set_gradient_divide_factor`",
        (
            "test_eager.py::test_a_divide_factor_of_ones_own",
            "test_meshes.py::test_gradients_are_divided_once",
            "test_settings.py::test_a_divide_factor_is_that_of_one_unit",
            "test_eager.py::test_a_divide_factor_that_is_known_behind_forward",
            "test_settings.py::test_the_old_name_of_the_divide_factor_warns_and_works",
        ),
        "Compiled too; does not recurse by default; old name with FutureWarning. Differs: a factor is always a sum and a division; where the whole model is compiled it holds from the next forward on. Not: a replicated mesh.",
    ),
    Row(
        "B19",
        "`set_force_sum_reduction_for_comms`",
        (
            "test_eager.py::test_a_divide_factor_of_ones_own",
            "test_meshes.py::test_gradients_are_divided_once",
            "test_matrix.py::test_a_row_holds_on_inductor",
        ),
    ),
    Row(
        "B20",
        "`set_reduce_scatter_unused_params`",
        (
            "test_eager.py::test_unused_parameters_get_zeros_on_request",
            "test_eager_regions.py::test_one_warning_names_the_module_and_the_reason",
            "test_models.py::test_unused_parameters_are_not_gathered_and_have_no_gradient",
        ),
        "On (eager; a compiled unit runs eagerly for it, with a warning) and off.",
    ),
    Row(
        "B21",
        "`set_reduce_scatter_max_input_buffers`",
        (
            "test_messages.py::test_ours_says_what_torch_says [a number of buffers that is none]",
            "test_messages.py::test_ours_says_what_torch_says [no buffers]",
            "test_settings.py::test_so_many_reductions_are_in_flight_as_there_may_be",
        ),
        "Differs: the largest number under a root holds, read at each backward, so later calls count.",
    ),
    Row(
        "B22",
        "`set_separate_reduce_scatter_group`",
        (
            "test_settings.py::test_reductions_have_a_group_of_their_own_on_request",
            "test_reduce_groups.py::test_switching_often_makes_one_group",
        ),
        "Groups seen on the wire, switching off included. Eager only.",
    ),
    Row(
        "B23",
        "`set_unshard_in_backward`",
        (
            "test_eager.py::test_an_embedding_need_not_be_gathered_for_backward",
        ),
        "In graphs nothing unneeded is gathered: `test_graphs.py::test_with_resharding_no_full_weight_is_saved`; a compiled unit says so: `test_matrix.py::test_a_row_holds_on_inductor`.",
    ),
    Row(
        "B24",
        "memory from the process group",
        (
            "test_messages.py::test_ours_says_what_torch_says [the group's memory for a gather of one's own]",
            "test_pools.py::test_every_gather_is_into_memory_of_the_group_which_is_registered_once",
            "test_gpu.py::test_gathers_in_memory_of_the_process_group",
        ),
        "A backend without allocator: `test_matrix.py::test_a_row_holds_on_inductor`.",
    ),
    Row(
        "B25",
        "`set_symm_mem_for_comm`",
        (
            "test_errors.py::test_a_mistake_is_named [symmetric memory on the CPU]",
            "test_messages.py::test_ours_says_what_torch_says [symmetric memory for a gather of one's own]",
            "test_pools.py::test_a_tensor_is_registered_once",
        ),
        "With a stand-in for the memory: its own needs GPUs. For gathers alone, reductions never use it.",
    ),
    Row(
        "B26",
        "`_set_unshard_async_op`",
        (
            "test_eager.py::test_it_is_fsdp2s_class_and_inherits_no_method_of_it",
        ),
        "The method is there and is ours. Differs: it does nothing.",
    ),
    Row(
        "B27",
        "`.to`, `.half`, `to_empty` after wrapping",
        (
            "test_training.py::test_to_dtype_after_sharding_is_followed",
            "test_training.py::test_a_model_built_on_meta_trains_once_it_has_data",
        ),
        "Not: while parameters are gathered. `.cuda`: gpu.",
    ),
    Row(
        "B28",
        "slicing and deepcopy",
        (
            "test_errors.py::test_equal_modules_share_a_class_and_indexing_keeps_the_original_one",
            "test_copy.py::test_a_copy_and_the_original_train_like_two_models",
            "test_copy.py::test_a_copy_has_the_settings_of_the_original",
            "test_copy.py::test_a_part_of_a_model_is_copied_as_a_model",
            "test_copy.py::test_pickle_and_shallow_copies_say_what_to_do_instead",
        ),
        "Differs: deepcopy works, also of inner units, of what is inside one and of compiled wrappers; pickling and `copy.copy` are refused.",
    ),
    Row(
        "M1",
        "`register_fsdp_forward_method`",
        (
            "test_eager.py::test_another_method_as_forward",
            "test_eager.py::test_a_method_that_the_module_was_given",
            "test_torch_names.py::test_torchs_forward_methods_gather_ours",
            "test_torch_names.py::test_a_reset_helps_after_such_a_method_raised",
            "test_messages.py::test_ours_says_what_torch_says [a forward method that is missing]",
        ),
        "No-op on plain modules included. torch's own function on our units too: eager, compiled, with casts. Not: what an unregistered method says.",
    ),
    Row(
        "M2",
        "`share_comm_ctx`",
        (
            "test_eager.py::test_two_roots_share_a_context",
            "test_torch_names.py::test_torchs_contexts_are_shared_by_ours",
            "test_messages.py::test_ours_says_what_torch_says [sharing a context with what is not sharded]",
        ),
        "Empty list included. Not: that the cap on reductions in flight is common.",
    ),
    Row(
        "M3",
        "handles' `wait()`",
        (
            "test_eager.py::test_unshard_and_reshard_show_in_reads",
            "test_eager.py::test_backward_is_finalized_by_hand",
            "test_messages.py::test_ours_says_what_torch_says [a handle after a reset]",
        ),
    ),
    Row(
        "M4",
        "protocol of custom collectives",
        (
            "test_eager.py::test_collectives_and_hooks_of_ones_own",
            "test_errors.py::test_a_mistake_is_named [a gather that cannot allocate]",
        ),
        "Any object with `allocate` and a call; the package exports no base classes. Built-in allocators: gpu.",
    ),
    Row(
        "M5",
        "policies and mesh dims",
        (
            "test_mixed_precision.py::test_gradients_match_a_hand_written_reference",
            "test_offload.py::test_trains_like_the_unsharded_model",
            "test_meshes.py::test_dp_mesh_dims_say_what_is_data_parallel",
        ),
        "torch's own classes; `DataParallelMeshDims` has a stand-in on older torch.",
    ),
    Row(
        "M6",
        "`replicate`",
        (
            "test_meshes.py::test_replicated_modules_train_like_the_unreplicated_one",
            "test_meshes.py::test_tensor_parallel_parameters_may_be_replicated",
            "test_torch_names.py::test_composable_ddp_beside_units",
            "test_torch_names.py::test_composable_ddp_around_a_replicated_unit",
        ),
        "Composable DDP (`_composable.replicate`) leaves units alone, and units leave what it was applied to. Not: its `offload_policy` and `ignored_params`.",
    ),
    Row(
        "M7",
        "class helpers for Dynamo's pickling",
        (),
        "Left out: private functions of torch's own classes. What they serve, a compiled model after a restart, is in `test_cache.py::test_a_second_start_compiles_from_the_cache`.",
    ),
    Row(
        "M8",
        "profiler ranges and logger",
        (
            "test_eager.py::test_a_profile_shows_the_units",
            "test_profile.py::test_every_gather_and_reduction_is_a_range_that_names_its_parameters",
        ),
        "Not: the logger (`fsdp_compile`, debug level); mesh size in a range's name is not implemented. Beyond: `profile` names the parameters of each collective, in compiled code too.",
    ),
    Row(
        "M9",
        "torch's memory trackers and estimators",
        (),
        "Left out: they patch the hooks of torch's own classes, which are not there.",
    ),
    Row(
        "D1",
        "what wrapping does, in order",
        (
            "test_refused.py::test_every_step_may_raise_and_nothing_has_changed",
            "test_inspect.py::test_report_shows_collectives_buckets_bytes_and_passes",
        ),
        "All checks come before any change; parameters go to the innermost unit. Moving to the device: gpu.",
    ),
    Row(
        "D2",
        "shards as DTensor parameters",
        (
            "test_errors.py::test_shards_lie_as_torch_chunk_says",
            "test_training.py::test_state_dict_holds_shards_under_the_original_keys",
            "test_demo.py::test_a_small_run_trains_one_graph_to_the_unsharded_losses",
        ),
        "The last one: half the bytes are held. Differs: a shard has no padding.",
    ),
    Row(
        "D3",
        "uneven and empty shards",
        (
            "test_fuzz.py::test_eager_models_train_as_unsharded",
            "test_models.py::test_gradients_are_the_unsharded_mean_over_ranks_to_rounding",
            "test_passes.py::test_the_cast_comes_before_the_gather_and_padding_goes_after_it",
        ),
        "Models with one and two rows on two ranks, and drawn ones on up to four.",
    ),
    Row(
        "D4",
        "building on the meta device",
        (
            "test_training.py::test_a_model_built_on_meta_trains_once_it_has_data",
            "test_training.py::test_what_is_tied_stays_tied_when_a_state_is_assigned",
        ),
        "Not: initialising module by module. With offload: gpu.",
    ),
    Row(
        "D5",
        "tied parameters",
        (
            "test_models.py::test_a_parameter_is_gathered_and_reduced_once_however_often_it_is_read",
            "test_training.py::test_trains_like_the_unsharded_model",
            "test_accumulate.py::test_micro_batches_without_sync_send_nothing",
            "test_training.py::test_what_is_tied_stays_tied_when_a_state_is_assigned",
            "test_training.py::test_what_is_tied_stays_tied_when_a_model_on_meta_gets_memory",
        ),
        "Differs: works across units too.",
    ),
    Row(
        "D6",
        "frozen parameters",
        (
            "test_models.py::test_frozen_parameters_are_gathered_but_not_reduced",
            "test_eager.py::test_frozen_units_are_freed_when_backward_leaves_them",
            "test_eager.py::test_a_frozen_parameter_stays_until_backward_has_read_it",
            "test_graphs.py::test_only_the_root_is_kept_by_default",
            "test_training.py::test_parameters_may_be_frozen_and_thawed_between_steps",
        ),
        "Eager and compiled.",
    ),
    Row(
        "D7",
        "gathered storage grows and shrinks",
        (
            "test_eager.py::test_frozen_units_are_freed_when_backward_leaves_them",
            "test_reads.py::test_no_gathered_parameter_outlives_its_step",
            "test_meshes.py::test_a_read_gives_the_dtensor_that_the_parameter_was",
        ),
        "Not: version counters by themselves.",
    ),
    Row(
        "D8",
        "how a gather is packed",
        (
            "test_passes.py::test_small_parameters_of_a_unit_share_a_collective",
            "test_passes.py::test_with_one_rank_the_parameter_itself_stands_there_and_outputs_get_a_copy",
            "test_training.py::test_parameters_cut_on_another_dim",
        ),
    ),
    Row(
        "D9",
        "how a reduction is packed",
        (
            "test_passes.py::test_gradients_share_a_reduction_once_the_last_one_is_there",
            "test_passes.py::test_replicas_sum_what_the_ranks_of_each_have_reduced",
            "test_eager.py::test_parameters_may_stay_gathered_between_micro_batches",
            "test_edges.py::test_autograd_and_its_hooks_see_shards_and_their_gradients",
        ),
        "Hooks after it: D19.",
    ),
    Row(
        "D10",
        "where gradients are divided",
        (
            "test_meshes.py::test_gradients_are_divided_once",
            "test_meshes.py::test_the_mean_is_over_all_ranks_and_fp16_does_not_overflow",
            "test_meshes.py::test_nccl_averages_on_the_way",
        ),
        "The average on a real NCCL group: gpu.",
    ),
    Row(
        "D11",
        "three ways to accumulate",
        (
            "test_eager.py::test_parameters_may_stay_gathered_between_micro_batches",
            "test_edges.py::test_autograd_and_its_hooks_see_shards_and_their_gradients",
            "test_accumulate.py::test_micro_batches_without_sync_send_nothing",
            "test_accumulate.py::test_the_modes_mix",
            "test_accumulate.py::test_what_is_held_back_is_reduced_once_whatever_comes_between",
        ),
        "`zero_grad` in the middle clears gradients that are there and leaves those held back, as in FSDP2.",
    ),
    Row(
        "D12",
        "HSDP",
        (
            "test_meshes.py::test_replicas_of_shards_train_like_the_unsharded_model",
            "test_meshes.py::test_a_bucket_is_all_reduced_before_the_next_unit_is_reduced",
            "test_passes.py::test_sums_over_replicas_are_launched_before_the_next_reduction_and_waited_for_one_later",
        ),
        "Streams: gpu.",
    ),
    Row(
        "D13",
        "with tensor and expert parallelism",
        (
            "test_meshes.py::test_tensor_parallel_parameters_train_like_the_unsharded_model",
            "test_meshes.py::test_partial_gradients_are_summed_before_the_reduction",
        ),
        "All four stored layouts asserted. Not: two model dimensions, and replicas with tensor parallelism, in a step (eight ranks, or dims of size 1).",
    ),
    Row(
        "D14",
        "pipelines",
        (
            "test_pipelining.py::test_schedules_of_one_stage_a_rank",
            "test_pipelining.py::test_schedules_of_two_stages_a_rank",
            "test_pipelining.py::test_zero_bubble_schedules",
        ),
        "Compiled stages: a row of `test_matrix.py::test_a_row_holds_on_inductor`.",
    ),
    Row(
        "D15",
        "activation checkpointing",
        (
            "test_compiled_blocks.py::test_blocks_of_every_kind",
            "test_reads.py::test_reentrant_checkpointing_inside_a_unit",
            "test_loop.py::test_recomputation_and_its_backward_share_a_gather",
            "test_interrupted.py::test_early_stop_in_a_compiled_block_with_a_break",
        ),
    ),
    Row(
        "D16",
        "gathers run ahead in forward",
        (
            "test_settings.py::test_gathers_run_one_unit_ahead_in_forward_and_in_backward",
            "test_order.py::test_gathers_go_a_unit_ahead_and_reductions_behind_them",
            "test_passes.py::test_gathers_run_one_unit_ahead",
            "test_around_graphs.py::test_gathers_run_one_block_ahead_and_reductions_one_behind",
        ),
        "Differs: launched one unit ahead explicitly. Streams: gpu.",
    ),
    Row(
        "D17",
        "gathers run ahead in backward",
        (
            "test_order.py::test_gathers_go_a_unit_ahead_and_reductions_behind_them",
            "test_passes.py::test_a_reduction_is_waited_for_after_the_next_units_was_launched",
            "test_settings.py::test_gathers_run_one_unit_ahead_in_forward_and_in_backward",
            "test_around_graphs.py::test_gathers_run_one_block_ahead_and_reductions_one_behind",
        ),
        "Eager, compiled, and around blocks that are compiled one by one.",
    ),
    Row(
        "D18",
        "inputs moved to the device",
        (
            "test_gpu.py::test_eager_training_frees_what_it_gathered",
            "test_gpu.py::test_compiled_training",
        ),
        "Both feed inputs from the CPU.",
    ),
    Row(
        "D19",
        "optimizer in backward",
        (
            "test_edges.py::test_autograd_and_its_hooks_see_shards_and_their_gradients",
            "test_matrix.py::test_a_row_holds_on_inductor",
        ),
        "Compiled without compiled autograd: `test_edges.py::test_autograd_and_its_hooks_see_shards_and_their_gradients`. With offload: gpu.",
    ),
    Row(
        "D20",
        "`state_dict()`",
        (
            "test_training.py::test_state_dict_holds_shards_under_the_original_keys",
            "test_graphs.py::test_equal_blocks_share_their_graphs",
        ),
        "After a compiled forward; a compiled wrapper's keys begin with `_orig_mod.`, as its parameters' names do (`test_wrapped.py::test_a_wrapped_models_names_agree`).",
    ),
    Row(
        "D21",
        "`load_state_dict`",
        (
            "test_training.py::test_state_dict_holds_shards_under_the_original_keys",
            "test_training.py::test_what_is_tied_stays_tied_when_a_state_is_assigned",
            "test_edges.py::test_replaced_shards_are_followed",
            "test_reads.py::test_dtypes_follow_to_and_load_state_dict",
            "test_training.py::test_loading_what_is_not_cut_so_is_refused_and_names_it",
        ),
        "Plain tensors: torch's RuntimeError, which names each key; nothing is changed.",
    ),
    Row(
        "D22",
        "DCP helpers",
        (
            "test_checkpoints.py::test_what_two_ranks_saved_three_load_and_the_reverse",
            "test_wrapped.py::test_a_wrapped_models_names_agree",
            "test_checkpoint_options.py::test_the_helpers_do_what_they_do_for_fsdp2",
        ),
        "The second one: every option of the getters and setters, not compiled and compiled in both ways, before and after steps; names, types, placements and values are those of FSDP2's models. A compiled wrapper as the model: `test_wrapped.py::test_a_wrapped_models_names_agree`.",
    ),
    Row(
        "D23",
        "gradient clipping",
        (
            "test_training.py::test_clip_grad_norm_gives_the_unsharded_norm",
            "test_matrix.py::test_a_row_holds_on_inductor",
            "test_meshes.py::test_norms_of_several_meshes_are_combined_by_hand",
        ),
        "Several meshes: `clip_grad_norm_` raises in torch; per-mesh norms with `get_total_norm`, then `clip_grads_with_norm_`.",
    ),
    Row(
        "D24",
        "AMP scaler",
        (
            "test_training.py::test_grad_scaler_skips_a_step_on_every_rank",
        ),
    ),
    Row(
        "D25",
        "all-gather extensions of subclasses",
        (
            "test_extension.py::test_a_subclass_decides_what_travels",
            "test_extension.py::test_an_extension_gets_the_mesh_of_its_shards",
            "test_graphs.py::test_backward_makes_a_weight_again_from_what_its_subclass_sends",
            "test_messages.py::test_ours_says_what_torch_says [half an extension]",
            "test_eager_regions.py::test_one_warning_names_the_module_and_the_reason",
            "test_extension_storages.py::test_trains_like_the_unsharded_model",
            "test_extension_storages.py::test_what_arrived_is_held_as_long_as_the_extension_says",
            "test_extension_storages.py::test_after_an_extension_that_raised_the_next_step_is_right",
            "test_extension_storages.py::test_trains_in_a_graph_like_the_unsharded_model",
            "test_float8.py::test_float8_trains_as_on_fsdp2",
        ),
        "Both forms, uneven shards, eager and traced; what is gathered again lies where it did the first time. torchao's float8 with scales found at once or by weight. Differs: what is gathered has no padding when the extension gets it, and shards of another dimension are joined along it.",
    ),
    Row(
        "D26",
        "`torch.func`",
        (
            "test_eager.py::test_derivatives_by_inputs_through_torch_func",
            "test_eager.py::test_parameters_get_their_gradients_through_transforms_of_torch_func",
        ),
        "vmap, jvp and grad inside a forward; jvp and grad by inputs.",
    ),
    Row(
        "D27",
        "`spmd_types`",
        (),
        "Left out: experimental annotations of torch's, which nothing here reads.",
    ),
    Row(
        "D28",
        "a view as output warns",
        (
            "test_eager.py::test_a_view_as_output_warns_once",
        ),
        "Names the module.",
    ),
    Row(
        "D29",
        "double backward",
        (
            "test_eager.py::test_double_backward_through_inputs_works_and_through_parameters_is_refused",
        ),
        "Differs: works by inputs. Not: compiled.",
    ),
    Row(
        "D30",
        "writing parameters between forward and backward",
        (),
        "Left out: unsupported as in FSDP2; docs/eager.md says so.",
    ),
    Row(
        "D31",
        "eval and inference mode",
        (
            "test_training.py::test_evaluation_leaves_the_shards_in_place",
            "test_reads.py::test_reads_through_lists_and_parametrizations",
            "test_matrix.py::test_a_row_holds_on_inductor",
            "test_evaluation.py::test_ranks_generate_texts_of_different_lengths",
        ),
        "Differs: the root is freed after such a forward.",
    ),
    Row(
        "D32",
        "devices",
        (
            "test_training.py::test_trains_like_the_unsharded_model",
        ),
        "CPU with gloo. All others: gpu.",
    ),
    Row(
        "D33",
        "a single rank",
        (
            "test_training.py::test_one_rank_never_hands_out_the_shard",
            "test_passes.py::test_with_one_rank_the_parameter_itself_stands_there_and_outputs_get_a_copy",
            "test_fuzz.py::test_eager_models_train_as_unsharded",
        ),
        "Compiled and eager, without collectives.",
    ),
)

HEAD = """\
# Which test covers which row

FSDP2's behaviour row by row: A its arguments, B the methods of a sharded module, M what stands beside them, D what holds
without being asked for. Its errors and warnings have a table of their own, MESSAGES.md. Written by `python -m tests.rows` from `tests/rows.py` and the tests, whose own
words say what they assert: change these, not this file.

- `Not:` a part of the row that the named tests do not assert.
- `Differs:` the package does something else on purpose, and that is what the tests assert.
- `Left out:` not there, with the reason.
- `[...]` is a case of the test's table.
- Tests of `test_gpu.py` are marked `gpu` and need one.
"""

@functools.cache
def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    """A test file's functions by name."""
    tree = ast.parse((HERE / file).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def split(named: str) -> tuple[str, str, str]:
    """File, test and case of what a row names."""
    test, _, case = named.partition(" [")
    file, _, function = test.partition("::")
    return file, function, case.removesuffix("]")


def asserted(named: str) -> str:
    """What a test says that it asserts."""
    file, function, case = split(named)
    if case:
        return f"{case} (`{file}`)"
    sentence = ast.get_docstring(functions_of(file)[function]) or ""
    first = " ".join(sentence.split("\n\n")[0].split())
    said = function.removeprefix("test_").replace("_", " ")
    return f"{said} (`{file}`)" if not first else f"{said}: {first.rstrip('.')} (`{file}`)"


def cases_in(file: str) -> set[str]:
    """Everything that may be the name of a case there: its strings, or those of its table (messages.py)."""
    file = file if file != "test_messages.py" else "messages.py"
    return {
        node.value
        for node in ast.walk(ast.parse((HERE / file).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def table(head: str, lines: list[list[str]]) -> str:
    columns = head.split("|")
    rule = "|".join("---" for _ in columns)
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"| {' | '.join(columns)} |\n|{rule}|\n{body}\n"


def written() -> str:
    """ROWS.md."""
    rows = [[one.row, one.what, "<br>".join(map(asserted, one.tests)) or "-", one.note] for one in ROWS]
    return f"{HEAD}\n{table('row|what|what tests assert|note', rows)}"


def named_in(text: str) -> set[str]:
    return set(re.findall(r"test_\w+\.py::test_\w+", text))


if __name__ == "__main__":
    (HERE / "ROWS.md").write_text(written())
