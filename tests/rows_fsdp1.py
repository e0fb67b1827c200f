"""FSDP1's behaviour, row by row, and the tests that cover it. ``python -m tests.rows_fsdp1`` writes ROWS_FSDP1.md.

As rows.py for FSDP2: what a test asserts is said by the test.
"""

from __future__ import annotations

from tests.rows import HERE, Row, asserted, table

INIT, METHODS, STATE, OLDER = (
    f"test_fsdp1{part}.py" for part in ("", "_methods", "_state", "_older")
)

NUMBERS = f"{INIT}::test_trains_like_torchs_fsdp1_and_the_unsharded_model"
MESSAGES = "test_messages.py::test_ours_says_what_torch_says"
MISTAKES = f"{INIT}::test_mistakes_raise_what_fsdp1_raises_and_say_what_to_do"
PRECISION = f"{INIT}::test_mixed_precision_is_torchs"
POLICIES = f"{INIT}::test_policies_wrap_what_torchs_fsdp1_wraps"
WARNING = f"{INIT}::test_one_warning_says_what_does_it_now"
SUMMONED = f"{METHODS}::test_full_parameters_are_seen_and_written"
RESUMED = f"{STATE}::test_training_goes_on_from_a_state_of_each_type"

HEAD = """\
# Rows of FSDP1 and their tests

What a user of `torch.distributed.fsdp.FullyShardedDataParallel` may rely on, and the tests that assert it of
`fsdp_compile.fsdp1`. Made from the tests by `python -m tests.rows_fsdp1`; `tests/test_rows.py` keeps it true.

- "Beside torch's": the same lines run under torch's own FSDP1 on the CPU with gloo, and losses, parameters, names or
  exceptions are compared. Where that does not work on the CPU, the note says so.
- Compiled means `torch.compile(model, fullgraph=True)`, one graph.
"""

ROWS = (
    # 2A: the constructor
    Row("2A1", "`module`", (f"{METHODS}::test_wrappers_know_their_tree", f"{METHODS}::test_reports_and_messages_leave_wrappers_out_of_names", f"{INIT}::test_enable_wrap_and_wrap_take_our_class", f"{INIT}::test_a_list_without_forward_is_one_unit", f"{INIT}::test_the_wrapper_hides_no_attribute_of_the_users", f"{INIT}::test_a_module_is_wrapped_again"), "Differs: `params` has the wrapper's own DTensors (FSDP1: its flat parameter); `named_parameters()` and `named_buffers()` leave out `_fsdp_wrapped_module.` always, not only inside `summon_full_params`; `named_modules()` has it."),
    Row("2A2", "`process_group`", (f"{NUMBERS} [process_group]", f"{NUMBERS} [HYBRID_SHARD]", f"{INIT}::test_shards_inside_a_node_and_replicates_over_nodes", f"{INIT}::test_a_group_of_one_rank_is_not_sharded", MESSAGES, f"{STATE}::test_a_mesh_without_names_is_replicas_of_shards", f"{STATE}::test_the_first_rank_of_a_subgroup_gets_what_rank_0_only_keeps_from_others"), "One, or (shard, replicate). A pair with a strategy that is not hybrid raises ValueError."),
    Row("2A3", "`sharding_strategy`", (f"{NUMBERS} [FULL_SHARD]", MISTAKES), "2B has each."),
    Row("2A4", "`cpu_offload`", (f"{NUMBERS} [cpu_offload]",), "Beside the unsharded model: torch's FSDP1 copies to a device, and the CPU is none. Real copies: test_offload.py for `CPUOffloadPolicy`, which this becomes."),
    Row("2A5", "`auto_wrap_policy`", (POLICIES, f"{INIT}::test_a_custom_policy_gives_modules_arguments_of_their_own", MESSAGES), "Differs: a module in two places is wrapped in both; frozen and trained parameters may share a wrapper."),
    Row("2A6", "`backward_prefetch`", (f"{NUMBERS} [BACKWARD_POST]", WARNING), "Taken with a warning: the plan decides."),
    Row("2A7", "`mixed_precision`", (PRECISION, f"{INIT}::test_the_roots_inputs_are_cast_and_inner_ones_on_request"), "2C1."),
    Row("2A8", "`ignored_modules`", (f"{INIT}::test_what_is_ignored_stays_whole", f"{INIT}::test_what_an_inner_wrapper_ignores_the_outer_one_does", MESSAGES)),
    Row("2A9", "`ignored_states`", (f"{INIT}::test_what_is_ignored_stays_whole", MESSAGES)),
    Row("2A10", "`param_init_fn`", (f"{INIT}::test_a_module_on_the_meta_device_gets_values", MESSAGES, f"{INIT}::test_ties_that_wrappers_would_cut_are_refused"), "Differs: tied weights of one wrapper stay tied, those of several are refused. Not: torchdistX."),
    Row("2A11", "`device_id`", (f"{INIT}::test_all_ranks_begin_with_rank_0s_values", f"{INIT}::test_a_module_is_wrapped_again", MISTAKES), "Differs: without an accelerator the CPU is taken; a device that is not the current one raises ValueError. On accelerators: not tested."),
    Row("2A12", "`sync_module_states`", (f"{INIT}::test_all_ranks_begin_with_rank_0s_values",), "FSDP1 refuses CPU tensors."),
    Row("2A13", "`forward_prefetch`", (f"{NUMBERS} [forward_prefetch]",), "What happens anyway."),
    Row("2A14", "`limit_all_gathers`", (f"{NUMBERS} [limit_all_gathers]", WARNING), "False is taken with a warning."),
    Row("2A15", "`use_orig_params`", (f"{NUMBERS} [flat parameters]", f"{INIT}::test_an_optimizer_that_was_built_before_wrapping_trains_the_model"), "Parameters have their original names and shapes, whatever it says; no warning, as False is the default. Differs: they are other objects, which optimizers that are there get in their places."),
    Row("2A16", "`device_mesh`", (f"{NUMBERS} [device_mesh]", f"{METHODS}::test_a_slice_of_a_mesh_leaves_tensor_parallelism_alone", MISTAKES), "Differs: a 2-D mesh without a hybrid strategy raises ValueError."),
    # 2B: enums
    Row("2B1", "`FULL_SHARD`", (f"{NUMBERS} [FULL_SHARD]",), "The root stays gathered, as in FSDP1."),
    Row("2B2", "`SHARD_GRAD_OP`", (f"{NUMBERS} [SHARD_GRAD_OP]",), "Not: staying gathered from one backward to the next inside `no_sync`."),
    Row("2B3", "`NO_SHARD`", (f"{NUMBERS} [NO_SHARD]", f"{INIT}::test_a_group_of_one_rank_is_not_sharded", WARNING), "It is `replicate`."),
    Row("2B4", "`HYBRID_SHARD`", (f"{NUMBERS} [HYBRID_SHARD]", f"{INIT}::test_shards_inside_a_node_and_replicates_over_nodes", MISTAKES)),
    Row("2B5", "`_HYBRID_SHARD_ZERO2`", (f"{NUMBERS} [_HYBRID_SHARD_ZERO2]",)),
    Row("2B6", "`BackwardPrefetch`", (f"{NUMBERS} [BACKWARD_POST]", WARNING)),
    Row("2B7", "`StateDictType`", (RESUMED, f"{STATE}::test_the_type_is_set_for_a_tree", f"{STATE}::test_a_checkpoint_of_shards_is_loaded"), "Differs: SHARDED has DTensors without a mesh as well (FSDP1: ShardedTensor); LOCAL has the same (FSDP1: ShardedTensors of flat pieces)."),
    Row("2B8", "`OptimStateKeyType`", (f"{OLDER}::test_numbers_become_names_and_names_numbers",)),
    Row("2B9", "`TrainingState`", (), "Left out: internal to FSDP1. What a user sees of it are exceptions: 2D8."),
    # 2C: configurations
    Row("2C1", "`MixedPrecision`", (PRECISION, f"{INIT}::test_the_roots_inputs_are_cast_and_inner_ones_on_request"), "All fields; beside torch's. Differs: buffers are cast when the module is wrapped, not at the first forward."),
    Row("2C2", "`FSDP_USE_FULL_PREC_IN_EVAL`", (f"{INIT}::test_evaluation_in_full_precision_is_asked_for_by_the_environment",), "Differs: it follows `train()` and `eval()` of a wrapper, or of a module around one."),
    Row("2C3", "`CPUOffload`", (f"{NUMBERS} [cpu_offload]",)),
    Row("2C4", "`StateDictConfig` and its kinds", (f"{STATE}::test_rank_0_alone_may_get_it", f"{STATE}::test_the_type_is_set_for_a_tree"), "On the CPU `offload_to_cpu` changes nothing."),
    Row("2C5", "`OptimStateDictConfig` and its kinds", (f"{STATE}::test_ranks_may_have_parameters_in_another_order", f"{STATE}::test_an_optimizers_state_goes_to_and_from_torchs_fsdp1"), "As 2C4."),
    Row("2C6", "`StateDictSettings`", (f"{STATE}::test_the_type_is_set_for_a_tree",)),
    # 2D: methods
    Row("2D1", "`module`, attributes, indices", (f"{METHODS}::test_wrappers_know_their_tree", f"{INIT}::test_enable_wrap_and_wrap_take_our_class", MISTAKES)),
    Row("2D2", "`check_is_root`", (f"{METHODS}::test_wrappers_know_their_tree",)),
    Row("2D3", "`fsdp_modules`", (f"{METHODS}::test_wrappers_know_their_tree",)),
    Row("2D4", "`apply`", (f"{METHODS}::test_apply_sees_full_parameters", MESSAGES)),
    Row("2D5", "`set_state_dict_type`, `get_`, `state_dict_type`", (f"{STATE}::test_the_type_is_set_for_a_tree",), "Differs: no FutureWarning; the context ends where it raises as well."),
    Row("2D6", "`state_dict`, `load_state_dict`", (RESUMED, f"{STATE}::test_whole_state_dicts_go_to_and_from_torchs_fsdp1_and_plain_models", f"{STATE}::test_rank_0_alone_may_get_it", f"{STATE}::test_what_is_missing_or_does_not_fit_is_named", f"{STATE}::test_a_checkpoint_of_shards_is_loaded", f"{METHODS}::test_a_slice_of_a_mesh_leaves_tensor_parallelism_alone", f"{STATE}::test_checkpointing_applied_after_wrapping_changes_no_name_and_no_value", f"{STATE}::test_helpers_of_checkpoints_know_our_class_by_its_import_alone", f"{STATE}::test_what_was_saved_does_not_change_when_training_goes_on", f"{STATE}::test_modules_see_the_version_that_they_were_saved_with")),
    Row("2D7", "`forward`", (NUMBERS, f"{INIT}::test_a_decoder_trains_in_one_graph_on_inductor", f"{INIT}::test_the_examples_script_trains_alike_under_either_class"), "Eager and compiled."),
    Row("2D8", "`summon_full_params`", (SUMMONED, f"{METHODS}::test_full_parameters_of_one_wrapper_or_on_one_rank", MESSAGES, f"{METHODS}::test_parameters_keep_their_shape_and_place_while_they_are_full", f"{METHODS}::test_a_slice_of_a_mesh_leaves_tensor_parallelism_alone", f"{METHODS}::test_what_is_frozen_inside_stays_frozen", f"{STATE}::test_checkpointing_applied_after_wrapping_changes_no_name_and_no_value", f"{STATE}::test_helpers_of_checkpoints_know_our_class_by_its_import_alone", f"{METHODS}::test_a_model_is_called_while_its_parameters_are_full", f"{METHODS}::test_full_parameters_are_seen_before_backward"), "Differs: `writeback=False` discards with NO_SHARD, too; `with_grads` works whatever `use_orig_params` says; a forward inside computes with them (FSDP1 documents that as unsupported); parameters inside are others than outside, so an optimizer is built after the block."),
    Row("2D9", "`named_parameters`, `named_buffers`, `_apply`", (SUMMONED, f"{STATE}::test_whole_state_dicts_go_to_and_from_torchs_fsdp1_and_plain_models", f"{METHODS}::test_parameters_keep_their_shape_and_place_while_they_are_full"), "2A1."),
    Row("2D10", "`no_sync`", (f"{METHODS}::test_no_sync_adds_up_and_sends_nothing", MESSAGES), "Beside torch's, which sends as little."),
    Row("2D11", "`clip_grad_norm_`", (f"{METHODS}::test_gradients_are_clipped_as_one_vector", f"{METHODS}::test_the_norms_dtype_is_that_of_the_gradients", f"{METHODS}::test_a_slice_of_a_mesh_leaves_tensor_parallelism_alone")),
    Row("2D12", "`full_optim_state_dict`, `sharded_`", (f"{OLDER}::test_the_older_functions_give_what_the_newer_ones_do",)),
    Row("2D13", "`shard_full_`, `flatten_sharded_`, `scatter_full_optim_state_dict`", (f"{OLDER}::test_the_older_functions_give_what_the_newer_ones_do",)),
    Row("2D14", "`rekey_optim_state_dict`", (f"{OLDER}::test_numbers_become_names_and_names_numbers",), "Differs: the order in a group stays that of the optimizer (FSDP1 sorts it)."),
    Row("2D15", "`optim_state_dict`, `optim_state_dict_to_load`", (RESUMED, f"{STATE}::test_an_optimizers_state_goes_to_and_from_torchs_fsdp1", f"{STATE}::test_ranks_may_have_parameters_in_another_order", f"{STATE}::test_parameters_that_the_optimizer_lacks_are_named", f"{STATE}::test_an_optimizer_may_have_names_for_keys", f"{STATE}::test_every_rank_raises_where_optimizers_differ", f"{STATE}::test_a_parameter_that_the_state_lacks_is_left_out", f"{STATE}::test_a_checkpoint_of_shards_is_loaded", f"{STATE}::test_what_was_saved_does_not_change_when_training_goes_on", f"{STATE}::test_an_optimizers_state_keeps_its_dtype", f"{STATE}::test_checkpointing_applied_after_wrapping_changes_no_name_and_no_value", f"{STATE}::test_helpers_of_checkpoints_know_our_class_by_its_import_alone")),
    Row("2D16", "`register_comm_hook`", (f"{METHODS}::test_a_hook_reduces_in_the_place_of_ours", f"{METHODS}::test_torchs_hooks_are_the_dtype_of_the_reduction", MESSAGES), "Differs: a sharded unit calls the hook once a bucket, not once a unit; after the first forward, too."),
    Row("2D17", "`_unshard`", (), "Left out: private. `model.module.unshard(async_op=True)` is FSDP2's, and there."),
    Row("2D18", "`_flat_param`, `FlatParameter`, `_deregister_orig_params_ctx`", (), "Left out: there is no flat parameter."),
    # 2E: wrapping
    Row("2E1", "`ModuleWrapPolicy`", (POLICIES,)),
    Row("2E2", "`CustomPolicy`", (POLICIES, f"{INIT}::test_a_custom_policy_gives_modules_arguments_of_their_own", MISTAKES)),
    Row("2E3", "`size_based_auto_wrap_policy`", (POLICIES,)),
    Row("2E4", "`transformer_`, `lambda_auto_wrap_policy`, `always_wrap_policy`", (POLICIES,)),
    Row("2E5", "`_or_policy` and its like", (), "Left out: private to torch; as functions they work as any other."),
    Row("2E6", "`enable_wrap`, `wrap`", (f"{INIT}::test_enable_wrap_and_wrap_take_our_class",), "torch's own."),
    Row("2E7", "batch norms under mixed precision", (PRECISION,)),
    # 2F: what else there is
    Row("2F1", "`ShardedGradScaler`", (f"{OLDER}::test_ranks_skip_a_step_together", f"{OLDER}::test_a_scaler_that_is_off_does_nothing", f"{OLDER}::test_the_scaler_keeps_dtypes_and_takes_sparse_gradients"), "On the CPU; offloaded gradients beside an accelerator are not tested."),
    Row("2F2", "execution order validation", (), "Left out: the lookout compares what ranks issue (test_lookout.py)."),
    Row("2F3", "rate limiter", (WARNING,), "2A14."),
    Row("2F4", "`FSDPExtensions`", (f"{METHODS}::test_a_slice_of_a_mesh_leaves_tensor_parallelism_alone",), "Private; what it was for, tensor parallelism, works."),
    Row("2F5", "`_debug_utils`, `_trace_utils`", (), "Left out: private; `fsdp_compile.inspect` and the profiler's ranges."),
    Row("2F6", "limits", (f"{INIT}::test_what_is_ignored_stays_whole",), "Frozen and trained parameters may be mixed; double backward is not supported here either."),
)  # fmt: skip

LENGTHS = {"A": 16, "B": 9, "C": 6, "D": 18, "E": 7, "F": 6}


def written() -> str:
    """ROWS_FSDP1.md."""
    rows = [[one.row, one.what, "<br>".join(map(asserted, one.tests)) or "-", one.note] for one in ROWS]
    return "\n".join([HEAD, table("row|what|what tests assert|note", rows)])


if __name__ == "__main__":
    (HERE / "ROWS_FSDP1.md").write_text(written())
