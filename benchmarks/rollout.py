"""Rates of sampling beside `transformers`, with and without a cache, and the time of one GRPO step.

    python -m benchmarks rollout
    python -m benchmarks rollout --device cuda

`generate` of `transformers` samples from a GPT-2 with the same width, depth, heads, vocabulary and
number of positions, with its default cache and with the static one that its documentation
recommends for speed; all draw the same number of new tokens. In the gym the policy is the base
policy of chapter 4, made if it is not cached. Two samplers without a cache stand beside ours:
`use_cache=False`, which reads whole prefixes before each draw, and one in lock step, which feeds a
tool's answer token by token and so runs every row at every position; of that one only the forward
passes are timed. FLOPs are 2 per parameter and token that is read or sampled, 6 for an update.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

import agentrl as arl
from agentrl import gym
from benchmarks import common
from benchmarks.common import Row, growth, key, say, timed

CFG = arl.RLConfig()
PROMPTS = {"tiny": 1, "full": 8, "cuda": 64}  # each with a group of episodes
MODEL = {  # beside `generate`
    "tiny": {"d_model": 16, "n_layers": 1, "n_heads": 2},
    "full": {"d_model": 64, "n_layers": 2, "n_heads": 4},
    "cuda": {"d_model": 1024, "n_layers": 8, "n_heads": 16},
}
DTYPES = {"tiny": ("float32",), "full": ("float64", "float32"), "cuda": ("float32", "bfloat16")}
NEW_TOKENS = {"tiny": 8, "full": 64, "cuda": 240}
GROWTH = {"tiny": (1, 4), "full": (1, 10, 100, 1_000), "cuda": (10, 100, 1_000, 10_000)}
REPEATS = {"tiny": 1, "full": 7, "cuda": 7}
PROMPT = [1, 20, 21, 2]


class Endless:
    """An environment that says nothing and ends after a number of tokens."""

    def __init__(self, new_tokens: int) -> None:
        self.left, self.done, self.reward, self.info = new_tokens, False, 0.0, {}

    def reset(self) -> list[int]:
        return list(PROMPT)

    def step(self, token: int) -> tuple[list[int], bool]:
        self.left -= 1
        self.done = not self.left
        return [], self.done


@cache
def gym_words() -> arl.Tokenizer:
    return arl.build_tokenizer(arl.make_tasks())


def endless(model: torch.nn.Module, rows: int, new_tokens: int) -> int:
    """Sample rows of the same length; returns the number of new tokens."""
    cfg = SimpleNamespace(group_size=rows, temperature=1.0)
    factory = lambda task, tok: Endless(new_tokens)  # noqa: E731
    gen = torch.Generator().manual_seed(0)
    trajs = arl.sample_groups(model, factory, [None], gym_words(), cfg, gen)
    return sum(len(traj.ids) - len(PROMPT) for traj in trajs)


@cache
def gpt2(words: int, which: str, dtype: torch.dtype, device: str) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    shape = MODEL[which]
    config = transformers.GPT2Config(
        vocab_size=words,
        n_positions=256,
        n_embd=shape["d_model"],
        n_layer=shape["n_layers"],
        n_head=shape["n_heads"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).to(dtype).to(device).eval()


def against_generate(size: str, device: str) -> list[Row]:
    which, words = key(size, device), len(gym_words())
    rows, new = PROMPTS[which] * CFG.group_size, NEW_TOKENS[which]
    found = []
    for dtype in DTYPES[which]:
        kind = getattr(torch, dtype)
        ours = arl.TinyAgent(words, dtype=kind, **MODEL[which]).to(device)
        peer = partial(gpt2, words, which, kind, device)

        @torch.no_grad()
        def generate(peer: Callable[[], Any] = peer, **options: Any) -> int:
            ids = torch.tensor([PROMPT] * rows, device=device)
            made = peer().generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                min_new_tokens=new,
                max_new_tokens=new,
                **options,
            )
            return made[:, len(PROMPT) :].numel()

        runs = {
            "agentrl sample_groups": partial(endless, ours, rows, new),
            "transformers generate": generate,
            "transformers generate, static cache": partial(generate, cache_implementation="static"),
        }
        for who, row in timed(runs, REPEATS[which], device=device).items():
            case = {"what": "sampling", "case": f"{rows} rows, {dtype}", "who": who}
            if "seconds" in row:
                model = ours if who.startswith("agentrl") else peer()
                row |= rates(model, row.pop("value"), row["seconds"])
            found.append(case | row | {"dtype": dtype})
        say(f"rollout: {dtype}")
    return found


def rates(model: torch.nn.Module, tokens: int, seconds: float, each: int = 2) -> Row:
    """Tokens per second, and the FLOPs of `each` per parameter and token."""
    flops = each * sum(p.numel() for p in model.parameters()) * tokens
    return {"tokens": tokens, "tokens_per_s": tokens / seconds, "flops": flops}


@torch.no_grad()
def lock_step(model: torch.nn.Module, trajs: list[arl.Trajectory], device: str) -> None:
    """Run the passes of a sampler without a cache that adds one token to every row at a time."""
    ids = arl.collate(trajs, 0)["ids"].to(device)
    lengths = torch.tensor([len(traj.ids) for traj in trajs], device=device)
    for t in range(1, ids.shape[1]):
        model(ids[lengths > t, :t])[:, -1]


class Timed(arl.BugFixEnv):
    """Adds up the time spent inside the environment."""

    spent = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        super().__init__(*args, **kwargs)
        Timed.spent += time.perf_counter() - start

    def step(self, token: int) -> tuple[list[int], bool]:
        start = time.perf_counter()
        result = super().step(token)
        Timed.spent += time.perf_counter() - start
        return result


def in_the_gym(size: str, device: str) -> list[Row]:
    """The same episodes each time: how fast they are sampled, and the parts of one GRPO step."""
    which, tok = key(size, device), gym_words()
    model = arl.TinyAgent(len(tok), **MODEL["tiny"]) if size == "tiny" else arl.make_rl_base(tok)
    model = model.to(device)
    tasks = arl.draw_tasks(
        arl.make_tasks("train"), PROMPTS[which], torch.Generator().manual_seed(0)
    )

    def sample(factory: Any = None, **options: Any) -> list[arl.Trajectory]:
        gen = torch.Generator().manual_seed(0)
        return arl.sample_groups(
            model, factory or arl.make_env(CFG), tasks, tok, CFG, gen, **options
        )

    def environment(cold: bool) -> None:
        if cold:
            gym._compile.cache_clear()  # no candidate program has been seen before
        Timed.spent = 0.0
        start = time.perf_counter()
        sample(Timed)
        shares[cold].append(Timed.spent / (time.perf_counter() - start))

    trajs, shares = sample(), {True: [], False: []}
    uncached = sample(use_cache=False)
    same = all(torch.equal(a.ids, b.ids) for a, b in zip(trajs, uncached, strict=True))
    tokens = sum(len(traj.ids) for traj in trajs)
    rewards = [traj.reward for traj in trajs]
    live = arl.compute_advantages(rewards, CFG.group_size).nonzero()[:, 0].tolist()
    learned = sum(len(trajs[i].ids) for i in live)
    learner = copy.deepcopy(model)
    optimizer = torch.optim.Adam(learner.parameters(), lr=CFG.lr)
    runs = {
        "agentrl, cached": sample,
        "agentrl, uncached": lambda: sample(use_cache=False),
        "agentrl, lock_step": lambda: lock_step(model, trajs, device),
        "agentrl, update": lambda: arl.rl_update(learner, optimizer, trajs, CFG),
    }
    rows = []
    for who, row in timed(runs, REPEATS[which], device=device).items():
        what, each, count = "gym", 2, tokens
        if who == "agentrl, update":
            what, each, count = "update", 6, learned
        case = {"what": what, "case": f"{len(trajs)} episodes", "who": who, "valid": same}
        if "seconds" in row:
            case |= rates(model, count, row["seconds"], each) | {"dtype": "float64"}
        rows.append(case | row)
    for cold in (True, False):
        for _ in range(REPEATS[which]):
            environment(cold)
        case = "no program seen before" if cold else "programs seen before"
        row = {"what": "environment, share of sampling", "case": case, "who": "agentrl"}
        share = common.summary(shares[cold])
        row |= {"share": share["seconds"], "least": share["low"], "most": share["high"]}
        rows.append(row | {"n": share["n"]})
    say("rollout: gym")
    return rows


def curve(size: str, device: str) -> tuple[list[Row], Row]:
    which, rows = key(size, device), []
    model = arl.TinyAgent(len(gym_words()), dtype=torch.float32).to(device)
    points: dict[int, Row] = {}
    for count in GROWTH[which]:
        run = partial(endless, model, count, 64)
        row = timed({"": run}, 3, device=device)[""]
        points[count] = row
        case = {"what": "growth", "case": f"{count:,} episodes", "who": "agentrl sample_groups"}
        if "seconds" in row:
            case |= rates(model, row.pop("value"), row["seconds"]) | {"dtype": "float32"}
        rows.append(case | row)
    return rows, growth("agentrl sample_groups", "episodes", points, "at most n", float)


def measure(size: str, device: str) -> Row:
    rows, found = curve(size, device)
    rows = against_generate(size, device) + in_the_gym(size, device) + rows
    return {"rows": rows, "growth": [found]}


if __name__ == "__main__":
    common.main("rollout")
