"""What the topics share: timing, memory of a process of its own, the machine and its limits, JSON.

A topic is a module with `measure(size, device)`, which returns what it found, and for memory
`peak(job, size, device)`, which prepares a job and returns the function to run. A peer that fails
is a result: `attempt` keeps its reason.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ON_HOST = ("packing", "microbatch", "flops")  # plans and counts are made there, GPU or not
PEERS = ("transformers", "trl", "verl", "liger-kernel", "cut-cross-entropy")
Row = dict[str, Any]


# The machine


def machine() -> Row:
    """Describe this machine and its software, without its name or any path."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e9, 1),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def slug(description: Row) -> str:
    """Name a machine by its processor and cores, and by its GPU if it has one."""
    words = f"{description['gpu'] or ''} {description['cpu']} {description['cores']} cores"
    words = re.sub(r"\((?:R|TM)\)|\bCPU\b|@.*?GHz|\bProcessor\b", " ", words, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def versions() -> Row:
    """Return the version of each peer, or why it is not here."""
    found: Row = {}
    for name in PEERS:
        try:
            found[name] = {"version": metadata.version(name)}
        except metadata.PackageNotFoundError:
            failed = Path(sys.prefix) / "failed.json"  # what the installer said
            reasons = json.loads(failed.read_text()) if failed.exists() else {}
            found[name] = {"failed": reasons.get(name, "not installed")}
    return found


def key(size: str, device: str) -> str:
    """Name the set of sizes: a GPU has a larger one."""
    return "cuda" if device == "cuda" and size == "full" else size


PROBES = {  # how `measure_accelerator` is asked for the limits
    "tiny": {"size": 256, "copy_bytes": 2**22, "repeats": 1},
    "full": {"size": 2048, "copy_bytes": 2**28, "repeats": 7},
    "cuda": {"size": 8192, "copy_bytes": 2**31, "repeats": 7},
}


def limits(device: str, size: str) -> Row:
    """Measure what the machine can do at best: FLOP/s of products by dtype, bytes/s of a copy."""
    import torch

    import agentrl as arl

    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    best = arl.measure_accelerator(device, dtypes, **PROBES[key(size, device)])
    return {"flops": dict(best.flops), "copy_bytes_per_s": best.bandwidth}


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


# Runs


class Took(float):
    """Seconds that a run reports itself: one process did the work of several, one after another."""


def reason(error: Exception) -> str:
    """Say in one line, without paths, why something failed."""
    line = (f"{type(error).__name__}: {error}".strip().splitlines() or ["no reason given"])[0]
    return re.sub(r"(?<![\w.])/[\w.@+/-]+/", "", line)[:200]


def attempt(run: Callable[[], Any]) -> Any:
    """Return what `run` returns, or `{"failed": reason}`: a peer may fail in any way."""
    try:
        return run()
    except Exception as error:
        return {"failed": reason(error)}


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def timed(
    runs: dict[str, Callable[[], object]],
    repeats: int = 5,
    *,
    device: str = "cpu",
    longest: float = 10.0,
    probe: Callable[[], object] | None = None,
) -> dict[str, Row]:
    """Time runs that take turns, after one to warm up each.

    Args:
        runs: by name; each does the same work again.
        repeats: rounds. A run whose rounds took more than `longest` seconds together is not
            repeated further.
        device: "cuda" waits for the device.
        probe: timed before each run, since a shared machine does not keep its pace.

    Returns:
        By name `seconds` (the median, of what the run says if that is a `Took`), `low` and `high`
        (the extremes), `n`, `value` if the run returns a number, and `probe`, its median beside
        this run; or `failed`.
    """
    gc.collect()
    found: dict[str, Row] = {name: {} for name in runs}
    times: dict[str, list[float]] = {name: [] for name in runs}
    probes: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            done = times[name]
            if "failed" in found[name] or sum(done) > longest:
                continue
            pace = _seconds(probe, device)[0] if probe else None
            result = attempt(lambda run=run: _seconds(run, device))
            if isinstance(result, dict):
                found[name] = result
                _release(device)  # what did not fit is not to be in the way of the next
                continue
            seconds, value = result
            if turn:
                done.append(seconds)
                probes[name] += [pace] if probe else []
            if isinstance(value, int | float):
                found[name]["value"] = value
    for name, done in times.items():
        if done and "failed" not in found[name]:
            found[name] |= summary(done)
            if probe:
                found[name]["probe"] = statistics.median(probes[name])
    return found


def summary(times: Sequence[float]) -> Row:
    """The median with its spread, the extremes."""
    median = statistics.median(times)
    return {"seconds": median, "low": min(times), "high": max(times), "n": len(times)}


def _seconds(run: Callable[[], object], device: str) -> tuple[float, object]:
    start = time.perf_counter()
    value = run()
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    if isinstance(value, Took):
        return float(value), None
    return time.perf_counter() - start, value


def _release(device: str) -> None:
    """Give back memory of the device that only PyTorch's allocator still holds."""
    gc.collect()
    if device == "cuda":
        import torch

        attempt(torch.cuda.empty_cache)


def peak_bytes(topic: str, job: str, size: str, device: str) -> Row:
    """Run a job of a topic in a process of its own; return the most bytes above its start."""
    import torch

    _release(device)  # what this process no longer uses, that one may need
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{topic}", "--peak", job]
    command += ["--size", size, "--device", device, "--threads", str(torch.get_num_threads())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": f"the process ended with status {done.returncode}"}
    return json.loads(lines[-1])


def in_process(topic: str, job: str, size: str, device: str) -> Row:
    """Prepare a job of a topic here, run it, and return the most bytes above what stood before."""
    run = attempt(lambda: import_module(f"benchmarks.{topic}").peak(job, size, device))
    return run if isinstance(run, dict) else attempt(lambda: _peak(run, device))


def _peak(run: Callable[[], object], device: str) -> Row:
    if device == "cuda":
        import torch

        _release(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return {"peak_mb": (torch.cuda.max_memory_allocated() - before) / 1e6}

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    before = status("VmRSS")
    run()
    return {"peak_mb": (status("VmHWM") - before) / 1e6}


# Growth


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Fit cost = a * size^b by least squares in the logarithms; return b."""
    if len(sizes) < 2 or len(sizes) != len(costs) or min(*sizes, *costs) <= 0:
        raise ValueError(f"two or more positive pairs are needed, got {sizes} and {costs}")
    x, y = [math.log(s) for s in sizes], [math.log(c) for c in costs]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread


def growth(
    who: str,
    unit: str,
    points: dict[int, Row],
    law: str,
    expected: Callable[[float], float],
) -> Row:
    """Describe how the time of `who` grows.

    Args:
        who, unit: what was measured, and of what `points` has the sizes.
        points: size -> what `timed` says. Sizes that failed are reported and left out of the fit.
        law: the expected growth in words; `expected` is it as a function of the size.
    """
    done = {n: row["seconds"] for n, row in points.items() if "seconds" in row}
    row: Row = {"who": who, "unit": unit, "law": law}
    row["failed"] = {str(n): r["failed"] for n, r in points.items() if "failed" in r}
    row["sizes"], row["seconds"] = list(done), list(done.values())
    for kept in ("low", "high", "n"):
        row[kept] = [points[n].get(kept) for n in done]
    if len(done) > 1:
        row["exponent"] = exponent(row["sizes"], row["seconds"])
        row["expected"] = exponent(row["sizes"], [expected(n) for n in done])
    return row


# Results


def with_fractions(rows: list[Row], best: Row) -> list[Row]:
    """Add to each row that has work and time the share of the machine's limit that it reached.

    `flops` with `dtype` are compared with matrix products, those beside the run (`peak_flops`) if
    they were measured, `bytes` with a copy.
    """
    for row in rows:
        if "seconds" not in row:
            continue
        if "flops" in row:
            row["limit"] = f"products in {row['dtype']}"
            peak = row.get("peak_flops", best["flops"][row["dtype"]])
            row["of_limit"] = row["flops"] / row["seconds"] / peak
        elif "bytes" in row:
            row["limit"] = "copy"
            row["of_limit"] = row["bytes"] / row["seconds"] / best["copy_bytes_per_s"]
    return rows


def document(
    topic: str,
    size: str,
    device: str,
    found: Row,
    best: Row,
    threads: int,
    started: float,
    load: float,
) -> Row:
    """Put around a topic's findings what they were measured with."""
    return {
        "topic": topic,
        "size": size,
        "device": device,
        "date": today(),
        "machine": machine(),
        "threads": threads,
        "load_before": round(load, 2),
        "versions": versions(),
        "limits": best,
        "wall_seconds": round(time.time() - started, 1),
        **found,
    }


def tidy(value: Any) -> Any:
    """Round floats to four digits, which is more than a timing has, and keep nan out of JSON."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): tidy(item) for key, item in value.items()}
    return [tidy(item) for item in value] if isinstance(value, list | tuple) else value


def write(path: Path, result: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")  # so that nobody reads half of it
    draft.write_text(json.dumps(tidy(result), indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def main(topic: str) -> None:
    """Run the module of a topic as a script: measure and write, or one job for its memory."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{topic}")
    parser.add_argument("--size", choices=("tiny", "full"), default="full")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peak", help="run one job and print its peak memory")
    args = parser.parse_args()
    load = os.getloadavg()[0]  # now: later it is this topic's own
    import torch

    torch.set_num_threads(args.threads)
    if args.peak:
        print(json.dumps(in_process(topic, args.peak, args.size, args.device)))
        return
    module = import_module(f"benchmarks.{topic}")
    started, device = time.time(), "cpu" if topic in ON_HOST else args.device
    best = limits(device, args.size)
    found = module.measure(args.size, device)
    # The better of both: the first may have met a cold core. A peer may have left a broken device.
    after = attempt(lambda: limits(device, args.size))
    if "failed" not in after:
        best["flops"] = {k: max(v, after["flops"][k]) for k, v in best["flops"].items()}
        best["copy_bytes_per_s"] = max(best["copy_bytes_per_s"], after["copy_bytes_per_s"])
    with_fractions(found["rows"], best)
    result = document(topic, args.size, device, found, best, args.threads, started, load)
    if args.out:
        write(args.out, result)
    else:
        print(json.dumps(tidy(result), indent=1))
