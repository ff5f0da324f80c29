# Generated from chapters/*.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Scaling and efficiency for agentic reinforcement learning: the saved helpers.

A name is imported from its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.grpo import (
        ADVANTAGES,
        LOSS_AGG_MODES,
        Demonstrator,
        RLConfig,
        aggregate_loss,
        behavior_clone,
        clipped_surrogate_loss,
        compute_advantages,
        demonstrate,
        draw_tasks,
        entropy,
        kl_estimate,
        make_rl_base,
        reinforce_loss,
        rl_update,
        sample_step,
        snap_weights,
        train_rl,
        zero_advantage_groups,
    )
    from agentrl.gym import (
        ACTIONS,
        BUILTINS,
        MAX_BITS,
        MAX_ITEMS,
        MAX_SOURCE,
        MAX_STEPS,
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
    from agentrl.policy import (
        Block,
        KVCache,
        TinyAgent,
        chunked_log_probs,
        selected_log_probs,
        sequence_log_probs,
    )
    from agentrl.rollout import (
        RolloutConfig,
        Trajectory,
        behavior_stats,
        check_trajectories,
        collate,
        evaluate,
        pad_rows,
        sample_groups,
    )


__all__ = [
    "ACTIONS",
    "ADVANTAGES",
    "BUILTINS",
    "LOSS_AGG_MODES",
    "MAX_BITS",
    "MAX_ITEMS",
    "MAX_SOURCE",
    "MAX_STEPS",
    "Block",
    "BugFixEnv",
    "Demonstrator",
    "EnvConfig",
    "KVCache",
    "RLConfig",
    "Rejected",
    "RolloutConfig",
    "Task",
    "TinyAgent",
    "Tokenizer",
    "Trajectory",
    "aggregate_loss",
    "behavior_clone",
    "behavior_stats",
    "build_tokenizer",
    "check_trajectories",
    "chunked_log_probs",
    "clipped_surrogate_loss",
    "collate",
    "compute_advantages",
    "demonstrate",
    "draw_tasks",
    "entropy",
    "evaluate",
    "kl_estimate",
    "make_env",
    "make_rl_base",
    "make_tasks",
    "pad_rows",
    "reinforce_loss",
    "rl_update",
    "run_tests",
    "sample_groups",
    "sample_step",
    "selected_log_probs",
    "sequence_log_probs",
    "snap_weights",
    "source_of",
    "train_rl",
    "zero_advantage_groups",
]

_HOME = {
    "ACTIONS": "gym",
    "BUILTINS": "gym",
    "BugFixEnv": "gym",
    "EnvConfig": "gym",
    "MAX_BITS": "gym",
    "MAX_ITEMS": "gym",
    "MAX_SOURCE": "gym",
    "MAX_STEPS": "gym",
    "Rejected": "gym",
    "Task": "gym",
    "Tokenizer": "gym",
    "build_tokenizer": "gym",
    "make_env": "gym",
    "make_tasks": "gym",
    "run_tests": "gym",
    "source_of": "gym",
    "Block": "policy",
    "KVCache": "policy",
    "TinyAgent": "policy",
    "chunked_log_probs": "policy",
    "selected_log_probs": "policy",
    "sequence_log_probs": "policy",
    "RolloutConfig": "rollout",
    "Trajectory": "rollout",
    "behavior_stats": "rollout",
    "check_trajectories": "rollout",
    "collate": "rollout",
    "evaluate": "rollout",
    "pad_rows": "rollout",
    "sample_groups": "rollout",
    "ADVANTAGES": "grpo",
    "Demonstrator": "grpo",
    "LOSS_AGG_MODES": "grpo",
    "RLConfig": "grpo",
    "aggregate_loss": "grpo",
    "behavior_clone": "grpo",
    "clipped_surrogate_loss": "grpo",
    "compute_advantages": "grpo",
    "demonstrate": "grpo",
    "draw_tasks": "grpo",
    "entropy": "grpo",
    "kl_estimate": "grpo",
    "make_rl_base": "grpo",
    "reinforce_loss": "grpo",
    "rl_update": "grpo",
    "sample_step": "grpo",
    "snap_weights": "grpo",
    "train_rl": "grpo",
    "zero_advantage_groups": "grpo",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("agentrl-book")
    if name not in _HOME:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    value = getattr(import_module(f"agentrl.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
