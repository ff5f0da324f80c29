"""Arms of the curriculum: runs side by side, and their scores."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_curriculum import scripted, tiny

from agentrl.course import curriculum as course
from agentrl.course.curriculum import run_arm, run_arms

ROOT = Path(__file__).resolve().parents[2]


RUN = """
import agentrl as arl

if __name__ == "__main__":
    arl.run_arms([{"cfg": {}, "steps": 500, "score_every": 10**9}], workers=1)
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    parent = subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        listed = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        wait(lambda: len(listed.read_text().split()) > 1)  # the worker, and who cleans up
        children = [Path("/proc", pid) for pid in listed.read_text().split()]
    finally:
        parent.kill()
        parent.wait()
    wait(lambda: not any(map(runs, children)))


def runs(process):
    return process.exists() and ") Z" not in (process / "stat").read_text()


def wait(done):
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_workers_do_not_show():
    jobs = [
        {"cfg": {"seed": seed}, "steps": 2, "budget": 64, "score_every": 32, **options}
        for seed, options in ((0, {}), (1, {"sampling": "dynamic", "max_groups": 8}))
    ]
    one, two = run_arms(jobs, workers=1), run_arms(jobs, workers=2)
    assert one == two and len(one) == 2
    for run in one:
        assert run["scores"][-1]["episodes"] == sum(s["episodes"] for s in run["history"])
        assert all(0 <= score["pass_rate"] <= 1 for score in run["scores"])
    assert run_arms([]) == []


def test_an_arm_is_scored_at_its_end_however_it_ends(monkeypatch):
    scripted(monkeypatch, lambda i, e, s: True)
    monkeypatch.setattr(course, "make_rl_base", lambda tok: tiny())
    monkeypatch.setattr(course, "evaluate", lambda *_, **__: {"pass_rate": 0.5, "stderr": 0.1})
    cfg = {"max_tokens": 40, "group_size": 4, "prompts_per_step": 3}
    run = run_arm({"cfg": cfg, "steps": 20, "revisit": 0})
    assert len(run["history"]) == 7
    spent = sum(step["episodes"] for step in run["history"])
    assert [score["episodes"] for score in run["scores"]] == [spent]
    with pytest.raises(ValueError, match="checkpoint"):
        run_arm({"cfg": cfg, "steps": 1, "checkpoint": "run.pt"})
    with pytest.raises(ValueError, match="workers"):
        run_arms([{}], workers=0)
