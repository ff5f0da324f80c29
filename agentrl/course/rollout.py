# Generated from chapters/03-rollout.ipynb by tools/export.py. Do not edit: edit the notebook.
"""For the chapter alone: Rollouts."""

from collections.abc import Sequence

from agentrl.gym import ACTIONS
from agentrl.rollout import Trajectory, check_trajectories

__all__ = ["behavior_stats"]


def behavior_stats(trajs: Sequence[Trajectory]) -> dict[str, float]:
    """Average reward, tokens, the policy's share, actions, errors and cut-offs over episodes.

    The last three are read from `info`, as `BugFixEnv` keeps it.

    Raises:
        ValueError, TypeError: naming the first trajectory that is malformed or lacks a count.
    """
    check_trajectories(trajs)
    keys = (*ACTIONS, "errors", "truncated")
    for i, traj in enumerate(trajs):
        for key in keys:
            if key not in traj.info:
                raise ValueError(f"trajs[{i}].info = {traj.info} has no {key!r}")
    tokens = sum(len(traj.ids) for traj in trajs)
    stats = {
        "reward": sum(traj.reward for traj in trajs) / len(trajs),
        "tokens": tokens / len(trajs),
        "policy_share": sum(int(traj.action_mask.sum()) for traj in trajs) / tokens,
    }
    for key in keys:
        stats[key.lower()] = sum(float(traj.info[key]) for traj in trajs) / len(trajs)
    return stats
