# Generated from chapters/09-curriculum.ipynb by tools/export.py. Do not edit: edit the notebook.
"""For the chapter alone: Curriculum by pass rate."""

import inspect
from pathlib import Path
from typing import Any

from agentrl import check
from agentrl.course.grpo import book_config, cached, make_rl_base
from agentrl.course.gym import Demonstrator
from agentrl.curriculum import train_curriculum
from agentrl.grpo import train_rl
from agentrl.gym import Task, build_tokenizer, make_tasks
from agentrl.policy import TinyAgent
from agentrl.rollout import Trajectory, evaluate

__all__ = ["record_arm"]

_ARMS = {
    "all": {"prompts_per_step": 16, "low": -1.0, "high": 2.0},
    "filter": {"prompts_per_step": 14, "revisit": 2},
}


def record_arm(job: tuple[str, int, int]) -> dict[str, Any]:
    """Train one arm from the base policy with a fixed denominator, and evaluate it; kept on disk.

    Args:
        job: the arm, `all` or `filter`, the seed, and the steps.

    Returns:
        `weights` at the end; `history`, as of `train_curriculum`; `score`, the held-out pass rate
        from 16 episodes of each task and its standard error.
    """
    arm, seed, steps = job
    check.one_of("arm", arm, tuple(_ARMS))
    options = dict(_ARMS[arm])
    prompts = options.pop("prompts_per_step")
    cfg = book_config(seed=seed, prompts_per_step=prompts, norm_const=1024.0)

    def train() -> dict[str, Any]:
        tok = build_tokenizer(make_tasks())
        model = make_rl_base(tok)
        history = train_curriculum(model, make_tasks("train"), tok, cfg, steps, **options)
        found = evaluate(model, make_tasks("heldout"), tok, episodes=16)
        score = (found["pass_rate"], found["stderr"])
        return {"weights": model.state_dict(), "history": history, "score": score}

    kinds = (Task, Demonstrator, TinyAgent, Trajectory, train_rl, book_config, train_curriculum)
    sources = [Path(inspect.getsourcefile(kind)).read_text("utf-8") for kind in kinds]
    made_by = [*sources, inspect.getsource(record_arm), str(cfg), str(options), str(job)]
    return cached("arm", made_by, train)
