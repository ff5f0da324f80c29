"""The demonstrator, its clone, and the cache of the base policy."""

import os
import random
from pathlib import Path

import pytest
import torch
from test_grpo import TOK, TRAIN, gen, run_python, weights_of

from agentrl.course import grpo as course
from agentrl.course.grpo import behavior_clone, demonstrate, make_rl_base
from agentrl.gym import BugFixEnv, build_tokenizer
from agentrl.policy import TinyAgent
from agentrl.rollout import evaluate


def test_demonstrations_replay():
    rng = random.Random(0)
    for task in TRAIN * 3:
        traj = demonstrate(task, TOK, rng)
        env, ids = BugFixEnv(task, TOK), traj.ids.tolist()
        expected = env.reset()
        mask = [False] * len(expected)
        while not env.done:
            token = ids[len(expected)]
            answer, _ = env.step(token)
            expected += [token, *answer]
            mask += [True, *[False] * len(answer)]
        assert (ids, traj.action_mask.tolist()) == (expected, mask[1:])
        assert traj.reward == env.reward and traj.info["task"] == task
        assert (traj.sample_logp == 0).all()
    one, other = (demonstrate(TRAIN[0], TOK, random.Random(0)).ids for _ in range(2))
    assert torch.equal(one, other)


def test_behavior_clone_learns_and_is_repeatable():
    rng = random.Random(0)
    data = [demonstrate(TRAIN[i % 20], TOK, rng) for i in range(640)]
    runs = []
    for _ in range(2):
        model = TinyAgent(len(TOK), d_model=16, n_layers=1, n_heads=2)
        losses = behavior_clone(model, data, TOK)
        runs.append((losses, weights_of(model)))
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5
    assert runs[0] == runs[1]


@pytest.fixture
def built(tmp_path, monkeypatch):
    """The paths that were written in a cache of this test's own, one entry per training."""
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    paths, write = [], course.save_atomically
    monkeypatch.setattr(
        course, "save_atomically", lambda state, path: (paths.append(path), write(state, path))
    )
    return paths


def base(tok=TOK, **kwargs):
    return weights_of(make_rl_base(tok, **{"episodes": 64, **kwargs}))


def test_base_policy_is_trained_once(tmp_path, built):
    torch.manual_seed(0)
    first = base()
    torch.manual_seed(1)
    assert base() == first and len(built) == 1
    assert built[0].parent == tmp_path / "cache"
    built[0].unlink()
    assert base() == first and len(built) == 2, "made again, the same bits"
    assert sorted(p.suffix for p in built[0].parent.iterdir()) == [".lock", ".pt"], "nothing else"


def test_what_determines_the_base_policy_is_in_its_key(built, monkeypatch):
    results = [base(), base(episodes=65), base(seed=1), base(build_tokenizer(TRAIN))]
    other = lambda model, shown, tok: behavior_clone(model, shown, tok, 1e-3)  # noqa: E731
    monkeypatch.setattr(course, "behavior_clone", other)
    results.append(base())
    monkeypatch.setattr(torch, "__version__", "0.0")
    base()
    assert len(set(built)) == len(built) == 6
    assert len(set(results)) == 5


class Attack:
    def __reduce__(self):
        return os.mkdir, ("touched",)


@pytest.mark.parametrize(
    "damage", ["empty", "cut", "flipped", "garbage", "other", "digest", "code"]
)
def test_a_damaged_cache_is_rebuilt(built, damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = base()
    path = built[0]
    data = path.read_bytes()
    saved, half = torch.load(path, weights_only=True), len(data) // 2
    saved["made"]["weights"]["lm_head.weight"][0, 0] += 1e-9
    code = {"made": {"weights": Attack()}, "digest": ""}
    objects = {"digest": saved, "other": {"something": 1}, "code": code}
    if damage in objects:
        torch.save(objects[damage], path)
    else:
        flipped = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
        files = {"empty": b"", "cut": data[:-100], "flipped": flipped, "garbage": b"x" * 99}
        path.write_bytes(files[damage])
    assert base() == good and len(built) == 2, "trained again"
    assert base() == good and len(built) == 2, "and repaired"
    assert not Path("touched").exists()


CONCURRENT = """
import hashlib, os, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, "tests/package")
import test_course_grpo as t
write = t.course.save_atomically
t.course.save_atomically = lambda *args: (os.write(1, b"trained\\n"), write(*args))
pids = []
while len(pids) < 3 and 0 not in pids:
    pids.append(os.fork())
os.write(1, f"{hashlib.sha256(t.base()).hexdigest()}\\n".encode())
sys.exit(0 not in pids and any(os.waitpid(pid, 0)[1] for pid in pids))
"""


def test_processes_side_by_side_train_once(tmp_path):
    lines = run_python(CONCURRENT, AGENTRL_CACHE=str(tmp_path)).split()
    assert len(lines) == 5 and lines.count("trained") == 1 and len(set(lines)) == 2


class TestBase:
    def test_base_passes_some_of_the_training_tasks(self, one_thread):
        result = evaluate(make_rl_base(TOK), TRAIN, TOK, 32, generator=gen(5))
        assert result["pass_rate"] - 2 * result["stderr"] >= 0.15
        assert result["pass_rate"] + 2 * result["stderr"] <= 0.60


def play_all(env, *tokens):
    env.reset()
    return [env.tok.decode(env.step(env.tok.encode([token])[0])[0]) for token in tokens]


def test_environments_of_the_ablations():
    task = next(t for t in TRAIN if t.goal == ("difference", "two"))
    sum_instead = ("EDIT", task.fix[0], "+", "TEST", "SUBMIT")  # passes the visible tests alone
    paid, answers = {}, {}
    for kind in (BugFixEnv, course.LenientEnv, course.SilentEnv):
        env = kind(task, TOK)
        answers[kind] = play_all(env, *sum_instead)[3]
        paid[kind] = env.reward
    assert paid == {BugFixEnv: 0, course.LenientEnv: 1, course.SilentEnv: 0}
    assert answers[BugFixEnv] == answers[course.LenientEnv] == ["ok", "<end>"]
    assert "ok" not in answers[course.SilentEnv]


def test_other_goals_are_of_another_kind():
    changed = course.with_other_goals(TRAIN)
    assert all(a.goal[0] != b.goal[0] for a, b in zip(TRAIN, changed, strict=True))
    assert [t.program for t in changed] == [t.program for t in TRAIN]
    assert changed == course.with_other_goals(TRAIN)
