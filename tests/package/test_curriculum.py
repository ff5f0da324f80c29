"""Curriculum: who is in the pool, what a silent group costs, and a run that is killed."""

import itertools
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from agentrl import curriculum, grpo
from agentrl.curriculum import (
    ESTIMATES,
    draw_weighted,
    estimate_pass_rate,
    expected_groups_per_kept,
    fill_groups,
    filter_by_pass_rate,
    run_arms,
    train_curriculum,
)
from agentrl.grpo import RLConfig, train_rl
from agentrl.gym import build_tokenizer, make_tasks
from agentrl.policy import TinyAgent
from agentrl.rollout import Trajectory, sample_groups

TRAIN = make_tasks("train")
TOK = build_tokenizer(make_tasks())
SMALL = RLConfig(max_tokens=40, group_size=4, prompts_per_step=3)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny() -> TinyAgent:
    return TinyAgent(len(TOK), d_model=16, n_layers=1, n_heads=2, seed=3)


def weights(model: nn.Module) -> list[list[float]]:
    return [p.flatten().tolist() for p in model.parameters()]


def is_kept(rate: Any, low: float = 0.0, high: float = 1.0) -> bool:
    return filter_by_pass_rate(["task"], [rate], low, high) == ["task"]


# The filter -----------------------------------------------------------------------------------


@given(st.integers(1, 64), st.data())
def test_decided_by_integer_successes(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    rewards = [1.0] * k + [0.0] * (n - k)
    random.Random(n).shuffle(rewards)
    for rate in (k / n, rewards, torch.tensor(rewards), torch.tensor(k / n)):
        assert is_kept(rate) == (0 < k < n)


@given(st.integers(1, 32), st.data())
def test_bounds_are_strict_and_exact(n: int, data: st.DataObject) -> None:
    k, low, high = (data.draw(st.integers(0, n)) for _ in range(3))
    if low < high:
        rewards = [1] * k + [0] * (n - k)
        assert is_kept(k / n, low / n, high / n) == (low < k < high)
        inside = low / n < Fraction(k, n) < high / n
        assert is_kept(rewards, low / n, high / n) == inside


@pytest.mark.parametrize(
    "rewards",
    [[0.3] * 4, [0.1] * 3, [0.1] * 8, [0.7] * 5, [1 / 3] * 7, [-2.0] * 4, [1.5] * 3, [0.3]],
)  # fmt: skip
def test_equal_rewards_are_dropped_whatever_their_mean(rewards: list[float]) -> None:
    for group in (rewards, torch.tensor(rewards), torch.tensor(rewards, dtype=torch.float64)):
        assert not is_kept(group)
        assert not is_kept(group, -0.5, 1.0)
        assert is_kept(group, -1.0, 2.0)  # nothing is filtered


@given(st.floats(0, 1), st.integers(2, 16))
def test_equal_or_not_is_decided_by_max_and_min(reward: float, n: int) -> None:
    assert not is_kept([reward] * n)
    other = math.nextafter(reward, 0.5)
    assert is_kept([reward] * (n - 1) + [other]) == (other != reward)


def test_every_bound_open_keeps_all_in_order() -> None:
    rates = [0.0, 1.0, 0.5, 1.0, 0.0]
    assert filter_by_pass_rate("abcde", rates, -1, 2) == list("abcde")
    assert filter_by_pass_rate("abcde", rates) == ["c"]
    assert filter_by_pass_rate("abcde", rates, low=-1) == ["a", "c", "e"]
    assert filter_by_pass_rate("abcde", rates, high=2) == ["b", "c", "d"]
    assert filter_by_pass_rate([], []) == []


def test_rates_by_name() -> None:
    rates = {task.name: i / 10 for i, task in enumerate(TRAIN[:11])}
    assert filter_by_pass_rate(TRAIN[:11], rates) == TRAIN[1:10]
    with pytest.raises(ValueError, match=repr(TRAIN[11].name)):
        filter_by_pass_rate(TRAIN[:12], rates)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([0.5, math.nan], r"pass_rates\[1\].*nan"),
        ([0.5, 8], r"pass_rates\[1\].*8"),
        ([-0.1, 0.5], r"pass_rates\[0\].*-0.1"),
        ([0.5, []], r"pass_rates\[1\]"),
        ([0.5, [0.0, math.inf]], r"pass_rates\[1\].*inf"),
        ([0.5, [0.0, 2.0]], r"pass_rates\[1\]: rewards\[1\] = 2.0 is not in \[0, 1\]"),
        ([[-1, -1, 1, 1], 0.5], r"pass_rates\[0\]: rewards\[0\] = -1.0 is not in \[0, 1\]"),
        ([0.5, [-1, 1, 1, 1]], r"pass_rates\[1\]: rewards\[0\] = -1.0 is not in \[0, 1\]"),
        ([0.5, None], r"pass_rates\[1\]"),
        ([0.5], "1 pass rates for 2 tasks"),
    ],
)
def test_bad_rates_are_named(rates: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filter_by_pass_rate(["a", "b"], rates)


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.5), (0.6, 0.4), (math.nan, 1.0)])
def test_bounds_in_order(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="must be below"):
        filter_by_pass_rate(["a"], [0.5], low, high)


# Silent groups --------------------------------------------------------------------------------


@given(st.integers(2, 64), st.fractions(0, 1))
def test_groups_per_kept_against_exact_arithmetic(n: int, p: Fraction) -> None:
    p = Fraction(float(p))
    silent = p**n + (1 - p) ** n
    expected = math.inf if silent == 1 else float(1 / (1 - silent))
    assert expected_groups_per_kept(float(p), n) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [1e-18, 1e-12, 1e-6])
def test_groups_per_kept_near_the_end(p: float) -> None:
    exact = 1 / (1 - Fraction(p) ** 8 - (1 - Fraction(p)) ** 8)
    assert expected_groups_per_kept(p, 8) == pytest.approx(float(exact), rel=1e-12)


def test_groups_per_kept_at_the_ends() -> None:
    assert expected_groups_per_kept(0.5, 2) == 2.0
    assert expected_groups_per_kept(0.9, 8) == pytest.approx(1 / (1 - 0.9**8 - 0.1**8))
    for p, n in ((0, 8), (1, 8), (0.5, 1)):
        assert expected_groups_per_kept(p, n) == math.inf
    for p, n in ((-0.1, 8), (1.1, 8), (math.nan, 8), (0.5, 0)):
        with pytest.raises(ValueError, match=r"p = |n = "):
            expected_groups_per_kept(p, n)


def test_groups_per_kept_by_simulation() -> None:
    passed = (torch.rand(50_000, 8, generator=gen(), dtype=torch.float64) < 0.9).sum(1)
    silent = ((passed == 0) | (passed == 8)).double().mean().item()
    assert silent == pytest.approx(0.43, abs=0.01)
    assert 1 / (1 - silent) == pytest.approx(expected_groups_per_kept(0.9, 8), rel=0.02)


# Estimates ------------------------------------------------------------------------------------

bits = st.lists(st.sampled_from([0.0, 1.0]), min_size=8, max_size=8)


@given(st.lists(bits, max_size=6))
def test_estimates_by_hand(groups: list[list[float]]) -> None:
    means = [sum(group) / 8 for group in groups]
    assert estimate_pass_rate(groups) == (means[-1] if means else 0.5)
    assert estimate_pass_rate(groups, "mean3") == sum(([0.5] * 3 + means)[-3:]) / 3
    age = [0.5**i for i in range(len(groups))][::-1]
    passed = sum(w * sum(g) for w, g in zip(age, groups, strict=True))
    total = sum(w * 8 for w in age)
    assert estimate_pass_rate(groups, "beta") == pytest.approx((1 + passed) / (2 + total))
    for how in ESTIMATES:
        inside = 0 < estimate_pass_rate(groups, how) < 1
        window = {"last": 1, "mean3": 3, "beta": 99}[how]
        recent = groups[-window:]
        silent = len(recent) == window and len({r for g in recent for r in g}) == 1
        assert inside == (not silent)


def test_estimates_refuse_other_names() -> None:
    with pytest.raises(ValueError, match="median"):
        estimate_pass_rate([], "median")


@pytest.mark.parametrize("how", ESTIMATES)
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[1.0], []], "groups[1] = [] has no rewards"),
        ([[2, 2]], "groups[0][0] = 2 is not in [0, 1]"),
        ([[1, 0], [0.5, -0.5]], "groups[1][1] = -0.5 is not in [0, 1]"),
        ([[0.0, math.nan]], "groups[0][1] = nan is not in [0, 1]"),
    ],
)
def test_estimates_refuse_other_rewards(groups: list[list[float]], message: str, how: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        estimate_pass_rate(groups, how)


def test_weighted_draws() -> None:
    wanted = torch.tensor([0.25, 0.09, 0.16, 0.0, 0.05], dtype=torch.float64)
    generator, first = gen(), torch.zeros(5, dtype=torch.float64)
    for _ in range(20_000):
        first[draw_weighted(wanted.tolist(), 1, generator)] += 1
    assert (first / 20_000 - wanted / wanted.sum()).abs().max() < 0.012
    for count in range(7):
        drawn = draw_weighted(wanted.tolist(), count, generator)
        assert len(drawn) == len(set(drawn)) == min(count, 4) and 3 not in drawn
    assert draw_weighted([0.0, 0.0], 2, generator) == []


# Dynamic sampling -----------------------------------------------------------------------------


def groups_of(rewards: list[list[float]]) -> list[list[Trajectory]]:
    none = torch.zeros(0)
    return [[Trajectory(none, none, none, reward) for reward in group] for group in rewards]


@given(st.lists(st.booleans(), min_size=60, max_size=60), st.integers(1, 9), st.integers(1, 40))
def test_fill_groups_against_a_walk(live: list[bool], want: int, budget: int) -> None:
    stream, asked = iter(live), []

    def sample(count: int) -> list[list[Trajectory]]:
        asked.append(count)
        assert len(asked) < 100, "endless sampling"
        return groups_of([[0.0, float(x)] for x in itertools.islice(stream, count)])

    kept, sampled, reason = fill_groups(sample, want, budget)
    running = list(itertools.accumulate(live[:budget]))
    needed = running.index(want) + 1 if want in running else budget
    assert len(sampled) == sum(asked) == needed <= budget
    assert len(kept) == sum(live[:needed]) <= want
    assert (reason == "") == (len(kept) == want)
    if reason:
        assert str(budget) in reason and f"{len(kept)} of {want}" in reason


@pytest.mark.parametrize("reward", [1.0, 0.0, 0.3, 0.1])
def test_silent_tasks_end_the_sampling_with_a_reason(reward: float) -> None:
    calls = itertools.count()

    def sample(count: int) -> list[list[Trajectory]]:
        assert next(calls) < 100, "endless sampling"
        return groups_of([[reward] * 3] * count)

    kept, sampled, reason = fill_groups(sample, 8, 24)
    assert (len(kept), len(sampled)) == (0, 24) and "24 groups" in reason


def test_a_dry_sampler_is_an_error_not_a_loop() -> None:
    with pytest.raises(ValueError, match=r"sample\(8\) returned 0 groups"):
        fill_groups(lambda n: [], 8, 24)


# Training -------------------------------------------------------------------------------------


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward an even sum of tokens: a small random policy passes about half of its episodes."""

    def sample(*args: Any) -> list[Trajectory]:
        trajs = sample_groups(*args)
        for traj in trajs:
            traj.reward = float(traj.ids.sum() % 2 == 0)
        return trajs

    monkeypatch.setattr(curriculum, "sample_groups", sample)
    monkeypatch.setattr(grpo, "sample_groups", sample)


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_open_bounds_are_train_rl(estimate: str, parity: None) -> None:
    cfg = RLConfig(max_tokens=60, group_size=4, prompts_per_step=5, seed=4)
    ours, theirs = tiny(), tiny()
    history = train_curriculum(ours, TRAIN, TOK, cfg, 5, low=-1, high=2, estimate=estimate)
    assert history == train_rl(theirs, TRAIN, TOK, cfg, 5)
    assert weights(ours) == weights(theirs) != weights(tiny())


Played = list[list[int]]


def scripted(monkeypatch: pytest.MonkeyPatch, passes: Callable[[int, int, int], bool]) -> Played:
    """Replace sampling and updating; task i's episode e passes in step s if passes(i, e, s)."""
    played: Played = []

    def sample(model: Any, env: Any, tasks: Any, tok: Any, cfg: Any, generator: Any) -> list:
        step = len(played)
        played.append([TRAIN.index(task) for task in tasks])
        ids = torch.tensor([1, 2])
        return [
            Trajectory(ids, torch.tensor([True]), torch.zeros(1), float(passes(i, e, step)))
            for i in played[-1]
            for e in range(cfg.group_size)
        ]

    stats = {"loss": 0.0, "grad_norm": 0.0, "clip_fraction": 0.0, "zero_advantage": 0.0}
    monkeypatch.setattr(curriculum, "sample_groups", sample)
    monkeypatch.setattr(curriculum, "rl_update", lambda *args: dict(stats))
    return played


def replay(
    played: Played, history: list, passes: Callable, size: int, low: float, high: float
) -> None:
    """Check each step's tasks, and its revisits, against the estimates known at that time."""
    known = [0.5] * len(TRAIN)
    for step, chosen in enumerate(played):
        pool = {i for i, p in enumerate(known) if low < p < high}
        inside = [i for i in chosen if i in pool]
        assert len(set(chosen)) == len(chosen)
        assert len(inside) == min(SMALL.prompts_per_step, len(pool))
        assert len(chosen) - len(inside) == min(1, len(TRAIN) - len(pool))
        assert chosen[: len(inside)] == inside
        for i in chosen:
            known[i] = sum(passes(i, e, step) for e in range(size)) / size
        outside = chosen[len(inside) :]
        if outside:
            assert history[step]["revisits"] == len(outside)
            assert history[step]["silent_revisits"] == sum(known[i] in (0, 1) for i in outside)
        else:
            assert "revisits" not in history[step]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.3, 0.8), (-1.0, 1.0)])
def test_pool_and_revisits_follow_the_last_group(
    monkeypatch: pytest.MonkeyPatch, low: float, high: float
) -> None:
    def passes(i: int, e: int, s: int) -> bool:
        return random.Random(f"{i} {e} {s}").random() < (i % 5) / 4

    played = scripted(monkeypatch, passes)
    history = train_curriculum(tiny(), TRAIN, TOK, SMALL, 60, low, high)
    assert len(history) == len(played) == 60
    replay(played, history, passes, SMALL.group_size, low, high)


def test_every_task_solved_goes_on_with_revisits(monkeypatch: pytest.MonkeyPatch) -> None:
    played = scripted(monkeypatch, lambda i, e, s: True)
    history = train_curriculum(tiny(), TRAIN, TOK, SMALL, 20, revisit=2)
    assert set(itertools.chain(*played[:8])) == set(range(20))
    late = history[-5:]
    assert [step["episodes"] for step in late] == [2 * SMALL.group_size] * 5
    assert all("pool is empty" in step["reason"] and step["zero_advantage"] == 1 for step in late)
    assert all("reason" not in step for step in history[:6])


def test_every_task_solved_without_revisits_stops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted(monkeypatch, lambda i, e, s: True)
    history = train_curriculum(tiny(), TRAIN, TOK, SMALL, 20, revisit=0)
    assert len(history) == 7 and "stopped after 7 of 20 steps" in history[-1]["reason"]
    path = tmp_path / "run.pt"
    options = {"revisit": 0, "checkpoint": path, "checkpoint_every": 50}
    scripted(monkeypatch, lambda i, e, s: True)
    assert train_curriculum(tiny(), TRAIN, TOK, SMALL, 20, **options) == history
    assert torch.load(path, weights_only=True)["history"] == history, "the last step is saved"
    assert train_curriculum(tiny(), TRAIN, TOK, SMALL, 20, **options) == history


def test_every_task_solved_dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, lambda i, e, s: True)
    history = train_curriculum(tiny(), TRAIN, TOK, SMALL, 4, sampling="dynamic", max_groups=7)
    assert [step["episodes"] for step in history] == [28] * 4
    assert all("budget of 7 groups" in step["reason"] for step in history)


def test_proportional_draws_from_all_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    played = scripted(monkeypatch, lambda i, e, s: i < 10)
    train_curriculum(tiny(), TRAIN, TOK, SMALL, 100, estimate="beta", sampling="proportional")
    assert all(len(set(step)) == SMALL.prompts_per_step for step in played)
    assert set(itertools.chain(*played[50:])) == set(range(20))  # none is lost


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "random"}, "sampling must be one of"),
        ({"estimate": "median"}, "estimate must be one of"),
        ({"revisit": -1}, "revisit = -1"),
        ({"low": 0.6, "high": 0.9, "revisit": 0}, "leaves out the start"),
        ({"low": 1.0, "high": 0.0}, "must be below"),
        ({"max_groups": -2}, "max_groups = -2"),
        ({"max_groups": 0}, "max_groups = 0"),
        ({"checkpoint_every": 0}, "checkpoint_every = 0"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_curriculum(tiny(), TRAIN, TOK, SMALL, 1, **options)


def test_a_run_that_on_step_ended_stays_ended(tmp_path: Path) -> None:
    path, stop = tmp_path / "run.pt", lambda model, history: len(history) == 2
    options = {"on_step": stop, "checkpoint": path}
    history = train_curriculum(tiny(), TRAIN, TOK, SMALL, 5, **options)
    assert len(history) == 2 and "on_step ended the run after 2 of 5" in history[-1]["reason"]
    assert train_curriculum(tiny(), TRAIN, TOK, SMALL, 5, **options) == history


def test_a_curriculum_is_not_resumed_without_its_rule(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    train_curriculum(tiny(), TRAIN, TOK, SMALL, 1, low=numpy.float64(-1), high=2, checkpoint=path)
    with pytest.raises(ValueError, match="rule"):
        train_rl(tiny(), TRAIN, TOK, SMALL, 2, checkpoint=path)
    again = {"low": numpy.float64(-1), "high": 2, "checkpoint": path}
    assert len(train_curriculum(tiny(), TRAIN, TOK, SMALL, 2, **again)) == 2


def test_no_jobs_and_no_workers() -> None:
    assert run_arms([]) == []
    with pytest.raises(ValueError, match="workers = 0"):
        run_arms([{}], workers=0)


@pytest.mark.parametrize("sampling", curriculum.SAMPLINGS)
def test_no_tasks_are_refused(sampling: str) -> None:
    with pytest.raises(ValueError, match="tasks is empty"):
        train_curriculum(tiny(), [], TOK, SMALL, 1, sampling=sampling)


def test_open_bounds_keep_every_group() -> None:
    for rewards in ([-5.0, 0.0], [0.0, 10.0], [-5.0, -5.0], [0.0, 1.0], [1.0, 1.0]):
        assert is_kept(rewards, -1, 2), rewards


def test_weights_are_checked_and_none_takes_anothers_place() -> None:
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=re.escape(f"weights[1] = {bad} is")):
            draw_weighted([1.0, bad], 1, gen())
    with pytest.raises(ValueError, match="count = -1"):
        draw_weighted([1.0, 1.0, 1.0], -1, gen())
    for seed in range(20):
        assert draw_weighted([0.0, 1e-310, 0.0], 1, gen(seed)) == [1]


def test_rewards_are_compared_by_value() -> None:
    def sample(count: int) -> list[list[Trajectory]]:
        ids = torch.tensor([1, 2])
        one = lambda: Trajectory(ids, ids[1:] > 0, torch.zeros(1), torch.tensor(1.0))  # noqa: E731
        return [[one() for _ in range(4)] for _ in range(count)]

    kept, sampled, reason = fill_groups(sample, 2, 6)
    assert not kept and len(sampled) == 6 and "0 of 2 kept" in reason


def test_on_step_ends_a_run() -> None:
    lengths: list[int] = []

    def on_step(model: nn.Module, history: list[dict[str, Any]]) -> bool:
        lengths.append(len(history))
        return len(history) == 2

    assert len(train_curriculum(tiny(), TRAIN, TOK, SMALL, 5, on_step=on_step)) == 2
    assert lengths == [1, 2]
    train_curriculum(tiny(), TRAIN, TOK, SMALL, 1, on_step=on_step)
    assert lengths == [1, 2, 1]  # after the last step too


# Killed and resumed ---------------------------------------------------------------------------

OPTIONS = [
    {},
    {"estimate": "mean3"},
    {"estimate": "beta", "low": 0.08, "high": 0.92},
    {"estimate": "beta", "sampling": "proportional"},
    {"sampling": "dynamic", "max_groups": 5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("every", [1, 2])
def test_a_killed_run_resumes_exactly(
    options: dict[str, Any],
    every: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parity: None,
) -> None:
    path = tmp_path / "run.pt"
    cfg = RLConfig(max_tokens=40, group_size=4, prompts_per_step=8, seed=1)
    whole = tiny()
    history = train_curriculum(whole, TRAIN, TOK, cfg, 6, **options)
    update = curriculum.rl_update

    def fail_at(step: int) -> Callable[..., dict[str, float]]:
        calls = itertools.count()

        def failing(*args: Any) -> dict[str, float]:
            if next(calls) == step:
                raise KeyboardInterrupt
            return update(*args)

        return failing

    for step in (3, 0, 1):
        monkeypatch.setattr(curriculum, "rl_update", fail_at(step))
        with pytest.raises(KeyboardInterrupt):
            train_curriculum(
                tiny(), TRAIN, TOK, cfg, 6, **options, checkpoint=path, checkpoint_every=every
            )
    monkeypatch.setattr(curriculum, "rl_update", update)
    resumed = tiny()
    again = train_curriculum(
        resumed, TRAIN, TOK, cfg, 6, **options, checkpoint=path, checkpoint_every=every
    )
    assert again == history and weights(resumed) == weights(whole) != weights(tiny())
    assert any(0 < step["reward"] < 1 for step in history)
    assert train_curriculum(tiny(), TRAIN, TOK, cfg, 6, **options, checkpoint=path) == history


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    train_curriculum(tiny(), TRAIN, TOK, SMALL, 2, checkpoint=path)
    for options in ({"revisit": 2}, {"low": 0.1}, {"estimate": "mean3"}, {"sampling": "dynamic"}):
        with pytest.raises(ValueError, match="has rule"):
            train_curriculum(tiny(), TRAIN, TOK, SMALL, 2, checkpoint=path, **options)
    with pytest.raises(ValueError, match="has tasks"):
        train_curriculum(tiny(), TRAIN[1:], TOK, SMALL, 2, checkpoint=path)
    with pytest.raises(ValueError, match="2 steps, more than 1"):
        train_curriculum(tiny(), TRAIN, TOK, SMALL, 1, checkpoint=path)


SCRIPT = """
import sys, torch
from agentrl import curriculum
from agentrl.grpo import RLConfig
from agentrl.gym import build_tokenizer, make_tasks
from agentrl.policy import TinyAgent
torch.set_num_threads(1)
sample_groups = curriculum.sample_groups

def sample(*args):
    trajs = sample_groups(*args)
    for traj in trajs:
        traj.reward = float(traj.ids.sum() % 2 == 0)
    return trajs

curriculum.sample_groups = sample
tok = build_tokenizer(make_tasks())
model = TinyAgent(len(tok), d_model=16, n_layers=1, n_heads=2, seed=3)
cfg = RLConfig(max_tokens=40, group_size=4, prompts_per_step=8, seed=1)
curriculum.train_curriculum(
    model, make_tasks("train"), tok, cfg, 2000, checkpoint=sys.argv[1], checkpoint_every=1
)
"""


def test_sigkill(tmp_path: Path, parity: None) -> None:
    path = tmp_path / "run.pt"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)], env=env)
    deadline = time.monotonic() + 120
    while not path.exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    child.send_signal(signal.SIGKILL)
    child.wait()
    cfg = RLConfig(max_tokens=40, group_size=4, prompts_per_step=8, seed=1)
    done = len(torch.load(path, weights_only=True)["history"])
    resumed, whole = tiny(), tiny()
    history = train_curriculum(resumed, TRAIN, TOK, cfg, done + 2, checkpoint=path)
    assert history == train_curriculum(whole, TRAIN, TOK, cfg, done + 2)
    assert weights(resumed) == weights(whole)


# Runs side by side ----------------------------------------------------------------------------


RUN = """
import agentrl as arl

if __name__ == "__main__":
    arl.run_arms([{"steps": 500, "score_every": 10**9}], workers=1)
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN)
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": str(root)})
    try:
        listed = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        wait(lambda: len(listed.read_text().split()) > 1)  # the worker, and who cleans up
        children = [Path("/proc", pid) for pid in listed.read_text().split()]
    finally:
        parent.kill()
        parent.wait()
    wait(lambda: not any(map(runs, children)))


def runs(process: Path) -> bool:
    try:
        return ") Z" not in (process / "stat").read_text()
    except OSError:
        return False


def wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_workers_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [
        {"cfg": {"seed": seed}, "steps": 2, "budget": 64, "score_every": 32, **options}
        for seed, options in ((0, {}), (1, {"sampling": "dynamic", "max_groups": 8}))
    ]
    one, two = run_arms(jobs, workers=1), run_arms(jobs, workers=2)
    assert one == two and len(one) == 2
    for run in one:
        assert run["scores"][-1]["episodes"] == sum(s["episodes"] for s in run["history"])
        assert all(0 <= score["pass_rate"] <= 1 for score in run["scores"])


def test_an_arm_is_scored_at_its_end_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, lambda i, e, s: True)
    monkeypatch.setattr(curriculum, "make_rl_base", lambda tok: tiny())
    monkeypatch.setattr(curriculum, "evaluate", lambda *_, **__: {"pass_rate": 0.5, "stderr": 0.1})
    cfg = {"max_tokens": 40, "group_size": 4, "prompts_per_step": 3}
    run = curriculum.run_arm({"cfg": cfg, "steps": 20, "revisit": 0})
    assert len(run["history"]) == 7
    spent = sum(step["episodes"] for step in run["history"])
    assert [score["episodes"] for score in run["scores"]] == [spent]
    with pytest.raises(ValueError, match="checkpoint"):
        curriculum.run_arm({"cfg": cfg, "steps": 1, "checkpoint": "run.pt"})
