# Generated from chapters/04-grpo.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Group-relative policy gradients.

How does a group of rewards become a gradient?
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl import check
from agentrl.gym import Task, Tokenizer, make_env
from agentrl.notebook import progress
from agentrl.policy import selected_log_probs
from agentrl.rollout import RolloutConfig, Trajectory, collate, sample_groups

__all__ = [
    "ADVANTAGES",
    "LOSS_AGG_MODES",
    "RLConfig",
    "aggregate_loss",
    "clipped_surrogate_loss",
    "compute_advantages",
    "draw_tasks",
    "entropy",
    "gather_counts",
    "kl_estimate",
    "reinforce_loss",
    "rl_update",
    "sample_step",
    "save_atomically",
    "snap_weights",
    "step_normalizer",
    "train_rl",
    "zero_advantage_groups",
]

ADVANTAGES = ("mean", "mean_std", "leave_one_out")
LOSS_AGG_MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")


def compute_advantages(rewards: Any, group_size: int, kind: str = "mean_std") -> Tensor:
    """Compare each reward with its group: [B] -> float64 [B]. Equal rewards give exactly 0.

    Args:
        rewards: finite numbers, group after group.
        group_size: G, which divides B.
        kind: with mean m and sample standard deviation s of a group, `mean` gives r - m;
            `mean_std` (r - m) / (s + 1e-6), Shao et al. 2024; `leave_one_out` (r - m) G / (G - 1),
            Ahmadian et al. 2024.
    """
    check.one_of("kind", kind, ADVANTAGES)
    groups = check.groups(rewards, group_size)  # [B / G, G]
    centred = groups - groups.mean(1, keepdim=True)
    if kind == "mean_std" and group_size > 1:
        centred = centred / (groups.std(1, keepdim=True) + 1e-6)
    elif kind == "leave_one_out" and group_size > 1:
        centred = centred * (group_size / (group_size - 1))
    equal = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    return centred.masked_fill(equal, 0.0).flatten()


def aggregate_loss(
    values: Tensor, mask: Tensor, loss_agg_mode: str, norm_const: float | Tensor | None = None
) -> Tensor:
    """Average token values [B, T] to a scalar, in at least float32.

    Without a policy token the result is exactly 0, and its gradient too.

    Args:
        values: [B, T]; where the mask is 0 they are never read, not even if they are NaN.
        mask: [B, T], 1 on policy tokens.
        loss_agg_mode: one of `LOSS_AGG_MODES`.
        norm_const: the denominator: tokens for `token_mean`, rows that have a policy token for the
            two `seq_mean` modes, any number for `constant`. By default counted in this batch;
            `constant` has no default. Microbatches pass the count of the whole step, as
            `step_normalizer` makes it. A tensor on CUDA is not checked.
    """
    check.one_of("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    check.shapes(values=(values, "B T"), mask=(mask, "B T"))
    mask = check.mask("mask", mask)
    kept = torch.where(mask, check.widened(values), 0.0)
    tokens = mask.sum(-1)  # [B]
    if loss_agg_mode == "seq_mean_token_mean":
        kept = kept / tokens.clamp(min=1)[:, None]
    if norm_const is not None:
        _check_norm_const(norm_const, mask)
    elif loss_agg_mode == "constant":
        raise ValueError("loss_agg_mode 'constant' needs norm_const")
    else:
        norm_const = tokens.sum() if loss_agg_mode == "token_mean" else (tokens > 0).sum()
    if isinstance(norm_const, Tensor):  # a batch without tokens counts 0, and its loss is 0
        norm_const = norm_const.masked_fill(norm_const == 0, 1)
    return kept.sum() / norm_const


def _check_norm_const(norm_const: float | Tensor, mask: Tensor) -> None:
    if not isinstance(norm_const, Tensor):
        check.number("norm_const", norm_const, above=0)
        return
    if norm_const.ndim:
        raise ValueError(f"norm_const {list(norm_const.shape)} must be a scalar")
    if torch.compiler.is_compiling() or type(norm_const) is not Tensor or not norm_const.is_cpu:
        return  # it has no value, or one that takes waiting for the device
    with contextlib.suppress(RuntimeError):  # under vmap
        if not (norm_const > 0 or (norm_const == 0 and not mask.any())):
            raise ValueError(f"norm_const = {norm_const} must be above 0")


def _per_token(advantages: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    """Spread advantages [B] over tokens [B, T], or take [B, T]; 0 where the mask is."""
    one_each = check.tensor("advantages", advantages).ndim == 1
    axes = "B" if one_each else "B T"
    check.shapes(logp=(logp, "B T"), mask=(mask, "B T"), advantages=(advantages, axes))
    advantages = advantages.detach().to(logp.device, logp.dtype)
    return torch.where(mask, advantages[:, None] if one_each else advantages, 0.0)


def reinforce_loss(
    logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_agg_mode: str = "token_mean",
    norm_const: float | Tensor | None = None,
) -> Tensor:
    """Return the negative policy-gradient objective, -A log p, averaged (Williams 1992).

    Args:
        logp: log-probabilities of the chosen tokens, [B, T].
        advantages: [B], or [B, T]; constants, that get no gradient.
        mask, loss_agg_mode, norm_const: as in `aggregate_loss`.
    """
    logp, mask = check.widened(check.tensor("logp", logp)), check.mask("mask", mask)
    values = -_per_token(advantages, logp, mask) * logp
    return aggregate_loss(values, mask, loss_agg_mode, norm_const)


def clipped_surrogate_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_agg_mode: str = "token_mean",
    norm_const: float | Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Return the clipped surrogate, -min(r A, clip(r, 1 - low, 1 + high) A), averaged.

    Schulman et al. 2017, with separate bounds as in Yu et al. 2025. The log-ratio is clamped to
    -20 and 20 nats, so that the ratio r stays finite; beyond, the gradient is 0.

    Args:
        logp, old_logp: log-probabilities of the chosen tokens now and when sampled, [B, T]; the
            gradient is with respect to `logp` alone.
        advantages: [B], or [B, T].
        mask, loss_agg_mode, norm_const: as in `aggregate_loss`.
        clip_low, clip_high: how far the ratio may fall below and rise above 1; `math.inf` for no
            bound.
    """
    _check_clips(clip_low=clip_low, clip_high=clip_high)
    check.shapes(logp=(logp, "B T"), old_logp=(old_logp, "B T"))
    logp, mask = check.widened(logp), check.mask("mask", mask)
    advantages = _per_token(advantages, logp, mask)
    # Masked entries may hold anything; an infinity or NaN there would poison the gradient.
    log_ratio = torch.where(mask, logp - check.widened(old_logp).detach(), 0.0)
    ratio = log_ratio.clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    values = -torch.minimum(ratio * advantages, clipped * advantages)
    return aggregate_loss(values, mask, loss_agg_mode, norm_const)


def _check_clips(**clips: float) -> None:
    for name, clip in clips.items():
        if clip != math.inf:  # no bound on this side
            check.number(name, clip, least=0)


def kl_estimate(
    logp: Tensor, ref_logp: Tensor, kind: str = "k3", mask: Tensor | None = None
) -> Tensor:
    """Estimate KL(p, q) in nats per token from tokens drawn from p, in at least float32.

    With d = logp - ref_logp (Schulman 2020): `k1` is d, unbiased and of either sign; `k2` is
    d^2 / 2, biased; `k3` is exp(-d) - 1 + d, unbiased and never negative. In `k3`, d is clamped to
    -20 and 20 as in verl, so that one token cannot blow up a step; beyond, the gradient is 0.

    As a loss on such tokens, k1 has expected gradient 0, k2 that of KL(p, q), k3 that of KL(q, p).

    Args:
        logp, ref_logp: log-probabilities of the drawn tokens under p and q, any shape.
        mask: where it is 0, the log-probs may be anything and the result is 0.
    """
    check.one_of("kind", kind, ("k1", "k2", "k3"))
    check.shapes(logp=(logp, "..."), ref_logp=(ref_logp, "..."))
    d = check.widened(logp) - check.widened(ref_logp)
    if mask is not None:
        check.shapes(logp=(logp, "..."), mask=(mask, "..."))
        d = torch.where(check.mask("mask", mask), d, 0.0)
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    d = d.clamp(-20, 20)
    return torch.expm1(-d) + d


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each distribution in nats, in at least float32: [..., V] -> [...]."""
    logp = check.widened(check.tensor("logits", logits)).log_softmax(-1)
    return -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)  # 0 log 0 = 0


@dataclass(frozen=True)
class RLConfig(RolloutConfig):
    """What a training run is made of, beside the model and the tasks.

    Attributes:
        prompts_per_step: tasks per step; each gives a group of `group_size` episodes.
        lr, adam_eps: learning rate and eps of Adam.
        seed: seeds the draws of tasks and of tokens.
        clip, clip_high: how far the ratio may fall below and rise above 1 before its gradient is
            cut; `clip_high` is `clip` unless given.
        advantage: how a reward is compared with its group, one of `ADVANTAGES`.
        loss_agg_mode: how token losses become one number, one of `LOSS_AGG_MODES`.
        norm_const: one denominator for all steps; None counts that of each step in its episodes.
        updates_per_step: passes over the sampled episodes.
        microbatch_size: episodes per backward pass; it does not change the gradient.
        max_grad_norm: the gradient is scaled down to this norm.
        weight_grid: a power of two; weights are rounded to multiples of it after each update.
            None leaves them as they are.
    """

    prompts_per_step: int = 8
    lr: float = 1e-3
    adam_eps: float = 1e-8
    seed: int = 0
    clip: float = 0.2
    clip_high: float | None = None
    advantage: str = "mean_std"
    loss_agg_mode: str = "token_mean"
    norm_const: float | None = None
    updates_per_step: int = 1
    microbatch_size: int = 16
    max_grad_norm: float = 1.0
    weight_grid: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in vars(self).items():  # a checkpoint reads no numbers of NumPy
            object.__setattr__(self, name, value.item() if hasattr(value, "item") else value)
        check.one_of("advantage", self.advantage, ADVANTAGES)
        check.one_of("loss_agg_mode", self.loss_agg_mode, LOSS_AGG_MODES)
        check.integer("seed", self.seed, None)
        for name in ("prompts_per_step", "updates_per_step", "microbatch_size"):
            check.integer(name, getattr(self, name))
        check.number("lr", self.lr, least=0)
        check.number("adam_eps", self.adam_eps, least=0)
        _check_clips(clip=self.clip, clip_high=self._clip_high)
        if self.norm_const is not None:
            check.number("norm_const", self.norm_const, above=0)
        if self.max_grad_norm != math.inf:
            check.number("max_grad_norm", self.max_grad_norm, above=0)
        if self.weight_grid is not None:
            _check_grid("weight_grid", self.weight_grid)
            if 0 < self.lr < self.weight_grid / 2:
                lost = f"steps below half of weight_grid = {self.weight_grid} are rounded away"
                raise ValueError(f"lr = {self.lr}: {lost}; set weight_grid to None")

    @property
    def _clip_high(self) -> float:
        return self.clip if self.clip_high is None else self.clip_high


def _check_grid(name: str, value: float) -> None:
    if math.frexp(check.number(name, value, above=0))[0] != 0.5:
        raise ValueError(f"{name} = {value} must be a power of two")


def draw_tasks(tasks: Sequence[Task], count: int, generator: torch.Generator) -> list[Task]:
    """Draw `count` different tasks, or all of them if there are fewer, in random order."""
    order = torch.randperm(len(tasks), generator=generator)
    return [tasks[i] for i in order[:count].tolist()]


def sample_step(
    model: nn.Module,
    tasks: Sequence[Task],
    tok: Tokenizer,
    cfg: RLConfig,
    generator: torch.Generator,
    env_factory: Callable[..., Any] | None = None,
) -> list[Trajectory]:
    """Sample one step's groups: `cfg.prompts_per_step` tasks, `cfg.group_size` episodes of each."""
    drawn = draw_tasks(tasks, cfg.prompts_per_step, generator)
    return sample_groups(model, env_factory or make_env(cfg), drawn, tok, cfg, generator)


def zero_advantage_groups(rewards: Any, group_size: int) -> Tensor:
    """Tell which groups have equal rewards, and so no gradient: [B] -> bool [B / group_size]."""
    groups = check.groups(rewards, group_size)
    return groups.amax(1) == groups.amin(1)


def gather_counts(
    counts: Sequence[int],
    group: "dist.ProcessGroup | None" = None,
    device: torch.device | None = None,
) -> list[list[int]]:
    """Return the counts of every rank, in one all-gather; without ranks those of this process.

    Args:
        group: the ranks, by default all.
        device: where the tensors of this rank are: with NCCL, a GPU.
    """
    if _ranks(group) == 1:
        return [list(counts)]
    where = torch.device("cpu")
    if dist.get_backend(group) == "nccl":
        bound = (group or dist.group.WORLD).bound_device_id
        current = torch.device("cuda", torch.cuda.current_device())
        where = device if device is not None and device.type == "cuda" else bound or current
    mine = torch.tensor(counts, device=where)
    everyone = [torch.empty_like(mine) for _ in range(_ranks(group))]
    dist.all_gather(everyone, mine, group=group)
    return [row.tolist() for row in everyone]


def _ranks(group: "dist.ProcessGroup | None" = None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def step_normalizer(
    batches: Sequence[Tensor | Mapping[str, Tensor]],
    loss_agg_mode: str = "token_mean",
    *,
    max_tokens: int | None = None,
    group: "dist.ProcessGroup | None" = None,
) -> float:
    """Return the denominator of an optimizer step, for each microbatch on each rank.

    Every rank has to call it, before the first backward pass; it waits for the others.

    Args:
        batches: this rank's microbatches, as many as on every other rank. Each is a batch of
            `collate` or of `pack_sequences`, or a mask [B, T] with one sequence in a row.
        max_tokens: for `constant`, which divides by sequences * max_tokens.
        group: the ranks that share the step, by default all.

    Returns:
        For `norm_const` of `aggregate_loss`, over all ranks: policy tokens for `token_mean`;
        sequences with a policy token for the `seq_mean` modes, times `max_tokens` for `constant`.
        At least 1, so that a step without policy tokens has loss 0 and gradient 0.
    """
    check.one_of("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    if loss_agg_mode == "constant":
        check.integer("max_tokens", max_tokens)
    counted = [_count(f"batches[{i}]", batch) for i, batch in enumerate(batches)]
    tokens, sequences = (sum(int(count[k]) for count in counted) for k in (0, 1))
    device = counted[0][0].device if counted else None
    per_rank = gather_counts([len(counted), tokens, sequences], group, device)
    for rank, (number, *_) in enumerate(per_rank):
        if number != per_rank[0][0]:
            unequal = f"rank {rank} has {number} microbatches and rank 0 has {per_rank[0][0]}"
            raise ValueError(f"{unequal}: all ranks need the same number")
    check.not_empty("batches", counted)
    tokens, sequences = (max(sum(counts[k] for counts in per_rank), 1) for k in (1, 2))
    if loss_agg_mode == "token_mean":
        return float(tokens)
    return float(sequences * max_tokens if loss_agg_mode == "constant" else sequences)


def _count(name: str, batch: Tensor | Mapping[str, Tensor]) -> tuple[Tensor, Tensor | int]:
    """Count a microbatch's policy tokens, and its sequences that have one."""
    batch = batch if isinstance(batch, Mapping) else {"action_mask": batch}
    mask = check.mask(name, batch.get("action_mask"))
    if "segment_ids" not in batch:
        check.shapes(**{name: (mask, "B T")})
        return mask.sum(), mask.any(-1).sum()
    segments = batch["segment_ids"]  # [R, L]; several sequences in a row
    check.shapes(segment_ids=(segments, "R L"), action_mask=(mask, "R L-1"))
    row, column = mask.nonzero(as_tuple=True)
    owners = torch.stack([row, segments[row, column + 1]])  # entry t is about token t + 1
    return mask.sum(), owners.unique(dim=1).shape[1]


def _log_probs(model: nn.Module, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Score tokens as the sampler drew them: [B, T] -> [B, T - 1]."""
    ids = ids.to(next(model.parameters()).device)
    logits = check.widened(model(ids[:, :-1]))
    return selected_log_probs(logits / temperature, ids[:, 1:])


def rl_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, trajs: Sequence[Trajectory], cfg: RLConfig
) -> dict[str, float]:
    """Update the model on sampled groups with the clipped surrogate, in one process.

    Args:
        trajs: group after group, as `sample_step` returns them.

    Returns:
        `loss` and `grad_norm` of the last pass, `clip_fraction` over policy tokens of the last pass
        (those of episodes with a gradient), and `zero_advantage`, the share of groups without one.
    """
    if _ranks() > 1:
        why = f"rl_update reduces no gradients, and {_ranks()} ranks are running"
        raise ValueError(f"{why}: build the step with accumulate_gradients")
    batch = collate(trajs, pad_id=0)
    advantages = compute_advantages(batch["rewards"], cfg.group_size, cfg.advantage)
    norm_const = cfg.norm_const
    if norm_const is None:
        norm_const = step_normalizer([batch], cfg.loss_agg_mode, max_tokens=cfg.max_tokens)
    live = advantages.nonzero()[:, 0]
    live = live[batch["lengths"][live].argsort(stable=True)]  # microbatches of similar length
    clips = {"clip_low": cfg.clip, "clip_high": cfg._clip_high}
    stats = {"loss": 0.0, "grad_norm": 0.0, "clip_fraction": 0.0}
    for _ in range(cfg.updates_per_step if len(live) else 0):
        optimizer.zero_grad()
        loss_sum, clipped, tokens = 0.0, 0, 0
        for rows in live.split(cfg.microbatch_size):
            width = int(batch["lengths"][rows].max())
            logp = _log_probs(model, batch["ids"][rows, :width], cfg.temperature)
            mask, old = (
                batch[key][rows, : width - 1].to(logp.device)
                for key in ("action_mask", "sample_logp")
            )
            of_step = cfg.loss_agg_mode, norm_const
            loss = clipped_surrogate_loss(
                logp, old.to(logp.dtype), advantages[rows], mask, *of_step, **clips
            )
            loss.backward()
            loss_sum += loss.item()
            ratio = (logp.detach() - old).exp()[mask]
            clipped += int(((ratio < 1 - cfg.clip) | (ratio > 1 + cfg._clip_high)).sum())
            tokens += ratio.numel()
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm).item()
        optimizer.step()
        if cfg.weight_grid is not None:
            snap_weights(model, cfg.weight_grid)
        share = clipped / max(tokens, 1)
        stats = {"loss": loss_sum, "grad_norm": norm, "clip_fraction": share}
    zero = zero_advantage_groups(batch["rewards"], cfg.group_size)
    return {**stats, "zero_advantage": zero.double().mean().item()}


def save_atomically(state: Any, path: str | Path) -> None:
    """Save so that a reader, or a crash, sees the old file or the new one and nothing between."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _resume(
    path: Path | None, run: dict[str, Any], steps: int, parts: tuple[Any, Any, torch.Generator]
) -> dict[str, Any]:
    """Put a checkpoint into model, optimizer and generator; return it, or {} if there is none."""
    if path is None or not path.exists():
        return {}
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        len(saved["history"])
    except Exception as error:
        raise ValueError(f"{path} is damaged, or no checkpoint of a run: {error!r}") from error
    for key, value in run.items():
        if (had := saved.get(key)) != value:
            if isinstance(had, dict) and isinstance(value, dict):  # only what differs
                names = [name for name in had | value if had.get(name) != value.get(name)]
                had, value = ({name: d.get(name) for name in names} for d in (had, value))
            raise ValueError(f"{path.name} has {key} = {had}, this run has {value}")
    if len(saved["history"]) > steps:
        raise ValueError(f"{path.name} has {len(saved['history'])} steps, more than {steps}")
    model, optimizer, generator = parts
    for name, value in model.state_dict().items():
        had = saved["model"].get(name, value).dtype
        if had != value.dtype:
            raise ValueError(f"{path.name} has {name} in {had}, the model in {value.dtype}")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    generator.set_state(saved["generator"])
    return saved


def train_rl(
    model: nn.Module,
    tasks: Sequence[Task],
    tok: Tokenizer,
    cfg: RLConfig,
    steps: int,
    *,
    sampler: Callable[..., list[Trajectory]] | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 5,
    on_step: Callable[[nn.Module, list[dict[str, Any]]], bool | None] | None = None,
) -> list[dict[str, Any]]:
    """Train a policy in place and return one record per step.

    A run that was killed and started again gives the same history and weights, bit for bit, as one
    that was not.

    Args:
        sampler: draws the groups to train on, called as `sample_step`, which it is by default; an
            empty list ends the run. Of its attributes, where it has them, `rule` must be that of
            the checkpoint, `state` is a dictionary that goes into the checkpoint, and `record` one
            that goes into the record of the step.
        checkpoint: a file to resume from if it exists, and to save to.
        checkpoint_every: steps between saves; the last step is always saved.
        on_step: called after each step with the model and the history; a true value ends the run.

    Returns:
        Per step: `episodes`, `tokens`, `reward`, the statistics of `rl_update`, what the sampler
        adds, and a `reason` where the run ended early, which it then has for good.

    Raises:
        ValueError: if the checkpoint is damaged, or belongs to another run or one of more steps.
    """
    check.integer("steps", steps, 0)
    check.integer("checkpoint_every", checkpoint_every)
    check.not_empty("tasks", tasks)
    sampler = sampler or sample_step
    generator = torch.Generator().manual_seed(cfg.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), eps=cfg.adam_eps)
    run = {"cfg": dataclasses.asdict(cfg), "tasks": [task.name for task in tasks]}
    run |= {"rule": getattr(sampler, "rule", None)}
    path = None if checkpoint is None else Path(checkpoint)
    saved = _resume(path, run, steps, (model, optimizer, generator))
    history, ended = saved.get("history", []), saved.get("ended", False)
    state = getattr(sampler, "state", {})
    state.update(saved.get("state", {}))
    for step in progress(range(len(history), steps), desc="train_rl"):
        if ended:
            break
        trajs = sampler(model, tasks, tok, cfg, generator)
        added = getattr(sampler, "record", {})
        if trajs:
            record = {
                "episodes": len(trajs),
                "tokens": sum(len(traj.ids) for traj in trajs),
                "reward": sum(traj.reward for traj in trajs) / len(trajs),
            }
            history.append(record | rl_update(model, optimizer, trajs, cfg) | added)
            ended = bool(on_step and on_step(model, history))
            if ended and step + 1 < steps:
                why = f"on_step ended the run after {step + 1} of {steps} steps"
                history[-1].setdefault("reason", why)
        else:  # no group, so nothing changes: it would stay so for ever
            ended, why = True, added.get("reason", "the sampler returned no episode")
            if not history:
                raise ValueError(why)
            history[-1]["reason"] = f"stopped after {step} of {steps} steps: {why}"
        if path and (ended or (step + 1) % checkpoint_every == 0 or step + 1 == steps):
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            parts |= {"generator": generator.get_state(), "history": history, "state": state}
            save_atomically({**parts, "ended": ended, **run}, path)
    return history


@torch.no_grad()
def snap_weights(model: nn.Module, grid: float = 2.0**-16) -> None:
    """Round all weights in place to multiples of `grid`, a power of two."""
    _check_grid("grid", grid)
    for p in model.parameters():
        p.copy_((p.double() / grid).round() * grid)
