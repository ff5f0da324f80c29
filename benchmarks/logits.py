"""Time and peak memory of output heads side by side: ours, the plain ones, and other libraries'.

    python benchmarks/logits.py                  # makes an environment for the other libraries
    python benchmarks/logits.py --python PATH    # or uses one that has them
    python benchmarks/logits.py --only fused_log_probs torch --repeats 5

All heads run in one process, in turn, so that each meets the same machine; medians are reported.
Memory is the high-water mark of a process of its own above what it held before, for one forward and
backward pass. Errors are against float64 on the same inputs. A head that fails is listed with the
reason. The score is the rate of the matrix products that a head executes against the best rate that
this machine shows in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "_build" / "benchmarks"
PEERS = ["trl==1.16.0", "liger-kernel==0.8.5", "cut-cross-entropy==25.1.1"]
# verl pins old versions of what the others need, and its head needs none of the rest.
PEERS_ALONE = ["verl==0.9.1"]
PEERS_OF_VERL = ["ray", "tensordict", "pyvers", "cloudpickle", "hydra-core", "codetiming"]
V = 151_936
SHAPES = {  # name: dtype, tokens, features
    "float32": ("float32", 4096, 256),
    "bf16-short": ("bfloat16", 256, 1024),
    "bf16-long": ("bfloat16", 4096, 1024),
}


# Each head returns a scalar loss, sum of upstream * log p, and the log-probs [T]. -----------------


def _pair(logp, upstream):
    return (logp * upstream).sum(), logp


def _plain(h, w, ids):
    import torch

    logits = torch.nn.functional.linear(h, w)
    return torch.log_softmax(logits.float(), -1).gather(-1, ids[..., None])[..., 0]


def full(h, w, ids, upstream):
    return _pair(_plain(h, w, ids), upstream)


def chunked(h, w, ids, upstream):
    import torch

    parts = [_plain(a, w, i) for a, i in zip(h.split(1024), ids.split(1024), strict=True)]
    return _pair(torch.cat(parts), upstream)


def checkpointed(h, w, ids, upstream):
    from agentrl.logits import checkpointed_log_probs

    return _pair(checkpointed_log_probs(h[None], w, ids[None])[0], upstream)


def fused_log_probs(h, w, ids, upstream):
    from agentrl.logits import fused_log_probs

    return _pair(fused_log_probs(h, w, ids), upstream)


def fused_policy_loss(h, w, ids, upstream):
    from agentrl.logits import fused_policy_loss

    loss, logp = fused_policy_loss(
        h[None], w, ids[None], -upstream[None], norm_const=1.0, return_logp=True
    )
    return loss, logp[0]


def trl_selective(h, w, ids, upstream):
    from trl.trainer.utils import selective_log_softmax

    return _pair(selective_log_softmax((h @ w.T)[None], ids[None])[0], upstream)


def trl_chunked(h, w, ids, upstream):
    from trl.kernels import ChunkedLogProbFunction

    outputs = ChunkedLogProbFunction.apply(h, w, None, ids, 1.0, 8192, None, 1.0, ())
    return _pair(outputs[0], upstream)


def verl(h, w, ids, upstream):
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return _pair(FusedLinearForPPO()(h, w, ids)[0], upstream)


def cut_cross_entropy(h, w, ids, upstream):
    from cut_cross_entropy import linear_cross_entropy

    return _pair(-linear_cross_entropy(h, w, ids, impl="torch_compile", reduction="none"), upstream)


def liger(h, w, ids, upstream):
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    return _pair(LigerFusedLinearPPOBase.chunk_forward(h[None], w, ids[None])[0], upstream)


def torch_linear_cross_entropy(h, w, ids, upstream):
    import torch

    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256, chunking_method=None)
    loss = torch.nn.functional.linear_cross_entropy(h, w, ids, reduction="none", options=options)
    return _pair(-loss, upstream)


HEADS: dict[str, tuple[Callable, int, str]] = {  # function, products it executes, whose it is
    "full": (full, 3, "plain"),
    "chunked": (chunked, 3, "plain"),
    "checkpointed": (checkpointed, 4, "ours"),
    "fused_log_probs": (fused_log_probs, 4, "ours"),
    "fused_policy_loss": (fused_policy_loss, 3, "ours"),
    "trl selective_log_softmax": (trl_selective, 3, "peer"),
    "trl ChunkedLogProbFunction": (trl_chunked, 4, "peer"),
    "verl FusedLinearForPPO": (verl, 4, "peer"),
    "cut-cross-entropy torch_compile": (cut_cross_entropy, 3, "peer"),
    "liger chunk_forward": (liger, 4, "peer"),
    "torch linear_cross_entropy": (torch_linear_cross_entropy, 4, "peer"),
}


# Workers ------------------------------------------------------------------------------------------


def inputs(dtype: str, tokens: int, features: int):
    """Hidden states of unit scale and a weight whose logits have a standard deviation of 2."""
    import torch

    generator = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, features, generator=generator)
    w = torch.randn(V, features, generator=generator) * (2 / features**0.5)
    ids = torch.randint(V, (tokens,), generator=generator)
    upstream = torch.randn(tokens, generator=generator)
    dtype = getattr(torch, dtype)
    return h.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), ids, upstream


def run(head: str, h, w, ids, upstream):
    h.grad = w.grad = None
    loss, logp = HEADS[head][0](h, w, ids, upstream)
    loss.backward()
    return logp


def attempt(fn: Callable) -> dict:
    try:
        return fn()
    except Exception as error:  # a peer may fail in any way: it is a result, with its reason
        lines = f"{type(error).__name__}: {error}".splitlines()
        return {"failed": lines[0][:200]}


def warm_up(head: str, dtype: str, features: int) -> dict:
    h, w, ids, upstream = inputs(dtype, 32, features)
    run(head, h, w, ids, upstream)
    return {}


def matrix_rate(dtype: str) -> float:
    """FLOP/s of the best of several square products."""
    import torch

    a = torch.randn(2048, 2048).to(getattr(torch, dtype))
    times = []
    for _ in range(12):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(times)


def work_time(shape: str, heads: list[str], repeats: int) -> dict:
    dtype, tokens, features = SHAPES[shape]
    out = {head: attempt(lambda head=head: warm_up(head, dtype, features)) for head in heads}
    print(f"{shape}: {', '.join(f'{k} {v}' for k, v in out.items() if v)}", file=sys.stderr)
    h, w, ids, upstream = inputs(dtype, tokens, features)
    rates = []
    for _ in range(repeats):
        for head in [head for head in heads if "failed" not in out[head]]:
            rates.append(matrix_rate(dtype))
            start, cpu = time.perf_counter(), time.process_time()
            result = attempt(lambda head=head: run(head, h, w, ids, upstream) is None or {})
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            out[head].setdefault("seconds", []).append(seconds)
            out[head].setdefault("cpu_seconds", []).append(cpu)
            out[head] |= result
            print(f"  {head}: {seconds:.2f} s, cpu {cpu:.2f} s", file=sys.stderr, flush=True)
    return {"heads": out, "matrix_flops": max(rates)}


def work_memory(shape: str, head: str) -> dict:
    dtype, tokens, features = SHAPES[shape]
    warm_up(head, dtype, features)
    h, w, ids, upstream = inputs(dtype, tokens, features)
    h.grad = w.grad = None

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    before = status("VmRSS")
    run(head, h, w, ids, upstream)
    return {"peak_mb": (status("VmHWM") - before) / 1e6}


def work_error(shape: str, heads: list[str], tokens: int = 256) -> dict:
    dtype, _, features = SHAPES[shape]
    h, w, ids, upstream = inputs(dtype, tokens, features)
    h64, w64 = (x.detach().double().requires_grad_() for x in (h, w))
    logp = (h64 @ w64.T).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    (logp * upstream.double()).sum().backward()

    def errors(head: str) -> dict:
        got = run(head, h, w, ids, upstream)
        return {
            "logp_error": (got.double() - logp).abs().max().item(),
            "grad_error": max(
                ((a.grad.double() - b.grad).norm() / b.grad.norm()).item()
                for a, b in ((h, h64), (w, w64))
            ),
        }

    return {head: attempt(lambda head=head: errors(head)) for head in heads}


# The parent ---------------------------------------------------------------------------------------


def environment(threads: int) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }


def ask(python: str, threads: int, *args: str) -> dict:
    """Run a worker and return what it prints as JSON on its last line."""
    command = [python, "-W", "ignore", __file__, "--worker", *args]
    done = subprocess.run(command, env=environment(threads), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"failed": f"the process ended with status {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def make_environment() -> str:
    python = BUILD / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    import torch

    pip = [str(python), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, f"torch=={torch.__version__.split('+')[0]}", *PEERS], check=True)
    subprocess.run([*pip, "--no-deps", *PEERS_ALONE], check=True)
    subprocess.run([*pip, *PEERS_OF_VERL], check=True)
    return str(python)


def measure(python: str, threads: int, shape: str, heads: list[str], repeats: int) -> dict:
    timed = ask(python, threads, "time", shape, str(repeats), *heads)
    errors = ask(python, threads, "error", shape, *heads)
    rows = {}
    for head in heads:
        row = dict(timed["heads"][head])
        if "failed" not in row:
            row |= ask(python, threads, "memory", shape, head) | errors.get(head, {})
            row["median_s"] = statistics.median(row["seconds"])
            row["median_cpu_s"] = statistics.median(row["cpu_seconds"])
            _, tokens, features = SHAPES[shape]
            flops = HEADS[head][1] * 2 * tokens * features * V
            row["products"] = HEADS[head][1]
            row["matrix_share"] = flops / row["median_s"] / timed["matrix_flops"]
        rows[head] = row
    return {"heads": rows, "matrix_flops": timed["matrix_flops"], "threads": threads}


def show(shape: str, result: dict) -> None:
    dtype, tokens, features = SHAPES[shape]
    nan = float("nan")
    peak = result["matrix_flops"] / 1e9
    print(f"\n{shape}: {dtype}, V = {V}, D = {features}, T = {tokens}, {result['threads']} threads")
    print(f"matrix peak of this machine in this run: {peak:.0f} GFLOP/s")
    columns = ("s", "cpu s", "peak MB", "of peak", "log-prob", "gradient")
    print(f"{'head':<32}" + "".join(f"{column:>9}" for column in columns))
    for head, row in result["heads"].items():
        if "failed" in row:
            print(f"{head:<32} failed: {row['failed']}")
            continue
        print(
            f"{head:<32}{row['median_s']:>9.2f}{row['median_cpu_s']:>9.2f}{row['peak_mb']:>9.0f}"
            f"{row['matrix_share']:>9.0%}{row.get('logp_error', nan):>9.1e}"
            f"{row.get('grad_error', nan):>9.1e}"
        )
    peers = {
        name: row
        for name, row in result["heads"].items()
        if HEADS[name][2] != "ours" and "failed" not in row
    }
    if not peers or "fused_log_probs" not in result["heads"]:
        return
    fastest = min(row["median_s"] for row in peers.values())
    leanest = min(row["peak_mb"] for row in peers.values())
    for name in ("fused_log_probs", "fused_policy_loss"):
        row = result["heads"].get(name)
        if row and "failed" not in row:
            print(
                f"{name}: {row['median_s'] / fastest:.2f} of the fastest other head's time,"
                f" {row['peak_mb'] / leanest:.2f} of the smallest other peak"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="an interpreter that has torch and the other libraries")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--only", nargs="+", help="heads whose name begins so", default=[""])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=BUILD / "logits.json")
    args = parser.parse_args()
    python = args.python or make_environment()
    heads = [head for head in HEADS if head.startswith(tuple(args.only))]
    results = {"machine": machine(), "vocabulary": V, "shapes": {}}
    for shape in args.shapes:
        results["shapes"][shape] = measure(python, args.threads, shape, heads, args.repeats)
        show(shape, results["shapes"][shape])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten: {args.out}")


def machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return f"{model or platform.processor()}, {os.cpu_count()} cores"


def worker(kind: str, shape: str, *rest: str) -> None:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if kind == "time":
        result = work_time(shape, list(rest[1:]), int(rest[0]))
    elif kind == "memory":
        result = attempt(lambda: work_memory(shape, rest[0]))
    else:
        result = work_error(shape, list(rest))
    print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main()
