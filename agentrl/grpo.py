# Generated from chapters/04-grpo.ipynb by tools/export.py. Do not edit: edit the notebook.
"""Group-relative policy gradients.

How does a group of rewards become a gradient?
"""

import ctypes
import dataclasses
import hashlib
import inspect
import itertools
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn

from agentrl.check import widened as _widened
from agentrl.gym import BugFixEnv, Task, Tokenizer, make_env, make_tasks, run_tests, source_of
from agentrl.notebook import progress
from agentrl.policy import TinyAgent, selected_log_probs
from agentrl.rollout import RolloutConfig, Trajectory, collate, sample_groups

__all__ = [
    "ADVANTAGES",
    "LOSS_AGG_MODES",
    "Demonstrator",
    "RLConfig",
    "aggregate_loss",
    "behavior_clone",
    "clipped_surrogate_loss",
    "compute_advantages",
    "demonstrate",
    "draw_tasks",
    "entropy",
    "kl_estimate",
    "make_rl_base",
    "reinforce_loss",
    "rl_update",
    "sample_step",
    "snap_weights",
    "train_rl",
    "zero_advantage_groups",
]

ADVANTAGES = ("mean", "mean_std", "leave_one_out")
LOSS_AGG_MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")


def _check_grid(name: str, value: float) -> None:
    if not 0 < value < math.inf or math.frexp(value)[0] != 0.5:
        raise ValueError(f"{name} = {value} must be a power of two")


def _plain_numbers(config: Any) -> None:
    """Turn NumPy's numbers in a frozen dataclass into Python's: a checkpoint could not be read."""
    for name, value in vars(config).items():
        if hasattr(value, "item"):
            object.__setattr__(config, name, value.item())


@dataclass(frozen=True)
class RLConfig(RolloutConfig):
    """What a training run is made of, beside the model and the tasks.

    Attributes:
        prompts_per_step: tasks per step; each gives a group of `group_size` episodes.
        lr: learning rate of Adam.
        seed: of the draws of tasks and tokens.
        clip, clip_high: how far the ratio may fall below and rise above 1 before its gradient is
            cut; `clip_high` is `clip` unless given.
        advantage: how a reward is compared with its group, one of `ADVANTAGES`.
        loss_agg_mode: how token losses become one number, one of `LOSS_AGG_MODES`.
        updates_per_step: passes over the sampled episodes.
        microbatch_size: episodes per backward pass; it does not change the gradient.
        max_grad_norm: the gradient is scaled down to this norm.
        weight_grid: weights are rounded to multiples of it, a power of two, after an update, so
            that all machines agree; None leaves them as they are, which a small `lr` needs.
    """

    prompts_per_step: int = 8
    lr: float = 1e-3
    seed: int = 0
    clip: float = 0.2
    clip_high: float | None = None
    advantage: str = "mean_std"
    loss_agg_mode: str = "token_mean"
    updates_per_step: int = 1
    microbatch_size: int = 16
    max_grad_norm: float = 1.0
    weight_grid: float | None = 2.0**-16

    def __post_init__(self) -> None:
        super().__post_init__()
        _plain_numbers(self)
        if self.advantage not in ADVANTAGES:
            raise ValueError(f"advantage must be one of {ADVANTAGES}, got {self.advantage!r}")
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(
                f"loss_agg_mode must be one of {LOSS_AGG_MODES}, got {self.loss_agg_mode!r}"
            )
        for name in ("prompts_per_step", "updates_per_step", "microbatch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("lr", "clip", "clip_high"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} = {value} must be at least 0")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm = {self.max_grad_norm} must be positive")
        if self.weight_grid is not None:
            _check_grid("weight_grid", self.weight_grid)
            if 0 < self.lr < self.weight_grid / 2:
                raise ValueError(
                    f"lr = {self.lr}: steps below half of weight_grid = {self.weight_grid} are"
                    " rounded away; set weight_grid to None"
                )


def compute_advantages(batch: dict[str, Tensor], cfg: Any) -> Tensor:
    """Compare each reward with those of its group.

    Args:
        batch: has `rewards` [B], group after group.
        cfg: has `group_size` G and `advantage`, as `RLConfig`.

    Returns:
        Advantages [B] in float64. With mean m and sample standard deviation s of the group: `mean`
        gives r - m; `mean_std` (r - m) / (s + 1e-6), Shao et al. 2024; `leave_one_out`
        (r - m) G / (G - 1), Ahmadian et al. 2024. A group of equal rewards gives exactly 0.

    Raises:
        ValueError: if G is below 1 or does not divide B, a reward is not finite, or for another
            `advantage`.
    """
    if cfg.advantage not in ADVANTAGES:
        raise ValueError(f"advantage must be one of {ADVANTAGES}, got {cfg.advantage!r}")
    size = cfg.group_size
    groups = _groups(batch["rewards"].double(), size)
    centred = groups - groups.mean(1, keepdim=True)
    if cfg.advantage == "mean_std" and size > 1:
        centred = centred / (groups.std(1, keepdim=True) + 1e-6)
    elif cfg.advantage == "leave_one_out" and size > 1:
        centred = centred * (size / (size - 1))
    equal = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    return centred.masked_fill(equal, 0.0).flatten()


def _groups(rewards: Tensor, size: int) -> Tensor:
    """Cut rewards [B] into groups [B / size, size]."""
    if size < 1:
        raise ValueError(f"group_size = {size} must be at least 1")
    if len(rewards) % size:
        raise ValueError(f"{len(rewards)} rewards are not a multiple of group_size = {size}")
    for index in (~rewards.isfinite()).nonzero()[:, 0].tolist():
        raise ValueError(f"rewards[{index}] = {rewards[index].item()} is not finite")
    return rewards.view(-1, size)


def aggregate_loss(
    values: Tensor, mask: Tensor, mode: str, norm_const: float | Tensor | None = None
) -> Tensor:
    """Average token values to a scalar.

    Args:
        values: [B, T]; where the mask is 0 they are never read, not even if they are NaN.
        mask: [B, T], 1 on policy tokens.
        mode: one of `LOSS_AGG_MODES`.
        norm_const: the denominator: tokens for `token_mean`, rows that have a policy token for the
            two `seq_mean` modes, any number for `constant`. By default counted in this batch;
            `constant` has no default. Microbatches pass the count of the whole batch.

    Returns:
        A scalar, in at least float32; exactly 0, with gradient 0, if the mask is 0 everywhere.

    Raises:
        ValueError: for an unknown mode, shapes that differ, a `norm_const` that is missing, not
            positive (a tensor on CUDA is not read) or more than one number.
    """
    if mode not in LOSS_AGG_MODES:
        raise ValueError(f"mode must be one of {LOSS_AGG_MODES}, got {mode!r}")
    if values.shape != mask.shape or values.ndim != 2:
        shapes = f"values {list(values.shape)} and mask {list(mask.shape)}"
        raise ValueError(f"{shapes} must both be [B, T]")
    if norm_const is None and mode == "constant":
        raise ValueError("mode 'constant' needs norm_const")
    mask = mask.bool()
    _check_norm_const(norm_const, mask)
    kept = torch.where(mask, _widened(values), 0.0)
    tokens = mask.sum(-1)  # [B]
    if mode == "seq_mean_token_mean":
        kept = kept / tokens.clamp(min=1)[:, None]
    if norm_const is None:
        count = tokens.sum() if mode == "token_mean" else (tokens > 0).sum()
        norm_const = count
    if isinstance(norm_const, Tensor):  # a batch without tokens counts 0, and its loss is 0
        norm_const = norm_const.masked_fill(norm_const == 0, 1)
    return kept.sum() / norm_const


def _check_norm_const(norm_const: float | Tensor | None, mask: Tensor) -> None:
    if isinstance(norm_const, Tensor):
        if norm_const.ndim:
            raise ValueError(f"norm_const {list(norm_const.shape)} must be a scalar")
        unread = type(norm_const) is not Tensor or torch.compiler.is_compiling()
        if unread or norm_const.device.type != "cpu":
            return  # it has no value, or one that takes waiting for the device
        try:
            if norm_const == 0 and not mask.any():
                return
        except RuntimeError:  # under vmap
            return
    if norm_const is not None and not norm_const > 0:
        raise ValueError(f"norm_const = {norm_const} must be positive")


def _per_token(advantages: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    """Spread advantages [B] over tokens [B, T], or take [B, T]; 0 where the mask is."""
    if logp.shape != mask.shape or advantages.shape not in (logp.shape, logp.shape[:1]):
        shapes = [list(x.shape) for x in (logp, mask, advantages)]
        raise ValueError(
            f"logp, mask and advantages are {shapes}, need [B, T] twice, and [B] or [B, T]"
        )
    advantages = advantages.detach().to(logp.device, logp.dtype)
    advantages = advantages[:, None].expand_as(logp) if advantages.ndim == 1 else advantages
    return torch.where(mask.bool(), advantages, 0.0)


def reinforce_loss(
    logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    mode: str = "token_mean",
    norm_const: float | Tensor | None = None,
) -> Tensor:
    """Return the negative policy-gradient objective, -A log p, averaged (Williams 1992).

    Args:
        logp: log-probabilities of the chosen tokens, [B, T].
        advantages: [B], or [B, T]; constants, that get no gradient.
        mask, mode, norm_const: as in `aggregate_loss`.

    Raises:
        ValueError: for shapes that do not fit, or as `aggregate_loss`.
    """
    logp = _widened(logp)
    return aggregate_loss(-_per_token(advantages, logp, mask) * logp, mask, mode, norm_const)


def clipped_surrogate_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    mode: str = "token_mean",
    norm_const: float | Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Return the clipped surrogate, -min(r A, clip(r, 1 - low, 1 + high) A), averaged.

    Schulman et al. 2017, with separate bounds as in Yu et al. 2025.

    Args:
        logp, old_logp: log-probabilities of the chosen tokens now and when sampled, [B, T]; the
            gradient is by `logp` alone.
        advantages: [B], or [B, T].
        mask, mode, norm_const: as in `aggregate_loss`.
        clip_low, clip_high: how far the ratio may fall below and rise above 1.

    Raises:
        ValueError: for shapes that do not fit, a negative clip, or as `aggregate_loss`.
    """
    for name, clip in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not clip >= 0:
            raise ValueError(f"{name} = {clip} must be at least 0")
    if old_logp.shape != logp.shape:
        raise ValueError(f"old_logp {list(old_logp.shape)} does not fit logp {list(logp.shape)}")
    logp, old_logp = _widened(logp), _widened(old_logp)
    advantages = _per_token(advantages, logp, mask)
    # Masked entries may hold anything; an infinity or NaN there would poison the gradient. So would
    # an infinite ratio, whose clipped gradient is 0 times infinity.
    largest = math.log(torch.finfo(logp.dtype).max) / 2
    ratio = torch.where(mask.bool(), logp - old_logp.detach(), 0.0).clamp(max=largest).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return aggregate_loss(
        -torch.minimum(ratio * advantages, clipped * advantages), mask, mode, norm_const
    )


def kl_estimate(
    logp: Tensor, ref_logp: Tensor, kind: str = "k3", mask: Tensor | None = None
) -> Tensor:
    """Estimate KL(p, q) per token from tokens drawn from p (Schulman 2020).

    As a loss on such tokens, k1 has expected gradient 0, k2 that of KL(p, q), k3 that of KL(q, p).

    Args:
        logp, ref_logp: log-probabilities of the drawn tokens under p and q, any shape.
        kind: with d = logp - ref_logp, `k1` is d, unbiased and of either sign; `k2` is d^2 / 2,
            biased; `k3` is exp(-d) - 1 + d, unbiased and never negative.
        mask: where it is 0, the log-probs may be anything and the result is 0.

    Returns:
        Nats, in the shape of `logp`.

    Raises:
        ValueError: for any other kind, or shapes that differ.
    """
    if logp.shape != ref_logp.shape:
        raise ValueError(f"ref_logp {list(ref_logp.shape)} does not fit logp {list(logp.shape)}")
    d = logp - ref_logp
    if mask is not None:
        if mask.shape != d.shape:
            raise ValueError(f"mask {list(mask.shape)} does not fit logp {list(logp.shape)}")
        d = torch.where(mask.bool(), d, 0.0)
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    if kind == "k3":
        return torch.expm1(-d) + d
    raise ValueError(f"kind must be 'k1', 'k2' or 'k3', got {kind!r}")


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each distribution in nats, in float32 or better: [..., V] -> [...]."""
    logp = _widened(logits).log_softmax(-1)
    return -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)  # 0 log 0 = 0


@dataclass(frozen=True)
class Demonstrator:
    """Probabilities of a scripted, imperfect agent that knows the repair.

    Attributes:
        look: it looks at the program first.
        skill: an edit is the right one.
        near, far, slip: odds that a wrong edit replaces the faulty token, any token of the program,
            or any token that is part of some repair, which the tool may refuse.
        test: it tests after an edit.
        give_up: it submits after a failed test.
        relook: it looks again after a refusal, or after reverting a failed edit.
        struggle: in this episode it has half the skill, tests nearly always, looks again often and
            hardly ever gives up; the long tail of episode lengths comes from here.
    """

    look: float = 0.97
    skill: float = 0.36
    near: float = 0.6
    far: float = 0.15
    slip: float = 0.25
    test: float = 0.3
    give_up: float = 0.5
    relook: float = 0.3
    struggle: float = 0.2


def _script(
    env: BugFixEnv, who: Demonstrator, replacements: Sequence[str], rng: random.Random
) -> Iterator[tuple[str, ...]]:
    """Yield the demonstrator's actions; it reads the environment between them."""
    skill, test, give_up, relook = who.skill, who.test, who.give_up, who.relook
    if rng.random() < who.struggle:
        skill, test, give_up, relook = skill / 2, 0.95, 0.04, 0.5
    if rng.random() < who.look:
        yield ("LOOK",)
    while True:
        old, new = env.task.fix
        if rng.random() >= skill:
            body = [token for token in env.program if token != "\n"]
            choices = ([old], body, replacements)
            old = rng.choice(rng.choices(choices, (who.near, who.far, who.slip))[0])
            new = rng.choice(replacements)
        errors = env.info["errors"]
        yield ("EDIT", old, new)
        if env.info["errors"] > errors:  # refused: give up, look again, or try at once
            if rng.random() < 0.05:
                break
            if rng.random() < relook:
                yield ("LOOK",)
            continue
        if rng.random() >= test:
            break
        yield ("TEST",)
        solved = all(run_tests(source_of(env.task.params, env.program), env.task.tests))
        if solved or rng.random() < give_up:
            break
        if old != new and env.program.count(new) == 1:
            yield ("EDIT", new, old)
        if rng.random() < relook:
            yield ("LOOK",)
    yield ("SUBMIT",)


def demonstrate(
    task: Task, tok: Tokenizer, rng: random.Random, who: Demonstrator | None = None
) -> Trajectory:
    """Play one scripted episode; its `sample_logp` is 0, since no policy was asked."""
    env = BugFixEnv(task, tok)
    ids = env.reset()
    mine = [False] * len(ids)
    replacements = sorted({token for t in make_tasks("train") for token in t.fix})
    for action in _script(env, who or Demonstrator(), replacements, rng):
        for token in tok.encode(action):
            observation, done = env.step(token)
            ids += [token, *observation]
            mine += [True] + [False] * len(observation)
            if done:
                break
        if env.done:
            break
    mask = torch.tensor(mine[1:])
    return Trajectory(
        torch.tensor(ids), mask, torch.zeros(len(mask), dtype=torch.float64), env.reward, env.info
    )


def _plant(task: Task, wrong: str, right: str) -> Task | None:
    """Replace the fault of a task by another one; None if that is impossible or harmless."""
    correct = [task.fix[1] if token == task.fix[0] else token for token in task.program]
    if correct.count(right) != 1 or wrong in correct:
        return None
    program = tuple(wrong if token == right else token for token in correct)
    harmless = all(run_tests(source_of(task.params, program), task.tests))
    return None if harmless else dataclasses.replace(task, program=program, fix=(wrong, right))


def _practice(tasks: Sequence[Task], tok: Tokenizer, rng: random.Random) -> Iterator[Task]:
    """Yield training programs with other faults, without end."""
    families = sorted({task.fix for task in tasks})
    variants = [v for task in tasks for fix in families if (v := _plant(task, *fix))]
    words = sorted(tok.program_tokens - {"\n"})
    while True:
        task: Task | None = rng.choice(variants)
        if rng.random() < 0.3:
            task = _plant(task, rng.choice(words), rng.choice(task.program))
        if task is not None:
            yield task if rng.random() < 0.7 else dataclasses.replace(task, goal=())


@torch.no_grad()
def snap_weights(model: nn.Module, grid: float = 2.0**-16) -> None:
    """Round all weights to multiples of `grid` in place; ValueError if it is no power of two."""
    _check_grid("grid", grid)
    for p in model.parameters():
        p.copy_((p.double() / grid).round() * grid)


def behavior_clone(
    model: nn.Module, demonstrations: Sequence[Trajectory], tok: Tokenizer, lr: float = 3e-3
) -> list[float]:
    """Train a model on the masked tokens of demonstrations, once through; return the losses.

    At the end the weights are rounded, as by `snap_weights`.

    Args:
        demonstrations: sorted into batches of 64 of similar length, visited in random order.
        lr: peak learning rate of AdamW, with a short warm-up and a linear decay.
    """
    order = sorted(range(len(demonstrations)), key=lambda i: len(demonstrations[i].ids))
    batches = [order[i : i + 64] for i in range(0, len(order), 64)]
    random.Random(0).shuffle(batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    losses = []
    for step, rows in enumerate(progress(batches, desc="behaviour cloning")):
        batch = collate([demonstrations[i] for i in rows], tok.pad_id)
        left = (len(batches) - step) / len(batches)
        optimizer.param_groups[0]["lr"] = lr * min(1, 2 * left, (step + 1) / 10)
        logp = _log_probs(model, batch["ids"])
        loss = -aggregate_loss(logp, batch["action_mask"].to(logp.device), "token_mean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    snap_weights(model)
    return losses


def _log_probs(model: nn.Module, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Score tokens as the sampler drew them: [B, T] -> [B, T - 1]."""
    ids = ids.to(next(model.parameters()).device)
    logits = model(ids[:, :-1])
    return selected_log_probs(_widened(logits) / temperature, ids[:, 1:])


def _write_atomically(state: Any, path: Path) -> None:
    """Save so that a reader, or a crash, sees the old file or the new one and nothing between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _digest(weights: dict[str, Tensor]) -> str:
    """Hash names and values."""
    sha = hashlib.sha256()
    for name, value in weights.items():
        value = value.cpu().contiguous()
        sha.update(name.encode() + ctypes.string_at(value.data_ptr(), value.nbytes))  # no NumPy
    return sha.hexdigest()


def _cache_dir() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentrl"
    return Path(os.environ.get("AGENTRL_CACHE", default))


def _load_weights(path: Path) -> dict[str, Tensor] | None:
    """Read weights from the cache; None if they are absent, unreadable or not what was written."""
    try:
        saved = torch.load(path, weights_only=True)
        return saved["weights"] if saved["digest"] == _digest(saved["weights"]) else None
    except Exception:  # a damaged file fails in many ways, and all of them mean: make it again
        return None


def make_rl_base(tok: Tokenizer, *, episodes: int = 16_000, seed: int = 0) -> TinyAgent:
    """Return the policy that RL starts from: a clone of the scripted demonstrator.

    It is trained once, in under a minute on two cores, and kept in `$AGENTRL_CACHE`, by default
    `~/.cache/agentrl`. The demonstrator practises on faults planted in the training programs.

    Args:
        tok: the vocabulary of all tasks.
        episodes: demonstrations.
        seed: of the demonstrations and of the initial weights.
    """
    made_by = [
        Path(inspect.getsourcefile(kind)).read_text() for kind in (Task, TinyAgent, Trajectory)
    ]
    code = (behavior_clone, snap_weights, aggregate_loss, _log_probs, demonstrate)
    made_by += map(inspect.getsource, (*code, _script, _plant, _practice))
    made_by += [str(tok.tokens), str(Demonstrator()), str((episodes, seed)), torch.__version__]
    key = hashlib.sha256("\0".join(made_by).encode()).hexdigest()
    path = _cache_dir() / f"rl-base-{key[:16]}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    model = TinyAgent(len(tok), seed=seed)
    with FileLock(f"{path}.lock"):  # chapters that run side by side train it once
        weights = _load_weights(path)
        if weights is None:
            rng = random.Random(seed)
            practice = itertools.islice(_practice(make_tasks("train"), tok, rng), episodes)
            data = [demonstrate(task, tok, rng) for task in practice]
            behavior_clone(model, data, tok)
            weights = model.state_dict()
            _write_atomically({"weights": weights, "digest": _digest(weights)}, path)
    model.load_state_dict(weights)
    return model


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
) -> list[Trajectory]:
    """Sample one step's groups: `cfg.prompts_per_step` tasks, `cfg.group_size` episodes of each."""
    drawn = draw_tasks(tasks, cfg.prompts_per_step, generator)
    return sample_groups(model, make_env(cfg), drawn, tok, cfg, generator)


def zero_advantage_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Tell which groups have equal rewards, and so no gradient: [B] -> bool [B / group_size].

    Raises ValueError as `compute_advantages`.
    """
    groups = _groups(rewards, group_size)
    return groups.amax(1) == groups.amin(1)


def _norm_const(mask: Tensor, cfg: RLConfig) -> float:
    """Return the denominator of the whole batch, so that microbatches add up to it.

    It counts policy tokens for `token_mean` and rows that have one for the other modes, at least
    1; for `constant` it is that many times `max_tokens`.
    """
    mask = mask.bool()
    if cfg.loss_agg_mode == "token_mean":
        return max(float(mask.sum()), 1.0)
    rows = max(float(mask.any(1).sum()), 1.0)
    return rows * cfg.max_tokens if cfg.loss_agg_mode == "constant" else rows


def rl_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, trajs: Sequence[Trajectory], cfg: RLConfig
) -> dict[str, float]:
    """Update the model on sampled groups with the clipped surrogate.

    Args:
        trajs: group after group, as `sample_step` returns them.
        cfg: the advantage, the averaging, the clip; `constant` divides by
            max_tokens * episodes that have a policy token.

    Returns:
        `loss` and `grad_norm` of the last pass, `clip_fraction` over policy tokens of the last pass
        (those of episodes with a gradient), and `zero_advantage`, the share of groups without one.

    Raises:
        ValueError, TypeError: as `collate` and `compute_advantages`.
    """
    batch = collate(trajs, pad_id=0)
    advantages = compute_advantages(batch, cfg)
    norm_const = _norm_const(batch["action_mask"], cfg)
    live = advantages.nonzero()[:, 0]
    live = live[batch["lengths"][live].argsort(stable=True)]  # microbatches of similar length
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
            high = cfg.clip if cfg.clip_high is None else cfg.clip_high
            loss = clipped_surrogate_loss(
                logp,
                old.to(logp.dtype),
                advantages[rows],
                mask,
                cfg.loss_agg_mode,
                norm_const,
                clip_low=cfg.clip,
                clip_high=high,
            )
            loss.backward()
            loss_sum += loss.item()
            ratio = (logp.detach() - old).exp()[mask]
            clipped += int(((ratio < 1 - cfg.clip) | (ratio > 1 + high)).sum())
            tokens += ratio.numel()
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
        optimizer.step()
        if cfg.weight_grid is not None:
            snap_weights(model, cfg.weight_grid)
        stats = {
            "loss": loss_sum,
            "grad_norm": norm.item(),
            "clip_fraction": clipped / max(tokens, 1),
        }
    zero = zero_advantage_groups(batch["rewards"], cfg.group_size)
    return {**stats, "zero_advantage": zero.double().mean().item()}


def _adam(model: nn.Module, cfg: RLConfig) -> torch.optim.Adam:
    # Adam's default eps would turn rounding into steps where gradients all but vanish.
    return torch.optim.Adam(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), eps=1e-5)


def _resume(
    path: Path | None, run: dict[str, Any], steps: int, parts: tuple[Any, Any, torch.Generator]
) -> dict[str, Any]:
    """Put a checkpoint into model, optimizer and generator; return it, or {} if there is none."""
    if path is None or not path.exists():
        return {}
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        len(state["history"])
    except Exception as error:
        raise ValueError(f"{path} is damaged, or no checkpoint of a run: {error!r}") from error
    for key, value in run.items():
        if (had := state.get(key)) != value:
            if isinstance(had, dict) and isinstance(value, dict):  # only what differs
                names = [name for name in had | value if had.get(name) != value.get(name)]
                had, value = ({name: d.get(name) for name in names} for d in (had, value))
            raise ValueError(f"{path.name} has {key} = {had}, this run has {value}")
    if len(state["history"]) > steps:
        raise ValueError(f"{path.name} has {len(state['history'])} steps, more than {steps}")
    model, optimizer, generator = parts
    for name, value in model.state_dict().items():
        had = state["model"].get(name, value).dtype
        if had != value.dtype:
            raise ValueError(f"{path.name} has {name} in {had}, the model in {value.dtype}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    generator.set_state(state["generator"])
    return state


def _save(path: Path, parts: tuple[Any, Any, torch.Generator], **rest: Any) -> None:
    model, optimizer, generator = parts
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    _write_atomically({**state, "generator": generator.get_state(), **rest}, path)


def train_rl(
    model: nn.Module,
    tasks: Sequence[Task],
    tok: Tokenizer,
    cfg: RLConfig,
    steps: int,
    *,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 5,
) -> list[dict[str, float]]:
    """Train a policy in place and return one record per step.

    Args:
        checkpoint: a file to resume from if it exists, and to save to. A run that was killed and
            started again gives the same history and weights, bit for bit, as one that was not.
        checkpoint_every: steps between saves; the last step is always saved.

    Returns:
        Per step: `episodes`, `tokens`, `reward` and the statistics of `rl_update`.

    Raises:
        ValueError: if the checkpoint belongs to another configuration, other tasks or more steps.
    """
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every = {checkpoint_every} must be at least 1")
    generator = torch.Generator().manual_seed(cfg.seed)
    parts = model, _adam(model, cfg), generator
    run = {"cfg": dataclasses.asdict(cfg), "tasks": [task.name for task in tasks]}
    run |= {"rule": None}  # a curriculum has one
    path = None if checkpoint is None else Path(checkpoint)
    history = _resume(path, run, steps, parts).get("history", [])
    for step in progress(range(len(history), steps), desc="train_rl"):
        trajs = sample_step(model, tasks, tok, cfg, generator)
        stats = rl_update(model, parts[1], trajs, cfg)
        reward = sum(traj.reward for traj in trajs) / len(trajs)
        tokens = sum(len(traj.ids) for traj in trajs)
        history.append({"episodes": len(trajs), "tokens": tokens, "reward": reward, **stats})
        if path is not None and ((step + 1) % checkpoint_every == 0 or step + 1 == steps):
            _save(path, parts, history=history, **run)
    return history
