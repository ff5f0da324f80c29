# Generated from chapters/04-grpo.ipynb by tools/export.py. Do not edit: edit the notebook.
"""For the chapter alone: Group-relative policy gradients."""

import concurrent.futures
import ctypes
import dataclasses
import hashlib
import inspect
import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn

from agentrl import check
from agentrl.course.gym import Demonstrator, play
from agentrl.grpo import (
    RLConfig,
    aggregate_loss,
    clipped_surrogate_loss,
    compute_advantages,
    rl_update,
    sample_step,
    save_atomically,
    snap_weights,
    train_rl,
)
from agentrl.gym import BugFixEnv, Task, Tokenizer, build_tokenizer, make_tasks
from agentrl.notebook import progress
from agentrl.policy import TinyAgent, sequence_log_probs
from agentrl.rollout import Trajectory, collate, evaluate

__all__ = [
    "LenientEnv",
    "SilentEnv",
    "behavior_clone",
    "book_config",
    "cached",
    "demonstrate",
    "in_processes",
    "make_rl_base",
    "policy_at",
    "record_run",
    "with_other_goals",
]


def book_config(**fields: Any) -> RLConfig:
    """Return an `RLConfig` whose runs all machines agree on: weights on a grid, a large eps."""
    # Adam's default eps would turn rounding into steps where gradients all but vanish.
    return RLConfig(**{"weight_grid": 2.0**-16, "adam_eps": 1e-5, **fields})


def demonstrate(
    task: Task, tok: Tokenizer, rng: random.Random, who: Demonstrator | None = None
) -> Trajectory:
    """Play one scripted episode; its `sample_logp` is 0, since no policy was asked."""
    env = BugFixEnv(task, tok)
    ids, mine = play(env, (who or Demonstrator()).act(env, rng))
    mask = torch.tensor(mine[1:])
    logp = torch.zeros(len(mask), dtype=torch.float64)
    return Trajectory(torch.tensor(ids), mask, logp, env.reward, env.info)


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
        device = next(model.parameters()).device
        logp = sequence_log_probs(model, batch["ids"].to(device))
        loss = -aggregate_loss(logp, batch["action_mask"].to(device), "token_mean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    snap_weights(model)
    return losses


def _digest(weights: dict[str, Tensor]) -> str:
    """Hash names and values."""
    sha = hashlib.sha256()
    for name, value in weights.items():
        value = value.cpu().contiguous()
        sha.update(name.encode() + ctypes.string_at(value.data_ptr(), value.nbytes))  # no NumPy
    return sha.hexdigest()


def cached(name: str, made_by: Sequence[str], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `make` returned, `weights` and more, from the cache if it is there and sound.

    Args:
        made_by: texts that say how it is made: another text is another result.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentrl"
    folder = Path(os.environ.get("AGENTRL_CACHE", default))
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256("\0".join([*made_by, torch.__version__]).encode()).hexdigest()
    path = folder / f"{name}-{key[:16]}.pt"
    with FileLock(f"{path}.lock"):  # chapters that run side by side make it once
        try:
            saved = torch.load(path, weights_only=True)
            if saved["digest"] == _digest(saved["made"]["weights"]):
                return saved["made"]
        except Exception:  # absent or damaged, in one of many ways: make it again
            pass
        made = make()
        save_atomically({"made": made, "digest": _digest(made["weights"])}, path)
        return made


def make_rl_base(tok: Tokenizer, *, episodes: int = 24_000, seed: int = 0) -> TinyAgent:
    """Return the policy that RL starts from: a clone of the scripted demonstrator.

    It is trained once, in under a minute, and kept in `$AGENTRL_CACHE`, by default
    `~/.cache/agentrl`.

    Args:
        tok: the vocabulary of all tasks.
        episodes: demonstrations, of training tasks.
        seed: seeds the demonstrations and the initial weights.
    """
    model = TinyAgent(len(tok), seed=seed)

    def train() -> dict[str, Any]:
        rng = random.Random(seed)
        tasks = make_tasks("train")
        shown = [demonstrate(rng.choice(tasks), tok, rng) for _ in range(episodes)]
        behavior_clone(model, shown, tok)
        return {"weights": model.state_dict()}

    model.load_state_dict(cached("rl-base", _base_code(tok, episodes, seed), train)["weights"])
    return model


def _base_code(tok: Tokenizer, *numbers: int) -> list[str]:
    """Collect what decides a base policy: the sources of all that makes it."""
    kinds = (Task, Demonstrator, TinyAgent, Trajectory)
    sources = [Path(inspect.getsourcefile(kind)).read_text("utf-8") for kind in kinds]
    code = (behavior_clone, snap_weights, aggregate_loss, demonstrate)
    return [*sources, *map(inspect.getsource, code), str(tok.tokens), str(numbers)]


class SilentEnv(BugFixEnv):
    """An environment whose `TEST` answers nothing."""

    def test(self) -> list[str]:
        return []


class LenientEnv(BugFixEnv):
    """An environment that pays for the visible tests."""

    def grade(self) -> float:
        return float(all(self.run(self.task.visible)))


def with_other_goals(tasks: Sequence[Task]) -> list[Task]:
    """Give each task the goal of another one, drawn among those that differ."""
    rng, goals = random.Random(0), sorted({task.goal for task in tasks})
    others = ([goal for goal in goals if goal[0] != task.goal[0]] for task in tasks)
    return [
        dataclasses.replace(task, goal=rng.choice(other))
        for task, other in zip(tasks, others, strict=True)
    ]


def record_run(job: tuple[int, int, str]) -> dict[str, Any]:
    """Train from the base policy with 16 groups of 8 a step, and evaluate; kept like that policy.

    Args:
        job: the seed, the steps, and whose verdict pays: `grading` tests or the `visible` ones.

    Returns:
        `weights` by step and name, as `policy_at` reads them; `history` of `train_rl`; `scores` on
        the held-out tasks, (pass rate, standard error): `trained`, from 128 episodes of each task;
        where grading tests pay also `other goal` and `silent test`, from fewer.
    """
    seed, steps, scorer = job
    tok, cfg = build_tokenizer(make_tasks()), book_config(seed=seed, prompts_per_step=16)
    paid = {"grading": BugFixEnv, "visible": LenientEnv}[scorer]
    heldout = make_tasks("heldout")

    def sampler(model: nn.Module, tasks: Sequence[Task], *rest: Any) -> list[Trajectory]:
        return sample_step(model, tasks, *rest, env_factory=paid)

    def train() -> dict[str, Any]:
        model, kept = make_rl_base(tok), {}

        def keep(now: nn.Module, history: list[dict[str, Any]]) -> None:
            if len(history) in (10, 30, steps):
                state = now.state_dict().items()
                kept.update({f"{len(history)}.{name}": w.clone() for name, w in state})

        history = train_rl(
            model, make_tasks("train"), tok, cfg, steps, sampler=sampler, on_step=keep
        )
        silent = partial(evaluate, env_factory=SilentEnv)
        plan = [("trained", evaluate, heldout, 128)]
        if scorer == "grading":
            plan += [("other goal", evaluate, with_other_goals(heldout), 16)]
            plan += [("silent test", silent, heldout, 4)]
        scores = {}
        for name, how, tasks, episodes in plan:
            found = how(model, tasks, tok, episodes)
            scores[name] = (found["pass_rate"], found["stderr"])
        return {"weights": kept, "history": history, "scores": scores}

    code = (record_run, train_rl, rl_update, clipped_surrogate_loss, compute_advantages)
    made_by = [*_base_code(tok, 0), *map(inspect.getsource, code), str(cfg), str(job)]
    return cached("rl-run", made_by, train)


def policy_at(run: Mapping[str, Any], step: int, tok: Tokenizer) -> TinyAgent:
    """Return the policy of a run after 10, 30 or all steps."""
    model, prefix = TinyAgent(len(tok)), f"{step}."
    weights = run["weights"].items()
    found = {name.removeprefix(prefix): w for name, w in weights if name.startswith(prefix)}
    model.load_state_dict(found)
    return model


def _one_thread() -> None:
    """Prepare a worker process."""
    os.environ["AGENTRL_PROGRESS"] = "0"  # the bar is the parent's
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    # Without this a worker outlives a parent that is killed.
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def in_processes(
    function: Callable[[Any], Any], jobs: Sequence[Any], workers: int | None = None
) -> list[Any]:
    """Call an importable function for each job in processes of their own; results in order.

    Args:
        workers: processes; by default one per CPU core, at most 8. Results do not depend on it.
    """
    most = min(os.cpu_count() or 1, 8) if workers is None else check.integer("workers", workers)
    spawn = multiprocessing.get_context("spawn")  # a forked child may not use CUDA
    workers = max(1, min(len(jobs), most))
    with concurrent.futures.ProcessPoolExecutor(workers, spawn, _one_thread) as pool:
        return list(progress(pool.map(function, jobs), desc="runs", total=len(jobs)))
