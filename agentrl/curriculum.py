# Generated from chapters/09-curriculum.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Curriculum by pass rate.

Which rollouts never produce a gradient, and can we avoid paying for them?
"""

import concurrent.futures
import dataclasses
import importlib
import math
import multiprocessing
import numbers
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from agentrl.grpo import (
    RLConfig,
    _adam,
    _plain_numbers,
    _resume,
    _save,
    draw_tasks,
    make_rl_base,
    rl_update,
    zero_advantage_groups,
)
from agentrl.gym import Task, Tokenizer, build_tokenizer, make_env, make_tasks
from agentrl.notebook import progress
from agentrl.rollout import Trajectory, evaluate, sample_groups

__all__ = [
    "ESTIMATES",
    "SAMPLINGS",
    "Group",
    "draw_weighted",
    "estimate_pass_rate",
    "expected_groups_per_kept",
    "fill_groups",
    "filter_by_pass_rate",
    "run_arm",
    "run_arms",
    "train_curriculum",
]

_T = TypeVar("_T")


def expected_groups_per_kept(p: float, n: int) -> float:
    """Return how many groups are sampled, on average, per group with unequal rewards.

    Args:
        p: pass rate of the task.
        n: episodes per group.

    Returns:
        1 / (1 - p^n - (1-p)^n), a geometric mean waiting time; infinite if no group can have both
        outcomes.

    Raises:
        ValueError: if p is not in [0, 1] or n is below 1.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p = {p} is not in [0, 1]")
    if n < 1:
        raise ValueError(f"n = {n} must be at least 1")
    q = min(p, 1 - p)
    if n == 1 or q == 0:
        return math.inf
    # 1 - (1-q)^n without cancellation; q^n is at most a third of it for n >= 2.
    return 1 / (-math.expm1(n * math.log1p(-q)) - q**n)


def _check_rewards(name: str, rewards: Sequence[float]) -> None:
    for index, reward in enumerate(rewards):
        if not 0 <= reward <= 1:
            raise ValueError(f"{name}[{index}] = {reward} is not in [0, 1]")


def _inside(rate: Any, low: float, high: float) -> bool:
    """Decide for one task; `rate` is a number in [0, 1], or the rewards of episodes."""
    if isinstance(rate, numbers.Real):
        if not 0 <= rate <= 1:
            raise ValueError(f"{rate} is not in [0, 1]")
        return bool(low < rate < high)
    rewards = [float(reward) for reward in rate]
    if not rewards or not all(map(math.isfinite, rewards)):
        raise ValueError(f"{rewards} is not a group of finite rewards")
    if low < 0 and high > 1:
        return True
    if min(rewards) == max(rewards) and rewards[0] not in (0.0, 1.0):
        return False  # no variance, whatever the mean
    _check_rewards("rewards", rewards)
    return low < sum(map(Fraction, rewards)) / len(rewards) < high  # exact, no rounding


def filter_by_pass_rate(
    tasks: Sequence[_T],
    pass_rates: Sequence[Any] | Mapping[str, Any] | Tensor,
    low: float = 0.0,
    high: float = 1.0,
) -> list[_T]:
    """Return the tasks whose pass rate lies strictly between `low` and `high`, in order.

    Args:
        tasks: anything; with a mapping, they have a `name`.
        pass_rates: per task a number in [0, 1], or the rewards of its episodes; in the order of the
            tasks, or by name. Rewards are judged exactly: by integer successes if they are 0 and 1;
            else equal ones are dropped whatever their value, and others, all in [0, 1], judged by
            their mean.
        low, high: the bounds; below 0 and above 1 they keep every task.

    Raises:
        ValueError: naming a rate that is missing or none, or a reward outside [0, 1] in a group
            that is judged by its mean; if there are more or fewer rates than tasks, or low >= high.
    """
    if not low < high:
        raise ValueError(f"low = {low} must be below high = {high}")
    if isinstance(pass_rates, Mapping):
        missing = [task.name for task in tasks if task.name not in pass_rates]
        if missing:
            raise ValueError(f"pass_rates has no entry for {missing[0]!r}")
        pass_rates = [pass_rates[task.name] for task in tasks]
    if len(pass_rates) != len(tasks):
        raise ValueError(f"{len(pass_rates)} pass rates for {len(tasks)} tasks")
    kept = []
    for index, (task, rate) in enumerate(zip(tasks, pass_rates, strict=True)):
        try:
            if _inside(rate.tolist() if hasattr(rate, "tolist") else rate, low, high):
                kept.append(task)
        except (TypeError, ValueError) as error:
            raise ValueError(f"pass_rates[{index}]: {error}") from None
    return kept


ESTIMATES = ("last", "mean3", "beta")
SAMPLINGS = ("filter", "proportional", "dynamic")
_MEMORY = 16  # groups remembered per task; in `beta`, the first of them counts 2**-15


def estimate_pass_rate(groups: Sequence[Sequence[float]], how: str = "last") -> float:
    """Estimate a task's pass rate from its groups.

    Args:
        groups: rewards in [0, 1], oldest group first; there may be no group.
        how: one of `ESTIMATES`; 0.5 without groups in each.

    Raises:
        ValueError: for another `how`, or naming a group without rewards or a reward outside [0, 1].
    """
    if how not in ESTIMATES:
        raise ValueError(f"estimate must be one of {ESTIMATES}, got {how!r}")
    for index, rewards in enumerate(groups):
        if not len(rewards):
            raise ValueError(f"groups[{index}] = {rewards} has no rewards")
        _check_rewards(f"groups[{index}]", rewards)
    if how == "beta":
        passed = failed = 0.0
        for rewards in groups:
            passed = passed / 2 + sum(rewards)
            failed = failed / 2 + len(rewards) - sum(rewards)
        return (1 + passed) / (2 + passed + failed)
    window = 3 if how == "mean3" else 1
    means = [0.5] * window + [sum(rewards) / len(rewards) for rewards in groups]
    return sum(means[-window:]) / window


@dataclass(frozen=True)
class _Rule:
    """How a curriculum picks its tasks; the arguments of `train_curriculum`, checked."""

    low: float
    high: float
    revisit: int
    estimate: str
    sampling: str
    max_groups: int

    def __post_init__(self) -> None:
        _plain_numbers(self)
        if self.sampling not in SAMPLINGS:
            raise ValueError(f"sampling must be one of {SAMPLINGS}, got {self.sampling!r}")
        if self.revisit < 0:
            raise ValueError(f"revisit = {self.revisit} must not be negative")
        if self.max_groups < 1:
            raise ValueError(f"max_groups = {self.max_groups} must be at least 1")
        start = filter_by_pass_rate(
            [0], [estimate_pass_rate([], self.estimate)], self.low, self.high
        )
        if self.sampling == "filter" and not start and not self.revisit:
            raise ValueError(
                f"({self.low}, {self.high}) leaves out the start 0.5, and revisit is 0"
            )


def draw_weighted(weights: Sequence[float], count: int, generator: torch.Generator) -> list[int]:
    """Draw different indices in proportion to weights, one by one (Efraimidis & Spirakis 2006).

    Returns:
        `count` indices, or as many as have a positive weight.

    Raises:
        ValueError: for a negative `count`, or naming a weight that is negative or not finite.
    """
    if count < 0:
        raise ValueError(f"count = {count} must not be negative")
    for index, weight in enumerate(weights):
        if not 0 <= weight < math.inf:
            raise ValueError(f"weights[{index}] = {weight} is negative or not finite")
    uniform = torch.rand(len(weights), generator=generator, dtype=torch.float64)
    keys = uniform.log() / torch.tensor(weights, dtype=torch.float64)  # -inf at weight 0
    order = keys.argsort(descending=True, stable=True).tolist()
    return [index for index in order if weights[index] > 0][:count]


def _choose(
    rates: Sequence[float], count: int, rule: _Rule, generator: torch.Generator
) -> tuple[list[int], int, str]:
    """Pick the tasks of a step by index, revisits last; how many those are; a reason if any."""
    if rule.sampling == "proportional":
        chosen = draw_weighted([rate * (1 - rate) for rate in rates], count, generator)
        return chosen, 0, "" if chosen else "every weight is 0"
    indices = list(range(len(rates)))
    pool = filter_by_pass_rate(indices, rates, rule.low, rule.high)
    outside = sorted(set(indices) - set(pool))
    # No draw is made for nothing: with every task in the pool, the generator runs as in `train_rl`.
    chosen = draw_tasks(pool, count, generator) if pool else []
    revisits = draw_tasks(outside, rule.revisit, generator) if rule.revisit and outside else []
    reason = "" if pool else f"the pool is empty: {len(revisits)} revisited"
    return chosen + revisits, len(revisits), reason


Group = Sequence[Trajectory]


def fill_groups(
    sample: Callable[[int], Sequence[Group]], want: int, max_groups: int
) -> tuple[list[Group], list[Group], str]:
    """Sample until enough groups have unequal rewards, or the budget is spent (dynamic sampling).

    Args:
        sample: returns that many new groups.
        want: groups with unequal rewards to collect.
        max_groups: the budget: groups to sample at most.

    Returns:
        The kept groups, all sampled groups, and the reason for stopping short; '' if it did not.

    Raises:
        ValueError: if `sample` returns another number of groups than asked for.
    """
    kept: list[Group] = []
    sampled: list[Group] = []
    while len(kept) < want and len(sampled) < max_groups:
        count = min(want - len(kept), max_groups - len(sampled))
        groups = sample(count)
        if len(groups) != count:
            raise ValueError(f"sample({count}) returned {len(groups)} groups")
        sampled += groups
        kept += [group for group in groups if len({float(t.reward) for t in group}) > 1]
    short = f"budget of {max_groups} groups spent, {len(kept)} of {want} kept"
    return kept, sampled, "" if len(kept) == want else short


def _sample(
    model: nn.Module,
    tasks: Sequence[Task],
    tok: Tokenizer,
    cfg: RLConfig,
    groups: list[list[list[float]]],
    rule: _Rule,
    generator: torch.Generator,
) -> tuple[list[Trajectory], list[Trajectory], int, str]:
    """Sample a step and note its rewards in `groups`: (kept, sampled, revisits, reason)."""

    def sample(chosen: Sequence[int]) -> list[list[Trajectory]]:
        drawn = [tasks[index] for index in chosen]
        trajs = sample_groups(model, make_env(cfg), drawn, tok, cfg, generator)
        found = [trajs[i : i + cfg.group_size] for i in range(0, len(trajs), cfg.group_size)]
        for index, group in zip(chosen, found, strict=True):
            groups[index] = [*groups[index], [traj.reward for traj in group]][-_MEMORY:]
        return found

    if rule.sampling == "dynamic":
        indices = list(range(len(tasks)))
        want = min(cfg.prompts_per_step, len(tasks))
        kept, sampled, reason = fill_groups(
            lambda count: sample(draw_tasks(indices, count, generator)), want, rule.max_groups
        )
        return [t for g in kept for t in g], [t for g in sampled for t in g], 0, reason
    rates = [estimate_pass_rate(seen, rule.estimate) for seen in groups]
    chosen, revisits, reason = _choose(rates, cfg.prompts_per_step, rule, generator)
    trajs = [traj for group in sample(chosen) for traj in group] if chosen else []
    return trajs, trajs, revisits, reason


def train_curriculum(
    model: nn.Module,
    tasks: Sequence[Task],
    tok: Tokenizer,
    cfg: RLConfig,
    steps: int,
    low: float = 0.0,
    high: float = 1.0,
    revisit: int = 1,
    *,
    estimate: str = "last",
    sampling: str = "filter",
    max_groups: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 5,
    on_step: Callable[[nn.Module, list[dict[str, Any]]], bool | None] | None = None,
) -> list[dict[str, Any]]:
    """Train as `train_rl` does, on tasks that are chosen by their estimated pass rate.

    Args:
        low, high: a task is in the pool if its estimate is strictly between; -1 and 2 keep every
            task, and the run is that of `train_rl`, bit for bit.
        revisit: tasks from outside the pool per step, beside `cfg.prompts_per_step` from inside.
        estimate: from a task's last groups, one of `ESTIMATES`; starts at 0.5.
        sampling: `filter` as above; `proportional` to p(1-p), without a pool; `dynamic` samples all
            tasks until `cfg.prompts_per_step` groups, or as many as there are tasks, have unequal
            rewards.
        max_groups: the most that `dynamic` samples per step; by default 3 `cfg.prompts_per_step`.
        checkpoint, checkpoint_every: as in `train_rl`; the file also holds the estimates.
        on_step: called after each step with the model and the history; a true value ends the run,
            which its checkpoint remembers.

    Returns:
        Per step the record of `train_rl`, over all sampled episodes; where tasks were revisited,
        `revisits` and how many of their groups were silent, `silent_revisits`; and a `reason` where
        the pool was empty, the budget of `dynamic` did not suffice, or the run ended early.

    Raises:
        ValueError: for an argument out of range, or a checkpoint of another run.
    """
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every = {checkpoint_every} must be at least 1")
    if not tasks:
        raise ValueError("tasks is empty: there is nothing to sample")
    max_groups = 3 * cfg.prompts_per_step if max_groups is None else max_groups
    rule = _Rule(low, high, revisit, estimate, sampling, max_groups)
    generator = torch.Generator().manual_seed(cfg.seed)
    parts = model, _adam(model, cfg), generator
    run = {"cfg": dataclasses.asdict(cfg), "tasks": [task.name for task in tasks]}
    run |= {"rule": dataclasses.asdict(rule)}
    path = None if checkpoint is None else Path(checkpoint)
    state = _resume(path, run, steps, parts)
    history, groups = state.get("history", []), state.get("groups", [[] for _ in tasks])
    if state.get("ended"):
        return history
    for step in progress(range(len(history), steps), desc="train_curriculum"):
        kept, trajs, revisits, reason = _sample(model, tasks, tok, cfg, groups, rule, generator)
        if not trajs:  # no group, no new estimate: it would stay so for ever
            history[-1]["reason"] = f"stopped after {step} of {steps} steps: {reason}"
            if path is not None:
                _save(path, parts, history=history, groups=groups, **run)
            break
        stats = rl_update(model, parts[1], kept or trajs, cfg)
        rewards = torch.tensor([traj.reward for traj in trajs], dtype=torch.float64)
        silent = zero_advantage_groups(rewards, cfg.group_size)
        stats["zero_advantage"] = silent.double().mean().item()
        if revisits:
            stats |= {"revisits": revisits, "silent_revisits": int(silent[-revisits:].sum())}
        reward = sum(traj.reward for traj in trajs) / len(trajs)
        tokens = sum(len(traj.ids) for traj in trajs)
        history.append({"episodes": len(trajs), "tokens": tokens, "reward": reward, **stats})
        if reason:
            history[-1]["reason"] = reason
        ended = bool(on_step and on_step(model, history))
        if ended and not reason and step + 1 < steps:
            history[-1]["reason"] = f"on_step ended the run after {step + 1} of {steps} steps"
        if path is not None and ((step + 1) % checkpoint_every == 0 or ended or step + 1 == steps):
            _save(path, parts, history=history, groups=groups, ended=ended, **run)
        if ended:
            break
    return history


def run_arm(job: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Train from the base policy on the training tasks, and score on the held-out ones.

    Args:
        job: `cfg`, the fields of an `RLConfig` as a dictionary; `steps`, the most there can be; and
            optionally `budget`, episodes after which the run ends; `score_every`, episodes between
            scores on the way; `device`; and arguments of `train_curriculum`, but no checkpoint.

    Returns:
        `history`, as of `train_curriculum`, and `scores`: `episodes` spent, the `pass_rate` from
        32 episodes of each task, and its `stderr`; the last one at the end of the run.

    Raises:
        ValueError: for a `checkpoint`, or what `RLConfig` and `train_curriculum` refuse.
    """
    if "checkpoint" in job:
        raise ValueError("checkpoint: a resumed run would lack the scores of its first part")
    ours = ("cfg", "steps", "budget", "score_every", "device")
    options = {key: value for key, value in job.items() if key not in ours}
    tok = build_tokenizer(make_tasks())
    model = make_rl_base(tok).to(job.get("device", "cpu"))
    every = job.get("score_every", math.inf)
    scores: list[dict[str, float]] = []

    def score(spent: int) -> None:
        result = evaluate(model, make_tasks("heldout"), tok, episodes=32)
        scores.append({"episodes": spent, **{k: result[k] for k in ("pass_rate", "stderr")}})

    def on_step(_: nn.Module, history: list[dict[str, Any]]) -> bool:
        spent = sum(step["episodes"] for step in history)
        end = spent >= job.get("budget", math.inf)
        before = spent - history[-1]["episodes"]
        if end or len(history) == job["steps"] or spent // every > before // every:
            score(spent)
        return end

    cfg = RLConfig(**job["cfg"])
    train = make_tasks("train")
    history = train_curriculum(model, train, tok, cfg, job["steps"], **options, on_step=on_step)
    spent = sum(step["episodes"] for step in history)
    if spent and (not scores or scores[-1]["episodes"] < spent):  # the pool ran empty
        score(spent)
    return {"history": history, "scores": scores}


def _one_thread() -> None:
    """Prepare a worker process."""
    os.environ["AGENTRL_PROGRESS"] = "0"  # the bar is the parent's
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    # Without this a worker outlives a parent that is killed.
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def run_arms(
    jobs: Sequence[Mapping[str, Any]], workers: int | None = None
) -> list[dict[str, list[dict[str, Any]]]]:
    """Do `run_arm` for each job in processes of their own; results in the order of the jobs.

    Args:
        workers: processes; by default one per CPU core, at most 8. Results do not depend on it.

    Raises:
        ValueError: if workers < 1, or for a job that `run_arm` refuses.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers = {workers} must be at least 1")
    workers = max(1, min(len(jobs), workers or min(os.cpu_count() or 1, 8)))
    spawn = multiprocessing.get_context("spawn")  # a forked child may not use CUDA
    # By its name in the package: a new process cannot import what a notebook has defined.
    ours = importlib.import_module("agentrl.curriculum")
    with concurrent.futures.ProcessPoolExecutor(workers, spawn, ours._one_thread) as pool:
        return list(progress(pool.map(ours.run_arm, jobs), desc="runs", total=len(jobs)))
