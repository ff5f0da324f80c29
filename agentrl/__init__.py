# Generated from chapters/*.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Scaling and efficiency for agentic reinforcement learning: the saved helpers.

A name is imported from its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.accumulation import accumulate_gradients, global_token_count
    from agentrl.audit import leak_check, split_invariance_check, step_zero_ratio_check
    from agentrl.course.audit import Plant, full_head, planted_faults
    from agentrl.course.curriculum import record_arm
    from agentrl.course.grpo import (
        LenientEnv,
        SilentEnv,
        behavior_clone,
        book_config,
        cached,
        demonstrate,
        in_processes,
        make_rl_base,
        policy_at,
        record_run,
        with_other_goals,
    )
    from agentrl.course.gym import TABLES, Demonstrator, play, table_score
    from agentrl.course.microbatch import TRAJECTORY_QUANTILES, draw_lengths
    from agentrl.course.packing import prefix_tree_tokens
    from agentrl.course.rollout import behavior_stats
    from agentrl.course.throughput import measure_accelerator
    from agentrl.curriculum import (
        draw_weighted,
        estimate_pass_rate,
        expected_groups_per_kept,
        fill_groups,
        filter_by_pass_rate,
        group_filter_check,
        train_curriculum,
    )
    from agentrl.grpo import (
        ADVANTAGES,
        LOSS_AGG_MODES,
        RLConfig,
        aggregate_loss,
        clipped_surrogate_loss,
        compute_advantages,
        draw_tasks,
        entropy,
        gather_counts,
        kl_estimate,
        reinforce_loss,
        rl_update,
        sample_step,
        save_atomically,
        snap_weights,
        step_normalizer,
        train_rl,
        zero_advantage_groups,
    )
    from agentrl.gym import (
        ACTIONS,
        BUILTINS,
        GOALS,
        MAX_BITS,
        MAX_ITEMS,
        MAX_SOURCE,
        MAX_STEPS,
        REPAIRS,
        BugFixEnv,
        EnvConfig,
        Rejected,
        Task,
        Tokenizer,
        build_tokenizer,
        make_env,
        make_tasks,
        run_tests,
        source_of,
    )
    from agentrl.logits import (
        checkpointed_log_probs,
        fused_log_probs,
        fused_policy_loss,
        head_memory_check,
        peak_memory,
    )
    from agentrl.microbatch import (
        padded_tokens,
        rank_balanced_batches,
        rank_imbalance,
        schedule_check,
        sequence_cost,
        token_budget_batches,
    )
    from agentrl.packing import (
        block_mask,
        pack_sequences,
        packed_logits,
        packing_bound,
        packing_plan,
        segment_attention,
        segment_cumsum,
        spread,
        transformers_inputs,
        unpack,
    )
    from agentrl.policy import (
        Block,
        KVCache,
        TinyAgent,
        chunked_log_probs,
        selected_log_probs,
        sequence_log_probs,
    )
    from agentrl.report import AuditError, CheckResult, Finding, as_check
    from agentrl.rollout import (
        RolloutConfig,
        Trajectory,
        check_trajectories,
        collate,
        evaluate,
        pad_rows,
        sample_groups,
    )
    from agentrl.throughput import (
        ACCELERATORS,
        Accelerator,
        Cost,
        Estimate,
        ModelShape,
        accelerator,
        causal_pairs,
        command_line,
        decode_flops,
        decode_tokens_per_s,
        decode_weights,
        flop_count_check,
        forward_flops,
        matmul_weights,
        prefill_seconds,
        prefill_tokens,
        run_cost,
        step_cost,
        train_tokens_per_s,
        training_flops,
    )


__all__ = [
    "ACCELERATORS",
    "ACTIONS",
    "ADVANTAGES",
    "BUILTINS",
    "GOALS",
    "LOSS_AGG_MODES",
    "MAX_BITS",
    "MAX_ITEMS",
    "MAX_SOURCE",
    "MAX_STEPS",
    "REPAIRS",
    "TABLES",
    "TRAJECTORY_QUANTILES",
    "Accelerator",
    "AuditError",
    "Block",
    "BugFixEnv",
    "CheckResult",
    "Cost",
    "Demonstrator",
    "EnvConfig",
    "Estimate",
    "Finding",
    "KVCache",
    "LenientEnv",
    "ModelShape",
    "Plant",
    "RLConfig",
    "Rejected",
    "RolloutConfig",
    "SilentEnv",
    "Task",
    "TinyAgent",
    "Tokenizer",
    "Trajectory",
    "accelerator",
    "accumulate_gradients",
    "aggregate_loss",
    "as_check",
    "behavior_clone",
    "behavior_stats",
    "block_mask",
    "book_config",
    "build_tokenizer",
    "cached",
    "causal_pairs",
    "check_trajectories",
    "checkpointed_log_probs",
    "chunked_log_probs",
    "clipped_surrogate_loss",
    "collate",
    "command_line",
    "compute_advantages",
    "decode_flops",
    "decode_tokens_per_s",
    "decode_weights",
    "demonstrate",
    "draw_lengths",
    "draw_tasks",
    "draw_weighted",
    "entropy",
    "estimate_pass_rate",
    "evaluate",
    "expected_groups_per_kept",
    "fill_groups",
    "filter_by_pass_rate",
    "flop_count_check",
    "forward_flops",
    "full_head",
    "fused_log_probs",
    "fused_policy_loss",
    "gather_counts",
    "global_token_count",
    "group_filter_check",
    "head_memory_check",
    "in_processes",
    "kl_estimate",
    "leak_check",
    "make_env",
    "make_rl_base",
    "make_tasks",
    "matmul_weights",
    "measure_accelerator",
    "pack_sequences",
    "packed_logits",
    "packing_bound",
    "packing_plan",
    "pad_rows",
    "padded_tokens",
    "peak_memory",
    "planted_faults",
    "play",
    "policy_at",
    "prefill_seconds",
    "prefill_tokens",
    "prefix_tree_tokens",
    "rank_balanced_batches",
    "rank_imbalance",
    "record_arm",
    "record_run",
    "reinforce_loss",
    "rl_update",
    "run_cost",
    "run_tests",
    "sample_groups",
    "sample_step",
    "save_atomically",
    "schedule_check",
    "segment_attention",
    "segment_cumsum",
    "selected_log_probs",
    "sequence_cost",
    "sequence_log_probs",
    "snap_weights",
    "source_of",
    "split_invariance_check",
    "spread",
    "step_cost",
    "step_normalizer",
    "step_zero_ratio_check",
    "table_score",
    "token_budget_batches",
    "train_curriculum",
    "train_rl",
    "train_tokens_per_s",
    "training_flops",
    "transformers_inputs",
    "unpack",
    "with_other_goals",
    "zero_advantage_groups",
]
__version__ = "0.2.0"

# Each module, followed by its names
_MODULES = """
gym ACTIONS BUILTINS BugFixEnv EnvConfig GOALS MAX_BITS MAX_ITEMS MAX_SOURCE MAX_STEPS REPAIRS
Rejected Task Tokenizer build_tokenizer make_env make_tasks run_tests source_of

course.gym Demonstrator TABLES play table_score

policy Block KVCache TinyAgent chunked_log_probs selected_log_probs sequence_log_probs

rollout RolloutConfig Trajectory check_trajectories collate evaluate pad_rows sample_groups

course.rollout behavior_stats

grpo ADVANTAGES LOSS_AGG_MODES RLConfig aggregate_loss clipped_surrogate_loss compute_advantages
draw_tasks entropy gather_counts kl_estimate reinforce_loss rl_update sample_step save_atomically
snap_weights step_normalizer train_rl zero_advantage_groups

course.grpo LenientEnv SilentEnv behavior_clone book_config cached demonstrate in_processes
make_rl_base policy_at record_run with_other_goals

packing block_mask pack_sequences packed_logits packing_bound packing_plan segment_attention
segment_cumsum spread transformers_inputs unpack

course.packing prefix_tree_tokens

microbatch padded_tokens rank_balanced_batches rank_imbalance schedule_check sequence_cost
token_budget_batches

course.microbatch TRAJECTORY_QUANTILES draw_lengths

logits checkpointed_log_probs fused_log_probs fused_policy_loss head_memory_check peak_memory

accumulation accumulate_gradients global_token_count

curriculum draw_weighted estimate_pass_rate expected_groups_per_kept fill_groups
filter_by_pass_rate group_filter_check train_curriculum

course.curriculum record_arm

throughput ACCELERATORS Accelerator Cost Estimate ModelShape accelerator causal_pairs command_line
decode_flops decode_tokens_per_s decode_weights flop_count_check forward_flops matmul_weights
prefill_seconds prefill_tokens run_cost step_cost train_tokens_per_s training_flops

course.throughput measure_accelerator

audit leak_check split_invariance_check step_zero_ratio_check

course.audit Plant full_head planted_faults

report AuditError CheckResult Finding as_check
"""
_HOME = {n: module for module, *names in map(str.split, _MODULES.split("\n\n")) for n in names}


if not TYPE_CHECKING:  # a type checker shall see the names above and no others

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
        value = getattr(import_module(f"agentrl.{_HOME[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
