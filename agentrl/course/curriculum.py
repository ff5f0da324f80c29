# Generated from chapters/09-curriculum.ipynb by tools/export.py. Do not edit: edit the notebook.
"""For the chapter alone: Curriculum by pass rate."""

import concurrent.futures
import importlib
import math
import multiprocessing
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from agentrl import check
from agentrl.course.grpo import book_config, make_rl_base
from agentrl.curriculum import train_curriculum
from agentrl.gym import build_tokenizer, make_tasks
from agentrl.notebook import progress
from agentrl.rollout import evaluate

__all__ = ["run_arm", "run_arms"]


def run_arm(job: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Train from the base policy on the training tasks, and score on the held-out ones.

    Args:
        job: `cfg`, fields for `book_config` as a dictionary; `steps`, the most there can be; and
            optionally `budget`, episodes after which the run ends; `score_every`, episodes between
            scores on the way; `device`; and arguments of `train_curriculum`, but no checkpoint.

    Returns:
        `history`, as of `train_curriculum`, and `scores`: `episodes` spent, the `pass_rate` from
        32 episodes of each task, and its `stderr`; the last one at the end of the run.
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

    cfg = book_config(**job["cfg"])
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
    """
    most = min(os.cpu_count() or 1, 8) if workers is None else check.integer("workers", workers)
    workers = max(1, min(len(jobs), most))
    spawn = multiprocessing.get_context("spawn")  # a forked child may not use CUDA
    # By its name in the package: a new process cannot import what a notebook has defined.
    ours = importlib.import_module("agentrl.course.curriculum")
    with concurrent.futures.ProcessPoolExecutor(workers, spawn, ours._one_thread) as pool:
        return list(progress(pool.map(ours.run_arm, jobs), desc="runs", total=len(jobs)))
