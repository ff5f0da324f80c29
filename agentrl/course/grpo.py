# Generated from chapters/04-grpo.ipynb by tools/export.py. Do not edit: edit the notebook.
"""For the chapter alone: Group-relative policy gradients."""

import ctypes
import dataclasses
import hashlib
import inspect
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn

from agentrl.grpo import RLConfig, aggregate_loss, save_atomically, snap_weights
from agentrl.gym import BugFixEnv, Task, Tokenizer, make_tasks, run_tests, source_of
from agentrl.notebook import progress
from agentrl.policy import TinyAgent, sequence_log_probs
from agentrl.rollout import Trajectory, collate

__all__ = ["Demonstrator", "behavior_clone", "book_config", "demonstrate", "make_rl_base"]


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


def book_config(**fields: Any) -> RLConfig:
    """Return an `RLConfig` whose runs all machines agree on: weights on a grid, a large eps."""
    # Adam's default eps would turn rounding into steps where gradients all but vanish.
    return RLConfig(**{"weight_grid": 2.0**-16, "adam_eps": 1e-5, **fields})


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
    code = (behavior_clone, snap_weights, aggregate_loss, demonstrate)
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
            save_atomically({"weights": weights, "digest": _digest(weights)}, path)
    model.load_state_dict(weights)
    return model
