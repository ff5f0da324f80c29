"""Curriculum: who is in the pool, what a zero-advantage group costs, and a run that is killed."""

import itertools
import math
import random
import re
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl import curriculum, grpo
from agentrl.curriculum import (
    draw_weighted,
    estimate_pass_rate,
    expected_groups_per_kept,
    fill_groups,
    filter_by_pass_rate,
    group_filter_check,
    train_curriculum,
)
from agentrl.grpo import RLConfig, train_rl
from agentrl.gym import build_tokenizer, make_tasks
from agentrl.policy import TinyAgent
from agentrl.rollout import Trajectory, sample_groups

ROOT = Path(__file__).resolve().parents[2]
TRAIN = make_tasks("train")[:20]
TOK = build_tokenizer(make_tasks())
SMALL = RLConfig(max_tokens=40, group_size=4, prompts_per_step=3)
LARGER = RLConfig(max_tokens=40, group_size=4, prompts_per_step=8, seed=1)
ESTIMATES = ("last", "mean3", "beta")
NAN, INF = math.nan, math.inf


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def tiny():
    return TinyAgent(len(TOK), d_model=16, n_layers=1, n_heads=2, seed=3)


def train(steps, model=None, tasks=TRAIN, cfg=SMALL, **options):
    return train_curriculum(model or tiny(), tasks, TOK, cfg, steps, **options)


def weights(model):
    return [p.flatten().tolist() for p in model.parameters()]


def is_kept(rate, low=0.0, high=1.0):
    return filter_by_pass_rate(["task"], [rate], low, high) == ["task"]


# The filter -----------------------------------------------------------------------------------


@given(st.integers(1, 64), st.data())
def test_decided_by_integer_successes(n, data):
    k = data.draw(st.integers(0, n))
    rewards = [1.0] * k + [0.0] * (n - k)
    random.Random(n).shuffle(rewards)
    for rate in (k / n, rewards, torch.tensor(rewards), torch.tensor(k / n), numpy.array(rewards)):
        assert is_kept(rate) == (0 < k < n)


@given(st.integers(1, 32), st.data())
def test_bounds_are_strict_and_exact(n, data):
    k, low, high = (data.draw(st.integers(0, n)) for _ in range(3))
    if low < high:
        rewards = [1] * k + [0] * (n - k)
        assert is_kept(k / n, low / n, high / n) == (low < k < high)
        inside = low / n < Fraction(k, n) < high / n
        assert is_kept(rewards, low / n, high / n) == inside


@pytest.mark.parametrize(
    "rewards",
    [[0.3] * 4, [0.1] * 3, [0.1] * 8, [0.7] * 5, [1 / 3] * 7, [-2.0] * 4, [1.5] * 3, [0.3]],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_equal_rewards_are_dropped_whatever_their_mean(rewards, dtype):
    for group in (rewards, torch.tensor(rewards, dtype=dtype)):
        assert not is_kept(group)
        assert not is_kept(group, -0.5, 1.0)
        assert is_kept(group, -1.0, 2.0)  # nothing is filtered


@given(st.floats(0, 1), st.integers(2, 16))
def test_equal_or_not_is_decided_by_max_and_min(reward, n):
    assert not is_kept([reward] * n)
    other = math.nextafter(reward, 0.5)
    assert is_kept([reward] * (n - 1) + [other]) == (other != reward)


def test_open_bounds_keep_all_in_order_and_rates_go_by_name():
    rates = [0.0, 1.0, 0.5, 1.0, 0.0]
    assert filter_by_pass_rate("abcde", rates, -1, 2) == list("abcde")
    assert filter_by_pass_rate("abcde", rates, -INF, INF) == list("abcde")
    assert filter_by_pass_rate("abcde", rates) == ["c"]
    assert filter_by_pass_rate("abcde", rates, low=-1) == ["a", "c", "e"]
    assert filter_by_pass_rate("abcde", rates, high=2) == ["b", "c", "d"]
    assert filter_by_pass_rate([], []) == []
    for rewards in ([-5.0, 0.0], [0.0, 10.0], [-5.0, -5.0], [0.0, 1.0], [1.0, 1.0]):
        assert is_kept(rewards, -1, 2), rewards
    named = {task.name: i / 10 for i, task in enumerate(TRAIN[:11])}
    assert filter_by_pass_rate(TRAIN[:11], named) == TRAIN[1:10]


# Zero-advantage groups and estimates ----------------------------------------------------------


@given(st.integers(2, 64), st.fractions(0, 1))
def test_groups_per_kept_against_exact_arithmetic(n, rate):
    for p in (Fraction(float(rate)), Fraction(1e-6), Fraction(1e-12), Fraction(1e-18)):
        zero = p**n + (1 - p) ** n
        expected = math.inf if zero == 1 else float(1 / (1 - zero))
        assert expected_groups_per_kept(float(p), n) == pytest.approx(expected, rel=1e-12)


def test_groups_per_kept_at_the_ends_and_by_simulation():
    assert expected_groups_per_kept(0.5, 2) == 2.0
    assert expected_groups_per_kept(0.5, 1_000_000) == 1.0
    for p, n in ((0, 8), (1, 8), (0.5, 1)):
        assert expected_groups_per_kept(p, n) == math.inf
    passed = (torch.rand(50_000, 8, generator=gen(), dtype=torch.float64) < 0.9).sum(1)
    zero = ((passed == 0) | (passed == 8)).double().mean().item()
    assert zero == pytest.approx(0.43, abs=0.01)
    assert 1 / (1 - zero) == pytest.approx(expected_groups_per_kept(0.9, 8), rel=0.02)


bits = st.lists(st.sampled_from([0.0, 1.0]), min_size=8, max_size=8)


@given(st.lists(bits, max_size=6))
def test_estimates_by_hand(groups):
    means = [sum(group) / 8 for group in groups]
    assert estimate_pass_rate(groups) == (means[-1] if means else 0.5)
    assert estimate_pass_rate(groups, "mean3") == sum(([0.5] * 3 + means)[-3:]) / 3
    age = [0.5**i for i in range(len(groups))][::-1]
    passed = sum(w * sum(g) for w, g in zip(age, groups, strict=True))
    total = sum(w * 8 for w in age)
    assert estimate_pass_rate(groups, "beta") == pytest.approx((1 + passed) / (2 + total))
    for how, window in zip(ESTIMATES, (1, 3, 99), strict=True):
        estimate, recent = estimate_pass_rate(groups, how), groups[-window:]
        equal = len(recent) == window and len({r for g in recent for r in g}) == 1
        assert (0 < estimate < 1) == (not equal)
        assert estimate_pass_rate([torch.tensor(g) for g in groups], how) == estimate


def test_weighted_draws():
    wanted = torch.tensor([0.25, 0.09, 0.16, 0.0, 0.05], dtype=torch.float64)
    generator, first = gen(), torch.zeros(5, dtype=torch.float64)
    for _ in range(20_000):
        first[draw_weighted(wanted, 1, generator)] += 1
    assert (first / 20_000 - wanted / wanted.sum()).abs().max() < 0.012
    for count in range(7):
        drawn = draw_weighted(wanted.tolist(), count, generator)
        assert len(drawn) == len(set(drawn)) == min(count, 4) and 3 not in drawn
    assert draw_weighted([0.0, 0.0], 2, generator) == []
    assert all(draw_weighted([0.0, 1e-310, 0.0], 1, gen(seed)) == [1] for seed in range(20))


BAD = [
    (filter_by_pass_rate, (TRAIN[:3], {t.name: 0 for t in TRAIN[:2]}), re.escape(TRAIN[2].name)),
    (filter_by_pass_rate, ("ab", [0.5]), "pass_rates"),
    *((filter_by_pass_rate, ("a", [0.5], *bounds), "low") for bounds in ((0.5, 0.5), (NAN, 1.0))),
    *((filter_by_pass_rate, ("ab", [0.5, r]), r"pass_rates\[1\]") for r in (NAN, 8, -0.1, [], "x")),
    (filter_by_pass_rate, ("ab", [0.5, None]), r"pass_rates\[1\]"),
    (filter_by_pass_rate, ("ab", [0.5, [0.0, INF]]), r"pass_rates\[1\]\[1\]"),
    (filter_by_pass_rate, ("ab", [[-1, -1, 1, 1], 0.5]), r"pass_rates\[0\]\[0\]"),
    (filter_by_pass_rate, ("ab", [0.5, [0.0, 2.0]]), r"pass_rates\[1\]\[1\]"),
    *((expected_groups_per_kept, (p, 8), "p ") for p in (-0.1, 1.1, NAN)),
    (expected_groups_per_kept, (0.5, 0), "n "),
    (estimate_pass_rate, ([], "median"), "how"),
    (draw_weighted, ([1.0, -1.0], 1, gen()), r"weights\[1\]"),
    (draw_weighted, ([1.0, NAN], 1, gen()), r"weights\[1\]"),
    (draw_weighted, ([1.0, INF], 1, gen()), r"weights\[1\]"),
    (draw_weighted, ([1.0, 1.0, 1.0], -1, gen()), "count"),
    (fill_groups, (lambda n: [], 8, 24), r"sample\(8\) returned 0 groups"),
    (fill_groups, (lambda n: groups_of([[0.0, 1.0]] * n), 0, 24), "want"),
    *(
        (estimate_pass_rate, (groups, how), rf"groups\[{index}")
        for how in ESTIMATES
        for groups, index in (([[1.0], []], 1), ([[2, 2]], r"0\]\[0"), ([[1, 0], [0.5, -0.5]], 1))
    ),
]


@pytest.mark.parametrize(("call", "arguments", "names"), BAD)
def test_bad_input_is_named(call, arguments, names):
    with pytest.raises((TypeError, ValueError), match=names):
        call(*arguments)


# Dynamic sampling -----------------------------------------------------------------------------


def groups_of(rewards):
    none = torch.zeros(0)
    return [[Trajectory(none, none, none, reward) for reward in group] for group in rewards]


@given(st.lists(st.booleans(), min_size=60, max_size=60), st.integers(1, 9), st.integers(1, 40))
def test_fill_groups_against_a_walk(live, want, budget):
    stream, asked = iter(live), []

    def sample(count):
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


@pytest.mark.parametrize("reward", [1.0, 0.0, 0.3, 0.1, torch.tensor(1.0), numpy.float32(0.1)])
def test_equal_rewards_end_the_sampling_with_a_reason(reward):
    rounds = iter(range(100))  # no endless sampling
    kept, sampled, reason = fill_groups(
        lambda count: groups_of([[reward] * 3] * (count + 0 * next(rounds))), 8, 24
    )
    assert (len(kept), len(sampled)) == (0, 24) and "24 groups" in reason and "0 of 8" in reason


@pytest.mark.parametrize("bad", [[NAN] * 3, [0.0, 1.0, NAN], [1.0, INF, 0.0], [0.0, None]])
def test_rewards_that_are_no_numbers_are_named_by_group_and_index(bad):
    index = next(i for i, x in enumerate(bad) if x is None or not math.isfinite(x))
    fine = iter(groups_of([[0.0, 1.0], [1.0, 1.0], bad, [0.0, 1.0]]))
    with pytest.raises((TypeError, ValueError), match=rf"groups\[2\]\[{index}\]"):
        fill_groups(lambda n: list(itertools.islice(fine, 1 if n < 2 else n)), 2, 9)


# Training -------------------------------------------------------------------------------------


@pytest.fixture
def parity(monkeypatch):
    """Reward an even sum of tokens: a small random policy passes about half of its episodes."""

    def sample(*args):
        trajs = sample_groups(*args)
        for traj in trajs:
            traj.reward = float(traj.ids.sum() % 2 == 0)
        return trajs

    monkeypatch.setattr(curriculum, "sample_groups", sample)
    monkeypatch.setattr(grpo, "sample_groups", sample)


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_open_bounds_are_train_rl(estimate, parity):
    cfg = RLConfig(max_tokens=60, group_size=4, prompts_per_step=5, seed=4)
    ours, theirs = tiny(), tiny()
    history = train(5, ours, cfg=cfg, low=-1, high=2, estimate=estimate)
    assert history == train_rl(theirs, TRAIN, TOK, cfg, 5)
    assert weights(ours) == weights(theirs) != weights(tiny())


def scripted(monkeypatch, passes):
    """Replace sampling and updating; task i's episode e passes in step s if passes(i, e, s)."""
    played = []

    def sample(model, env, tasks, tok, cfg, generator):
        step = len(played)
        played.append([TRAIN.index(task) for task in tasks])
        ids = torch.tensor([1, 2])
        return [
            Trajectory(ids, torch.tensor([True]), torch.zeros(1), float(passes(i, e, step)))
            for i in played[-1]
            for e in range(cfg.group_size)
        ]

    def update(model, optimizer, trajs, cfg):
        zero = grpo.zero_advantage_groups([traj.reward for traj in trajs], cfg.group_size)
        return {"loss": 0.0, "zero_advantage": zero.double().mean().item()}

    monkeypatch.setattr(curriculum, "sample_groups", sample)
    monkeypatch.setattr(grpo, "rl_update", update)
    return played


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.3, 0.8), (-1.0, 1.0)])
def test_pool_and_revisits_follow_the_last_group(monkeypatch, low, high):
    """Check each step's tasks, and its revisits, against the estimates known at that time."""

    def passes(i, e, s):
        return random.Random(f"{i} {e} {s}").random() < (i % 5) / 4

    played = scripted(monkeypatch, passes)
    history = train(60, low=low, high=high)
    assert len(history) == len(played) == 60
    known = [0.5] * len(TRAIN)
    for step, (chosen, record) in enumerate(zip(played, history, strict=True)):
        pool = {i for i, p in enumerate(known) if low < p < high}
        inside = [i for i in chosen if i in pool]
        assert len(set(chosen)) == len(chosen)
        assert len(inside) == min(SMALL.prompts_per_step, len(pool))
        assert len(chosen) - len(inside) == min(1, len(TRAIN) - len(pool))
        assert chosen[: len(inside)] == inside
        for i in chosen:
            known[i] = sum(passes(i, e, step) for e in range(4)) / 4
        outside = chosen[len(inside) :]
        assert record.get("revisits", 0) == len(outside)
        equal = sum(known[i] in (0, 1) for i in outside)
        assert record.get("zero_advantage_revisits", 0) == equal
        assert record["zero_advantage"] == sum(known[i] in (0, 1) for i in chosen) / len(chosen)


def test_every_task_solved_goes_on_with_revisits(monkeypatch):
    played = scripted(monkeypatch, lambda i, e, s: True)
    history = train(20, revisit=2)
    assert set(itertools.chain(*played[:8])) == set(range(20))
    late = history[-5:]
    assert [step["episodes"] for step in late] == [2 * SMALL.group_size] * 5
    assert all("pool is empty" in step["reason"] and step["zero_advantage"] == 1 for step in late)
    assert all("reason" not in step for step in history[:6])


def test_every_task_solved_without_revisits_stops(monkeypatch, tmp_path):
    path = tmp_path / "run.pt"
    options = {"revisit": 0, "checkpoint": path, "checkpoint_every": 50}
    scripted(monkeypatch, lambda i, e, s: True)
    history = train(20, revisit=0)
    assert len(history) == 7 and "stopped after 7 of 20 steps" in history[-1]["reason"]
    assert train(20, **options) == history
    assert torch.load(path, weights_only=True)["history"] == history, "the last step is saved"
    assert train(20, **options) == history


def test_dynamic_counts_what_it_paid_for_and_trains_on_what_it_kept(monkeypatch):
    scripted(monkeypatch, lambda i, e, s: True)
    history = train(4, sampling="dynamic", max_groups=7)
    assert [step["episodes"] for step in history] == [28] * 4
    assert all("budget of 7 groups" in step["reason"] for step in history)
    scripted(monkeypatch, lambda i, e, s: i < 10 or e == 0)
    sizes, update = [], grpo.rl_update
    monkeypatch.setattr(grpo, "rl_update", lambda *a: sizes.append(len(a[2])) or update(*a))
    for step, kept in zip(train(4, sampling="dynamic"), sizes, strict=True):
        assert step["zero_advantage"] == pytest.approx(1 - kept / step["episodes"])
        assert step["episodes"] >= kept == 12 and step["reward"] >= 0.25


def test_proportional_draws_from_all_tasks(monkeypatch):
    played = scripted(monkeypatch, lambda i, e, s: i < 10)
    train(100, estimate="beta", sampling="proportional")
    assert all(len(set(step)) == SMALL.prompts_per_step for step in played)
    assert set(itertools.chain(*played[50:])) == set(range(20))  # none is lost
    assert "every weight is 0" in train(20, sampling="proportional")[-1]["reason"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"sampling": "random"}, "sampling"), ({"estimate": "median"}, "estimate"),
        ({"revisit": -1}, "revisit"), ({"low": 0.6, "high": 0.9, "revisit": 0}, "low"),
        ({"low": 1.0, "high": 0.0}, "low"), ({"max_groups": -2}, "max_groups"),
        ({"max_groups": 0}, "max_groups"), ({"checkpoint_every": 0}, "checkpoint_every"),
        *(({"tasks": [], "sampling": s}, "tasks") for s in ("filter", "proportional", "dynamic")),
    ],
)  # fmt: skip
def test_bad_arguments(options, names):
    with pytest.raises(ValueError, match=names):
        train(1, **options)


def test_on_step_ends_a_run_for_good(tmp_path):
    lengths = []

    def on_step(model, history):
        lengths.append(len(history))
        return len(history) == 2

    options = {"on_step": on_step, "checkpoint": tmp_path / "run.pt"}
    history = train(5, **options)
    assert len(history) == 2 and "on_step ended the run after 2 of 5" in history[-1]["reason"]
    assert train(5, **options) == history and lengths == [1, 2]
    train(1, on_step=on_step)
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
def test_a_killed_run_resumes_exactly(options, every, tmp_path, monkeypatch, parity):
    whole, resumed = tiny(), tiny()
    history = train(6, whole, cfg=LARGER, **options)
    update = grpo.rl_update
    saving = {**options, "checkpoint": tmp_path / "run.pt", "checkpoint_every": every}
    for step in (3, 0, 1):
        calls = itertools.count()

        def failing(*args, step=step, calls=calls):
            if next(calls) == step:
                raise KeyboardInterrupt
            return update(*args)

        monkeypatch.setattr(grpo, "rl_update", failing)
        with pytest.raises(KeyboardInterrupt):
            train(6, cfg=LARGER, **saving)
    monkeypatch.setattr(grpo, "rl_update", update)
    again = train(6, resumed, cfg=LARGER, **saving)
    assert again == history and weights(resumed) == weights(whole) != weights(tiny())
    assert any(0 < step["reward"] < 1 for step in history)
    assert train(6, cfg=LARGER, **saving) == history


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    train(2, low=numpy.float64(0.0), checkpoint=path)
    for options in ({"revisit": 2}, {"low": 0.1}, {"estimate": "mean3"}, {"sampling": "dynamic"}):
        with pytest.raises(ValueError, match="has rule"):
            train(2, checkpoint=path, **options)
    with pytest.raises(ValueError, match="has rule"):
        train_rl(tiny(), TRAIN, TOK, SMALL, 2, checkpoint=path)
    with pytest.raises(ValueError, match="has tasks"):
        train(2, tasks=TRAIN[1:], checkpoint=path)
    with pytest.raises(ValueError, match="2 steps, more than 1"):
        train(1, checkpoint=path)
    assert len(train(3, checkpoint=path)) == 3


# The check of other filters


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.2, 0.8), (-1.0, 0.5), (0.7, 1.0), (2 / 3, 1.0)]
)
def test_the_filter_passes_its_own_check(low, high):
    def finished(groups: list[list[float]], cut: list[list[bool]]) -> list[bool]:
        return right(
            [
                [r for r, c in zip(group, short, strict=True) if not c]
                for group, short in zip(groups, cut, strict=True)
            ]
        )

    def right(groups: list[list[float]]) -> list[bool]:
        inside = [bool(filter_by_pass_rate([0], [g], low, high)) for g in groups]
        return [k and min(g) < max(g) for k, g in zip(inside, groups, strict=True)]

    found = group_filter_check(right, low=low, high=high)
    assert found, found
    found = group_filter_check(finished, low=low, high=high, truncation=True)
    assert found, found


def test_broken_filters_are_diagnosed():
    judge = group_filter_check
    assert "3 verdicts" in judge(lambda groups: [True] * 3).likely
    assert "raised ZeroDivisionError" in judge(lambda groups: 1 / 0).likely
    assert "unequal rewards is dropped" in judge(lambda groups: [False] * len(groups)).likely
    assert judge(lambda groups: [True] * len(groups)).index == "group 0, rewards [0, 0]"
    unbounded = judge(lambda groups: [min(g) < max(g) for g in groups], low=0.2, high=0.8)
    assert "outside the bounds is kept" in unbounded.likely
    everything = judge(lambda groups: [len(set(g)) > 1 and g[0] != 0.25 for g in groups])
    assert everything.worst == 1 and "[0.25, 0.5]" in everything.index


@pytest.mark.parametrize(
    ("fill", "says"),
    [
        (lambda sample: 1 / 0, "an exception instead of a stop"),
        (lambda sample: [sample(8) for _ in range(10**9)], "no bound"),
        (lambda sample: sample(3) and [], "without a reason"),
        (lambda sample: ([], "budget spent"), ""),
    ],
)
def test_dynamic_sampling_ends_and_says_why(fill, says):
    right = lambda groups: [min(g) < max(g) for g in groups]  # noqa: E731
    found = group_filter_check(right, fill_fn=fill)
    assert bool(found) == (not says) and says in found.likely
