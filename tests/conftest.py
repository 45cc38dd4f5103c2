"""Which tests are left out by default, beside those marked slow where they stand."""

from __future__ import annotations

import pytest

LONG = """
tests/parity/test_experts.py::test_experts_on_other_axes[moe-2-data_parallel-accumulation1]
tests/parity/test_experts.py::test_experts_sharded_over_an_axis[moe-dp2xep2-expert_parallel-accumulation3]
tests/parity/test_experts.py::test_experts_sharded_over_an_axis[moe-ep2-expert_parallel-accumulation1]
tests/parity/test_experts.py::test_experts_sharded_over_an_axis[moe_switch-dp2xep2-fsdp-accumulation1]
tests/parity/test_experts.py::test_experts_without_a_capacity[mixtral-2-data_parallel-accumulation1-]
tests/parity/test_experts.py::test_experts_without_a_capacity[mixtral_grouped-ep2-expert_parallel-accumulation1-mixtral]
tests/parity/test_experts.py::test_experts_without_a_capacity[moe_dropless-2-data_parallel-accumulation1-]
tests/parity/test_experts.py::test_experts_without_a_capacity[moe_dropless-dp2xep2-expert_parallel-accumulation1-]
tests/parity/test_parity.py::TestDropout::test_every_plan_equals_one_rank[(2, 2)-fsdp]
tests/parity/test_parity.py::TestDropout::test_every_plan_equals_one_rank[(2, 2)-tensor_parallel]
tests/parity/test_parity.py::TestDropout::test_every_plan_equals_one_rank[(2,)-auto]
tests/parity/test_parity.py::TestDropout::test_every_plan_equals_one_rank[(2,)-data_parallel]
tests/parity/test_parity.py::TestDropout::test_every_plan_equals_one_rank[(2,)-fsdp]
tests/parity/test_parity.py::TestDropout::test_every_plan_equals_one_rank[(2,)-tensor_parallel]
tests/parity/test_parity.py::test_mean_squared_error[tensor_parallel]
tests/parity/test_parity.py::test_other_norms[1.0]
tests/parity/test_parity.py::test_other_norms[3.0]
tests/parity/test_parity.py::test_other_norms[inf]
tests/parity/test_parity.py::test_parity[gpt-2x2-data_parallel-accumulation3]
tests/parity/test_parity.py::test_parity[gpt-4-auto-accumulation3]
tests/parity/test_parity.py::test_parity[gpt-4-tensor_parallel-accumulation1]
tests/parity/test_parity.py::test_parity[gpt2-2-fsdp-accumulation1]
tests/parity/test_parity.py::test_parity[gpt2-2x2-data_parallel-accumulation3]
tests/parity/test_parity.py::test_parity[gpt2-4-tensor_parallel-accumulation1]
tests/parity/test_parity.py::test_parity[llama-2-auto-accumulation3]
tests/parity/test_parity.py::test_parity[llama-2-tensor_parallel-accumulation1]
tests/parity/test_parity.py::test_parity[llama-2x2-fsdp-accumulation1]
tests/parity/test_parity.py::test_parity[resnet-2-data_parallel-accumulation1]
tests/parity/test_parity.py::test_parity[resnet-4-fsdp-accumulation3]
tests/parity/test_parity.py::test_parity_in_float32[gpt-2x2-tensor_parallel-accumulation3-float32]
tests/parity/test_parity.py::test_parity_in_float32[gpt-4-fsdp-accumulation1-float32]
tests/parity/test_parity.py::test_parity_in_float32[mlp-2x2-auto-accumulation3-float32]
tests/parity/test_pipelines.py::test_pipelines_compute_what_one_device_computes[gpt-pp2xdp2-auto-accumulation1-zero_bubble_v-4]
tests/parity/test_vocabulary.py::test_parity[20011-True-(2, 2)-inf-tensor_parallel]
tests/parity/test_vocabulary.py::test_parity[20011-True-(4,)-2.0-tensor_parallel]
tests/passes/test_ungroup_experts.py::TestTheExample::test_mixtral_has_the_same_experts_in_both_implementations
tests/rules/test_capture.py::test_every_operator_of_the_models_has_a_rule[gpt2-eval]
tests/rules/test_capture.py::test_every_operator_of_the_models_has_a_rule[llama-eval]
tests/rules/test_capture.py::test_every_operator_of_the_models_has_a_rule[mixtral-eval]
tests/rules/test_capture.py::test_every_operator_of_the_models_has_a_rule[mixtral-train]
tests/rules/test_capture.py::test_every_operator_of_the_models_has_a_rule[moe-eval]
tests/rules/test_capture.py::test_every_operator_of_the_models_has_a_rule[moe_dropless-train]
tests/rules/test_capture.py::test_every_operator_of_the_models_has_a_rule[moe_switch-eval]
tests/rules/test_capture.py::test_every_operator_of_the_models_has_a_rule[moe_switch-train]
tests/rules/test_proof.py::test_rules_of_a_family_are_proved[elementwise]
tests/runtime/test_calls.py::test_rows_of_each_rank_equal_the_global_batch[fsdp]
tests/runtime/test_calls.py::test_rows_of_each_rank_equal_the_global_batch[tensor_parallel]
tests/runtime/test_clipping.py::test_a_skipped_step_changes_nothing[Adam amsgrad]
tests/runtime/test_clipping.py::test_a_skipped_step_changes_nothing[AdamW]
tests/runtime/test_clipping.py::test_a_skipped_step_changes_nothing[SGD]
tests/runtime/test_clipping_step.py::test_a_step_clips_as_one_process_does[(2, 2)-torch.float32]
tests/runtime/test_clipping_step.py::test_a_step_clips_as_one_process_does[(2, 2)-torch.float64]
tests/runtime/test_clipping_step.py::test_a_step_clips_as_one_process_does[(4,)-torch.float32]
tests/runtime/test_clipping_step.py::test_a_step_clips_as_one_process_does[(4,)-torch.float64]
tests/runtime/test_clipping_step.py::test_a_step_on_what_is_not_finite_changes_nothing[raise-foreach]
tests/runtime/test_clipping_step.py::test_a_step_on_what_is_not_finite_changes_nothing[skip-fused]
tests/runtime/test_gradients.py::test_parameters_that_are_left_out[data_parallel]
tests/runtime/test_gradients.py::test_parameters_that_are_left_out[fsdp]
tests/runtime/test_layouts.py::test_parameters_sharded_over_different_axes[data_parallel]
tests/runtime/test_layouts.py::test_parameters_sharded_over_different_axes[tensor_parallel]
tests/runtime/test_pipeline_traffic.py::test_predicted_traffic_is_counted_traffic[gpt-zero_bubble_v-2-data_parallel]
tests/runtime/test_precision.py::test_float32_compute_with_float64_parameters[(2, 2)-fsdp]
tests/runtime/test_precision.py::test_float32_compute_with_float64_parameters[(2, 2)-tensor_parallel]
tests/runtime/test_uneven.py::TestFullySharded::test_a_nan_is_seen_on_every_rank[(2, 2)]
tests/runtime/test_uneven.py::TestFullySharded::test_gradients_norms_and_steps_equal_one_process[(2, 2)]
tests/runtime/test_uneven.py::TestFullySharded::test_padded_bytes_are_predicted_as_they_are_counted[(2, 2)]
tests/runtime/test_uneven.py::TestFullySharded::test_parameters_lie_in_shards_of_different_sizes[(2, 2)]
tests/runtime/test_uneven.py::test_state_of_every_uneven_layout[columns]
tests/runtime/test_uneven.py::test_state_of_every_uneven_layout[rows over four]
tests/runtime/test_uneven.py::test_state_of_every_uneven_layout[the first axis]
tests/runtime/test_uneven.py::test_state_of_every_uneven_layout[the second axis]
tests/runtime/test_uneven.py::test_state_of_every_uneven_layout[two axes on one dim]
tests/runtime/test_uneven.py::test_state_of_every_uneven_layout[two axes on two dims]
tests/runtime/test_uneven.py::test_uneven_gradients_reduced_at_any_time[across_replicas_per_step]
tests/runtime/test_uneven.py::test_uneven_gradients_reduced_at_any_time[per_step]
tests/test_backend.py::test_batch_norm_takes_the_global_batch_and_its_buffers_are_written_back[(2, 2)-tensor_parallel]
tests/test_backend.py::test_batch_norm_takes_the_global_batch_and_its_buffers_are_written_back[(2,)-data_parallel]
tests/test_backend.py::test_batch_norm_takes_the_global_batch_and_its_buffers_are_written_back[(2,)-tensor_parallel]
tests/test_backend.py::test_training_equals_the_plain_model[gpt-(2, 2)-auto]
tests/test_backend.py::test_training_equals_the_plain_model[gpt-(2,)-auto]
tests/test_backend.py::test_training_equals_the_plain_model[gpt-(2,)-data_parallel]
tests/test_backend.py::test_training_equals_the_plain_model[gpt-(2,)-tensor_parallel]
tests/test_backend.py::test_training_equals_the_plain_model[mlp-(2, 2)-auto]
tests/test_backend.py::test_training_equals_the_plain_model[mlp-(2, 2)-data_parallel]
tests/test_backend.py::test_training_equals_the_plain_model[mlp-(2, 2)-tensor_parallel]
tests/test_cli_plan.py::test_pins_beside_a_preset
tests/test_examples.py::TestTrainMoE::test_experts_on_other_processes_follow_the_curve_of_one
tests/test_examples.py::TestTrainResNet::test_two_processes_train
tests/test_explain.py::test_explains_plans_of_real_models
tests/test_inductor.py::test_a_traced_body_equals_the_eager_one[gpt-tensor_parallel]
tests/test_inductor.py::test_a_traced_body_equals_the_eager_one[mlp-data_parallel]
tests/test_inductor.py::test_a_traced_body_equals_the_eager_one[mlp-tensor_parallel]
tests/test_inductor.py::test_inductor_equals_the_eager_body
tests/test_plan.py::TestFingerprints::test_they_are_the_same_in_another_process
tests/test_traffic.py::test_predicted_equals_counted[(2,)]
tests/test_traffic.py::test_predicted_equals_counted[(4,)]
tests/test_verify.py::test_gpt_with_dropout_is_compared_with_eager[bfloat16]
tests/test_verify.py::test_gpt_with_dropout_is_compared_with_eager[float64]
""".strip().splitlines()
"""Longer tests, of whose kind others run by default: with -m slow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = frozenset(LONG)
    for item in items:
        if item.nodeid in long:
            item.add_marker(pytest.mark.slow)
