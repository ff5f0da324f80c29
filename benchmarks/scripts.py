"""The topics that are scripts of their own, `logits.py` and `rollout.py`, as topics like others.

    python -m benchmarks logits rollout

Each script runs as it is, and what it writes becomes rows. The growth of both is measured here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import agentrl as arl
from benchmarks import common
from benchmarks.common import ROOT, Row, growth, say, timed

HEADS = ("full", "fused_log_probs", "fused_policy_loss", "torch linear_cross_entropy")
TOKENS = {"tiny": (2, 20), "full": (4, 40, 400, 4_000)}
# The long shape in bf16 takes minutes a head, so only the heads that one would pick run it, once.
LOGITS_RUNS = (
    ("--shapes", "float32", "bf16-short", "--repeats", "2"),
    ("--shapes", "bf16-long", "--repeats", "1", "--only", "fused", "cut", "liger", "torch"),
)
EPISODES = {"tiny": (1, 4), "full": (1, 10, 100, 1_000)}


def run_script(name: str, device: str, *options: str) -> Row:
    """Run a script with `--out` and return what it wrote."""
    if device != "cpu":
        options = (*options, "--device", device)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / f"{name}.py")]
        command += ["--out", str(out), *options]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        if done.returncode or not out.exists():
            return {"failed": f"{name}.py ended with status {done.returncode}"}
        return json.loads(out.read_text(encoding="utf-8"))


# Output heads


def head_rows(result: Row) -> list[Row]:
    """One row per shape and head of what `logits.py` writes."""
    rows = []
    for shape, found in result["shapes"].items():
        for who, head in found["heads"].items():
            row = {"what": "head", "case": shape, "who": who}
            if "failed" in head:
                rows.append(row | {"failed": common.reason(RuntimeError(head["failed"]))})
                continue
            times = head.get("seconds", [head.get("median_s")])
            row |= {"low": min(times), "high": max(times), "n": len(times)}
            row |= {"seconds": head["median_s"], "of_limit": head.get("matrix_share")}
            row |= {"limit": "products, measured between the runs"}
            kept = ("peak_mb", "logp_error", "grad_error", "products", "median_cpu_s")
            rows.append(row | {key: head[key] for key in kept if key in head})
    return rows


def measure_logits(size: str, device: str) -> Row:
    from benchmarks import logits

    rows: list[Row] = []
    if size == "full":
        for options in LOGITS_RUNS:
            threads = str(torch.get_num_threads())
            given = ("--python", sys.executable, "--threads", threads)
            result = run_script("logits", device, *options, *given)
            failed = [{"what": "head", "case": options[1], "who": "logits.py", **result}]
            rows += head_rows(result) if "shapes" in result else failed
    width, words = 256, logits.V
    roof = arl.measure_accelerator(device, size=256 if size == "tiny" else 2048)

    def expected(tokens: float) -> float:
        """Weight and gradient are moved whatever the tokens; the products grow with them."""
        moved = 4 * words * width * 4  # read twice, and a gradient written and read
        return moved / roof.bandwidth + 3 * 2 * tokens * width * words / roof.peak("float32")

    points: dict[str, dict[int, Row]] = {head: {} for head in HEADS}
    for tokens in TOKENS[size]:
        given = logits.inputs("float32", tokens, width)
        runs = {head: lambda head=head, given=given: logits.run(head, *given) for head in HEADS}
        for head, row in timed({h: _drop(run) for h, run in runs.items()}, 2, longest=4.0).items():
            points[head][tokens] = row
            row = {"what": "growth", "case": f"{tokens:,} tokens", "who": head, **row}
            products = logits.HEADS[head][1]
            rows.append(row | {"flops": products * 2 * tokens * width * words, "dtype": "float32"})
        say(f"logits: growth, {tokens} tokens")
    curves = [growth(head, "tokens", p, "the roofline's", expected) for head, p in points.items()]
    return {"rows": rows, "growth": curves}


def _drop(run: Callable[[], Any]) -> Callable[[], None]:
    return lambda: run() is None or None


# Rollouts


def rollout_rows(result: Row) -> list[Row]:
    """Rows of what `rollout.py` writes."""
    rows = []
    for dtype in ("float64", "float32"):
        found = result["generate"][dtype]
        case = f"{result['generate']['rows']} rows, {dtype}"
        for who, name in (("agentrl sample_groups", "ours"), ("transformers generate", "generate")):
            rate = found[f"{name}_tokens_per_s"]
            tokens = result["generate"]["rows"] * result["generate"]["new_tokens_per_row"]
            row = {"what": "sampling", "case": case, "who": who, "tokens_per_s": rate}
            # Of the limit: the products of one forward pass per token, and nothing else.
            flops = 2 * found["parameters" if name == "ours" else "peer_parameters"] * tokens
            rows.append(row | {"seconds": tokens / rate, "flops": flops, "dtype": dtype})
    cache = result["cache"]
    for who in ("cached", "uncached", "lock_step"):
        if f"{who}_tokens_per_s" not in cache:
            continue
        rate = cache[f"{who}_tokens_per_s"]
        row = {"what": "gym", "case": f"{cache['episodes']} episodes", "who": f"agentrl, {who}"}
        rows.append(row | {"tokens_per_s": rate, "seconds": cache["tokens"] / rate})
    step = result["step"]
    parts = {"sampling": "sampling_s", "update": "update_s"}
    for who, key in parts.items():
        rows.append({"what": "one step", "case": who, "who": "agentrl", "seconds": step[key]})
    return rows


def measure_rollout(size: str, device: str) -> Row:
    from benchmarks import rollout

    rows: list[Row] = []
    if size == "full":
        result = run_script("rollout", device, "--threads", "1")  # it measures CPU time
        rows = (
            rollout_rows(result)
            if "generate" in result
            else [{"what": "sampling", "who": "rollout.py", **result}]
        )
    tok = arl.build_tokenizer(arl.make_tasks())
    task, model = arl.make_tasks("train")[:1], arl.TinyAgent(len(tok), dtype=torch.float32)
    cfg = SimpleNamespace(group_size=1, temperature=1.0)
    points: dict[int, Row] = {}
    for count in EPISODES[size]:

        def sample(count: int = count) -> None:
            gen = torch.Generator().manual_seed(0)
            factory = lambda task, tok: rollout.Endless([1, 2, 3, 4])  # noqa: E731
            arl.sample_groups(model, factory, task * count, tok, cfg, gen)

        points[count] = timed({"": sample}, 3)[""]
        row = {"what": "growth", "case": f"{count:,} episodes", "who": "agentrl sample_groups"}
        flops = 2 * sum(p.numel() for p in model.parameters()) * count * rollout.NEW_TOKENS
        rows.append(row | points[count] | {"flops": flops, "dtype": "float32"})
    curve = growth("agentrl sample_groups", "episodes", points, "at most n", float)
    return {"rows": rows, "growth": [curve]}


TOPICS = {"logits": measure_logits, "rollout": measure_rollout}

if __name__ == "__main__":
    topic = sys.argv.pop(1)
    common.main(topic, SimpleNamespace(measure=TOPICS[topic]))
