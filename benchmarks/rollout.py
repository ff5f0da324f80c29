"""Speed of sampling and of one GRPO step: with and without a cache, and beside `transformers`.

    python benchmarks/rollout.py
    python benchmarks/rollout.py --repeats 15 --threads 2

Everything runs in one process, in turn, after a warm-up, so that each part meets the same machine;
medians of CPU time are reported, and ratios of medians. The policy is the base policy of chapter 4,
made if it is not cached. Two samplers without a cache stand beside ours: `use_cache=False`, which
reads whole prefixes before each draw, and a lock-step one, which feeds a tool's answer token by
token and so runs every row at every position; of that one only the forward passes are timed.
`generate` of `transformers` samples from a GPT-2 with the same width, depth, heads, vocabulary and
number of positions, with its own cache; both draw the same number of new tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

import agentrl as arl
from agentrl import gym

OUT = Path(__file__).resolve().parents[1] / "_build" / "benchmarks" / "rollout.json"
CFG = arl.RLConfig()
NEW_TOKENS = 64  # per row, beside `generate`


def seconds(fn: Callable[[], Any]) -> float:
    start = time.process_time()
    fn()
    return time.process_time() - start


def medians(parts: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Run each part once to warm up, then all of them in turn; return median seconds."""
    times = {name: [] for name in parts}
    for turn in range(repeats + 1):
        for name, fn in parts.items():
            taken = seconds(fn)
            if turn:
                times[name].append(taken)
    return {name: statistics.median(values) for name, values in times.items()}


def sample(
    model: torch.nn.Module,
    tok: arl.Tokenizer,
    factory: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> list[arl.Trajectory]:
    """Sample the same 64 episodes each time: 8 tasks, 8 episodes of each."""
    generator = torch.Generator().manual_seed(0)
    tasks = arl.draw_tasks(arl.make_tasks("train"), CFG.prompts_per_step, generator)
    factory = factory or arl.make_env(CFG)
    return arl.sample_groups(model, factory, tasks, tok, CFG, generator, **kwargs)


@torch.no_grad()
def lock_step(model: torch.nn.Module, trajs: list[arl.Trajectory]) -> None:
    """Run the passes of a sampler without a cache that adds one token to every row at a time."""
    ids = arl.collate(trajs, 0)["ids"]
    lengths = torch.tensor([len(traj.ids) for traj in trajs])
    for t in range(1, int(lengths.max())):
        model(ids[lengths > t, :t])[:, -1]


def cache_speed(model: torch.nn.Module, tok: arl.Tokenizer, repeats: int) -> dict[str, Any]:
    cached, uncached = sample(model, tok), sample(model, tok, use_cache=False)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(cached, uncached, strict=True))
    tokens = sum(len(traj.ids) for traj in cached)
    times = medians(
        {
            "cached": lambda: sample(model, tok),
            "uncached": lambda: sample(model, tok, use_cache=False),
            "lock_step": lambda: lock_step(model, cached),
        },
        repeats,
    )
    rates = {f"{name}_tokens_per_s": tokens / value for name, value in times.items()}
    longest = max(len(traj.ids) for traj in cached)
    return {
        "episodes": len(cached),
        "tokens": tokens,
        "longest": longest,
        **rates,
        "speedup": times["uncached"] / times["cached"],
        "speedup_lock_step": times["lock_step"] / times["cached"],
    }


class Endless:
    """An environment that says nothing and ends after `NEW_TOKENS` tokens."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.done, self.reward, self.info, self.taken = prompt, False, 0.0, {}, 0

    def reset(self) -> list[int]:
        return list(self.prompt)

    def step(self, token: int) -> tuple[list[int], bool]:
        self.taken += 1
        self.done = self.taken == NEW_TOKENS
        return [], self.done


def against_generate(tok: arl.Tokenizer, repeats: int) -> dict[str, Any]:
    prompt, batch = [1, 20, 21, 2], CFG.prompts_per_step * CFG.group_size
    config = transformers.GPT2Config(
        vocab_size=len(tok),
        n_positions=256,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    results: dict[str, Any] = {"rows": batch, "new_tokens_per_row": NEW_TOKENS}
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        torch.manual_seed(0)
        peer = transformers.GPT2LMHeadModel(config).to(dtype).eval()
        ours = arl.TinyAgent(len(tok), dtype=dtype)
        ids = torch.tensor([prompt] * batch)

        def generate(peer: Any = peer, ids: torch.Tensor = ids) -> torch.Tensor:
            with torch.no_grad():
                return peer.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    top_k=0,
                    min_new_tokens=NEW_TOKENS,
                    max_new_tokens=NEW_TOKENS,
                    use_cache=True,
                )

        def sampled(ours: Any = ours) -> list[arl.Trajectory]:
            return sample(ours, tok, lambda task, tok: Endless(prompt))

        assert generate().shape == (batch, len(prompt) + NEW_TOKENS)
        assert {len(traj.ids) for traj in sampled()} == {len(prompt) + NEW_TOKENS}
        times = medians({"ours": sampled, "generate": generate}, repeats)
        results[name] = {
            **{f"{k}_tokens_per_s": batch * NEW_TOKENS / v for k, v in times.items()},
            "speedup": times["generate"] / times["ours"],
            "parameters": sum(p.numel() for p in ours.parameters()),
            "peer_parameters": sum(p.numel() for p in peer.parameters()),
        }
    return results


class Timed(arl.BugFixEnv):
    """Adds up the time spent inside the environment."""

    spent = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        start = time.process_time()
        super().__init__(*args, **kwargs)
        Timed.spent += time.process_time() - start

    def step(self, token: int) -> tuple[list[int], bool]:
        start = time.process_time()
        result = super().step(token)
        Timed.spent += time.process_time() - start
        return result


def one_step(model: torch.nn.Module, tok: arl.Tokenizer, repeats: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"sampling": [], "update": [], "environment": [], "cold": []}
    for turn in range(repeats + 1):
        learner = copy.deepcopy(model)
        optimizer = torch.optim.Adam(learner.parameters(), lr=CFG.lr)
        start = time.process_time()
        trajs = sample(learner, tok)
        middle = time.process_time()
        arl.rl_update(learner, optimizer, trajs, CFG)
        end = time.process_time()
        row = {"sampling": middle - start, "update": end - middle}
        for name in ("cold", "environment"):
            if name == "cold":
                gym._compile.cache_clear()  # no candidate program has been seen before
            Timed.spent = 0.0
            sample(learner, tok, Timed)
            row[name] = Timed.spent
        if turn:
            for name, value in row.items():
                times[name].append(value)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "sampling_s": median["sampling"],
        "update_s": median["update"],
        "step_s": median["sampling"] + median["update"],
        "environment_share": median["environment"] / median["sampling"],
        "environment_share_cold": median["cold"] / median["sampling"],
        "live_episodes": int(
            arl.compute_advantages(arl.collate(sample(model, tok), 0), CFG).count_nonzero()
        ),
    }


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def show(result: SimpleNamespace) -> None:
    cache, peer, step = result.cache, result.generate, result.step
    print(f"{result.machine['cpu']}, {result.machine['threads']} threads, float64 unless said")
    print(
        f"64 episodes, {cache['tokens']} tokens, longest {cache['longest']}:"
        f" cached {cache['cached_tokens_per_s']:.0f} tokens/s,"
        f" uncached {cache['uncached_tokens_per_s']:.0f}, ratio {cache['speedup']:.1f};"
        f" uncached in lock step {cache['lock_step_tokens_per_s']:.0f},"
        f" ratio {cache['speedup_lock_step']:.1f}"
    )
    for name in ("float64", "float32"):
        row = peer[name]
        print(
            f"{peer['rows']} rows, {peer['new_tokens_per_row']} new tokens, {name}:"
            f" ours {row['ours_tokens_per_s']:.0f} tokens/s,"
            f" generate {row['generate_tokens_per_s']:.0f}, ratio {row['speedup']:.1f}"
        )
    print(
        f"one step: sampling {step['sampling_s']:.3f} s, update {step['update_s']:.3f} s"
        f" ({step['live_episodes']} of 64 episodes have an advantage),"
        f" together {step['step_s']:.3f} s; environment {step['environment_share']:.1%} of"
        f" sampling, {step['environment_share_cold']:.1%} with no program seen before"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    tok = arl.build_tokenizer(arl.make_tasks())
    model = arl.make_rl_base(tok)
    result = SimpleNamespace(
        machine=machine(),
        cache=cache_speed(model, tok, args.repeats),
        generate=against_generate(tok, args.repeats),
        step=one_step(model, tok, args.repeats),
    )
    show(result)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(vars(result), indent=1) + "\n")
    print(f"written: {args.out.name}")


if __name__ == "__main__":
    main()
