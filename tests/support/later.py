"""Tests outside of ``integration`` and ``slurm`` that `pytest` leaves to `.ci/run`, or that, too.

By file and by how the names of tests begin, the cases in the same way; no cases are all of them.
Each is of a kind of which the other tests make one, or takes long for what it adds. Tests whose
cases make a large matrix deal them by `thinned` instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

Table = dict[str, dict[str, tuple[str, ...]]]

MATRIX: Table = {
    "component/shim/compile_auto/test_compile_ranks.py": {
        "test_a_copy_that_fails_": (),
        "test_a_rank_that_": (),
        "test_nobody_waits_": (),
        "test_ranks_whose_steps_": (),
    },
    "component/shim/data_parallel/test_answers.py": {
        "test_ranks_that_wait_for_each_other_are_told": ("0-1", "1-2"),
    },
    "component/shim/data_parallel/test_shared_loading.py": {
        "test_a_rank_that_reads_and_dies_": (),
    },
    "component/shim/levers/test_graph_rehearsal.py": {
        "test_a_loop_may_change_when_it_zeroes_gradients": (),
        "test_a_safe_loop_gets_graphs": ("plain-InPlaceEma", "takes_fields", "two_optimizers"),
        "test_an_unsafe_loop_gets_none": (
            "delays",
            "plain-InBlock",
            "plain-InObject",
            "reads_global-Hooked",
            "takes_items",
        ),
        "test_gradients_outlive_the_next_forward": ("zeroes_late", "zeroes_now"),
        "test_graphs_end_when_a_loop_becomes_unsafe": ("keeps_gradients",),
        "test_two_models_in_turn_get_none": (),
    },
    "component/shim/tune/test_ranks_repeat.py": {
        "test_what_is_wrong_on_one_rank_": ("drops_nothing", "forgets_statistics"),
    },
    "contract/test_tune_ranks.py": {"test_the_same_levers_": ("injected",)},
    # the real compiler, in a minute each; the steps: component/shim/compile_auto
    "contract/test_compile_auto_ranks.py": {"test_two_ranks_": ("injected",)},
    "contract/test_checkpoints.py": {
        "test_levers_that_are_off_change_no_bit": ("adam]", "sgd]"),
        "test_pickles_of_classes_in_the_script_itself": (),
        "test_a_resumed_run_goes_on_as_if_it_had_never_stopped": (
            "bfloat16-compile-blocks-fused",
            "bfloat16-compile-model-fused",
            "float16-compile-model-fused-adamw",
            "bfloat16-compile-model-keep",
            "float16-compile-blocks-keep",
            "float16-compile-model-fused-sgd",
            "off-compile-model",
        ),
        "test_a_checkpoint_is_the_one_that_the_script_alone_saves": (
            "bfloat16-compile-model-fused-adam]",
            "float16-compile-model-fused-adamw",
            "off-compile-blocks",
        ),
        "test_a_run_goes_on_with_and_without_levers": (
            "plain-first-bfloat16-compile-model-keep",
            "plain-first-float16-compile-blocks",
            "plain-first-float16-compile-model-fused-sgd",
            "plain-first-off-compile-model",
        ),
    },
    "contract/test_data_parallel.py": {
        "test_the_command_trains_what_one_process_trains": (),  # the real command: test_torchrun
        "test_ranks_train_what_one_process_trains": (
            "accumulate_three-4",
            "bucketed_lengths-4",
            "growing_batches-4",
            "onecycle_by_batch-4",
            "tiny_gpt-4",
            "weighted_sampler-4",
        ),
    },
    "contract/test_data_parallel_guards.py": {
        "test_ranks_that_go_different_ways_are_an_error": ("ends-ranks-steps",),
    },
    "contract/test_data_parallel_loops.py": {
        "test_losses_of_all_forms_are_those_of_one_process": ("outside-2",),
        "test_two_ranks_train_what_one_process_trains": ("retain_graph",),
        "test_batch_norm_over_all_ranks_is_that_of_one_process": ("3-4",),
    },
    "contract/test_frameworks.py": {
        "test_what_a_framework_does_is_left_to_it": ("lightning_trainer",),
        "test_what_a_framework_leaves_undone_is_done": ("accelerate_loop",),
        "test_with_all_levers_off_it_prints_what_python_prints": (),
    },
    "contract/test_levers_amp.py": {
        "test_an_error_that_precision_may_explain_": (),
        "test_a_script_that_bf16_would_end": (),
    },
    "contract/test_levers_children.py": {
        "test_a_childs_traceback_is_pythons_own": (),
        "test_children_that_train": ("spawn",),
        "test_a_parent_that_trains_too_is_counted_once": (),
    },
    "contract/test_levers_compile.py": {
        "test_a_graph_that_is_used_twice": (),
        "test_a_saved_model_loads_without_fasttrain": (),
        "test_hooks_that_come_and_go_after_the_first_call": (),
        "test_tensors_of_the_scripts_own_classes_": ("Bare",),
        "test_the_scripts_own_compilation": ("True-own_forward", "True-own_wrapper"),
        "test_tracing_and_transforms_of_a_compiled_model": ("model",),
        "test_whatever_a_model_returns": ("<lambda>2", "<lambda>3", "<lambda>4"),
    },
    "contract/test_levers_compile_streams.py": {
        "test_a_copy_for_each_task_": (),
        "test_a_new_wrapper_at_each_step_": (),
        "test_a_recurrent_layer_runs_eagerly_and_is_told": ("GRU",),
        "test_a_spectral_norm_that_comes_later_": (),
        "test_an_ensemble_and_a_model_per_fold_": (),
        "test_hooks_added_at_each_step_": (),
        "test_no_root_is_compiled_after_many_graphs": (),
    },
    "contract/test_levers_dynamo.py": {
        "test_a_loop_of_hundreds_of_rounds_": (),
        "test_a_short_loop_and_a_deep_model_are_compiled": (),
        "test_dynamo_warns_only_where_it_is_asked_to": (),
    },
    "contract/test_levers_graphs.py": {
        "test_hooks_that_change_end_graphs": (),
        "test_several_models_get_none": (),
        "test_a_loop_that_graphs_would_make_wrong_gets_none": ("never_steps",),
    },
    "contract/test_levers_loops.py": {
        "test_all_levers_together": ("teacher",),
        "test_compiled_loops_give_the_same_losses": ("closures", "gan", "thrifty"),
    },
    "contract/test_levers_process.py": {
        "test_a_child_forked_before_torch_": (),
        "test_workers_of_a_loader_get_no_levers": (),
        "test_the_scripts_random_numbers_are_its_own": (),
        "test_dynamo_is_not_imported_": (),
    },
    "contract/test_levers_second.py": {
        "test_a_penalty_is_that_of_an_eager_run": ("bundled", "dropout", "plain-1"),
        "test_nothing_is_kept_after_a_plain_backward_pass": (),
    },
    "contract/test_parity_exit.py": {
        "test_exit_code_and_last_words": ("256", "259", "none", "object", "true", "text"),
    },
    "contract/test_parity_identity.py": {
        "test_a_script_is_found_by_any_path": (
            "elsewhere-../link",
            "elsewhere-ABSOLUTE",
            "project-sub//",
            "project/sub-near",
        ),
    },
    "contract/test_parity_torch.py": {
        "test_an_error_in_forward": (),
        "test_what_a_script_sets_before_it_imports_torch": (),
    },
    "contract/test_parity_traceback.py": {
        "test_module": (
            ".parcel",
            "nothing-",
            "parcel.__main__",
            "parcel.part.deeper",
            "parcel/part",
            "sys",
        ),
        "test_traceback": ("context", "cycle", "no_text", "suppressed"),
        "test_torch_that_fails_to_import": ("import",),
    },
    "contract/test_ranks_styles.py": {
        "test_ranks_that_would_part_end": ("part_background_training",),
        "test_two_ranks_do_what_python_does": (
            "accumulate_reading_grads",
            "actor_critic_single",
            "adversarial_inputs",
            "agc_and_clip_value",
        ),
    },
    "contract/test_preempt_snapshots.py": {
        "test_a_preempted_run_ends_as_one_that_was_not": ("classifier", "endless"),
        "test_what_can_not_be_followed_is_refused_at_once": (
            "by_hand-environ0",
            "fragile",
            "read_ahead",
            "with_closure",
        ),
    },
    "contract/test_scripts.py": {
        "test_generated_code_gives_the_same_loss": ("convnet_batchnorm",),
        "test_the_command_with_levers_off_is_plain_python": (
            "retain_graph",
            "seq2seq_parts",
            "unfreeze_later",
        ),
        "test_compiled_gives_the_same_loss": (
            "dqn_target",
            "packed_lengths",
            "seq2seq_parts",
            "vae_sum",
        ),
    },
    "contract/test_shared_loading.py": {
        "test_ranks_read_what_python_reads": ("2-methods0",),
        "test_a_worker_that_dies_is_seen_by_all_ranks": (),
    },
}

# By hand before a release, with what still meets their faults in .ci/run.
FULL: Table = {
    "contract/test_compile_auto_ranks.py": {"test_two_ranks_": ("own",)},
    "component/shim/levers/test_graph_rehearsal.py": {  # of each kind others are in .ci/run
        "test_gradients_outlive_the_next_forward": ("zeroes_late_in", "zeroes_now"),
        "test_a_loop_may_change_when_it_zeroes_gradients": (),
        "test_graphs_end_when_a_loop_becomes_unsafe": ("keeps_gradients",),
        "test_a_safe_loop_gets_graphs": (
            "averages",
            "counted",
            "plain-InPlaceEma",
            "takes_fields",
            "validates-Normed",
            "plain-Rotary",
            "two_optimizers",
            "detached",
            "plain-Normed",
            "recurs",
            "retains",
            "takes_items",
        ),
        "test_an_unsafe_loop_gets_none": (
            "accumulates",
            "calls_twice",
            "delays",
            "keeps_gradients",
            "keeps_views",
            "plain-Hooked",
            "plain-InBlock",
            "plain-InObject",
            "plain-OnClass",
            "takes_fields-InBoxedField",
            "takes_items-InProxy",
            "plain-InDeque",
            "plain-InSlots",
            "plain-OnParameter",
            "reads_global-Backward",
        ),
    },
    "contract/test_checkpoints.py": {  # the other pairs of precision, compilation and optimizer
        "test_levers_that_are_off_change_no_bit": ("sgd]",),
        "test_pickles_of_classes_in_the_script_itself": (),  # whole models
        "test_a_checkpoint_is_the_one_that_the_script_alone_saves": (
            "bfloat16-compile-blocks-keep",
            "float16-compile-model-fused-adamw",
            "off-compile-blocks-keep",
            "off-compile-model-fused-sgd",
        ),
        "test_a_run_goes_on_with_and_without_levers": (
            "plain-first-bfloat16-compile-model-keep",
            "plain-first-float16-compile-model-fused-sgd",
            "plain-first-off-compile-model",
        ),
        "test_a_resumed_run_goes_on_as_if_it_had_never_stopped": (
            "bfloat16-compile-blocks-keep",
            "bfloat16-compile-model-keep",
            "float16-compile-blocks-keep",
            "off-compile-model",
            "float16-compile-model-fused-sgd",
            "float16-compile-model-fused-adam]",
            "bfloat16-compile-model-fused-adam]",
        ),
        # generated code in test_scripts, resumed runs with all other backends here
        "test_saved_and_resumed_with_inductor": (),
    },
    "contract/test_data_parallel.py": {  # the same scripts as forks, and one by the command
        "test_two_nodes_train_what_one_process_trains": (),  # test_torchrun, and SLURM's two nodes
        "test_two_runs_are_the_same_bit_for_bit": ("weighted_sampler",),
        "test_the_receipt_counts_what_the_ranks_did": (  # tiny_gpt and weighted_sampler
            "accumulate_three-4",
            "bucketed_lengths-4",
            "growing_batches-4",
            "onecycle_by_batch-4",
        ),
        "test_ranks_train_what_one_process_trains": (  # two ranks; four of other scripts
            "bucketed_lengths-4",
            "gan_latents-4",
            "growing_batches-4",
            "last_batch_of_one-4",
            "onecycle_by_batch-4",
            "semi_supervised-4",
            "stream_dataset-4",
            "two_heads_dict-4",
            "weighted_sampler-4",
            "workers_drop_last-4",
        ),
        "test_the_command_trains_what_one_process_trains": (
            "bucketed_lengths",
            "gan_latents",
            "semi_supervised",
            "stream_dataset",
            "weighted_sampler",
        ),
    },
    "contract/test_data_parallel_guards.py": {
        "test_files_are_those_of_one_process": ("temporary", "checkpoints"),
        "test_a_model_that_is_not_split_is_an_error_with_strict": (),  # --strict of other levers
        "test_ranks_that_go_different_ways_are_an_error": ("changed", "ends-ranks-steps"),
        # faults/test_random_kills.py, and test_crash_ranks
        "test_a_killed_rank_ends_the_run": (),
        "test_a_rank_that_raises_ends_the_run": (),
    },
    "contract/test_data_parallel_loops.py": {
        "test_a_group_of_the_scripts_own_is_left_alone": (),  # frameworks with ranks
        "test_precision_kernels_and_compilation_work_together": (),  # each of them, and two of them
        "test_losses_of_all_forms_are_those_of_one_process": (
            "inside-3",
            "outside-2",
        ),  # scripts/ranks
        "test_the_script_that_asks_for_its_rank_in_vain_is_stopped": (),  # source/ranks
    },
    "contract/test_data_parallel_nodes.py": {
        "test_nodes_apart_train_what_one_process_trains": (
            "elastic",
        ),  # static ones, and test_torchrun
    },
    "contract/test_frameworks.py": {  # each framework is in another test
        "test_what_mmengine_refuses_on_a_cpu_is_refused": (),
        "test_fp16_under_accelerate_is_the_loop_by_hand": (),  # fp16 without it
        "test_a_module_that_fabric_wraps_is_compiled_with_its_precision": (),
        "test_a_recipe_that_does_everything_itself_is_left_alone": (),
        "test_what_a_framework_does_is_left_to_it": ("lightning_trainer",),
        "test_what_a_framework_compiles_is_left_to_it": ("hf_trainer",),
        "test_what_a_framework_leaves_uncompiled_is_compiled": (),
        "test_what_a_framework_leaves_undone_is_done": (
            "accelerate_loop",
            "lightning_trainer",
            "torchtune_loop",
        ),
        "test_with_all_levers_off_it_prints_what_python_prints": ("fabric_loop", "mmengine"),
    },
    "contract/test_levers_children.py": {  # spawn, fork and mp.spawn
        "test_a_childs_traceback_is_pythons_own": (),
        "test_children_that_train": ("spawn",),
        "test_a_parent_that_trains_too_is_counted_once": (),
        "test_something_else_called_fasttrain_is_in_nobodys_way": (),
        "test_with_every_lever_off_children_are_pythons_own": (),
    },
    "contract/test_levers_dynamo.py": {
        "test_a_short_loop_and_a_deep_model_are_compiled": (),  # deep ones in test_scripts
        "test_a_loop_of_hundreds_of_rounds_": (),
        "test_dynamo_warns_only_where_it_is_asked_to": (),
        "test_gradients_behind_a_max_pool": (),
        "test_inductor_and_its_missing_compiler": (),
    },
    "contract/test_preempt_snapshots.py": {
        "test_what_can_not_be_followed_is_refused_at_once": (
            "fragile",
            "read_ahead",
            "with_closure",
        ),
        "test_a_preempted_run_ends_as_one_that_was_not": ("classifier", "several", "steep"),
        "test_a_run_that_was_queued_again": (),  # slurm/test_slurm_requeue.py
        # one script alone and as two ranks; unit tests of what is kept and of signals
        "test_a_signal_that_comes_while_processes_start_waits_for_them": ("torchrun",),
        "test_a_snapshot_that_can_not_be_used_leaves_the_one_before": (),
    },
    "contract/test_ranks_styles.py": {
        "test_two_ranks_do_what_python_does": (
            "accumulate_reading",
            "actor_critic",
            "barlow_batchnorm",
            "arguments_in_place",
            "attention_kept_on_self",
            "agc_and_clip_value",
        ),
        "test_ranks_that_would_part_end": (  # others that part
            "part_background_training",
            "part_caught_errors",
            "part_garbage",
            "part_lock_file",
            "part_own_environ",
            "part_string_hashes",
            "part_unseeded_numpy",
        ),
    },
    "contract/test_tune_ranks.py": {"test_the_same_levers_": ("own",)},  # injected
    "contract/test_scripts.py": {  # the same scripts in forks
        "test_compiled_gives_the_same_loss": (
            "masked_transformer",
            "packed_lengths",
            "seq2seq_parts",
        ),
        "test_generated_code_gives_the_same_loss": (),  # README's first command, and --compile auto
        "test_the_command_with_levers_off_is_plain_python": (
            "contrastive_infonce",
            "convnet_batchnorm",
            "loss_method",
            "multitask_dataclass",
            "progressive_growing",
            "retain_graph",
            "swa_update_bn",
            "seq2seq_parts",
            "unet_dice",
            "unfreeze_later",
        ),
    },
    "contract/test_shared_loading.py": {  # component/shim/data_parallel/test_shared_loading
        "test_ranks_read_what_python_reads": (),
        "test_a_worker_that_dies_is_seen_by_all_ranks": (),
    },
    "contract/test_parity_torch.py": {"test_an_error_in_forward": ()},  # test_parity_traceback
    "contract/test_parity_traceback.py": {  # the other causes and names
        "test_module": ("nothing-", "parcel.part.deeper", "parcel/part", "sys"),
        "test_traceback": ("cycle", "no_text"),
    },
    "faults/test_matrix.py": {
        # real failures in test_crash_causes and test_crash_torch, signals in test_signals and
        # test_stopping, and no other for gloo's time-out
        "test_cell": (
            "control_group",
            "full_/dev/shm",
            "SIGKILL_at_the_agent",
            "gloo",
            "hang",
            "limit_of_memory",
            "nothing",
            "SIGABRT",
            "SIGBUS",
            "SIGSEGV",
            "SIGINT_at_the_launcher",
            "SIGKILL-",
            "SIGTERM",
            "SIGHUP",
            "SIGUSR2",
            "exception",
            "full_disk",
            "loader_worker",
            "nan",
            "no_space",
            "os._exit",
            "sys.exit",
        ),
    },
    "faults/test_no_orphans.py": {
        "test_nothing_of_the_run_is_left": (
            "1-launcher-SIGUSR2",
            "2-agent-SIGINT",
            "2-worker-SIGTERM",
            "1-worker-SIGTERM",
            "2-agent-SIGUSR2",
            "2-worker-SIGKILL",
        ),
        "test_workers_of_a_data_loader_end_too": ("worker",),
    },
    "faults/test_soak.py": {"test_runs_of_one_parent": ()},
    "faults/test_staggered_crashes.py": {
        "test_the_first_of_two_that_fail_at_different_times": (),  # test_crash_ranks
    },
    "contract/test_framework_ranks.py": {
        "test_ranks_of_a_framework_are_left_to_it": (),  # frameworks alone, ranks of scripts
    },
    "contract/test_levers_amp.py": {
        "test_a_script_that_bf16_would_end": (),  # test_amp_repeat
        "test_an_error_that_precision_may_explain_": (),
    },
    "contract/test_levers_compile.py": {
        "test_a_graph_that_is_used_twice": (),  # retain_graph in test_sharded and test_scripts
        "test_hooks_that_come_and_go_after_the_first_call": (),  # hooks that change all the time
        "test_a_saved_model_loads_without_fasttrain": (),  # test_checkpoints
        "test_tracing_and_transforms_of_a_compiled_model": ("model",),  # its blocks
        "test_whatever_a_model_returns": ("<lambda>2", "<lambda>3", "<lambda>4"),  # the others
        "test_the_scripts_own_compilation": ("True-own_wrapper",),  # the other ways
    },
    "contract/test_levers_compile_streams.py": {  # wrappers, copies and hooks of other kinds
        "test_an_ensemble_and_a_model_per_fold_": (),
        "test_a_copy_for_each_task_": (),
        "test_a_recurrent_layer_runs_eagerly_and_is_told": ("GRU",),
        "test_hooks_added_at_each_step_": (),
        "test_a_spectral_norm_that_comes_later_": (),
    },
    "contract/test_levers_loops.py": {  # the same loops in test_styles and test_scripts
        "test_compiled_loops_give_the_same_losses": ("closures", "thrifty"),
    },
    "contract/test_levers_second.py": {
        "test_a_penalty_is_that_of_an_eager_run": ("dropout", "plain-1"),  # the other models
    },
    "contract/test_levers_process.py": {
        # children by fork in test_levers_children
        "test_a_child_forked_before_torch_": (),
        "test_workers_of_a_loader_get_no_levers": (),
        "test_the_scripts_random_numbers_are_its_own": (),  # test_levers_compile_streams
    },
}


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark the tests of the tables."""
    for item in items:
        if _is_in(MATRIX, item) or _is_in(FULL, item):
            item.add_marker(pytest.mark.matrix)
        if _is_in(FULL, item):
            item.add_marker(pytest.mark.full)


def _is_in(table: Table, item: pytest.Item) -> bool:
    tests = table.get(item.nodeid.removeprefix("tests/").partition("::")[0], {})
    function, _, case = item.name.partition("[")
    return any(
        function.startswith(test) and (not cases or case.startswith(cases))
        for test, cases in tests.items()
    )
