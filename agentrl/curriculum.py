# Generated from chapters/09-curriculum.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Curriculum by pass rate.

Which rollouts never produce a gradient, and can we avoid paying for them?
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from agentrl import check
from agentrl.grpo import RLConfig, draw_tasks, train_rl, zero_advantage_groups
from agentrl.gym import Task, Tokenizer, make_env
from agentrl.report import Finding, as_check
from agentrl.rollout import Trajectory, sample_groups

__all__ = [
    "draw_weighted",
    "estimate_pass_rate",
    "expected_groups_per_kept",
    "fill_groups",
    "filter_by_pass_rate",
    "group_filter_check",
    "train_curriculum",
]

_T = TypeVar("_T")


def expected_groups_per_kept(p: float, n: int) -> float:
    """Return how many groups of n are sampled, on average, per group with unequal rewards.

    At pass rate p that is 1 / (1 - p^n - (1-p)^n), a geometric mean waiting time; infinite if no
    group can have both outcomes.
    """
    p, n = check.number("p", p, 0, 1), check.integer("n", n)
    q = min(p, 1 - p)
    if n == 1 or q == 0:
        return math.inf
    # 1 - (1-q)^n without cancellation; q^n is at most a third of it for n >= 2.
    return 1 / (-math.expm1(n * math.log1p(-q)) - q**n)


def _inside(name: str, rate: Any, low: float, high: float) -> bool:
    """Decide for one task; `rate` is a number in [0, 1], or the rewards of episodes."""
    rate = rate.tolist() if hasattr(rate, "tolist") else rate
    if isinstance(rate, int | float):
        return low < check.number(name, rate, 0, 1) < high
    rewards = check.numbers(name, rate).tolist()
    if low < 0 and high > 1:
        return True
    if min(rewards) == max(rewards) and rewards[0] not in (0.0, 1.0):
        return False  # no variance, whatever the mean
    check.numbers(name, rewards, 0, 1)
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
    """
    if not low < high:
        raise ValueError(f"low = {low} must be below high = {high}")
    if isinstance(pass_rates, Mapping):
        missing = [task.name for task in tasks if task.name not in pass_rates]
        if missing:
            raise ValueError(f"pass_rates has no entry for {missing[0]!r}")
        pass_rates = [pass_rates[task.name] for task in tasks]
    if len(pass_rates) != len(tasks):
        raise ValueError(f"{len(pass_rates)} pass_rates for {len(tasks)} tasks")
    inside = (_inside(f"pass_rates[{i}]", rate, low, high) for i, rate in enumerate(pass_rates))
    return [task for task, keep in zip(tasks, inside, strict=True) if keep]


_ESTIMATES = ("last", "mean3", "beta")
_MEMORY = 16  # groups remembered per task; in `beta`, the first of them counts 2**-15


def estimate_pass_rate(groups: Sequence[Sequence[float]], how: str = "last") -> float:
    """Estimate a task's pass rate from its groups, oldest first; 0.5 without any.

    Args:
        groups: of rewards in [0, 1].
        how: `last` is the mean of the last group; `mean3` that of the last three means, missing
            ones counted as 0.5; `beta` that of a Beta posterior with a uniform prior, where each
            group counts half of the next one.
    """
    check.one_of("how", how, _ESTIMATES)
    seen = [
        check.numbers(f"groups[{i}]", rewards, 0, 1).tolist() for i, rewards in enumerate(groups)
    ]
    if how == "beta":
        passed = failed = 0.0
        for rewards in seen:
            passed = passed / 2 + sum(rewards)
            failed = failed / 2 + len(rewards) - sum(rewards)
        return (1 + passed) / (2 + passed + failed)
    window = 3 if how == "mean3" else 1
    means = [0.5] * window + [sum(rewards) / len(rewards) for rewards in seen]
    return sum(means[-window:]) / window


def draw_weighted(weights: Sequence[float], count: int, generator: torch.Generator) -> list[int]:
    """Draw different indices in proportion to weights, one by one (Efraimidis & Spirakis 2006).

    There are `count` of them, or as many as have a positive weight.
    """
    weights, count = check.numbers("weights", weights, least=0), check.integer("count", count, 0)
    uniform = torch.rand(len(weights), generator=generator, dtype=torch.float64)
    keys = uniform.log() / weights.cpu()  # -inf at weight 0
    order = keys.argsort(descending=True, stable=True)
    return order[weights.cpu()[order] > 0][:count].tolist()


def fill_groups(
    sample: Callable[[int], Sequence[Sequence[Trajectory]]], want: int, max_groups: int
) -> tuple[list[Sequence[Trajectory]], list[Sequence[Trajectory]], str]:
    """Sample until `want` groups have unequal rewards, or `max_groups` are sampled.

    Args:
        sample: returns that many new groups; their rewards are finite.

    Returns:
        The kept groups, all sampled groups, and the reason for stopping short; '' if it did not.
    """
    check.integer("want", want)
    check.integer("max_groups", max_groups)
    kept: list[Sequence[Trajectory]] = []
    sampled: list[Sequence[Trajectory]] = []
    while len(kept) < want and len(sampled) < max_groups:
        count = min(want - len(kept), max_groups - len(sampled))
        groups = sample(count)
        if len(groups) != count:
            raise ValueError(f"sample({count}) returned {len(groups)} groups")
        for group in groups:
            rewards = check.numbers(f"groups[{len(sampled)}]", [traj.reward for traj in group])
            sampled.append(group)
            if rewards.min() < rewards.max():
                kept.append(group)
    short = f"budget of {max_groups} groups spent, {len(kept)} of {want} kept"
    return kept, sampled, "" if len(kept) == want else short


def _choose(
    rates: Sequence[float], count: int, rule: dict[str, Any], generator: torch.Generator
) -> tuple[list[int], list[int]]:
    """Pick the tasks of a step by index: those of the pool, and those revisited."""
    if rule["sampling"] == "proportional":
        return draw_weighted([rate * (1 - rate) for rate in rates], count, generator), []
    indices = list(range(len(rates)))
    pool = filter_by_pass_rate(indices, rates, rule["low"], rule["high"])
    outside = sorted(set(indices) - set(pool))
    # No draw is made for nothing: with every task in the pool, the generator runs as in `train_rl`.
    chosen = draw_tasks(pool, count, generator) if pool else []
    again = rule["revisit"] if outside else 0
    return chosen, draw_tasks(outside, again, generator) if again else []


class _ByPassRate:
    """A sampler for `train_rl` that chooses tasks by pass rate; its state is their last groups."""

    def __init__(self, tasks: int, rule: dict[str, Any]) -> None:
        self.rule, self.state = rule, {"groups": [[] for _ in range(tasks)]}
        self.record: dict[str, Any] = {}

    def __call__(
        self,
        model: nn.Module,
        tasks: Sequence[Task],
        tok: Tokenizer,
        cfg: RLConfig,
        generator: torch.Generator,
    ) -> list[Trajectory]:
        rule, groups, size, self.record = self.rule, self.state["groups"], cfg.group_size, {}

        def sample(chosen: Sequence[int]) -> list[list[Trajectory]]:
            drawn = [tasks[index] for index in chosen]
            trajs = sample_groups(model, make_env(cfg), drawn, tok, cfg, generator)
            found = [trajs[i : i + size] for i in range(0, len(trajs), size)]
            for index, group in zip(chosen, found, strict=True):
                groups[index] = [*groups[index], [traj.reward for traj in group]][-_MEMORY:]
            return found

        if rule["sampling"] == "dynamic":
            everyone, want = range(len(tasks)), min(cfg.prompts_per_step, len(tasks))

            def more(count: int) -> list[list[Trajectory]]:
                return sample(draw_tasks(everyone, count, generator))

            kept, sampled, reason = fill_groups(more, want, rule["max_groups"])
            found, paid = kept or sampled, [traj for group in sampled for traj in group]
            rewards = [traj.reward for traj in paid]
            zero = zero_advantage_groups(rewards, size).double().mean().item()
            self.record |= {"episodes": len(paid), "reward": sum(rewards) / len(paid)}
            self.record |= {"tokens": sum(len(traj.ids) for traj in paid), "zero_advantage": zero}
        else:
            rates = [estimate_pass_rate(seen, rule["estimate"]) for seen in groups]
            chosen, revisited = _choose(rates, cfg.prompts_per_step, rule, generator)
            found = sample(chosen + revisited) if chosen + revisited else []
            why = {"filter": f"the pool is empty: {len(revisited)} revisited"}
            reason = "" if chosen else why.get(rule["sampling"], "every weight is 0")
            if revisited:
                rewards = [traj.reward for group in found[len(chosen) :] for traj in group]
                zero = int(zero_advantage_groups(rewards, size).sum())
                self.record |= {"revisits": len(revisited), "zero_advantage_revisits": zero}
        if reason:
            self.record["reason"] = reason
        return [traj for group in found for traj in group]


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
        estimate: from a task's last groups, as in `estimate_pass_rate`; starts at 0.5.
        sampling: `filter` as above; `proportional` to p(1-p), without a pool; `dynamic` samples all
            tasks until `cfg.prompts_per_step` groups, or as many as there are tasks, have unequal
            rewards.
        max_groups: the most that `dynamic` samples per step; by default 3 `cfg.prompts_per_step`.
        checkpoint, checkpoint_every, on_step: as in `train_rl`; the file also holds the groups.

    Returns:
        Per step the record of `train_rl`, over all sampled episodes; where tasks were revisited,
        `revisits` and `zero_advantage_revisits`, how many of their groups had no gradient; and a
        `reason` where the pool was empty or the budget of `dynamic` did not suffice.
    """
    check.one_of("sampling", sampling, ("filter", "proportional", "dynamic"))
    check.one_of("estimate", estimate, _ESTIMATES)
    budget = 3 * cfg.prompts_per_step if max_groups is None else max_groups
    rule = {"low": float(low), "high": float(high), "estimate": estimate, "sampling": sampling}
    rule["revisit"] = check.integer("revisit", revisit, 0)
    rule["max_groups"] = check.integer("max_groups", budget)
    start = filter_by_pass_rate([0], [estimate_pass_rate([], estimate)], low, high)
    if sampling == "filter" and not start and not revisit:
        raise ValueError(f"low = {low}, high = {high} leave out the start 0.5, and revisit is 0")
    run = {"checkpoint": checkpoint, "checkpoint_every": checkpoint_every, "on_step": on_step}
    return train_rl(model, tasks, tok, cfg, steps, sampler=_ByPassRate(len(tasks), rule), **run)


def _filter_cases(low: float, high: float, truncation: bool) -> list[Any]:
    """Return groups of rewards, which episodes were cut, and whether the group is to be kept."""
    equal = [[k / 10] * n for k in range(11) for n in (2, 3, 4, 5, 7, 8, 16)]
    mixed = [[0.0] * n + [1.0] * m for n, m in ((1, 1), (1, 7), (7, 1), (4, 4), (15, 1))]
    mixed += [[0.25, 0.5], [0.5] * 7 + [0.75], [0.0, 0.25, 0.5, 1.0]]
    cases = [(group, [False] * len(group)) for group in (*equal, *mixed)]
    if truncation:  # of what ran out of length nothing is known
        cases += [([1.0] * n + [0.0], [False] * n + [True]) for n in (3, 7)]
        cases += [([1.0, 1.0, 0.0, 0.0], [False] * 3 + [True])]
    judged = []
    for group, cut in cases:
        ended = [r for r, c in zip(group, cut, strict=True) if not c]
        mean = sum(ended) / len(ended)
        if len({*ended}) == 1 or min(abs(mean - low), abs(mean - high)) > 0.01:  # else a convention
            judged.append((group, cut, len({*ended}) > 1 and low < mean < high))
    return judged


def _why_filter(rewards: list[float], cut: list[bool], keep: bool, wrong: int) -> str:
    if keep:
        return "a group with unequal rewards is dropped"
    if any(cut):
        return "an episode that ran out of length is scored as a failure"
    if len({*rewards}) > 1:
        return "a group outside the bounds is kept"
    if wrong > 31:  # more than half of the groups of equal rewards between 0 and 1
        return "groups of equal rewards are kept: the mean is compared and the variance is not"
    return "a standard deviation of rounding size is compared with 0"


@as_check
def group_filter_check(
    filter_fn: Callable[..., Sequence[Any]],
    *,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype | None = None,
    truncation: bool = False,
    fill_fn: Callable[[Callable[[int], list[list[float]]]], Any] | None = None,
    strict: bool = False,
) -> Iterator[Finding]:
    """Check that a filter keeps exactly the groups that give a gradient.

    Args:
        filter_fn: gets groups, lists of rewards, and says for each whether it is kept, in order.
        low, high: the filter's own bounds on a group's mean reward.
        dtype: give each group as a tensor of this type.
        truncation: call `filter_fn(groups, cut)`, where `cut` marks episodes that ran out of length
            with reward 0; such an episode is no failure, and must not make a group worth keeping.
        fill_fn: dynamic sampling: gets `sample(count)`, which returns that many groups, all solved;
            has to come to an end, without an exception, and say why.
        strict: raise `AuditError` if the check fails.
    """
    cases = _filter_cases(low, high, truncation)
    groups = [g if dtype is None else torch.tensor(g, dtype=dtype) for g, _, _ in cases]
    passed = Finding(0, "groups", f"any of {len(cases)} groups", 0, "equal rewards are equal")
    broken = passed.but(worst=math.nan, index="the output")
    try:
        given = (groups, [cut for _, cut, _ in cases]) if truncation else (groups,)
        kept = [bool(k) for k in filter_fn(*given)]
    except Exception as problem:
        yield broken.but(likely=f"filter_fn raised {type(problem).__name__}: {problem}")
    if len(kept) != len(cases):
        likely = f"filter_fn returned {len(kept)} verdicts for {len(cases)} groups"
        yield broken.but(likely=likely)
    wrong = [i for i, (k, (_, _, keep)) in enumerate(zip(kept, cases, strict=True)) if k != keep]
    for i in wrong[:1]:
        short = ", ".join(f"{r:g}" for r in cases[i][0][:4]) + ", ..." * (len(cases[i][0]) > 4)
        index, likely = f"group {i}, rewards [{short}]", _why_filter(*cases[i], len(wrong))
        yield passed.but(worst=len(wrong), index=index, likely=likely)
    yield passed if fill_fn is None else _solved(fill_fn)


class _Endless(BaseException):
    """Stops a sampler that would go on for ever; no `except Exception` holds it."""


def _solved(fill_fn: Callable[..., Any]) -> Finding:
    """Run dynamic sampling where every task is solved."""
    asked, out, likely = 0, None, "it stops without a reason"

    def sample(count: int) -> list[list[float]]:
        nonlocal asked
        asked += max(count, 1)
        if asked > 10_000:
            raise _Endless
        return [[1.0] * 8 for _ in range(count)]

    try:
        out = fill_fn(sample)
    except _Endless:
        likely = f"sampling has no bound: {asked} groups and no end"
    except Exception as problem:
        likely = f"an exception instead of a stop: {type(problem).__name__}: {problem}"
    reason = any(isinstance(x, str) and x for x in tree_leaves(out))
    why = "there is nothing to find, so the search ends and says so"
    index = f"every task solved, after {asked} groups"
    return Finding(0 if reason else max(asked, 1), "groups", index, 0, why, likely)
