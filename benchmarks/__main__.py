"""Measure agentrl beside its peers, in an environment of their own, and keep the results.

    python -m benchmarks                     all topics, into benchmarks/results/<machine>/
    python -m benchmarks packing flops       some of them
    python -m benchmarks --device cuda       the larger set, on a GPU host
    python -m benchmarks chapters            the times that the chapters take, in this environment
    python -m benchmarks --size tiny --out _build/tiny --python .venv/bin/python    a quick look

The page of results in the book reads these files: run `make run CHAPTER=results` afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import chapters, common
from benchmarks.common import ROOT, Row

TOPICS = (
    "packing",
    "step",
    "microbatch",
    "logits",
    "accumulation",
    "rollout",
    "flops",
    "throughput",
)
THREADS = {"rollout": 1}  # a step of a small model is too short to be shared
VENV = ROOT / "_build" / "bench-venv"
REQUIREMENTS = ("requirements-peers.txt", "benchmarks/requirements.txt")


def requirements() -> str:
    """Return what the environment needs, a line each: torch, transformers, the peers."""
    tested = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in tested if line.startswith(("torch==", "transformers=="))]
    return "\n".join(
        [*lines, *((ROOT / name).read_text(encoding="utf-8") for name in REQUIREMENTS)]
    )


def make_environment() -> Path:
    """Install the peers line by line; keep the reason where one fails. Returns the interpreter."""
    python, stamp = VENV / "bin" / "python", VENV / "installed.txt"
    wanted = requirements()
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    if not python.with_name("pip").exists():  # a half-made one is completed
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    failed = {}
    for line in wanted.splitlines():
        requirement, _, options = line.partition("#")
        if not requirement.strip():
            continue
        print(f"installing {requirement.strip()}", flush=True)
        command = [python, "-m", "pip", "install", "-q", *options.split(), requirement.strip()]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            errors = [text for text in done.stderr.splitlines() if "ERROR" in text]
            why = common.reason(RuntimeError((errors or ["pip failed"])[0]))
            failed[requirement.split("==")[0].strip()] = why
            print(f"  {why}")
    (VENV / "failed.json").write_text(json.dumps(failed))
    if "torch" in failed:
        raise SystemExit("torch did not install, and nothing runs without it")
    if not failed:  # else the next run tries again
        stamp.write_text(wanted, encoding="utf-8")
    return python


def measure(topic: str, python: Path, args: argparse.Namespace) -> Row:
    """Run one topic in the environment of the peers and return its document."""
    threads = str(THREADS.get(topic, args.threads))
    variables = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        options = ["--threads", threads, "--size", args.size, "--device", args.device]
        command = [python, "-W", "ignore", "-m", f"benchmarks.{topic}", *options, "--out", out]
        done = subprocess.run(command, cwd=ROOT, env=variables)
        if done.returncode or not out.exists():
            return {"topic": topic, "failed": f"the process ended with status {done.returncode}"}
        return json.loads(out.read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.split("\n")[0]
    )
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"of {', '.join(TOPICS)}")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="cpu, or cuda with a larger set"
    )
    parser.add_argument("--size", choices=("tiny", "full"), default="full")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--python", type=Path, help="an interpreter that has the peers")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<machine>")
    args = parser.parse_args()
    if args.topics == ["chapters"]:
        return chapters.note(sorted((ROOT / "chapters").glob("*.ipynb")), args.device)
    unknown = [topic for topic in args.topics if topic not in TOPICS]
    if unknown:
        parser.error(f"no topic is called {unknown[0]!r}; there are {', '.join(TOPICS)}")
    if args.size != "full" and not args.out:
        parser.error("only full runs are kept with the results: give --out for another size")
    python = args.python or make_environment()
    status = 0
    for topic in args.topics or TOPICS:
        started = time.time()
        print(f"{topic} ...", flush=True)
        result = measure(topic, python, args)
        if "failed" in result:
            print(f"{topic} failed: {result['failed']}")
            status = 1
            continue
        folder = args.out or common.RESULTS / common.slug(result["machine"])
        common.write(folder / f"{topic}.json", result)
        print(f"{topic}: {time.time() - started:.0f} s, {folder / topic}.json", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
