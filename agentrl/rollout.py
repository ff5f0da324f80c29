# Generated from chapters/03-rollout.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Rollouts.

What does sampling cost, and which tokens are the policy's?
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from agentrl import check
from agentrl.gym import EnvConfig, Task, Tokenizer, make_env

__all__ = [
    "RolloutConfig",
    "Trajectory",
    "check_trajectories",
    "collate",
    "evaluate",
    "pad_rows",
    "sample_groups",
]


@dataclass(eq=False)
class Trajectory:
    """One episode as a trainer sees it; T tokens.

    Attributes:
        ids: token ids, prompt and tool output included, int64 [T].
        action_mask: [T-1]; 1 where the *next* token was sampled by the policy.
        sample_logp: [T-1]; log-probability of the next token when it was sampled, in nats; 0
            where it was not.
        reward: of the whole episode.
        info: anything else; our sampler puts the `task` and the counts of `BugFixEnv.info` there.
    """

    ids: Tensor
    action_mask: Tensor
    sample_logp: Tensor
    reward: float
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutConfig(EnvConfig):
    """How to sample: `group_size` episodes of each task, from the logits over `temperature`."""

    group_size: int = 8
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check.integer("max_tokens", self.max_tokens)
        check.integer("group_size", self.group_size)
        check.number("temperature", self.temperature, above=0)


def _draw(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[list[int], list[float]]:
    """Draw one token per row by inverting the distribution: [K, V], [K] -> tokens, log-probs.

    `uniform` holds multiples of 2**-53 in [0, 1).
    """
    logp = (logits.cpu().double() / temperature).log_softmax(-1)
    cumulative = logp.exp().cumsum(-1)
    for row in cumulative[:, -1].isnan().nonzero()[:, 0].tolist():
        raise ValueError(f"logits[{row}] are no distribution (NaN or infinite): has it diverged?")
    # At most 1 - 2**-53 of the total: in float64 always below it, so some token is drawn.
    target = uniform[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True)
    return token[:, 0].tolist(), logp.gather(-1, token)[:, 0].tolist()


class _Row:
    """One episode in the making."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.ids: list[int] = []
        self.sampled: list[bool] = []
        self.logp: list[float] = []
        self._add(env.reset(), False, 0.0)

    def _add(self, tokens: list[int], sampled: bool, logp: float) -> None:
        self.ids += tokens
        self.sampled += [sampled] * len(tokens)
        self.logp += [logp] * len(tokens)

    def take(self, token: int, logp: float) -> None:
        """Append a drawn token, and what the environment answers to it."""
        self._add([token], True, logp)
        self._add(self.env.step(token)[0], False, 0.0)

    def trajectory(self) -> Trajectory:
        return Trajectory(
            ids=torch.tensor(self.ids),
            action_mask=torch.tensor(self.sampled[1:], dtype=torch.bool),
            sample_logp=torch.tensor(self.logp[1:], dtype=torch.float64),
            reward=self.env.reward,
            info=dict(self.env.info),
        )


def pad_rows(rows: Sequence[Tensor], width: int, value: float) -> Tensor:
    """Stack rows [n] of different lengths, filled up on the right with `value`: [B, width].

    Raises:
        ValueError, TypeError: if there are no rows, or one is no tensor [n] or longer than `width`.
    """
    rows, width = list(rows), check.integer("width", width, 0)
    check.not_empty("rows", rows)
    for index, row in enumerate(rows):
        if check.tensor(f"rows[{index}]", row).ndim != 1 or len(row) > width:
            raise ValueError(
                f"rows[{index}] {list(row.shape)} must be [n] with n <= width = {width}"
            )
    dtype = functools.reduce(torch.promote_types, {row.dtype for row in rows})
    out = rows[0].new_full((len(rows), width), value, dtype=dtype)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out


@torch.inference_mode()
def _next_logits(
    model: nn.Module, rows: Sequence[_Row], cache: Any, device: torch.device
) -> Tensor:
    """Read what the cache has not seen, or without a cache everything; return [K, V].

    The new tokens of all rows go through the model end to end; whole prefixes are padded.
    """
    if cache is None:
        ids = pad_rows(
            [torch.tensor(row.ids) for row in rows], max(len(row.ids) for row in rows), 0
        )
        last = [len(row.ids) - 1 for row in rows]
        return model(ids.to(device))[range(len(rows)), last]
    new = [row.ids[seen:] for row, seen in zip(rows, cache.lengths, strict=True)]
    counts = [len(tokens) for tokens in new]
    ids = torch.tensor([list(itertools.chain(*new))], device=device)
    last = [end - 1 for end in itertools.accumulate(counts)]
    return model(ids, cache=cache, counts=counts)[0, last]


def sample_groups(
    model: nn.Module,
    env_factory: Callable[[Task, Tokenizer], Any],
    tasks: Sequence[Task],
    tok: Tokenizer,
    cfg: Any,
    generator: torch.Generator,
    *,
    use_cache: bool = True,
) -> list[Trajectory]:
    """Sample `cfg.group_size` episodes of each task, group after group.

    Args:
        model: a `TinyAgent`, on any device.
        env_factory: makes an environment from a task and a vocabulary, as `make_env(cfg)` does.
        cfg: has `group_size` and `temperature`, as `RolloutConfig`.
        generator: makes the draws, on the CPU. It gives one number per row and position, so an
            episode depends on neither the device nor `use_cache`, nor on the other rows.
        use_cache: keep keys and values; False runs every prefix again, to compare.

    Raises:
        ValueError: if there are no tasks, or an environment begins with an empty prompt.
    """
    check.not_empty("tasks", tasks)
    group_size = check.integer("group_size", cfg.group_size)
    temperature = check.number("temperature", cfg.temperature, above=0)
    device = next(model.parameters()).device
    rows = [_Row(env_factory(task, tok)) for task in tasks for _ in range(group_size)]
    for r, row in enumerate(rows):
        if not row.ids:
            raise ValueError(f"episode {r}, of tasks[{r // group_size}], has an empty prompt")
    numbers: list[list[float]] = []  # by position and row

    def draw_numbers(positions: int) -> None:
        for _ in range(len(numbers), positions):
            numbers.append(torch.rand(len(rows), generator=generator, dtype=torch.float64).tolist())

    most = 256 if device.type == "cpu" else len(rows)  # what a processor's caches hold
    for start in range(0, len(rows), most):
        alive = list(range(start, min(start + most, len(rows))))
        cache = model.new_cache(len(alive)) if use_cache else None
        while alive:
            batch = [rows[r] for r in alive]
            logits = _next_logits(model, batch, cache, device)
            draw_numbers(1 + max(len(row.ids) for row in batch))
            uniform = [numbers[len(row.ids)][r] for r, row in zip(alive, batch, strict=True)]
            uniform = torch.tensor(uniform, dtype=torch.float64)
            draws = zip(batch, *_draw(logits, uniform, temperature), strict=True)
            for row, token, logp in draws:
                row.take(token, logp)
            kept = [k for k, row in enumerate(batch) if not row.env.done]
            if cache is not None and 0 < len(kept) < len(batch):
                cache.select(kept)
            alive = [alive[k] for k in kept]
    draw_numbers(max(len(row.ids) for row in rows))  # leave the generator where the episodes end
    return [row.trajectory() for row in rows]


def check_trajectories(trajs: Sequence[Trajectory], min_tokens: int = 2) -> None:
    """Refuse trajectories whose fields do not fit together; the error names the first of them.

    `ids` are integers [T] with T >= `min_tokens`, `action_mask` [T-1] holds 0 and 1 in any dtype,
    and `sample_logp` [T-1] holds floats.
    """
    check.not_empty("trajs", trajs)
    for i, traj in enumerate(trajs):
        ids = check.ids(f"trajs[{i}].ids", getattr(traj, "ids", None))
        mask = check.mask(f"trajs[{i}].action_mask", traj.action_mask)
        logp = check.tensor(f"trajs[{i}].sample_logp", traj.sample_logp)
        tokens = ids.numel()
        if ids.ndim != 1 or tokens < min_tokens or not mask.shape == logp.shape == (tokens - 1,):
            shapes = " ".join(str(list(x.shape)) for x in (ids, mask, logp))
            want = f"ids [T], action_mask [T-1], sample_logp [T-1] with T >= {min_tokens}"
            raise ValueError(f"trajs[{i}] must have {want}, got the shapes {shapes}")
        if not logp.is_floating_point():
            raise TypeError(f"trajs[{i}].sample_logp must be floats, got {logp.dtype}")


def collate(trajs: Sequence[Trajectory], pad_id: int) -> dict[str, Tensor]:
    """Pad trajectories to one rectangular batch: B trajectories, T the longest length.

    Returns:
        `ids` [B, T], `action_mask` bool [B, T-1], `lengths` [B], and in float64
        `sample_logp` [B, T-1] and `rewards` [B].

    Raises:
        ValueError, TypeError: naming the index of a trajectory that is malformed, whose `reward`
            is not a finite number, or whose `sample_logp` is not finite at a policy token.
    """
    check_trajectories(trajs)
    lengths = torch.tensor([len(traj.ids) for traj in trajs])
    width = int(lengths.max())
    mask = pad_rows([traj.action_mask.bool() for traj in trajs], width - 1, False)
    logp = pad_rows([traj.sample_logp.detach().double() for traj in trajs], width - 1, 0.0)
    check.finite("sample_logp", logp, where=mask.to(logp.device))
    return {
        "ids": pad_rows([traj.ids for traj in trajs], width, check.integer("pad_id", pad_id, None)),
        "action_mask": mask,
        "sample_logp": logp,
        "lengths": lengths,
        "rewards": check.numbers("rewards", [traj.reward for traj in trajs]),
    }


def evaluate(
    model: nn.Module,
    tasks: Sequence[Task],
    tok: Tokenizer,
    episodes: int,
    generator: torch.Generator | None = None,
    cfg: Any = None,
    env_factory: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Sample `episodes` episodes of each task and report how many pass.

    Args:
        generator: makes the draws; by default a new one with a fixed seed.
        cfg: has `max_tokens` and `temperature`; by default `RolloutConfig()`.
        env_factory: called with a task and `tok`; by default the gym's environment.

    Returns:
        `pass_rate`, the mean over tasks; `stderr`, its standard error over the sampling of
        episodes, the tasks being given; `by_task`, from task name to pass rate.
    """
    cfg = cfg or RolloutConfig()
    check.integer("episodes", episodes)
    sampling = RolloutConfig(cfg.max_tokens, episodes, cfg.temperature)
    generator = generator or torch.Generator().manual_seed(1234)
    trajs = sample_groups(model, env_factory or make_env(cfg), tasks, tok, sampling, generator)
    rates = check.groups([traj.reward for traj in trajs], episodes).mean(1)
    variance = rates * (1 - rates) / (episodes - 1)  # unknown, NaN, from one episode
    return {
        "pass_rate": rates.mean().item(),
        "stderr": variance.sum().sqrt().item() / len(tasks),
        "by_task": dict(zip([task.name for task in tasks], rates.tolist(), strict=True)),
    }
